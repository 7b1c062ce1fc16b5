"""What exercises/check.py compares your functions with, a file for each exercise.  You need not read them.

run(function, folder)    on each rank: calls your function; returns what is judged, as numbers and tensors
judge(answers)           in one process, with the answers of all ranks: "", or what is wrong, in words
alone(function, folder)  in one process, where there is one: more that is tried without other ranks; "" or what is wrong
"""

NAMES = [
    "shard",
    "ring_all_reduce",
    "global_mean",
    "gather_unequal",
    "average_gradients",
    "token_mean",
    "accumulate",
    "global_batchnorm",
    "atomic_checkpoint",
    "stop_together",
    "return_tokens",
]

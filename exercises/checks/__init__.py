"""The checks of the exercises, one file each: correct answers, and common mistakes.  You need not read them.

run(function, folder)    on each rank: calls your function; returns its answer, as numbers and tensors
judge(answers)           in one process, with the answers of all ranks: returns "", or what is wrong, in words
alone(function, folder)  in some files, one more test in one process: returns "", or what is wrong, in words
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
    "ring_attention",
]

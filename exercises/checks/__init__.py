"""The checks of the exercises, one file each: the right answers, and the usual wrong ones.  You need not read them.

run(function, folder)    on each rank: calls your function; returns its answer, as numbers and tensors
judge(answers)           in one process, with the answers of all ranks: "", or what is wrong, in words
alone(function, folder)  in some files, with one process only: one more test; "", or what is wrong, in words
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

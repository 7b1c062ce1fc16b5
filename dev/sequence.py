"""mnist_context_parallel.py with patches of another size: smaller ones make a longer sequence of an image.

python -m dev.sequence 2 --dataset synthetic     # 2 x 2 pixels: 196 tokens
"""

import sys

import distributed as dist
from variants import mnist_context_parallel as script

if __name__ == "__main__":
    script.PATCH = int(sys.argv.pop(1))
    dist.launch(script.main, script.parse_args())

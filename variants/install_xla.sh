#!/usr/bin/env bash
# Makes a virtual environment with torch and PyTorch/XLA in which mnist_xla.py runs on the CPU.
#
#     bash variants/install_xla.sh .venv-xla
#
# Needs Python 3.10 to 3.13, Linux on x86-64, and 8 GB.  On a TPU machine add libtpu: pip install "torch_xla[tpu]==2.9.0"
set -euo pipefail

[ $# -eq 1 ] || {
    echo "usage: bash variants/install_xla.sh FOLDER" >&2
    exit 2
}
python3 -m venv "$1"
folder=$(cd "$1" && pwd)
"$folder/bin/pip" install torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0 filelock pillow tqdm
PJRT_DEVICE=CPU "$folder/bin/python" -c 'import torch, torch_xla; torch.ones(1, device="xla").cpu()'
echo "PyTorch/XLA is installed: PJRT_DEVICE=CPU $folder/bin/python -m variants.mnist_xla --dataset synthetic"

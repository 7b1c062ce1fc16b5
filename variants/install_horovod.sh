#!/usr/bin/env bash
# Makes a virtual environment with torch and Horovod in which mnist_horovod.py runs on the CPU (Gloo, no MPI, no CUDA).
#
#     bash variants/install_horovod.sh .venv-horovod
#     bash variants/install_horovod.sh .venv-horovod torch==2.9.0 torchvision==0.24.0     # another torch
#
# Needs a C++ compiler with C++20 (g++ 12 was used) and 5 GB; compiles for some minutes.  Horovod's last release,
# 0.28.1 of June 2023, compiles as C++14, which torch's headers have not accepted since 2.1, and takes any CUDA compiler
# that it finds: hence the edits.
set -euo pipefail

[ $# -ge 1 ] || {
    echo "usage: bash variants/install_horovod.sh FOLDER [torch==VERSION torchvision==VERSION]" >&2
    exit 2
}
command -v c++ >/dev/null || {
    echo "install_horovod.sh: there is no C++ compiler: install g++ (Debian, Ubuntu: apt-get install g++ make)" >&2
    exit 2
}
folder=$1
shift
[ $# -gt 0 ] || set -- torch==2.14.1 torchvision==0.29.1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$folder"
folder=$(cd "$folder" && pwd)
export PATH="$folder/bin:$PATH"
pip install "$@" filelock pillow tqdm "cmake<4" "setuptools<81" wheel packaging # setuptools 81 has no pkg_resources

pip download --no-deps --no-build-isolation --no-binary horovod --dest "$work" horovod==0.28.1
tar -xzf "$work"/horovod-0.28.1.tar.gz -C "$work"
cd "$work/horovod-0.28.1"
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
sed -i 's/^check_language(CUDA)/set(CMAKE_CUDA_COMPILER NOTFOUND)/; s/^    find_package(CUDAToolkit)$//' CMakeLists.txt
sed -i 's/CUDA_HOME is not None/False/' cmake/Modules/FindPytorch.cmake

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5               # its copy of Gloo asks for an older CMake than there is
export MAKEFLAGS=${MAKEFLAGS:--j$(getconf _NPROCESSORS_ONLN)} # else it starts 8 compilers
pip install --no-build-isolation .
cd /
python -c 'import horovod.torch as hvd; hvd.init(); assert hvd.gloo_enabled()'
echo "Horovod is installed: $folder/bin/horovodrun -np 2 --gloo $folder/bin/python -m variants.mnist_horovod"

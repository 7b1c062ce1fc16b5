#!/bin/sh
# torch's context_parallel: attention over two ranks on the CPU.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: an error from the start, as its ring is made of CUDA's kernels; and rank 0 has the first half of the tokens.
# What happens: forward works on the CPU and is attention to all tokens; only backward ends in NotImplementedError. Inside
# the context rank 0 has the first and the last quarter, so that a causal mask costs all ranks the same, although nothing
# here asks for a mask.
# Seen:
#> rank 0 has tokens [0, 1, 2, 3, 12, 13, 14, 15]; attention to all tokens: True; to its own only: False
#> rank 0: backward: NotImplementedError
#> rank 1 has tokens [4, 5, 6, 7, 8, 9, 10, 11]; attention to all tokens: True; to its own only: False
#> rank 1: backward: NotImplementedError
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = dist.init_device_mesh("cpu", (2,))
whole = [torch.randn(2, 4, 16, 8) for _ in range(3)]
expected = F.scaled_dot_product_attention(*whole)
shares, tokens = [one.clone() for one in whole], torch.arange(16)
said = []
with context_parallel(mesh, buffers=[*shares, tokens], buffer_seq_dims=[2, 2, 2, 0]):
    mine = tokens.tolist()
    query, key, value = (one.clone().requires_grad_() for one in shares)
    result = F.scaled_dot_product_attention(query, key, value)
    try:
        result.sum().backward()
        said.append("backward: works")
    except Exception as problem:
        said.append(f"backward: {type(problem).__name__}")
own = torch.softmax(query @ key.mT / 8**0.5, -1) @ value
is_whole, is_own = torch.allclose(result, expected[:, :, mine], atol=1e-5), torch.allclose(result, own, atol=1e-5)
for rank in range(2):
    if rank == dist.get_rank():
        print(f"rank {rank} has tokens {mine}; attention to all tokens: {is_whole}; to its own only: {is_own}")
        print(f"rank {rank}: {said[0]}", flush=True)
    dist.barrier()
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen" 2> "$folder/errors" || { cat "$folder/errors" >&2; exit 1; }

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: on the CPU context_parallel has a forward pass, no backward pass, and deals out the ends"

#!/bin/sh
# torch.distributed's ReduceOp.AVG: all_reduce with the gloo backend.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: an error. The documentation of ReduceOp says "AVG is only available with the NCCL backend", and code that runs
# on the CPU, too, therefore sums and divides.
# What happens: gloo averages numbers with a fraction, in all_reduce, reduce and reduce_scatter_tensor. Only integers
# fail, with a message about types and not about the backend.
# Seen:
#> all_reduce of 1.0 and 2.0: 1.5
#> reduce of 1.0 and 2.0: 1.5
#> reduce_scatter_tensor of [1.0, 2.0] and [2.0, 4.0]: 1.5 on rank 0
#> all_reduce of 1 and 2: RuntimeError: result type Float can't be cast to the desired output type Long
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = dist.get_rank() + 1
lines = []

tensor = torch.tensor([float(number)])
dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
lines.append(f"all_reduce of 1.0 and 2.0: {tensor.item()}")

tensor = torch.tensor([float(number)])
dist.reduce(tensor, dst=0, op=dist.ReduceOp.AVG)
lines.append(f"reduce of 1.0 and 2.0: {tensor.item()}")

part = torch.empty(1)
dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]) * number, op=dist.ReduceOp.AVG)
lines.append(f"reduce_scatter_tensor of [1.0, 2.0] and [2.0, 4.0]: {part.item()} on rank 0")

try:
    dist.all_reduce(torch.tensor([number]), op=dist.ReduceOp.AVG)
except RuntimeError as error:
    lines.append(f"all_reduce of 1 and 2: RuntimeError: {error}")
if dist.get_rank() == 0:
    print("\n".join(lines))
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: gloo averages"

#!/bin/sh
# torch's fully_shard: .item() of a norm, a sum, a maximum or a spread of a parameter.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: one rule for all. clip_grad_norm_(...).item() is the norm of the whole gradient, so weight.norm().item() is that
# of the whole weight.
# What happens: two rules. norm, sum, max, mean and isnan().sum() are this rank's share only, without a word; std and
# clip_grad_norm_ are of the whole. So "skip this step if a weight is not finite" decides otherwise on each rank.
# Seen:
#> norm: whole 8.8318, .item() on the ranks [2.2361, 8.544]
#> sum: whole 14.0, .item() on the ranks [3.0, 11.0]
#> max: whole 8.0, .item() on the ranks [2.0, 8.0]
#> std: whole 3.1091, .item() on the ranks [3.1091, 3.1091]
#> isnan().sum(), a NaN in rank 1's share: whole 1, .item() on the ranks [0, 1]
#> clip_grad_norm_: whole 2.0, .item() on the ranks [2.0, 2.0]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def report(what, result):
    whole = result.full_tensor().item()
    ranks = [None, None]
    dist.all_gather_object(ranks, round(result.item(), 4))
    if dist.get_rank() == 0:
        print(f"{what}: whole {round(whole, 4)}, .item() on the ranks {ranks}")


dist.init_process_group("gloo")
model = nn.Linear(2, 2, bias=False)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 8.0]]))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
weight = model.weight.detach()
report("norm", weight.norm())
report("sum", weight.sum())
report("max", weight.max())
report("std", weight.std())
model(torch.ones(1, 2)).sum().backward()
norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=100.0)
if dist.get_rank() == 1:
    weight.to_local()[0, 0] = float("nan")
report("isnan().sum(), a NaN in rank 1's share", weight.isnan().sum())
report("clip_grad_norm_", norm)
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: .item() of a sharded weight's norm is one rank's, of its std everybody's"

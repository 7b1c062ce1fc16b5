#!/bin/sh
# torch's ZeroRedundancyOptimizer: the state that consolidate_state_dict has gathered, one step later.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: after a further step state_dict() either raises, as it does before the first consolidation, or returns the
# gathered state, that of one point in time.
# What happens: neither. Rank 0's own share is alive and has made the further step; the rest is the gathered copy. The
# result is a state of two different steps, without a warning.
# Seen:
#> before consolidation: RuntimeError
#> consolidated after step 1: Adam's step counters [1, 1, 1, 1]
#> after step 2: Adam's step counters [2, 1, 1, 2]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


def step():
    optimizer.zero_grad()
    model(torch.ones(1, 3)).pow(2).sum().backward()
    optimizer.step()


def report(when):
    if dist.get_rank() == 0:
        try:
            state = optimizer.state_dict()["state"]
            print(f"{when}: Adam's step counters {[int(state[index]['step']) for index in sorted(state)]}")
        except RuntimeError:
            print(f"{when}: RuntimeError")


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
step()
report("before consolidation")
optimizer.consolidate_state_dict(to=0)
report("consolidated after step 1")
step()
report("after step 2")
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: ZeroRedundancyOptimizer's state_dict mixes two steps"

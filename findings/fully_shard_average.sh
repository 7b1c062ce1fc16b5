#!/bin/sh
# torch's AveragedModel (EMA and SWA of weights): a model that fully_shard or DDP has wrapped.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: DDP, which holds a process group and hooks, can't be copied; fully_shard leaves an ordinary module, which can.
# What happens: the other way round. AveragedModel copies its model by deepcopy: DDP becomes a second DDP, with names
# that begin with "module.module.", and fully_shard's model refuses.
# Seen:
#> DDP: copied, names begin with module.module.weight
#> fully_shard: AssertionError: FSDP does not support deepcopy. Please use state dict for serialization.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def averaged(model):
    try:
        return f"copied, names begin with {next(name for name, _ in AveragedModel(model).named_parameters())}"
    except AssertionError as error:
        return f"AssertionError: {error}"


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
results = {
    "DDP": averaged(DistributedDataParallel(nn.Linear(4, 4))),
    "fully_shard": averaged(fully_shard(nn.Linear(4, 4), mesh=mesh)),
}
if dist.get_rank() == 0:
    for name, result in results.items():
        print(f"{name}: {result}")
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: AveragedModel copies DDP, and not a fully_shard model"

#!/bin/sh
# torch's DDP: bucket_cap_mb, and the buckets that a step really has.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: no bucket is larger than the cap, and a tensor that is as large as the cap gets a bucket of its own.
# What happens: in the first step one bucket holds the whole model, whatever the cap, so nothing overlaps. From the
# second step on a bucket is closed by the tensor that reaches the cap, so each is larger: bias and weight together.
# Seen:
#> a layer: bias of 20 bytes, weight of 100 bytes; bucket_cap_mb=0.0001 is a cap of 104 bytes
#> step 1: buckets of 480 bytes
#> step 2: buckets of 120, 120, 120, 120 bytes
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
model = DistributedDataParallel(layers, bucket_cap_mb=0.0001)
for _ in range(2):
    model(torch.ones(1, 5)).sum().backward()
model(torch.ones(1, 5))  # DDP counts and rearranges at the beginning of forward
data = model._get_ddp_logging_data()
if dist.get_rank() == 0:
    bias, weight = layers[0].bias.nbytes, layers[0].weight.nbytes
    print(f"a layer: bias of {bias} bytes, weight of {weight} bytes; ", end="")
    print(f"bucket_cap_mb=0.0001 is a cap of {data['bucket_cap_bytes']} bytes")
    print(f"step 1: buckets of {data['bucket_sizes']} bytes")
    print(f"step 2: buckets of {data['rebuilt_bucket_sizes']} bytes")
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: a bucket is larger than its cap, and the first step has one bucket"

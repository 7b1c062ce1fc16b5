#!/bin/sh
# torch's flight recorder: the state of collectives that gloo has finished.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: an all_reduce that has returned is "completed", one that waits for rank 1 is "started".
# What happens: gloo's calls are recorded, with names, shapes and stacks, but each stays "scheduled" for ever, and has no
# time of completion. A dump can't tell the call that hangs from those before it by its state: only the last entry,
# compared between ranks, tells.
# Seen:
#> returned long ago: gloo:all_reduce is scheduled, completed at 0
#> rank 1 has not come: gloo:all_reduce is scheduled, completed at 0
#> after both have returned: gloo:all_reduce is scheduled, completed at 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import json
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json


def report(when):
    if dist.get_rank() == 0:
        last = json.loads(_dump_fr_trace_json())["entries"][-1]
        print(f"{when}: {last['profiling_name']} is {last['state']}, completed at {last['time_discovered_completed_ns']}")


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
time.sleep(0.5)
report("returned long ago")

if dist.get_rank() == 1:
    time.sleep(2)
work = dist.all_reduce(torch.ones(3), async_op=True)
if dist.get_rank() == 0:
    time.sleep(0.5)
report("rank 1 has not come")
work.wait()
time.sleep(0.5)
report("after both have returned")
dist.destroy_process_group()
EOF
TORCH_FR_BUFFER_SIZE=100 OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 \
    "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: the flight recorder never calls gloo's collectives completed"

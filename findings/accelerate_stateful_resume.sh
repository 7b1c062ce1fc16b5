#!/bin/sh
# Accelerate's use_stateful_dataloader: load_state in the middle of a shuffled epoch.
# Versions: accelerate 1.15.0, torchdata 0.11.0, torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: the loader's state and all random numbers are saved, so exactly the examples come that had not come.
# What happens: the position comes back, the order does not: it is drawn from the seed with which the second run began.
# With another seed, or none, the right number of batches comes, but some examples come again and as many never. Nothing
# warns. use_seedable_sampler=True does not help; only the first run's own seed does.
# Seen:
#> use_seedable_sampler=False, the same seed: 8 left, 8 come, of these seen before: 0, never come: 0
#> use_seedable_sampler=False, another seed: 8 left, 8 come, of these seen before: 4, never come: 4
#> use_seedable_sampler=True, another seed: 8 left, 8 come, of these seen before: 5, never come: 5
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 accelerate==1.15.0 torchdata==0.11.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import json
import pathlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

seedable, seed, first_seed = sys.argv[1] == "True", int(sys.argv[2]), int(sys.argv[3])
configuration = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
accelerator = Accelerator(cpu=True, dataloader_config=configuration)
set_seed(seed)
loader = accelerator.prepare(DataLoader(torch.arange(16), batch_size=2, shuffle=True))
state, notes = pathlib.Path("state"), pathlib.Path("notes.json")
resumed = state.exists()
accelerator.wait_for_everyone()
if resumed:
    accelerator.load_state(state)

epoch = []
for number, batch in enumerate(loader, 1):
    epoch += accelerator.gather(batch).tolist()
    if not resumed and number == 2:
        accelerator.save_state(state)
if accelerator.is_main_process and not resumed:
    notes.write_text(json.dumps(epoch))
elif accelerator.is_main_process:
    before, left = json.loads(notes.read_text())[:8], json.loads(notes.read_text())[8:]
    again, never = len(set(epoch) & set(before)), len(set(left) - set(epoch))
    same = "the same seed" if seed == first_seed else "another seed"
    print(f"use_seedable_sampler={seedable}, {same}: {len(left)} left, {len(epoch)} come, ", end="")
    print(f"of these seen before: {again}, never come: {never}")
accelerator.end_training()
EOF
twice() {  # use_seedable_sampler, the first run's seed, the second run's seed
    rm -rf state notes.json
    for seed in "$2" "$3"; do
        OMP_NUM_THREADS=1 env/bin/torchrun --standalone --nproc_per_node=2 program.py "$1" "$seed" "$2" >> seen
    done
}
script=$(realpath "$0")
cd "$folder"
twice False 1 1
twice False 1 2
twice True 1 2

sed -n 's/^#> //p' "$script" > expected
diff expected seen || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: load_state brings a stateful loader's position back, and not its order"

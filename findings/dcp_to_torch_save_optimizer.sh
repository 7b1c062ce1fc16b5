#!/bin/sh
# torch.distributed.checkpoint's dcp_to_torch_save: an optimizer's state_dict, made one file and loaded.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. One process.
# Guess: the file holds what was saved, so the optimizer goes on; if keys did not fit, load_state_dict would say so.
# What happens: the keys of "state", which count parameters, come back as strings. load_state_dict takes them without a
# word and attaches the state to no parameter: Adam starts anew, with empty moments and at step 0.
# Seen:
#> saved: keys [0, 1], Adam has made 3 steps
#> in the file: keys ['0', '1']
#> loaded without an error: the weight's state is {}
#> after one more step: Adam has made 1 steps
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")  # that no process group is there: one process saves


def step(optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    step(optimizer)
steps = int(optimizer.state[model.weight]["step"])
print(f"saved: keys {sorted(optimizer.state_dict()['state'])}, Adam has made {steps} steps")
dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id="checkpoint")
dcp_to_torch_save("checkpoint", "checkpoint.pt")

saved = torch.load("checkpoint.pt")["optimizer"]
print(f"in the file: keys {sorted(saved['state'])}")
resumed = torch.optim.Adam(model.parameters())
resumed.load_state_dict(saved)
print(f"loaded without an error: the weight's state is {resumed.state[model.weight]}")
step(resumed)
print(f"after one more step: Adam has made {int(resumed.state[model.weight]['step'])} steps")
EOF
(cd "$folder" && env/bin/python program.py > seen)

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: an optimizer's state is lost on its way through dcp_to_torch_save"

#!/bin/sh
# torch.distributed.checkpoint: get_optimizer_state_dict of an optimizer that has not stepped.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. One process.
# Guess: it reads. To ask for the state (to print its keys, to prepare a load that is then left out) changes no training.
# What happens: it fills Adam's state by a step of its own with a learning rate of 0, and leaves that step counted. The
# first real step is then number 2: another bias correction, so other weights, in a run that loads nothing.
# Seen:
#> not asked: step counter 0 before training; weights after one step [0.0947, 0.4793]
#> asked: step counter 1 before training; weights after one step [0.0691, 0.4537]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

for asked in False, True:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if asked:
        get_optimizer_state_dict(model, optimizer)
    state = optimizer.state[model.weight] if model.weight in optimizer.state else {}
    before = int(state.get("step", 0))

    optimizer.zero_grad()
    model(torch.ones(1, 2)).pow(2).sum().backward()
    optimizer.step()
    weights = [round(weight, 4) for weight in model.weight.flatten().tolist()]
    print(f"{'asked' if asked else 'not asked'}: step counter {before} before training; weights after one step {weights}")
EOF
"$folder/env/bin/python" "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: get_optimizer_state_dict counts a step that nobody made"

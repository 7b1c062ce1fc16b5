#!/bin/sh
# torchdata's StatefulDataLoader: a state that is saved in the epoch's last step.
# Versions: torchdata 0.11.0, torch 2.13.0, numpy 2.1.3, Python 3.11.
# Guess: all batches have come, so a run that loads this state begins the next epoch.
# What happens: the loaded loader first gives an epoch of no batches. A loop that saves in each step and resumes there
# counts one epoch too many, without a step. A state that is saved after the loop gives a whole epoch.
# Seen:
#> saved in the last step, 0 workers: epochs of [0, 4] batches
#> saved in the last step, 2 workers: epochs of [0, 4] batches
#> saved after the loop, 0 workers: epochs of [4, 4] batches
#> saved after the loop, 2 workers: epochs of [4, 4] batches
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 torchdata==0.11.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
from torchdata.stateful_dataloader import StatefulDataLoader


def resumed(state, workers):
    loader = StatefulDataLoader(range(8), batch_size=2, num_workers=workers)
    loader.load_state_dict(state)
    return [sum(1 for _ in loader) for _ in range(2)]


if __name__ == "__main__":
    in_the_loop, after_the_loop = {}, {}
    for workers in 0, 2:
        loader = StatefulDataLoader(range(8), batch_size=2, num_workers=workers)
        for _ in loader:
            in_the_loop[workers] = loader.state_dict()
        after_the_loop[workers] = loader.state_dict()
    for when, states in ("in the last step", in_the_loop), ("after the loop", after_the_loop):
        for workers, state in states.items():
            print(f"saved {when}, {workers} workers: epochs of {resumed(state, workers)} batches")
EOF
"$folder/env/bin/python" "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: a state of the last step gives an epoch without batches"

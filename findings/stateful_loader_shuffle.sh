#!/bin/sh
# torchdata's StatefulDataLoader: the order of shuffle=True under one seed.
# Versions: torchdata 0.11.0, torch 2.13.0, numpy 2.1.3, Python 3.11.
# Guess: it is a "drop-in replacement" for torch's DataLoader, so a seed gives both the same order, with or without workers.
# What happens: it draws another order than DataLoader. With workers it draws a third one: its second epoch without
# workers. DataLoader's order does not depend on workers. Who changes the loader or its workers changes the run.
# Seen:
#> DataLoader, 0 workers: [2, 0, 5, 3, 1, 4, 7, 6] then [0, 3, 7, 1, 6, 2, 5, 4]
#> DataLoader, 2 workers: [2, 0, 5, 3, 1, 4, 7, 6] then [0, 3, 7, 1, 6, 2, 5, 4]
#> StatefulDataLoader, 0 workers: [2, 5, 4, 6, 1, 7, 0, 3] then [6, 1, 3, 0, 7, 2, 4, 5]
#> StatefulDataLoader, 2 workers: [6, 1, 3, 0, 7, 2, 4, 5] then [3, 5, 1, 6, 7, 4, 2, 0]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 torchdata==0.11.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


def epoch(loader):
    return [index.item() for index in loader]


if __name__ == "__main__":
    for kind in DataLoader, StatefulDataLoader:
        for workers in 0, 2:
            torch.manual_seed(0)
            loader = kind(range(8), batch_size=1, shuffle=True, num_workers=workers)
            print(f"{kind.__name__}, {workers} workers: {epoch(loader)} then {epoch(loader)}")
EOF
"$folder/env/bin/python" "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: StatefulDataLoader shuffles in another order than DataLoader, and in a third one with workers"

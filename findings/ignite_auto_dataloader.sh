#!/bin/sh
# Ignite's auto_dataloader(shuffle=True): the order in the second epoch.
# Versions: pytorch-ignite 0.5.5, torch 2.13.0, numpy 2.1.3, packaging 26.4, Python 3.11. Two processes, gloo.
# Guess: Ignite has put a DistributedSampler in, so its Engine, which counts the epochs, calls set_epoch, too.
# What happens: nobody calls it. Each epoch has the same order, so the ranks never exchange examples, while with one
# process the same program draws a new order. A handler of one's own must call loader.sampler.set_epoch.
# Seen:
#> 1 process, RandomSampler: epochs alike: False
#> 2 processes, DistributedSampler: epochs alike: True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 pytorch-ignite==0.5.5 numpy==2.1.3 packaging==26.4

cat > "$folder/program.py" <<'EOF'
import logging

import ignite.distributed as idist
import torch
from ignite.engine import Engine

logging.disable(logging.WARNING)


def training(local_rank):
    torch.manual_seed(0)
    loader = idist.auto_dataloader(range(64), batch_size=8, shuffle=True)
    seen = {}
    engine = Engine(lambda engine, batch: seen.setdefault(engine.state.epoch, []).extend(batch.tolist()))
    engine.run(loader, max_epochs=2)
    if idist.get_rank() == 0:
        processes = f"{idist.get_world_size()} process{'es' if idist.get_world_size() > 1 else ''}"
        print(f"{processes}, {type(loader.sampler).__name__}: epochs alike: {seen[1] == seen[2]}", flush=True)


if __name__ == "__main__":
    with idist.Parallel() as parallel:
        parallel.run(training)
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(training)
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/python" "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: Ignite's Engine never calls set_epoch, so auto_dataloader repeats one order"

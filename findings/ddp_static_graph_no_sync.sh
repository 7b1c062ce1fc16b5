#!/bin/sh
# torch's DDP: static_graph=True in a program that accumulates gradients with no_sync().
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes, gloo.
# Guess: the graph is the same in each pass, as static_graph asks, so the result is that of DDP without it.
# What happens: if the program's first backward pass stands in no_sync(), as it does when gradients are accumulated, it
# ends in an internal assertion that asks for a bug report. After one synchronised pass the same loop is right.
# Seen:
#> static_graph=False, accumulating at once: gradient 11.0
#> static_graph=True, accumulating at once: RuntimeError expect_autograd_hooks_ INTERNAL ASSERT FAILED
#> static_graph=True, accumulating after one synchronised pass: gradient 11.0
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


def accumulate(static_graph, first_synchronised):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), static_graph=static_graph)
    inputs = torch.ones(1, 1) * (1 if dist.get_rank() == 0 else 10)
    if first_synchronised:
        model(inputs).sum().backward()
        model.zero_grad()
    try:
        with model.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
    except RuntimeError as error:
        return f"RuntimeError {str(error).split(' at ')[0]}"
    return f"gradient {model.module.weight.grad.item()}"


dist.init_process_group("gloo")
for static_graph, first in (False, False), (True, False), (True, True):
    result = accumulate(static_graph, first)
    when = "after one synchronised pass" if first else "at once"
    if dist.get_rank() == 0:
        print(f"static_graph={static_graph}, accumulating {when}: {result}")
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: static_graph=True fails if the first backward pass stands in no_sync()"

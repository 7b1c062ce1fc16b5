#!/bin/sh
# torch.compile and hooks of all modules (register_module_forward_pre_hook of torch.nn.modules.module), as profilers use.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. One process, backend "eager".
# Guess: inside of compiled code such a hook is not called, as no module is called there: the outer module is seen once
# in each call, and what a hook does in Python (a list of the modules that run) is as without torch.compile.
# What happens: the hooks are compiled, too. A hook that notes names is called for each inner module in each call, and
# once more for the wrapper OptimizedModule, of which a warning tells; with module.compile() only for the modules. A
# pair of hooks that keeps a list of the modules that run works without torch.compile and with module.compile(), but
# torch.compile(module) ends with an AssertionError of the compiler's own: the list holds a module that it compiles.
# A hook that first asks torch.compiler.is_compiling(), and then returns, has neither.
# Seen:
#> names with torch.compile(module), twice: OptimizedModule Sequential Linear ReLU OptimizedModule Sequential Linear ReLU
#> names with module.compile(), twice: Sequential Linear ReLU Sequential Linear ReLU
#> a list of the modules that run, plain: works
#> a list of the modules that run, module.compile(): works
#> a list of the modules that run, torch.compile(module): AssertionError
#> the same with is_compiling() asked first, torch.compile(module): works
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOP'
import contextlib

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

inputs = torch.ones(2, 4)


def new_model(how):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if how == "module.compile()":
        model.compile(backend="eager")
    return torch.compile(model, backend="eager") if how == "torch.compile(module)" else model


@contextlib.contextmanager
def hooks(before, after):
    handles = register_module_forward_pre_hook(before), register_module_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        torch._dynamo.reset()


for how in "torch.compile(module)", "module.compile()":
    names = []
    with hooks(lambda module, args: names.append(type(module).__name__), lambda *_: None):
        model = new_model(how)
        model(inputs)
        model(inputs)
    print(f"names with {how}, twice: {' '.join(names)}")


def run(how, asks):
    running = []

    def before(module, args):
        if not (asks and torch.compiler.is_compiling()):
            running.append(module)

    def after(module, args, output):
        if not (asks and torch.compiler.is_compiling()) and running[-1] is module:
            running.pop()

    with hooks(before, after):
        try:
            new_model(how)(inputs)
        except AssertionError:
            return "AssertionError"
    return "works" if not running else f"{len(running)} left"


for how in "plain", "module.compile()", "torch.compile(module)":
    print(f"a list of the modules that run, {how}: {run(how, asks=False)}")
print(f"the same with is_compiling() asked first, {how}: {run(how, asks=True)}")
EOP
"$folder/env/bin/python" -W ignore "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: torch.compile compiles hooks of all modules, and may fail there"

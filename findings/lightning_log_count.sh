#!/bin/sh
# Lightning's self.log: a number of tokens.
# Versions: lightning 2.6.6, torch 2.13.0, numpy 2.1.3, Python 3.11. One process.
# Guess: a Python integer or an int64 tensor comes back as it was logged.
# What happens: all become float32, also those that are summed (reduce_fx="sum"). Above 16,777,216, a few seconds of a
# language model's tokens, the last digits are lost: adding 1 changes nothing. A float64 tensor stays exact.
# Seen:
#> logged 16777217, an int: 16777216.0 in float32
#> logged 16777217, an int64 tensor: 16777216.0 in float32
#> logged 16777216 and 1, ints, reduce_fx="sum": 16777216.0 in float32
#> logged 16777217, a float64 tensor: 16777217.0 in float64
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 lightning==2.6.6 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

LARGE = 2**24 + 1


class Model(LightningModule):
    def validation_step(self, batch, index):
        self.log(f"{LARGE}, an int", LARGE, on_epoch=True, reduce_fx="max")
        self.log(f"{LARGE}, an int64 tensor", torch.tensor(LARGE), on_epoch=True, reduce_fx="max")
        self.log(f'{LARGE - 1} and 1, ints, reduce_fx="sum"', LARGE - 1 if index == 0 else 1, reduce_fx="sum")
        number = torch.tensor(LARGE, dtype=torch.float64)
        self.log(f"{LARGE}, a float64 tensor", number, on_epoch=True, reduce_fx="max")


trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
trainer.validate(Model(), DataLoader(range(2)), verbose=False)
for what, number in trainer.callback_metrics.items():
    print(f"logged {what}: {number.item()} in {str(number.dtype).removeprefix('torch.')}")
EOF
(cd "$folder" && env/bin/python program.py > seen 2> errors) || { cat "$folder/errors" >&2; exit 1; }

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: what self.log gets becomes float32"

#!/bin/sh
# Lightning's fit(ckpt_path=...): a checkpoint of step 3 in an epoch of 5 batches.
# Versions: lightning 2.6.6, torch 2.13.0, numpy 2.1.3, Python 3.11. One process.
# Guess: the progress of the epoch is in the checkpoint, so batches 3 and 4 come next, then the second epoch.
# What happens: a checkpoint that ModelCheckpoint has written resumes with two batches, but the epoch's first two: they
# come again, and 3 and 4 never do. One that save_checkpoint has written after max_steps=3 goes on with the next epoch.
# Seen:
#> by ModelCheckpoint in step 3: batches [0, 1, 0, 1, 2, 3, 4], 10 steps at the end
#> by save_checkpoint after max_steps=3: batches [0, 1, 2, 3, 4], 8 steps at the end
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 lightning==2.6.6 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(int(batch))
        return self.layer(batch.view(-1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(checkpoint=None, **options):
    options.setdefault("enable_checkpointing", False)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options
    )
    model = Model()
    trainer.fit(model, DataLoader(torch.arange(5.0), batch_size=1), ckpt_path=checkpoint)
    return trainer, model


callback = ModelCheckpoint(dirpath=".", filename="{step}", every_n_train_steps=3)
fit(max_epochs=1, enable_checkpointing=True, callbacks=[callback])
trainer, _ = fit(max_epochs=-1, max_steps=3)
trainer.save_checkpoint("stopped.ckpt")
for how, path in ("ModelCheckpoint in step 3", "step=3.ckpt"), ("save_checkpoint after max_steps=3", "stopped.ckpt"):
    trainer, model = fit(path, max_epochs=2)
    print(f"by {how}: batches {model.seen}, {trainer.global_step} steps at the end")
EOF
(cd "$folder" && env/bin/python program.py > seen 2> errors) || { cat "$folder/errors" >&2; exit 1; }

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: the rest of an interrupted epoch never comes"

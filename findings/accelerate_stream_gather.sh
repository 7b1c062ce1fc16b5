#!/bin/sh
# Accelerate's gather_for_metrics: a stream that each rank reads for itself.
# Versions: accelerate 1.15.0, torch 2.13.0, numpy 2.1.3, Python 3.11.
# Guess: "drops duplicates in the last batch" holds for each loader that Accelerate has prepared, so 10 examples are 10.
# What happens: with dispatch_batches=False, which lets each rank read an IterableDataset, the last batches are filled
# with the stream's first examples, and these stay: 16 of 10. A metric counts them twice. The default (rank 0 reads for
# all) gives 10.
# Seen:
#> dispatch_batches=None: 10 values, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
#> dispatch_batches=False: 16 values, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 accelerate==1.15.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


for dispatch in None, False:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    values = []
    for batch in accelerator.prepare(DataLoader(Stream(), batch_size=4)):
        values += accelerator.gather_for_metrics(batch).tolist()
    accelerator.print(f"dispatch_batches={dispatch}: {len(values)} values, {values}")
accelerator.end_training()
EOF
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 "$folder/program.py" > "$folder/seen"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: gather_for_metrics returns 16 values of a stream of 10"

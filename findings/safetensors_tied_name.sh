#!/bin/sh
# safetensors' save_model: the name under which tied weights are saved.
# Versions: safetensors 0.8.0, torch 2.13.0, numpy 2.1.3, Python 3.11.
# Guess: the first name of the model's state_dict, the embedding's, whose parameter the output layer borrows.
# What happens: the first name of the alphabet. "embed" comes before "lm_head", but "head" before "wte": two models of
# one structure write different keys, and renaming a layer moves the weights to the other name.
# Seen:
#> embed and lm_head, in this order: the file has ['embed.weight']
#> wte and head, in this order: the file has ['head.weight']
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
from safetensors.torch import load_file, save_model
from torch import nn

for first, second in ("embed", "lm_head"), ("wte", "head"):
    embedding, output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    output.weight = embedding.weight
    model = nn.ModuleDict({first: embedding, second: output})
    save_model(model, "model.safetensors")
    print(f"{first} and {second}, in this order: the file has {list(load_file('model.safetensors'))}")
EOF
(cd "$folder" && env/bin/python program.py > seen)

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { echo "changed: see the lines above" >&2; exit 1; }
echo "as found: save_model keeps the tied name that comes first in the alphabet"

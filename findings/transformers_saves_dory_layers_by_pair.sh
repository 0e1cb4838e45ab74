#!/usr/bin/env bash
# transformers 5.24.0 saves Dory's tensors under the hub's prefix and its own numbers: config.json counts attention and mlp as a
# layer each, as the hub's do, and backbone.layers.N holds both. vLLM 0.33.0 looks for backbone.layers.2N.mixer and 2N+1.mixer.
# Seen: of 2 layers, 4 by config.json, names have the numbers 0 and 1, with self_attn, mlp and lambda_1, and no mixer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'P'
import json
import re
import sys
from pathlib import Path

from safetensors import safe_open
from transformers import DoryConfig, DoryForCausalLM

folder = Path(sys.argv[1]) / "dory"
sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40, "vocab_size": 97}
layers = {"num_hidden_layers": 2, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0}
DoryForCausalLM(DoryConfig(**sizes, **layers)).save_pretrained(folder)
num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
with safe_open(folder / "model.safetensors", "pt") as file:
    found = [re.match(r"backbone\.layers\.(\d+)\.(\w+)", name) for name in file.keys()]
numbers, parts = ({match[place] for match in found if match} for place in (1, 2))
print(num_layers, sorted(numbers), sorted(parts))
raise SystemExit(not (num_layers == 4 and numbers == {"0", "1"} and parts == {"self_attn", "mlp", "lambda_1", "lambda_2"}))
P

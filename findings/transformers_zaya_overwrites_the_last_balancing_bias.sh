#!/usr/bin/env bash
# ZayaForCausalLM.from_pretrained of transformers 5.24.0 sets the last number of each layer's balancing_biases to -1,
# whatever the file has: ZayaPreTrainedModel._init_weights writes it after loading. The others are the file's.
# Seen: of 0.1, -0.2, 0.3, 0.4, 0.5 in a file, the model has 0.1, -0.2, 0.3, 0.4, -1.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cd "$folder"
"$folder/venv/bin/python" - <<'P'
import torch
from transformers import ZayaConfig, ZayaForCausalLM

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 97, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 8}
model = ZayaForCausalLM(ZayaConfig(**sizes))
stored = torch.tensor([0.1, -0.2, 0.3, 0.4, 0.5])
for layer in model.model.layers:
    layer.mlp.gate.balancing_biases.copy_(stored)
model.save_pretrained("saved")
loaded = ZayaForCausalLM.from_pretrained("saved")
found = loaded.model.layers[0].mlp.gate.balancing_biases
print(stored.tolist(), found.tolist())
raise SystemExit(not (torch.equal(found[:-1], stored[:-1]) and found[-1] == -1))
P

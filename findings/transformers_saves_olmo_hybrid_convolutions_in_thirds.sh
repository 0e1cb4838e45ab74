#!/usr/bin/env bash
# OLMo-Hybrid's files have the short convolutions of q, k and v apart. transformers 5.24 holds them as one tensor and
# splits it into three equal parts when it saves, whatever the sizes of keys and values are, so that a file's
# v_conv1d.weight is not that of the values unless all are of one size. Its own loader joins them again and gives the
# same model; any other reader finds other shapes.
# Seen: 16 channels of q, 16 of k and 32 of v are saved as 22, 22 and 20.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder/model" <<'P'
import sys

import torch
from safetensors import safe_open
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

folder, tokens = sys.argv[1], torch.arange(10)[None]
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
config = OlmoHybridConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64, pad_token_id=None, eos_token_id=1,
    layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=16, **heads,
)
model = OlmoHybridForCausalLM(config).eval()
model.save_pretrained(folder)
with safe_open(f"{folder}/model.safetensors", "pt") as file:
    name = "model.layers.0.linear_attn.{}_conv1d.weight"
    channels = [file.get_slice(name.format(role)).get_shape()[0] for role in "qkv"]
again = OlmoHybridForCausalLM.from_pretrained(folder).eval()
is_same = torch.equal(model(tokens).logits, again(tokens).logits)
print(f"channels of q, k and v in the file: {channels}; loaded again the same model: {is_same}")
raise SystemExit((channels, is_same) != ([22, 22, 20], True))
P

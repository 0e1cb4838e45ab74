#!/usr/bin/env bash
# DBRX's config.json has the base of its rope in attn_config, rope_theta=500000. transformers 5.24 keeps that number on each
# attention, where nothing reads it, and turns by rope_parameters, which such a file has not: the base is 10000, without a
# word. A file that it saves has both. transformers 4 and vLLM take the 500000.
# Seen: frequencies of base 10000, whatever attn_config has; attn_config.rope_theta is 500000 next to it in what is saved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
import transformers
from transformers import DbrxConfig, DbrxForCausalLM

attention = {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000}  # as in databricks/dbrx-instruct
experts = {"ffn_hidden_size": 16, "model_type": "", "moe_num_experts": 4, "moe_top_k": 2}
config = DbrxConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=64, attn_config=attention, ffn_config=experts)
found = DbrxForCausalLM(config).transformer.rotary_emb.inv_freq
is_of = {base: torch.allclose(found, base ** -(torch.arange(0, 8, 2) / 8)) for base in (10000.0, 500000.0)}
saved = config.to_dict()
print(f"transformers {transformers.__version__}: frequencies of base {[base for base, same in is_of.items() if same]}")
print(f"saved: {saved['rope_parameters']}, attn_config.rope_theta={saved['attn_config']['rope_theta']}")
raise SystemExit(is_of != {10000.0: True, 500000.0: False})
P

#!/usr/bin/env bash
# transformers 5.24 saves Hy4 under names that neither its classes nor the checkpoints of tencent/Hy4-preview have: undoing its
# renaming puts hc_pre ahead of the module that has it, and calls the gates of mlps linear_gate, as that of attention.
# Seen: model.layers.0.hc_pre.hc_attn_layer.hc_fn for model.layers.0.hc_attn_layer.hc_pre.hc_fn, model.hc_pre.hc_head.hc_head_fn for
# model.hc_head.hc_head_fn, and mlp.linear_gate for mlp.gate_proj. It reads all of these.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'P'
import sys

import transformers
from safetensors import safe_open
from transformers import HYV4Config, HYV4ForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
heads = {"num_attention_heads": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
config = HYV4Config(**sizes, **heads, index_n_heads=2, index_head_dim=8, n_routed_experts=2, num_experts_per_tok=1, pad_token_id=None)
HYV4ForCausalLM(config).save_pretrained(sys.argv[1])
with safe_open(f"{sys.argv[1]}/model.safetensors", "pt") as file:
    names = sorted(name for name in file.keys() if "hc_" in name or "mlp" in name)
print(f"transformers {transformers.__version__}: {' '.join(names)}")
saved = {"model.layers.0.hc_pre.hc_attn_layer.hc_fn", "model.hc_pre.hc_head.hc_head_fn", "model.layers.0.mlp.linear_gate.weight"}
raise SystemExit(not saved <= set(names))
P

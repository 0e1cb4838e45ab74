#!/usr/bin/env bash
# save_pretrained of DeepseekV4ForCausalLM in transformers 5.24.0 turns its renamings back into names that are neither its
# own nor the checkpoint's: kv_norm becomes attn.norm (the hub's is attn.kv_norm; norm is that of a compressor), all but the
# head keep the prefix `model.`, which the hub's names do not have, and embed_tokens and hc_head keep transformers' names.
# Loaders of the hub's names (vLLM's deepseek_v4) do not find them.
# Seen: head.weight, model.embed_tokens.weight, model.hc_head.hc_fn, model.layers.0.attn.norm.weight, and no kv_norm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder/model" <<'P'
import sys

from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV4Config

sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 8, "o_groups": 2,
         "o_lora_rank": 8, "vocab_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"], "bos_token_id": None, "eos_token_id": None}
AutoModelForCausalLM.from_config(DeepseekV4Config(**sizes)).save_pretrained(sys.argv[1])
names = set(safe_open(f"{sys.argv[1]}/model.safetensors", "pt").keys())
seen = {"head.weight", "model.embed_tokens.weight", "model.hc_head.hc_fn", "model.layers.0.attn.norm.weight"}
print(*sorted(names & seen), *(name for name in names if "kv_norm" in name))
raise SystemExit(not seen <= names or any("kv_norm" in name for name in names))
P

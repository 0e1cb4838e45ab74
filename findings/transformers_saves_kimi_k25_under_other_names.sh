#!/usr/bin/env bash
# transformers 5.24.0 saves Kimi-K2.5's tensors under names that are not all the hub's, which its own loader and vLLM's read:
# the text's layers are called blocks, as those of the tower are, the patches' convolution lies in the encoder, and the
# norm of the projector is below model. So a checkpoint that it saves again is one that others do not find these tensors in.
# Seen: language_model.model.blocks.0, vision_tower.encoder.patch_embed.proj and model.mm_projector.pre_norm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'P'
import sys
from pathlib import Path

from safetensors import safe_open
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

folder = Path(sys.argv[1]) / "kimi"
text = {"model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 40, "vocab_size": 97, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
config = Kimi_K25Config(text_config=text, vision_config=tower, projection_hidden_size=16)
Kimi_K25ForConditionalGeneration(config).save_pretrained(folder)
with safe_open(folder / "model.safetensors", "pt") as file:
    names = set(file.keys())
seen = {name for name in names if "blocks.0.input_layernorm" in name or "patch_embed.proj.weight" in name or "pre_norm.weight" in name}
print(sorted(seen))
hub = {"language_model.model.layers.0.input_layernorm.weight", "vision_tower.patch_embed.proj.weight", "mm_projector.pre_norm.weight"}
raise SystemExit(bool(hub & names) or len(seen) != 3)
P

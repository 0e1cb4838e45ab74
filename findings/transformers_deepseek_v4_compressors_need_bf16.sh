#!/usr/bin/env bash
# transformers 5.24.0 lists the compressors' linears of DeepSeek-V4 in _keep_in_fp32_modules. With dtype=float16 they are
# loaded in float32 and then given half-precision hidden states: each forward pass of a checkpoint with compressed layers
# raises. In bfloat16, for which that list is not meant, they stay in bfloat16 and run.
# Seen: "expected m1 and m2 to have the same dtype, but got: c10::Half != float" in float16, logits in bfloat16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder/model" <<'P'
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV4Config

print("transformers", transformers.__version__)
config = DeepseekV4Config(
    vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
    q_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=8, sliding_window=8, hc_mult=2,
    layer_types=["heavily_compressed_attention"], mlp_layer_types=["moe"], partial_rotary_factor=0.5,
    compress_rates={"heavily_compressed_attention": 4},
)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
seen = {}
for dtype in (torch.float16, torch.bfloat16):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
    try:
        seen[dtype] = model(torch.arange(8)[None]).logits.dtype
    except RuntimeError as error:
        seen[dtype] = str(error)
    print(dtype, model.model.layers[0].self_attn.compressor.kv_proj.weight.dtype, seen[dtype])
sys.exit(not ("same dtype" in str(seen[torch.float16]) and seen[torch.bfloat16] == torch.bfloat16))
P

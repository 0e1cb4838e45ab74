#!/usr/bin/env bash
# Phi-3.5-MoE's longrope has factors for contexts up to the original one and others beyond it. transformers 5.24 asks
# for the frequencies of PhiMoE without the length of the sequence, so that it divides by the short ones whatever the
# length is, and only changes the scale of cos and sin. vLLM takes the long ones, as Microsoft's code does.
# Seen: with other long factors, logits of 40 tokens, where the original context is 16, stay the same; with other short
# ones they change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
from transformers import PhimoeConfig, PhimoeForCausalLM

tokens, scale = torch.arange(40)[None], {"short_mscale": 1.2, "long_mscale": 1.3}


def logits(short, long):
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **scale}
    config = PhimoeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, pad_token_id=None, eos_token_id=1,
        initializer_range=0.3, rope_parameters={**rope, "short_factor": [short] * 8, "long_factor": [long] * 8},
    )
    return PhimoeForCausalLM(config).eval()(tokens).logits


with torch.inference_mode():
    first = logits(1.0, 2.0)
    is_same = torch.equal(first, logits(1.0, 8.0)), torch.equal(first, logits(3.0, 2.0))
print(f"the same logits with other long factors: {is_same[0]}; with other short ones: {is_same[1]}")
raise SystemExit(is_same != (True, False))
P

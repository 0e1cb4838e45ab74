#!/usr/bin/env bash
# The text of PaliGemma without token_type_ids is causal by attn_implementation="eager" in transformers 5.24.0, and not by
# "sdpa": a causal mask without padding is left out for sdpa to make, and GemmaAttention.is_causal is false, since
# PaliGemmaConfig sets use_bidirectional_attention. vLLM's text is causal.
# Seen: another last token changes no earlier logits by eager, and all by sdpa unless the batch has padding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

text = {"model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 101}
images = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
          "num_attention_heads": 2, "patch_size": 4, "image_size": 8}
config = PaliGemmaConfig(text_config=text, vision_config=images, image_token_index=100, projection_dim=32)
tokens = torch.arange(24).view(2, 12)
others = tokens.clone()
others[:, -1] += 50
padded = torch.ones_like(tokens)
padded[1, 0] = 0
changed = {}
for kind in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration._from_config(config, attn_implementation=kind).eval()
    for name, mask in (("whole", torch.ones_like(tokens)), ("padded", padded)):
        with torch.no_grad():
            a, b = (model(input_ids=each, attention_mask=mask).logits[0, :-1] for each in (tokens, others))
        changed[kind, name] = float((a - b).abs().max())
print(changed)
raise SystemExit(not all((value > 1e-3) == (at == ("sdpa", "whole")) for at, value in changed.items()))
P

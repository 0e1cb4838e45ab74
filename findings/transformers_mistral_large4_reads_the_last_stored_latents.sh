#!/usr/bin/env bash
# kv_source_layers of Mistral Large 4 says for each layer "the index of the layer whose latent KV cache it attends to". transformers
# 5.24 keeps one pair for all layers with a rope and one for those without, in which each layer that others name writes: a layer
# reads the last one, whatever its index says. With [0, 1, 0, 1] the third layer so attends to the latents of the second.
# Seen: of four layers with a rope, layer 2 reads the latents of layer 1, not of layer 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
import transformers
from transformers.models.mistral_large4 import modeling_mistral_large4 as modeling

config = transformers.MistralLarge4TextConfig(
    hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, moe_intermediate_size=8,
    n_routed_experts=2, num_experts_per_tok=1, vocab_size=32, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    index_n_heads=2, index_head_dim=8, no_rope_layers=[1] * 4, kv_source_layers=[0, 1, 0, 1],
)
config._attn_implementation = "eager"
torch.manual_seed(0)
model = modeling.MistralLarge4TextModel(config).eval()
for parameter in model.parameters():
    parameter.data.normal_()
read = []
expand = model.layers[2].self_attn.expand_kv
model.layers[2].self_attn.expand_kv = lambda latent, key: (read.append(latent), expand(latent, key))[1]
stored = []
for layer in model.layers[:2]:
    own = layer.self_attn.expand_kv
    layer.self_attn.expand_kv = lambda latent, key, own=own: (stored.append(latent), own(latent, key))[1]
with torch.inference_mode():
    model(torch.arange(5)[None], use_cache=False)
found = [index for index, latent in enumerate(stored) if torch.equal(latent, read[0])]
print(f"transformers {transformers.__version__}: kv_source_layers={config.kv_source_layers}, layer 2 reads those of {found}")
raise SystemExit(found != [1])
P

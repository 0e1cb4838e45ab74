#!/usr/bin/env bash
# Falcon with alibi (Falcon-RW) has other logits by attn_implementation="eager" than by "sdpa" in transformers 5.24.0: the
# model puts the bias into the attention mask for sdpa, and FalconAttention's eager path adds it once more. vLLM adds it once.
# Seen: eager and sdpa differ by more than 0.01; without alibi by less than 1e-5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
from transformers import FalconConfig, FalconForCausalLM

differences = {}
for alibi in (False, True):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 97, "ffn_hidden_size": 80}
    model = FalconForCausalLM(FalconConfig(**sizes, alibi=alibi, multi_query=False, parallel_attn=False)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    logits = []
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        for layer in model.transformer.h:
            layer.self_attention.config._attn_implementation = kind
        with torch.no_grad():
            logits.append(model(torch.arange(30)[None]).logits)
    differences[alibi] = float((logits[0] - logits[1]).abs().max())
print(differences)
raise SystemExit(not (differences[False] < 1e-5 and differences[True] > 0.01))
P

#!/usr/bin/env bash
# MiniMaxM3VLTextConfig of transformers 5.24.0 documents `rotary_dim` as the number of a head's dims that turn, and its model
# reads `partial_rotary_factor` only: without that, all dims turn. MiniMaxM2Config derives the factor from `rotary_dim`.
# Published files have both, and they agree. atom turns `rotary_dim` dims.
# Seen, of heads of 128 dims with rotary_dim 64: 64 frequencies (128 dims) for M3, 32 for M2, 32 for M3 with a factor of 0.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cd "$folder"
"$folder/venv/bin/python" - <<'P'
from transformers import MiniMaxM2Config, MiniMaxM3VLTextConfig
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLRotaryEmbedding

sizes = {"head_dim": 128, "rotary_dim": 64}
factor = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
m3 = len(MiniMaxM3VLRotaryEmbedding(MiniMaxM3VLTextConfig(**sizes)).inv_freq)
m2 = len(MiniMaxM2RotaryEmbedding(MiniMaxM2Config(**sizes)).inv_freq)
both = len(MiniMaxM3VLRotaryEmbedding(MiniMaxM3VLTextConfig(**sizes, **factor)).inv_freq)
print(f"frequencies: {m3} of M3, {m2} of M2, {both} of M3 with a factor")
raise SystemExit((m3, m2, both) != (64, 32, 32))
P

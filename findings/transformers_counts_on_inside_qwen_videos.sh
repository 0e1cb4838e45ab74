#!/usr/bin/env bash
# get_rope_index of Qwen2-VL and Qwen2.5-VL in transformers 5.24.0 counts on after a video from the larger of its rows and
# columns, not from its frames: text after a video of more temporal positions than these has positions inside it, and the
# next token of an answer is far after the prompt's. The models' first code, and vLLM's, count on from the largest of all three.
# Seen: a video of 8 x 1 x 1 after one token has the times 1 to 8; the token after it has the position 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
from transformers import Qwen2VLConfig, Qwen2VLModel

model = Qwen2VLModel.__new__(Qwen2VLModel)
torch.nn.Module.__init__(model)
model.config = Qwen2VLConfig()
types = torch.tensor([[0, *[2] * 8, 0]])
positions, delta = model.get_rope_index(torch.zeros_like(types), types, video_grid_thw=torch.tensor([[8, 2, 2]]))
print(positions[0, 0].tolist(), delta.tolist())
raise SystemExit(positions[0, 0].tolist() != [0, 1, 2, 3, 4, 5, 6, 7, 8, 2])
P

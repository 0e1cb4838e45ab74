#!/usr/bin/env bash
# Hy4's weights are stored for a rope that turns pairs of dims, (0, 1), (2, 3), …: vLLM 0.33 turns them so, in attention and in
# the indexer, and says that halves lose the relative position. transformers 5.24 has it so in hy_v4_vl, the text of Hy4-VL, and
# turns halves, (0, R / 2), …, in hy_v4, of weights that its conversion leaves in their order.
# Seen: of one vector at position 3, hy_v4 turns dim 0 with dim 4, hy_v4_vl with dim 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
import transformers
from transformers.models.hy_v4 import modeling_hy_v4
from transformers.models.hy_v4_vl import modeling_hy_v4_vl

angles = 3.0 * 10000.0 ** -(torch.arange(4) / 4)
cos, sin = (torch.cat((each, each))[None, None] for each in (angles.cos(), angles.sin()))
x = torch.zeros(1, 1, 1, 8)
x[..., 0] = 1.0
partners = {}
for module in (modeling_hy_v4, modeling_hy_v4_vl):
    turned, _ = module.apply_rotary_pos_emb(x, x, cos, sin)
    partners[module.__name__.rpartition(".")[2]] = [int(dim) for dim in turned.flatten().nonzero()]
print(f"transformers {transformers.__version__}: what dim 0 becomes: {partners}")
raise SystemExit(partners != {"modeling_hy_v4": [0, 4], "modeling_hy_v4_vl": [0, 1]})
P

#!/usr/bin/env bash
# Mamba-2 clamps its time steps to config.time_step_limit. transformers 5.24 does so in the forward of several tokens, but
# not in that of one token with a cache: with a finite limit, an answer is not that of the same tokens at once. Without a
# limit both agree.
# Seen: logits of the last of 12 tokens, whole against 11 and 1, are equal to 1e-6 of the largest without a limit, and
# more than 1% off with (0, 0.001) at steps of about 1.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "num_hidden_layers": 1}
tokens = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
differences = []
for limit in ((0.0, float("inf")), (0.0, 0.001)):
    torch.manual_seed(1)
    config = Mamba2Config(**sizes, vocab_size=50, chunk_size=8, time_step_limit=limit)
    model = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        model.backbone.layers[0].mixer.dt_bias.fill_(1.0)
        whole = model(tokens).logits[0, -1]
        before = model(tokens[:, :-1], use_cache=True)
        last = model(tokens[:, -1:], cache_params=before.cache_params).logits[0, -1]
    differences.append(((whole - last).abs().max() / whole.abs().max()).item())
print(f"without a limit {differences[0]:.1e}, with one {differences[1]:.1e}")
raise SystemExit(not (differences[0] < 1e-5 and differences[1] > 0.01))
P

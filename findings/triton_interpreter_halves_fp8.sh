#!/usr/bin/env bash
# Triton's interpreter (TRITON_INTERPRET=1) makes half of a number that e4m3 rounds up to a power of 2: it adds the carry of
# the mantissa to a field that has lost it. Torch, and a GPU, round 126.4 to 128.
# Seen: 3.8.0: 126.375 -> 64, 31.5 -> 16; 100, a tie, -> 104, by torch 96; 255 -> 256 and 3.99 -> 4 as torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check triton==3.8.0 torch==2.13.0 numpy
cat >"$folder/program.py" <<'P'
import torch
import triton
import triton.language as tl


@triton.jit
def convert(x, y, NUM: tl.constexpr):
    at = tl.arange(0, NUM)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


x = torch.tensor([126.375, 31.5, 100.0, 255.0, 3.99, 1.1, 0.9999, 447.0])
made, torchs = torch.empty(8, dtype=torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)
convert[(1,)](x, made, 8)
print(triton.__version__, x.tolist())
print("interpreter", made.float().tolist())
print("torch", torchs.float().tolist())
raise SystemExit(made.float().tolist()[:3] != [64, 16, 104] or torchs.float().tolist()[:3] != [128, 32, 96])
P
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/program.py"

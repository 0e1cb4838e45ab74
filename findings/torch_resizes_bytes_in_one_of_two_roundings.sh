#!/usr/bin/env bash
# F.interpolate(uint8, mode="bicubic", antialias=True) of torch 2.13.0 rounds after its pass over rows and after that over
# columns, as Pillow does, or only once, as with floats: which depends on the shape. torchvision's resize, and so the
# processors of transformers by default, inherit it; on noise, a bicubic peak that is cut off at 255 in between makes
# tens of levels. So pixels are held against the processors that have Pillow resize.
# Seen: 512 columns of 333 rows to 480 x 320 are within 1 level of Pillow's, 517 columns to 512 x 320 are 23 off.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pillow==13.0.0
"$folder/venv/bin/python" - <<'P'
import numpy as np
import torch
from PIL import Image


def distance(shape, size):
    pixels = np.random.default_rng(2848).integers(0, 256, (*shape, 3), np.uint8)
    channels_first = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].contiguous()
    made = torch.nn.functional.interpolate(channels_first, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    expected = np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC))
    return int(np.abs(made.numpy().astype(int) - expected).max())


near, far = distance((333, 512), (320, 480)), distance((333, 517), (320, 512))
print(f"levels off Pillow's: 512 columns {near}, 517 columns {far}")
raise SystemExit(not (near <= 2 and far > 10))
P

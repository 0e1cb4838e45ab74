#!/usr/bin/env bash
# Image.convert("RGB") of Pillow 13.0.0 makes 255 of each value over 255 of a 16-bit image (mode I;16), and does not scale:
# a grey PNG of 16 bits, as scanners and microscopes write them, becomes white. The same PNG in color is scaled as it is
# read. The processors of transformers convert so; atom keeps the upper 8 bits.
# Seen: [0, 128, 256, 32768, 65535] becomes [0, 128, 255, 255, 255].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0
"$folder/venv/bin/python" - <<'P'
import io

import numpy as np
from PIL import Image

file = io.BytesIO()
Image.fromarray(np.array([[0, 128, 256, 32768, 65535]], np.uint16)).save(file, "PNG")
image = Image.open(file)
seen = np.asarray(image.convert("RGB"))[0, :, 0].tolist()
print(image.mode, seen)
raise SystemExit(seen != [0, 128, 255, 255, 255])
P

#!/usr/bin/env bash
# numpy.random.default_rng of NumPy 2.4.6 ignores zeros at the end of a list of up to four seeds: [7], [7, 0] and
# [7, 0, 0] draw the same numbers. A seed that ends with a count from 0 is that of another generator: count from 1.
# Seen: the first 64 bits of [7] and [7, 0] are equal, those of [7, 1] and of [0, 7] are others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - <<'P'
import sys

import numpy

seeds = ([7], [7, 0], [7, 0, 0], [7, 1], [0, 7])
first = {str(seed): int(numpy.random.default_rng(seed).integers(2**63)) for seed in seeds}
print(numpy.__version__, first)
sys.exit(not (first["[7]"] == first["[7, 0]"] == first["[7, 0, 0]"]) or len({*first.values()}) != 3)
P

"""Parameters of kernels that were measured to be the fastest, by GPU: a JSON file each.

parameters("NVIDIA H200", "linear", "1 6144 4096 1")     # ["vector", 8, 8, 3, 1], or None where nobody has measured

A key says what a kernel's choice depends on: of a linear the rows up to which it holds, outputs, inputs, and 2 where
half of the outputs are gates. ["library"] is where the vendor's is the fastest. What is not listed follows from the
kernel's own rule.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any


def parameters(gpu: str, kernel: str, key: str) -> list[Any] | None:
    """What was measured on a GPU of this name."""
    found: list[Any] | None = _measured(gpu).get(kernel, {}).get(key)
    return found


@cache
def _measured(gpu: str) -> dict[str, dict[str, list[Any]]]:
    file = Path(__file__).with_name(re.sub(r"\W+", "_", gpu.lower()) + ".json")
    return json.loads(file.read_text()) if file.is_file() else {}

from __future__ import annotations

import torch
from safetensors.torch import _TYPES as SAFETENSORS

from atom.dtypes import DTYPES


def test_torch_and_safetensors_have_dtypes_of_these_names_and_sizes():
    known = [each for each in DTYPES.values() if each.safetensors in SAFETENSORS and each.bits >= 8]
    assert len(known) > 12
    for each in known:
        assert SAFETENSORS[each.safetensors] is getattr(torch, each.name), each
        assert each.bits == 8 * SAFETENSORS[each.safetensors].itemsize, each

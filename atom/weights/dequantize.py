"""Dequantize weights that a checkpoint stores packed.

dense = unpack("mxfp4", {"values": blocks, "scales": scales})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atom.dtypes import FORMATS
from atom.graph import formats

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, by its 4 bits


def unpack(fmt: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Dequantize a weight's parts to fp32[..., O, I], see `graph.parts`; of one that was transposed too."""
    if fmt in UNPACK:
        return UNPACK[fmt](**parts)
    stored = formats.transpose(fmt)
    assert stored in UNPACK, f"a weight is stored as {fmt}: refuse_packed comes first"
    blocks = {name: len(part.block) for name, part in FORMATS[stored].parts.items()}
    swapped = {name: part.transpose(-2 - blocks[name], -1 - blocks[name]) for name, part in parts.items()}
    return UNPACK[stored](**swapped).mT


def unpack_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """values u8[..., B, 16], scales u8[..., B] -> fp32[..., 32 B] (OCP Microscaling Formats 1.0)

    A byte holds two elements, the first in its lower half; a scale is an exponent of 2, plus 127.
    """
    fp4 = torch.tensor(FP4)
    pairs = torch.stack((fp4.repeat(16), fp4.repeat_interleave(16)), dim=1)  # by byte
    elements = torch.nn.functional.embedding(values.int(), pairs).flatten(-2)
    return torch.ldexp(elements, scales.int().unsqueeze(-1) - 127).flatten(-2)


UNPACK: dict[str, Callable[..., Tensor]] = {"mxfp4": unpack_mxfp4}  # formats whose parts are known

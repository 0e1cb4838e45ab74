"""Dequantize weights that a checkpoint stores packed.

dense = unpack("mxfp4", {"values": blocks, "scales": scales})
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atom.graph import formats

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, by its 4 bits


def unpack(fmt: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Dequantize a weight's parts to fp32[..., O, I], see `graph.parts`; of one that was transposed too."""
    if fmt == formats.transpose("mxfp4"):
        return unpack_mxfp4(parts["values"].transpose(-3, -2), parts["scales"].mT).mT
    assert fmt == "mxfp4", f"a weight is stored as {fmt}: refuse_packed comes first"
    return unpack_mxfp4(parts["values"], parts["scales"])


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks u8[..., B, 16], scales u8[..., B] -> fp32[..., 32 B] (OCP Microscaling Formats 1.0)

    A byte holds two elements, the first in its lower half; a scale is an exponent of 2, plus 127.
    """
    fp4 = torch.tensor(FP4)
    pairs = torch.stack((fp4.repeat(16), fp4.repeat_interleave(16)), dim=1)  # by byte
    values = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)

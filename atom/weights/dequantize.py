"""Dequantize weights that a checkpoint stores packed.

dense = unpack(leaf, read)                               # all of it
dense = unpack(leaf, read, lambda part: part[2:3])       # the third expert alone
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atom.graph import W
from atom.graph.formats import stored_parts

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, by its 4 bits


def unpack(leaf: W, read: Callable[[str], Tensor], choose: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Dequantize a leaf to fp32[..., O, I], or only what `choose` selects in all dims of its parts but the last."""
    assert leaf.fmt == "mxfp4", f"{leaf.name} is stored as {leaf.fmt}: refuse_packed comes first"
    blocks, scales = (choose(read(leaf.name + suffix)) for suffix in stored_parts(leaf.type, leaf.fmt))
    return unpack_mxfp4(blocks, scales)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks u8[..., B, 16], scales u8[..., B] -> fp32[..., 32 B] (OCP Microscaling Formats 1.0)

    A byte holds two elements, the first in its lower half; a scale is an exponent of 2, plus 127.
    """
    fp4 = torch.tensor(FP4)
    pairs = torch.stack((fp4.repeat(16), fp4.repeat_interleave(16)), dim=1)  # by byte
    values = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)

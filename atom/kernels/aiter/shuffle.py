"""Shuffle weights for AITER, into tiles of 16 rows and 32 columns.

    weight = shuffle(packed)    # once: values in tiles; on gfx942 in fp8_e4m3fnuz, whose scales are twice as large
    weight = shuffle(plain)     # of experts, in bf16 or fp16

A tile is 16 rows of lanes of 16 bytes, two in fp8 and four in 16 bits. The tiles of a strip of 16 rows are consecutive,
and within one the rows of the first lane precede those of the second, so that a thread loads 16 consecutive bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from atom.graph import PackedWeight

LAYOUT = "aiter"
ROWS, COLUMNS, LANE = 16, 32, 16  # of a tile: rows, columns, bytes of a lane
FNUZ = "gfx942"  # its matrix cores multiply fp8_e4m3fnuz; later ones fp8_e4m3fn
NEGATIVE_ZERO = 0x80  # the NaN of e4m3fnuz


def find_arch() -> str:
    """The architecture of the first AMD GPU that this process sees; "" without one."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    name: str = torch.cuda.get_device_properties(0).gcnArchName
    return name.partition(":")[0]


def shuffle(weight: Tensor | PackedWeight) -> Tensor | PackedWeight:
    """A weight [..., O, I], plain or in fp8, shuffled for this machine's GPU."""
    return shuffle_tiles(weight) if isinstance(weight, Tensor) else lay_out(weight, find_arch())


def lay_out(weight: PackedWeight, arch: str) -> PackedWeight:
    values, scales = weight.parts["values"], weight.parts["scales"].float()
    if arch == FNUZ:
        values, scales = to_fnuz(values), scales * 2
    return replace(
        weight, parts={**weight.parts, "values": shuffle_tiles(values), "scales": scales.contiguous()}, layout=LAYOUT
    )


def shuffle_tiles(values: Tensor) -> Tensor:
    """[..., O, I] -> the same shape, in tiles; O and I are multiples of 16 and 32"""
    lanes = COLUMNS * values.itemsize // LANE
    strips = values.contiguous().view(torch.uint8).view(-1, ROWS, values.shape[-1] // COLUMNS, lanes, LANE)
    tiles = strips.permute(0, 2, 3, 1, 4).contiguous()
    return tiles.view(*values.shape[:-1], -1).view(values.dtype)


def to_fnuz(values: Tensor) -> Tensor:
    """fp8_e4m3fn -> fp8_e4m3fnuz of half the value: the same bits, since the exponent's bias is one more"""
    bits = values.view(torch.uint8)
    return bits.where(bits != NEGATIVE_ZERO, 0).view(torch.float8_e4m3fnuz)

"""Unpack GGUF blocks: K-quants, and numbers of 5 bits.

    blocks = take_apart("q4_k", stored)     # u8[..., B, 144] -> numbers u8[..., B, 256], scales u8[..., B, 8], …
    dense = unpack_blocks(stored, "q4_k")   # fp32[..., 256 B]

A number is (number - middle) * factor * scale + min_factor * min. Source: ggml (ggml-quants.c, dequantize_row_…).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from atom.graph.formats import parse_format

SPLIT = "parts"  # the layout of a GPU's linears, see `kernels.triton.linear.split_blocks`
PLANES = "wgmma"  # that of Hopper's, see `kernels.hopper.shuffle`


class BlockType(NamedTuple):
    take_apart: Callable[[Tensor], Blocks]
    group: int  # columns that share a scale
    factors_at: tuple[int, ...]  # the bytes at which a block's fp16 begin
    middle: int = 0  # what numbers are larger by
    has_mins: bool = False


@dataclass(frozen=True)
class Blocks:
    """The parts of blocks [..., B]; a block has G groups of columns."""

    numbers: Tensor  # u8[..., B, columns]
    factors: Tensor  # fp16[..., B]
    scales: Tensor | None = None  # i8[..., B, G], times factors; None: the factors are the scales
    min_factors: Tensor | None = None  # fp16[..., B]
    mins: Tensor | None = None  # i8[..., B, G], times min_factors; None: the factors are the minima


def take_apart(fmt: str, stored: Tensor) -> Blocks:
    """Blocks u8[..., B, bytes of a block] of a format in TYPES."""
    return TYPES[fmt].take_apart(stored)


def unpack_blocks(values: Tensor, fmt: str) -> Tensor:
    """u8[..., B, bytes of a block] -> fp32[..., columns of all blocks]"""
    blocks, known = take_apart(fmt, values), TYPES[fmt]
    numbers = _cut(blocks.numbers.float() - known.middle, -1, known.group)
    numbers *= _products(blocks.factors, blocks.scales)
    if blocks.min_factors is not None:
        numbers += _products(blocks.min_factors, blocks.mins)
    return numbers.flatten(-3)


def fit_factors(fmt: str, stored: Tensor, size: float) -> Tensor:
    """Random bytes u8[..., B, bytes of a block] with factors that give numbers of this standard deviation around 0."""
    blocks, known, made = take_apart(fmt, stored), TYPES[fmt], stored.clone()
    numbers = _cut(blocks.numbers.float() - known.middle, -1, known.group)
    numbers *= 1 if blocks.scales is None else blocks.scales[..., None]
    factors = [1.0]
    if known.has_mins:
        mins = torch.ones(1, device=stored.device) if blocks.mins is None else blocks.mins[..., None].float()
        ratio = numbers.mean() / mins.mean()
        numbers -= mins * ratio
        factors.append(float(ratio if blocks.scales is not None else -ratio))  # K-quants subtract them
    unit = size / float(numbers.std())
    for at, factor in zip(known.factors_at, factors, strict=True):
        number = torch.tensor([unit * factor], dtype=torch.float16, device=stored.device)
        made[..., at : at + 2] = number.view(torch.uint8)
    return made


def split_bits(fmt: str, layout: str) -> Fraction:
    """The bits of a number in the layout SPLIT or PLANES, with its part of scales, minima and factors."""
    known, stored = TYPES[fmt], parse_format(fmt)
    columns, num = int(stored.block[1] or 0), 1 + known.has_mins
    has_factors = columns > known.group
    of_group = Fraction(num * (8 if has_factors else 16), known.group)
    of_number = stored.bits if layout == PLANES else 4 if stored.bits <= 4 else 8
    return of_number + of_group + (Fraction(16 * num, columns) if has_factors else 0)


def _products(factors: Tensor, scales: Tensor | None) -> Tensor:
    """fp32[..., B, G, 1]"""
    wide = factors.float()[..., None]
    return (wide if scales is None else wide * scales)[..., None]


def _q5_0(stored: Tensor) -> Blocks:
    return Blocks(_five_bits(stored, 2), _fp16(stored, 0))


def _q5_1(stored: Tensor) -> Blocks:
    return Blocks(_five_bits(stored, 4), _fp16(stored, 0), min_factors=_fp16(stored, 2))


def _five_bits(stored: Tensor, first: int) -> Tensor:
    """The fifth bits of 32 numbers, then their lower 4 bits: those of the first half in the lower halves of bytes."""
    high = _bits(stored[..., first : first + 4], 1).flatten(-2)
    return _halves(stored[..., first + 4 :]) | high << 4


def _q2_k(stored: Tensor) -> Blocks:
    scales = stored[..., :16]
    numbers = _planes(stored[..., 16:80], 2)
    factors = _fp16(stored, 80), _fp16(stored, 82)
    return Blocks(numbers, factors[0], _signed(scales & 15), -factors[1], _signed(scales >> 4))


def _q3_k(stored: Tensor) -> Blocks:
    high = _bits(stored[..., :32], 1).mT.flatten(-2)  # of 32 columns each
    low, packed = _planes(stored[..., 32:96], 2), stored[..., 96:108]
    scales = _halves(packed[..., :8]) | _bits(packed[..., 8:], 2).mT.flatten(-2) << 4
    return Blocks(low | high << 2, _fp16(stored, 108), _signed(scales) - 32)


def _q4_k(stored: Tensor) -> Blocks:
    return Blocks(_halves(_cut(stored[..., 16:], 4, 32)).flatten(-2), *_scales_of_k(stored))


def _q5_k(stored: Tensor) -> Blocks:
    high = _bits(stored[..., 16:48], 1).mT.flatten(-2)
    low = _halves(_cut(stored[..., 48:], 4, 32)).flatten(-2)
    return Blocks(low | high << 4, *_scales_of_k(stored))


def _q6_k(stored: Tensor) -> Blocks:
    low = _halves(_cut(stored[..., :128], 2, 64)).flatten(-2)
    high = _planes(stored[..., 128:192], 2)
    return Blocks(low | high << 4, _fp16(stored, 208), _signed(stored[..., 192:208]))


def _scales_of_k(stored: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors and scales, then those of minima, of which 8 have 6 bits each.

    The first 4 scales and minima are the lower 6 bits of 4 bytes each. The last 4 have their lower 4 bits in the halves
    of 4 more bytes, and their upper 2 in the upper bits of the first ones.
    """
    first, second, last = _cut(stored[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)
    return _fp16(stored, 0), _signed(scales), -_fp16(stored, 2), _signed(mins)


def _cut(numbers: Tensor, *sizes: int) -> Tensor:
    """[..., N] -> [..., *sizes]"""
    return numbers.reshape(*numbers.shape[:-1], *sizes)


def _fp16(stored: Tensor, at: int) -> Tensor:
    return stored[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _signed(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int8)


def _bits(numbers: Tensor, size: int) -> Tensor:
    """u8[..., N] -> u8[..., N, 8 / size], the lowest bits first"""
    shifts = torch.arange(0, 8, size, dtype=torch.uint8, device=numbers.device)
    return numbers.unsqueeze(-1) >> shifts & (1 << size) - 1


def _halves(numbers: Tensor) -> Tensor:
    """u8[..., N] -> u8[..., 2 N]: the lower halves of all bytes, then the upper ones"""
    return torch.cat((numbers & 15, numbers >> 4), -1)


def _planes(numbers: Tensor, size: int) -> Tensor:
    """u8[..., 2 N] -> u8[..., 16 / size N]: of each half the lowest bits of all bytes, then the next ones"""
    return _bits(_cut(numbers, 2, -1), size).mT.flatten(-3)


TYPES = {
    "q5_0": BlockType(_q5_0, 32, (0,), 16),
    "q5_1": BlockType(_q5_1, 32, (0, 2), has_mins=True),
    "q2_k": BlockType(_q2_k, 16, (80, 82), has_mins=True),
    "q3_k": BlockType(_q3_k, 16, (108,), 4),
    "q4_k": BlockType(_q4_k, 32, (0, 2), has_mins=True),
    "q5_k": BlockType(_q5_k, 32, (0, 2), has_mins=True),
    "q6_k": BlockType(_q6_k, 16, (208,), 32),
}

"""Dequantize weights that a checkpoint stores packed.

dense = unpack("mxfp4", {"values": blocks, "scales": scales})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from atom.graph.formats import parse_format

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, by its 4 bits


def unpack(fmt: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Dequantize a weight's parts to fp32[..., O, I], see `graph.parts`; of one that was transposed too."""
    known = parse_format(fmt)
    unpack_kind = UNPACK[known.kind]
    held = {name: part.holds for name, part in known.parts.items()}
    if "bytes" not in held.values():
        return unpack_kind(**parts, block=known.block)
    if known.block[0] == 1:
        return unpack_kind(**parts)
    dims = {"bytes": (-3, -2), "blocks": (-2, -1), "tensor": (0, 0)}
    return unpack_kind(**{name: part.transpose(*dims[held[name]]) for name, part in parts.items()}).mT


def unpack_scaled(values: Tensor, scales: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """values fp8 or i8[..., O, I], scales fp32[..., ⌈O / rows⌉, ⌈I / columns⌉] -> fp32[..., O, I]"""
    unpacked = values.float()
    for dim, size in zip((-2, -1), block, strict=True):
        if size is not None and size > 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return unpacked.mul_(scales)


def unpack_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """values u8[..., B, 16], scales u8[..., B] -> fp32[..., 32 B] (OCP Microscaling Formats 1.0)

    A scale is an exponent of 2, plus 127.
    """
    return torch.ldexp(unpack_fp4(values), scales.int().unsqueeze(-1) - 127).flatten(-2)


def unpack_nvfp4(values: Tensor, scales: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> Tensor:
    """values u8[..., B, 8], scales fp8[..., B] -> fp32[..., 16 B], times the tensor's factor or by its divisor"""
    factor = factor if divisor is None else divisor.reciprocal()
    assert factor is not None, "a format has one of them"
    return (unpack_fp4(values) * (scales.float() * factor).unsqueeze(-1)).flatten(-2)


def unpack_fp4(values: Tensor) -> Tensor:
    """u8[..., N] -> fp32[..., 2 N]: a byte holds two e2m1, the first in its lower half"""
    fp4 = torch.tensor(FP4)
    pairs = torch.stack((fp4.repeat(16), fp4.repeat_interleave(16)), dim=1)  # by byte
    return torch.nn.functional.embedding(values.int(), pairs).flatten(-2)


def unpack_integers(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None, *, bits: int
) -> Tensor:
    """values u8[..., B, block bytes], scales fp32[..., B], zeros u8[..., B] -> fp32[..., I]: (value - zero) · scale

    Without zeros, zero is the middle: 8 of 4 bits, 128 of 8. groups i32[I]: the block of each column, where blocks are
    not of neighbours.
    """
    numbers = (torch.stack((values & 15, values >> 4), -1).flatten(-2) if bits == 4 else values).float()
    zeros = scales.new_full(scales.shape, 1 << (bits - 1)) if zeros is None else zeros.float()
    if groups is not None:
        return (numbers.flatten(-2) - zeros[..., groups]) * scales[..., groups]
    return ((numbers - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2)


def repack(words: Tensor, how: str, bits: int, shape: Sequence[int]) -> Tensor:
    """The numbers in int32 words as u8 of this shape, see `graph.recipes.Repack`."""
    holds_values = len(shape) > words.dim()
    numbers = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)  # [..., R, C, numbers a word]
    if how == "awq" and bits == 4:
        numbers = numbers[..., torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))]
    along_rows = how == "rows" or (how.startswith("gptq") and holds_values)
    numbers = numbers.movedim(-1, -2).flatten(-3, -2) if along_rows else numbers.flatten(-2)
    if how == "gptq_minus_1":
        numbers = numbers + 1
    numbers = (numbers & ((1 << bits) - 1)).to(torch.uint8)
    if how not in ("columns", "rows"):
        numbers = numbers.mT
    if not holds_values:
        return numbers[..., : shape[-2], : shape[-1]]
    columns = shape[-2] * shape[-1] * 8 // bits
    numbers = numbers[..., : shape[-3], :columns]
    if bits == 4:
        numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
    return numbers.reshape(*shape)


UNPACK: dict[str, Callable[..., Tensor]] = {
    "scaled": unpack_scaled,
    "int4": partial(unpack_integers, bits=4),
    "int8": partial(unpack_integers, bits=8),
    "mxfp4": unpack_mxfp4,
    "nvfp4": unpack_nvfp4,
}

"""Unpack quantized weights: from values, scales and zeros to numbers.

dense = unpack("mxfp4", {"values": blocks, "scales": scales})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from atom.graph.formats import parse_format
from atom.graph.gguf_blocks import TYPES, unpack_blocks

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
    unpacked, (rows, columns) = _floats(values), values.shape[-2:]
    down, across = (size or dim for size, dim in zip(block, (rows, columns), strict=True))
    if rows % down or columns % across:
        scales = scales.repeat_interleave(down, -2)[..., :rows, :].repeat_interleave(across, -1)[..., :columns]
        return unpacked.mul_(scales)
    blocks = unpacked.view(*values.shape[:-2], rows // down, down, columns // across, across)
    blocks.mul_(scales[..., :, None, :, None])
    return unpacked


def _floats(values: Tensor) -> Tensor:
    """As float32; fp8 by its bits, which is several times as fast as torch's conversion on a CPU.

    e4m3 has the bits of a bf16 of 2^-120 times its value, but for its NaN, 0x7F and 0xFF.
    """
    if values.dtype != torch.float8_e4m3fn:
        return values.float()
    stored = values.contiguous().view(torch.int8)
    if stored.max() == 0x7F or stored.view(torch.uint8).max() == 0xFF:
        return values.float()
    bits = stored.to(torch.int16).bitwise_left_shift_(4).bitwise_and_(SIGN_AND_NUMBER)
    return bits.view(torch.bfloat16).float().mul_(2.0**120)


SIGN_AND_NUMBER = -0x7810  # 0x87F0: what is left of the sign's extension to 16 bits


def unpack_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """values u8[..., B, 16], scales u8[..., B] -> fp32[..., 32 B] (OCP Microscaling Formats 1.0)

    A scale is an exponent of 2, plus 127.
    """
    return unpack_fp4(values).mul_(torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def unpack_nvfp4(values: Tensor, scales: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> Tensor:
    """values u8[..., B, 8], scales fp8[..., O, B] -> fp32[..., O, 16 B], times the factor of the tensor
    or of a row, [..., 1 or O], or by its divisor"""
    factor = factor if divisor is None else divisor.reciprocal()
    assert factor is not None, "a format has one of them"
    return unpack_fp4(values).mul_((scales.float() * factor.unsqueeze(-1)).unsqueeze(-1)).flatten(-2)


def unpack_fp4(values: Tensor) -> Tensor:
    """u8[..., N] -> fp32[..., 2 N]: a byte holds two e2m1, the first in its lower half"""
    fp4 = torch.tensor(FP4, device=values.device)
    pairs = torch.stack((fp4.repeat(16), fp4.repeat_interleave(16)), dim=1)  # by byte
    return torch.nn.functional.embedding(values.int(), pairs).flatten(-2)


def unpack_integers(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    mins: Tensor | None = None,
    *,
    bits: int,
) -> Tensor:
    """values u8[..., B, block bytes], scales fp32[..., B], zeros u8[..., B] -> fp32[..., I]: (value - zero) · scale

    Without zeros, zero is the middle: 8 of 4 bits, 128 of 8; with mins fp16[..., B] it is value · scale + min. groups
    i32[I]: the block of each column, if blocks are not of neighbours.
    """
    scales = scales.float()
    numbers = (torch.stack((values & 15, values >> 4), -1).flatten(-2) if bits == 4 else values).float()
    if mins is not None:
        return (numbers * scales.unsqueeze(-1)).add_(mins.float().unsqueeze(-1)).flatten(-2)
    zeros = scales.new_full(scales.shape, 1 << (bits - 1)) if zeros is None else zeros.float()
    if groups is not None:
        return (numbers.flatten(-2) - zeros[..., groups]) * scales[..., groups]
    return ((numbers - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2)


UNPACK: dict[str, Callable[..., Tensor]] = {
    "scaled": unpack_scaled,
    "int4": partial(unpack_integers, bits=4),
    "int8": partial(unpack_integers, bits=8),
    "mxfp4": unpack_mxfp4,
    "nvfp4": unpack_nvfp4,
    **{name: partial(unpack_blocks, fmt=name) for name in TYPES},
}

"""Unpack tiles of packed weights in registers.

    numbers = unpack_bytes(tile, zeros, PACKING, dtype)             # a number a byte
    even, odd = unpack_pairs(tile, zeros, PACKING, dtype)           # two a byte: those of even and of odd columns
    scales = unpack_scales(stored, PACKING, dtype)
    even * spread(scales, 64), odd * spread(scales, 64)             # a scale for each group of columns

A number comes exact in the dtype of the GEMM: bf16, fp32 or, but for e2m1, fp16. It is made of the bits of a bf16,
whose exponent has the same bias as fp32's: those of an e4m3 are 2^-120 times its value, those of an e2m1 2^-126 times,
subnormals too; 128 and an int4 are 0x4300 and its bits. So e2m1 stay 2^-126 times their value, and their scales, powers
of 2 or e4m3, are 2^63 times, which a bf16 holds exactly: what is left is for the sum, in fp32.

This is for attention and experts; linears leave more of it to their sums, see `linear/packed.py`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.triton.compile.jit import jit

# the code below, for two or four bytes at a time, which the compiler does one by one
FP8_PTX = tl.constexpr("""{.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; shr.u32 c, a, 4; shr.u32 d, b, 4;
and.b32 c, c, 0x07F007F0; and.b32 d, d, 0x07F007F0;
lop3.b32 a, a, 0x80008000, c, 0xEA; lop3.b32 b, b, 0x80008000, d, 0xEA; mov.b32 c, 0x7B807B80;
mov.b32 d, 0x80008000; fma.rn.bf16x2 $0, a, c, d; fma.rn.bf16x2 $1, b, c, d;}""")
I8_PTX = tl.constexpr("""{.reg .b32 n, s;
prmt.b32 n, $2, 0, 0x4140; and.b32 s, n, 0x00800080; and.b32 n, n, 0x007F007F;
or.b32 $0, n, 0x43004300; or.b32 $1, s, 0x43004300;}""")
INT4_PTX = tl.constexpr("""{.reg .b32 n, m;
prmt.b32 n, $2, 0, 0x4140; shr.b32 m, n, 4;
and.b32 n, n, 0x000F000F; or.b32 $0, n, 0x43004300; and.b32 m, m, 0x000F000F; or.b32 $1, m, 0x43004300;}""")
E2M1_PTX = tl.constexpr("""{.reg .b32 b, s, n;
prmt.b32 b, $2, 0, 0x1404;
shl.b32 s, b, 4; and.b32 s, s, 0x80008000; shr.b32 n, b, 2; and.b32 n, n, 0x01C001C0; or.b32 $0, s, n;
and.b32 s, b, 0x80008000; shr.b32 n, b, 6; and.b32 n, n, 0x01C001C0; or.b32 $1, s, n;}""")


def packing_of(weight: PackedWeight) -> str:
    """How a weight's numbers are stored: fp8, i8, int4, int8, mxfp4 or nvfp4."""
    if weight.kind != "scaled":
        return weight.kind
    return "i8" if weight.parts["values"].dtype == torch.int8 else "fp8"


def as_bytes(part: Tensor) -> Tensor:
    """A part of a packed weight as kernels load it: fp8 as its bits."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


@jit
def unpack_bytes(tile, zeros, PACKING: tl.constexpr, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """u8 (or i8) -> numbers, for int8 less their zero, 128 if zeros is None; zeros [R, G]"""
    if PACKING == "fp8":
        if HAS_PTX and dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(FP8_PTX, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            bits = tile.to(tl.uint16)
            return _times(((bits & 0x80) << 8) | ((bits & 0x7F) << 4), 2.0**120, dtype)
    elif PACKING == "i8":
        if HAS_PTX and dtype == tl.bfloat16:
            numbers, less = tl.inline_asm_elementwise(
                I8_PTX, "=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
            return numbers - less
        else:
            return tile.to(tl.float32).to(dtype)
    else:
        numbers = tile.to(tl.int32)
        if zeros is None:
            numbers -= 128
        else:
            numbers -= spread(zeros, tile.shape[1]).to(tl.int32)
        return numbers.to(tl.float32).to(dtype)


@jit
def unpack_pairs(tile, zeros, PACKING: tl.constexpr, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """u8 -> numbers of even columns, numbers of odd ones; int4 less their zero [R, G], 8 if zeros is None"""
    if HAS_PTX and dtype == tl.bfloat16:
        PTX: tl.constexpr = INT4_PTX if PACKING == "int4" else E2M1_PTX
        even, odd = tl.inline_asm_elementwise(
            PTX, "=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        bits = tile.to(tl.uint16)
        if PACKING == "int4":
            even, odd = _times((bits & 15) | 0x4300, 1.0, dtype), _times((bits >> 4) | 0x4300, 1.0, dtype)
        else:
            even = _times(((bits & 8) << 12) | ((bits & 7) << 6), 1.0, dtype)
            odd = _times(((bits & 0x80) << 8) | ((bits & 0x70) << 2), 1.0, dtype)
    if PACKING != "int4":
        return even, odd
    elif zeros is None:
        return even - 136.0, odd - 136.0
    else:
        zero = _times(spread(zeros, tile.shape[1]).to(tl.uint16) | 0x4300, 1.0, dtype)
        return even - zero, odd - zero


@jit
def unpack_scales(scales, PACKING: tl.constexpr, dtype: tl.constexpr):
    """Scales as they are stored -> as numbers from `unpack_pairs` and `unpack_bytes` want them"""
    if PACKING == "mxfp4":
        return _times(tl.minimum(scales.to(tl.uint16) + 63, 254) << 7, 1.0, dtype)
    elif PACKING == "nvfp4":
        return (unpack_bytes(scales, None, "fp8", tl.float32, False) * 2.0**63).to(dtype)
    else:
        return scales.to(tl.float32)


@jit
def offsets_of(minima, scales):
    """What is added to numbers of 4 bits, less 8 and scaled: a block's minimum, and 8 times its scale"""
    return minima.to(tl.float32) + 8 * scales


@jit
def _times(bits, factor: tl.constexpr, dtype: tl.constexpr):
    """The bits of bf16s, u16, as numbers times a factor."""
    if dtype == tl.bfloat16:
        numbers = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return numbers if factor == 1.0 else numbers * factor
    else:
        return ((bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * factor).to(dtype)


@jit
def spread(groups, SIZE: tl.constexpr):
    """[R, G], of this many groups of neighbours -> [R, SIZE], or of one group [R, 1]"""
    if groups.shape[1] == 1:
        return groups
    else:
        times: tl.constexpr = SIZE // groups.shape[1]
        wide = tl.broadcast_to(groups[:, :, None], [groups.shape[0], groups.shape[1], times])
        return wide.reshape([groups.shape[0], SIZE])

"""Unpack the weights of linears, in registers or whole.

    dense = unpack(weight, torch.bfloat16)       # [O, I]
    weight = round_to_fp8(weight)                # a weight of 4 bits with numbers of 8

A byte holds one number, or those of an even and the next, odd column, which are multiplied by columns of x of their
own, so that nothing is interleaved. fp8 and fp4 become floats by their bits only, which makes them smaller by a power
of 2: the result is multiplied by it, and x by another one ahead, so that no sum is near the smallest of float32.

Powers of 2, scales and zero points count once a sum here, which takes fewer instructions a number than
`kernels/triton/unpack.py`: attention needs numbers that are exact, and experts scale them before they are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.graph.formats import parse_format
from atom.graph.gguf_blocks import TYPES
from atom.graph.packed import PackedWeight
from atom.graph.quantize_rows import MIN_ROW
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.linear.weight_encoding import FACTOR_SPAN, KQUANTS, SPANS, operand_of

SPAN = tl.constexpr(FACTOR_SPAN)
# Of 4 bytes, as bf16: NVIDIA has no conversion that is as fast. prmt puts bytes where they belong.
E4M3_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 $0, a, 0x80008000, c, 0xEA;
lop3.b32 $1, b, 0x80008000, d, 0xEA;
}""")
E2M1_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 6;
shr.u32 d, b, 6;
and.b32 c, c, 0x01c001c0;
and.b32 d, d, 0x01c001c0;
lop3.b32 $0, a, 0x80008000, c, 0xEA;
lop3.b32 $1, b, 0x80008000, d, 0xEA;
}""")
E2M1_LOW_ASM = tl.constexpr("{\n.reg .b32 e;\nshl.b32 e, $2, 4;\n" + E2M1_ASM.value.replace("$2", "e") + "\n}")
U4_LOW_ASM = tl.constexpr("""{
.reg .b32 a, b, c;
and.b32 a, $2, 0x0f0f0f0f;
prmt.b32 b, a, 0x43434343, 0x4140;
prmt.b32 c, a, 0x43434343, 0x4342;
mov.b32 a, 0x43084308;
sub.rn.bf16x2 $0, b, a;
sub.rn.bf16x2 $1, c, a;
}""")
U4_ASM = tl.constexpr("{\n.reg .b32 e;\nshr.u32 e, $2, 4;\n" + U4_LOW_ASM.value.replace("$2", "e") + "\n}")
U8_ASM = tl.constexpr("""{
.reg .f32 a, b, c, d;
prmt.b32 a, $2, 0x4B000000, 0x7440;
prmt.b32 b, $2, 0x4B000000, 0x7441;
prmt.b32 c, $2, 0x4B000000, 0x7442;
prmt.b32 d, $2, 0x4B000000, 0x7443;
sub.rn.f32 a, a, 0f4B000080;
sub.rn.f32 b, b, 0f4B000080;
sub.rn.f32 c, c, 0f4B000080;
sub.rn.f32 d, d, 0f4B000080;
prmt.b32 $0, a, b, 0x7632;
prmt.b32 $1, c, d, 0x7632;
}""")


@triton.constexpr_function
def exponent_of(VALUES, TYPE):
    """Unpacked numbers are smaller by this power of 2."""
    bias = 15 if tl.float16 == TYPE else 127
    return {"e4m3": bias - 7, "e2m1": bias - 1}.get(VALUES, 0)


@triton.constexpr_function
def raise_of(VALUES, TYPE):
    """The factor of x before a GEMM with such numbers."""
    return 1.0 if tl.float16 == TYPE or VALUES not in ("e4m3", "e2m1") else 2.0**64


@triton.constexpr_function
def rest_of(VALUES, TYPE):
    """The factor of such a GEMM's result."""
    return 2.0 ** exponent_of(VALUES, TYPE) / raise_of(VALUES, TYPE)


@triton.constexpr_function
def parts_of(BLOCKS, SCALE_COLUMNS, BLOCK_I):
    """In how many parts a group's columns are summed up, each with one scale."""
    return 1 if BLOCKS == 1 else BLOCK_I // min(SCALE_COLUMNS & -SCALE_COLUMNS, BLOCK_I)


@triton.constexpr_function
def unsigned_of(TYPE):
    return {16: tl.uint16, 32: tl.uint32, 64: tl.uint64}[TYPE.primitive_bitwidth]


@triton.constexpr_function
def pair_of(TYPE):
    return {16: tl.uint32, 32: tl.uint64}[TYPE.primitive_bitwidth]


@jit
def _from_bits(number, BITS: tl.constexpr, MANTISSA: tl.constexpr, TYPE: tl.constexpr):
    """A float of few bits as one of more, see `exponent_of`."""
    wide = number.to(unsigned_of(TYPE))
    SIGN: tl.constexpr = 1 << (BITS - 1)
    shifted = (wide & (SIGN - 1)) << (TYPE.fp_mantissa_width - MANTISSA)
    return (shifted | (wide & SIGN) << (TYPE.primitive_bitwidth - BITS)).to(TYPE, bitcast=True)


@jit
def unpack_bytes(tile, TYPE: tl.constexpr, VALUES: tl.constexpr, HAS_ASM: tl.constexpr):
    """Bytes of a number each -> TYPE; unsigned ones less 128."""
    FAST: tl.constexpr = HAS_ASM and tl.bfloat16 == TYPE
    if VALUES == "e4m3":
        if FAST:
            return tl.inline_asm_elementwise(E4M3_ASM, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            return _from_bits(tile, 8, 3, TYPE)
    elif FAST:
        offset = tile ^ 0x80 if VALUES == "i8" else tile
        return tl.inline_asm_elementwise(U8_ASM, "=r,=r,r", [offset], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        signed = tile if VALUES == "i8" else tile ^ 0x80
        return signed.to(tl.int8, bitcast=True).to(TYPE)


@jit
def unpack_half(tile, IS_HIGH: tl.constexpr, TYPE: tl.constexpr, VALUES: tl.constexpr, HAS_ASM: tl.constexpr):
    """The lower or the higher halves of bytes, which are of even or odd columns -> TYPE; integers less 8."""
    if HAS_ASM and tl.bfloat16 == TYPE:  # one result each: Triton would store another one and load it again
        HIGH: tl.constexpr = E2M1_ASM if VALUES == "e2m1" else U4_ASM
        LOW: tl.constexpr = E2M1_LOW_ASM if VALUES == "e2m1" else U4_LOW_ASM
        ASM: tl.constexpr = HIGH if IS_HIGH else LOW
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        half = tile >> 4 if IS_HIGH else tile & 15
        return _from_bits(half, 4, 1, TYPE) if VALUES == "e2m1" else half.to(TYPE) - 8


@jit
def split_pairs(pairs, TYPE: tl.constexpr):
    """Two neighbours in a word each -> the first, the second."""
    UNSIGNED: tl.constexpr = unsigned_of(TYPE)
    second = (pairs >> TYPE.primitive_bitwidth).to(UNSIGNED).to(TYPE, bitcast=True)
    return pairs.to(UNSIGNED).to(TYPE, bitcast=True), second


@jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@jit
def load_scales(pointers, mask, FACTOR: tl.constexpr):
    """Scales of any dtype as float32: bytes are exponents, or e4m3 with a factor."""
    scales = _load(pointers, mask)
    if scales.dtype != tl.uint8:
        return scales.to(tl.float32)
    elif FACTOR is None:
        return (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        return _from_bits(scales, 8, 3, tl.float32) * (2.0**120)


@jit
def load_zeros(pointers, mask, VALUES: tl.constexpr):
    """Zero points of blocks, less what is subtracted already."""
    return _load(pointers, mask).to(tl.float32) - (8 if VALUES == "u4" else 128)


@triton.constexpr_function
def are_minima(zeros_ptr):
    """Whether numbers of blocks are added, and no zero points subtracted."""
    return zeros_ptr is not None and zeros_ptr.dtype.element_ty != tl.uint8


@triton.constexpr_function
def has_spans(FACTOR):
    """Whether scales and minima have factors, and no rows."""
    return FACTOR == SPANS


@triton.constexpr_function
def has_factors(FACTOR):
    """Whether rows, or the tensor, have factors."""
    return FACTOR is not None and not has_spans(FACTOR)


@jit
def load_spans(scales_ptr, factor_ptr, block, span, mask, HAS_MINIMA: tl.constexpr):
    """Scales and minima of blocks as they are stored, and their factors: each in one integer with minima."""
    if HAS_MINIMA:
        scales_ptr, factor_ptr = scales_ptr.to(tl.pointer_type(tl.int16)), factor_ptr.to(tl.pointer_type(tl.int32))
    return _load(scales_ptr + block, mask), _load(factor_ptr + span, mask)


@jit
def multiply_spans(scales, factors, HAS_MINIMA: tl.constexpr):
    """The scales and the minima, float32, of what `load_spans` gives; twice the scales without minima."""
    if HAS_MINIMA:
        scale = scales.to(tl.int8).to(tl.float32) * factors.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (factors >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return scale, (scales >> 8).to(tl.float32) * high.to(tl.float32)
    else:
        scale = scales.to(tl.float32) * factors.to(tl.float32)
        return scale, scale


@jit
def load_offsets(minima_ptr, mask, scales, VALUES: tl.constexpr):
    """What is added to each number of a block, less 8 and scaled, of 4 bits: its minimum, and 8 times its scale."""
    return offsets_of(_load(minima_ptr, mask).to(tl.float32), scales, VALUES)


@jit
def offsets_of(minima, scales, VALUES: tl.constexpr):
    """What is added to each number of a block, of 4 bits less 8, and scaled."""
    return minima + 8 * scales if VALUES == "u4" else minima


@jit
def load_factors(factor_ptr, row, FACTOR: tl.constexpr):
    """The factors of rows, or of the tensor."""
    factor = tl.load(factor_ptr + row) if FACTOR == "factors" or FACTOR == "divisors" else tl.load(factor_ptr)
    return 1.0 / factor if FACTOR == "divisor" or FACTOR == "divisors" else factor


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """A packed weight [O, I] as a plain one."""
    (out, inner), gpu = weight.shape, find_gpu(weight.device)
    values, scales, zeros, factor, encoding = operand_of(weight)
    y = torch.empty(out, inner, dtype=dtype, device=weight.device)
    grid = -(-inner // 1024), -(-out // 8)
    if encoding.values in KQUANTS:
        known = parse_format(str(weight.type.fmt))
        _unpack_kquants_kernel[grid](
            values, weight.parts.get("high"), scales, zeros, factor, y, out, inner, known.bits - 4,
            TYPES[known.kind].middle, encoding.columns, num_warps=4, **gpu.options,
        )  # fmt: skip
    elif encoding.is_shuffled:
        _unpack_shuffled_kernel[grid](
            values, scales, zeros, y, out, inner, values.numel() // out, encoding.per_byte, encoding.values,
            encoding.rows, encoding.columns, num_warps=4, **gpu.options,
        )  # fmt: skip
    else:
        _unpack_kernel[grid](
            values, scales, zeros, factor, y, out, inner, encoding.per_byte, encoding.values, encoding.rows,
            encoding.columns or inner, encoding.factor, num_warps=4, **gpu.options,
        )  # fmt: skip
    return y


def round_to_fp8(weight: PackedWeight) -> PackedWeight:
    """A weight [..., O, I] of 4 bits in the layout wgmma, in fp8 with a scale by row, as `round_weight` rounds it.

    A row's scale is by the largest number that its blocks may have, and so larger at times: numbers 2^-10 times as
    large as the row's largest may lose bits for that. Columns are in their own order.
    """
    (*_, inner), gpu = weight.shape, find_gpu(weight.device)
    values, scales, zeros, _, encoding = operand_of(weight)
    out = math.prod(weight.shape[:-1])
    y = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    y_scales = torch.empty(*weight.shape[:-1], 1, dtype=torch.float32, device=weight.device)
    assert encoding.columns is not None, "4 bits have blocks"
    _round_shuffled_kernel[(-(-inner // 1024), -(-out // 8))](
        values, scales, zeros, y, y_scales, out, inner, values.numel() // out, encoding.per_byte, encoding.values,
        encoding.rows, encoding.columns, next_power_of_2(-(-inner // encoding.columns)), MIN_ROW, num_warps=4,
        **gpu.options,
    )  # fmt: skip
    return PackedWeight(replace(weight.type, fmt="fp8[1, *]"), {"values": y, "scales": y_scales})


@jit
def _unpack_shuffled_kernel(
    values_ptr, scales_ptr, zeros_ptr, y_ptr, out, INNER: tl.constexpr, ROW_BYTES: tl.constexpr,
    PER_BYTE: tl.constexpr, VALUES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """8 rows by 1,024 columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(1) * 8 + tl.arange(0, 8))[:, None].to(tl.int64)
    weight = (values_ptr, scales_ptr, zeros_ptr)
    y = _load_shuffled(weight, row, tl.program_id(0), out, INNER, ROW_BYTES, PER_BYTE, VALUES, SCALE_ROWS,
                       SCALE_COLUMNS)  # fmt: skip
    column = (tl.program_id(0) * 1024 + tl.arange(0, 1024))[None, :]
    tl.store(y_ptr + row * INNER + column, y.to(y_ptr.dtype.element_ty), mask=(row < out) & (column < INNER))


@jit
def _load_shuffled(
    weight, row, place, out, INNER: tl.constexpr, ROW_BYTES: tl.constexpr, PER_BYTE: tl.constexpr,
    VALUES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Numbers f32[8, 1024] of rows [8, 1] and the 1,024 columns of this place; past the last column they are any."""
    values_ptr, scales_ptr, zeros_ptr = weight
    ROWS: tl.constexpr = 8
    COLUMNS: tl.constexpr = 1024
    BYTES: tl.constexpr = COLUMNS // PER_BYTE
    NUM: tl.constexpr = 1 if SCALE_COLUMNS is None else COLUMNS // SCALE_COLUMNS  # blocks of a row here
    BLOCKS: tl.constexpr = 1 if SCALE_COLUMNS is None else triton.cdiv(INNER, SCALE_COLUMNS)
    if VALUES == "e2m1":
        numbers = _load_shuffled_e2m1(values_ptr, row, place, out, ROW_BYTES, ROWS, BYTES)
    else:
        byte = (place * BYTES + tl.arange(0, BYTES))[None, :]
        tile = tl.load(values_ptr + row * ROW_BYTES + byte, mask=(row < out) & (byte < ROW_BYTES), other=0)
        UP: tl.constexpr = 2.0 ** exponent_of(VALUES, tl.float32)
        if PER_BYTE == 1:  # the inverse of the layout wgmma's order
            numbers = unpack_bytes(tile, tl.float32, VALUES, False) * UP
            numbers = numbers.reshape([ROWS, BYTES // 64, 4, 4, 2, 2]).permute((0, 1, 3, 5, 2, 4))
        else:
            low = unpack_half(tile, False, tl.float32, VALUES, False) * UP
            high = unpack_half(tile, True, tl.float32, VALUES, False) * UP
            numbers = tl.join(low, high).reshape([ROWS, BYTES // 64, 4, 4, 2, 2, 2]).permute((0, 1, 3, 5, 6, 2, 4))
    numbers = numbers.reshape([ROWS, NUM, COLUMNS // NUM])
    block = (0 if SCALE_COLUMNS is None else place * NUM) + tl.arange(0, NUM)[None, :]
    mask = (row < out) & (block < BLOCKS)
    index = row // SCALE_ROWS * BLOCKS + block
    if VALUES == "e2m1":  # words of four blocks, of 8 rows next to each other
        index = ((row // 8 * triton.cdiv(BLOCKS, 4) + block // 4) * 8 + row % 8) * 4 + block % 4
    if zeros_ptr is not None:
        numbers -= tl.expand_dims(load_zeros(zeros_ptr + index, mask, VALUES), 2)
    numbers *= tl.expand_dims(load_scales(scales_ptr + index, mask, None), 2)
    return numbers.reshape([ROWS, COLUMNS])


@jit
def _round_shuffled_kernel(
    values_ptr, scales_ptr, zeros_ptr, y_ptr, y_scales_ptr, out, INNER: tl.constexpr, ROW_BYTES: tl.constexpr,
    PER_BYTE: tl.constexpr, VALUES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr, MIN_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """8 rows by 1,024 columns, rounded to fp8 with scales that are powers of 2. BLOCK_S: at least a row's blocks"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(1) * 8 + tl.arange(0, 8))[:, None].to(tl.int64)
    BLOCKS: tl.constexpr = triton.cdiv(INNER, SCALE_COLUMNS)
    block = tl.arange(0, BLOCK_S)[None, :]
    index = row * BLOCKS + block
    if VALUES == "e2m1":
        index = ((row // 8 * triton.cdiv(BLOCKS, 4) + block // 4) * 8 + row % 8) * 4 + block % 4
    # the largest number that a row may have: 448 is 1.75 * 2^8
    LARGEST: tl.constexpr = 6 if VALUES == "e2m1" else 8 if zeros_ptr is None else 15
    scales = tl.abs(load_scales(scales_ptr + index, (row < out) & (block < BLOCKS), None))
    largest = tl.maximum(tl.max(scales, 1, keep_dims=True) * LARGEST, MIN_ROW)
    exponent = (largest.to(tl.int32, bitcast=True) + 0x1FFFFF >> 23) - 8
    if tl.program_id(0) == 0:
        tl.store(y_scales_ptr + row, (exponent << 23).to(tl.float32, bitcast=True), mask=row < out)
    weight = (values_ptr, scales_ptr, zeros_ptr)
    y = _load_shuffled(weight, row, tl.program_id(0), out, INNER, ROW_BYTES, PER_BYTE, VALUES, SCALE_ROWS,
                       SCALE_COLUMNS)  # fmt: skip
    y *= (254 - exponent << 23).to(tl.float32, bitcast=True)
    column = (tl.program_id(0) * 1024 + tl.arange(0, 1024))[None, :]
    tl.store(y_ptr + row * INNER + column, y.to(y_ptr.dtype.element_ty), mask=(row < out) & (column < INNER))


@jit
def _unpack_kquants_kernel(
    values_ptr, high_ptr, scales_ptr, zeros_ptr, factor_ptr, y_ptr, out, INNER: tl.constexpr, MORE: tl.constexpr,
    MIDDLE: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """8 rows by 1,024 columns of K-quants in the layout wgmma. MORE: bits of a number besides 4"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ROWS: tl.constexpr = 8
    BYTES: tl.constexpr = 512
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    byte = (tl.program_id(0) * BYTES + tl.arange(0, BYTES))[None, :]
    mask = (row < out) & (byte < INNER // 2)
    tile = tl.load(values_ptr + row * (INNER // 2) + byte, mask=mask, other=0).to(tl.int32)
    low, high = tile & 15, tile >> 4
    if MORE > 0:
        TOGETHER: tl.constexpr = 16 // MORE  # bytes whose numbers have a word in common
        words = tl.load(high_ptr + row * (INNER // 2 // TOGETHER) + byte // TOGETHER, mask=mask, other=0)
        at = byte % TOGETHER
        place = 16 * (at // 2 % 2) + 4 + 2 * MORE * (at // 4 * 2 + at % 2)
        low |= (words >> place % 32 & (1 << MORE) - 1) << 4
        high = high << MORE | words >> (place - MORE) % 32 & (1 << MORE) - 1
    numbers = tl.join(low, high).reshape([ROWS, BYTES // 64, 4, 4, 2, 2, 2]).permute((0, 1, 3, 5, 6, 2, 4))
    numbers = (numbers.reshape([ROWS, 2 * BYTES]) - MIDDLE).to(tl.float32)
    column = (tl.program_id(0) * 2 * BYTES + tl.arange(0, 2 * BYTES))[None, :]
    mask = (row < out) & (column < INNER)
    block, span = row * (INNER // SCALE_COLUMNS) + column // SCALE_COLUMNS, row * (INNER // SPAN) + column // SPAN
    HAS_MINIMA: tl.constexpr = zeros_ptr is not None
    scale, minimum = multiply_spans(*load_spans(scales_ptr, factor_ptr, block, span, mask, HAS_MINIMA), HAS_MINIMA)
    y = numbers * scale + minimum if HAS_MINIMA else numbers * scale
    tl.store(y_ptr + row * INNER + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _load_shuffled_e2m1(values_ptr, row, place, out, ROW_BYTES: tl.constexpr, ROWS: tl.constexpr,
                        BYTES: tl.constexpr):  # fmt: skip
    """Numbers f32[ROWS, groups, 4, 2, 2, 4, 2] in the order of the columns. row: [ROWS, 1]"""
    word = (place * BYTES // 4 + tl.arange(0, BYTES // 4))[None, :]
    words = values_ptr.to(tl.pointer_type(tl.uint32)) + row * (ROW_BYTES // 4) + word
    bits = tl.load(words, mask=(row < out) & (word < ROW_BYTES // 4), other=0)
    first, second = _float_pairs(bits << 6), _float_pairs(bits << 2)
    third, last = _float_pairs(bits << 28 | bits >> 4), _float_pairs(bits & 0x81808180 | bits >> 8 & 0x00400040)
    numbers = tl.join(tl.join(first, second), tl.join(third, last))
    return numbers.reshape([ROWS, BYTES // 64, 4, 4, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4))


@jit
def _float_pairs(bits):
    """The two numbers of words [O, N] whose bits are where bf16 has them, f32[O, N, 2]."""
    bits = bits & 0x81C081C0
    low, high = (bits << 16).to(tl.float32, bitcast=True), (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.join(low, high) * 2.0**126


@jit
def _unpack_kernel(
    values_ptr, scales_ptr, zeros_ptr, factor_ptr, y_ptr, out, INNER: tl.constexpr, PER_BYTE: tl.constexpr,
    VALUES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """8 rows by 1,024 columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    BLOCK: tl.constexpr = 1024 // PER_BYTE
    row = (tl.program_id(1) * 8 + tl.arange(0, 8))[:, None].to(tl.int64)
    byte = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < out) & (byte < INNER // PER_BYTE)
    tile = tl.load(values_ptr + row * (INNER // PER_BYTE) + byte, mask=mask, other=0)
    block = row // SCALE_ROWS * tl.cdiv(INNER, SCALE_COLUMNS) + byte * PER_BYTE // SCALE_COLUMNS
    HAS_MINIMA: tl.constexpr = are_minima(zeros_ptr)
    if has_spans(FACTOR):
        span = row * (INNER // SPAN) + byte * PER_BYTE // SPAN
        scale, minimum = multiply_spans(*load_spans(scales_ptr, factor_ptr, block, span, mask, HAS_MINIMA), HAS_MINIMA)
    else:
        scale = load_scales(scales_ptr + block, mask, FACTOR)
    if has_factors(FACTOR):
        scale *= load_factors(factor_ptr, tl.minimum(row, out - 1), FACTOR)
    zero = 0.0 if zeros_ptr is None or HAS_MINIMA else load_zeros(zeros_ptr + block, mask, VALUES)
    UP: tl.constexpr = 2.0 ** exponent_of(VALUES, tl.float32)
    if HAS_MINIMA:  # numbers times scales are exact
        if not has_spans(FACTOR):
            minimum = _load(zeros_ptr + block, mask).to(tl.float32)
        if PER_BYTE == 1:
            y = unpack_bytes(tile, tl.float32, VALUES, False) * scale + minimum
        else:
            low = unpack_half(tile, False, tl.float32, VALUES, False) + 8
            high = unpack_half(tile, True, tl.float32, VALUES, False) + 8
            y = tl.interleave(low * scale + minimum, high * scale + minimum)
    elif PER_BYTE == 1:
        y = (unpack_bytes(tile, tl.float32, VALUES, False) * UP - zero) * scale
    else:
        low = unpack_half(tile, False, tl.float32, VALUES, False)
        high = unpack_half(tile, True, tl.float32, VALUES, False)
        y = tl.interleave((low * UP - zero) * scale, (high * UP - zero) * scale)
    column = (tl.program_id(0) * 1024 + tl.arange(0, 1024))[None, :]
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * INNER + column, y, mask=(row < out) & (column < INNER))

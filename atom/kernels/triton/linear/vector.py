"""Multiply one row by a weight, fused with a norm and a gated activation.

    y, total = multiply_vector(a, b, norm, weight, bias, 1e-6, "silu", Vector(4, 8, 5, 1))

No tensor core takes part: each program computes the norm again and then streams its share of the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.kquant_gemv import multiply_kquants
from atom.kernels.triton.linear.packed import (
    are_minima,
    has_factors,
    load_factors,
    load_offsets,
    load_scales,
    load_zeros,
    raise_of,
    rest_of,
    unpack_bytes,
    unpack_half,
)
from atom.kernels.triton.linear.row_kernels import load_row, load_total, store_outputs, weight_rows
from atom.kernels.triton.linear.tiles import TileError, Vector
from atom.kernels.triton.linear.weight_encoding import SPANS, Weight, WeightEncoding, operand_of


def multiply_vector(
    a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Weight, bias: Tensor | None, eps: float,
    kind: str | None, parameters: Vector,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """multiply for one row: a and b [1, I]. TileError if scales are of columns that are no power of 2."""
    (rows, inner), gates = weight.shape, 1 if kind is None else 2
    operand = operand_of(weight)
    _check_columns(operand.encoding)
    if operand.encoding.factor == SPANS:
        return multiply_kquants(a, b, norm, (rows, inner), operand, bias, eps, kind, parameters)
    y = a.new_empty(1, rows // gates)
    total = a if b is None else a.new_empty(1, inner)
    gpu = find_gpu(a.device)
    block_out, warps, stages, programs = parameters
    tiles = -(-rows // block_out)
    programs = min(programs * gpu.units, tiles)
    _vector_kernel[(programs,)](
        a, b, norm, total, *operand[:4], bias, y, eps, rows // gates,
        inner, block_out, -(-tiles // programs), stages, kind, *operand.encoding.constants, num_warps=warps,
        **gpu.options,
    )  # fmt: skip
    return y, total


def _check_columns(encoding: WeightEncoding) -> None:
    if encoding.columns is not None and encoding.columns & encoding.columns - 1:
        raise TileError(f"{encoding.columns} columns share a scale, which is no power of 2")


@jit
def _load_pairs(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER: tl.constexpr):
    """`load_row`, in even and odd columns."""
    even = tl.arange(0, triton.next_power_of_2(INNER) // 2) * 2
    mask = even < INNER
    x, y = load_total(a_ptr, b_ptr, even, mask), load_total(a_ptr, b_ptr, even + 1, mask)
    if b_ptr is not None:
        tl.store(total_ptr + even, x.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
        tl.store(total_ptr + even + 1, y.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
    if norm_ptr is not None:
        scale = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / INNER + eps)
        norm = tl.load(norm_ptr + even, mask=mask, other=0.0).to(tl.float32)
        next_norm = tl.load(norm_ptr + even + 1, mask=mask, other=0.0).to(tl.float32)
        x = (x * scale * norm).to(a_ptr.dtype.element_ty).to(tl.float32)
        y = (y * scale * next_norm).to(a_ptr.dtype.element_ty).to(tl.float32)
    return x, y


@jit
def _multiply_row(
    tile, x, odd, scales_ptr, zeros_ptr, factor_ptr, weight_row, INNER: tl.constexpr, VALUES: tl.constexpr,
    PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, FACTOR: tl.constexpr,
    HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Rows of a packed weight by a row, x, or its even columns and its odd ones, in float32."""
    TYPE: tl.constexpr = tl.bfloat16 if HAS_ASM else tl.float32
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1] if SCALE_COLUMNS is None else SCALE_COLUMNS // PER_BYTE  # bytes of a block
    BLOCKS: tl.constexpr = 1 if SCALE_COLUMNS is None else triton.cdiv(INNER, SCALE_COLUMNS)
    NUM: tl.constexpr = tile.shape[1] // WIDTH
    block = tl.arange(0, NUM)[None, :]
    index = (weight_row // SCALE_ROWS)[:, None] * BLOCKS + block
    scale = load_scales(scales_ptr + index, block < BLOCKS, FACTOR)
    blocks = tile.reshape([ROWS, NUM, WIDTH])
    UP: tl.constexpr = raise_of(VALUES, TYPE)
    x = (x * UP).reshape([1, NUM, WIDTH])
    if PER_BYTE == 1:
        product = unpack_bytes(blocks, TYPE, VALUES, HAS_ASM).to(tl.float32) * x
    else:
        low = unpack_half(blocks, False, TYPE, VALUES, HAS_ASM).to(tl.float32)
        high = unpack_half(blocks, True, TYPE, VALUES, HAS_ASM).to(tl.float32)
        odd = (odd * UP).reshape([1, NUM, WIDTH])
        product = low * x + high * odd
        x += odd
    acc = tl.sum(product, axis=2)
    if are_minima(zeros_ptr):
        offset = load_offsets(zeros_ptr + index, block < BLOCKS, scale, VALUES)
        return tl.sum(acc * scale + offset * tl.sum(x, axis=2), axis=1)
    if zeros_ptr is not None:
        acc -= load_zeros(zeros_ptr + index, block < BLOCKS, VALUES) * tl.sum(x, axis=2)
    result = tl.sum(acc * scale, axis=1) * rest_of(VALUES, TYPE)
    return result * load_factors(factor_ptr, weight_row, FACTOR) if has_factors(FACTOR) else result


@jit
def _vector_kernel(
    a_ptr, b_ptr, norm_ptr, total_ptr, weight_ptr, scales_ptr, zeros_ptr, factor_ptr, bias_ptr, y_ptr, eps, out,
    INNER: tl.constexpr, BLOCK_O: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    VALUES: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: each program takes BLOCK_O rows of the weight at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    COLUMNS: tl.constexpr = INNER // PER_BYTE  # of bytes, where packed
    column = tl.arange(0, triton.next_power_of_2(INNER) // PER_BYTE)
    x = tl.zeros([column.shape[0]], tl.float32)
    odd = x
    if not PDL:
        if PER_BYTE == 1:
            x = load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
        else:
            x, odd = _load_pairs(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (step * tl.num_programs(0) + tl.program_id(0)) * NUM
        weight_row = weight_rows(first, out, BLOCK_O, KIND)
        tile = tl.load(weight_ptr + weight_row[:, None] * COLUMNS + column[None, :], other=0,
                       mask=(column < COLUMNS)[None, :] & (first < out), eviction_policy="evict_first")  # fmt: skip
        if PDL and step == 0:  # inside the loop, so that the loads of the first steps are issued before the wait
            tl.extra.cuda.gdc_wait()
            if PER_BYTE == 1:
                x = load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
            else:
                x, odd = _load_pairs(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
        if VALUES is None:
            acc = tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
        else:
            acc = _multiply_row(tile, x, odd, scales_ptr, zeros_ptr, factor_ptr, weight_row, INNER, VALUES, PER_BYTE,
                                SCALE_ROWS, SCALE_COLUMNS, FACTOR, PDL)  # fmt: skip
        store_outputs(acc, bias_ptr, y_ptr, first, out, BLOCK_O, KIND)

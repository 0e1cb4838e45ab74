"""Grouped GEMM: rows sorted by expert, plain or packed weights.

y = multiply_plain(x, weight, ends, None, None, tiles)              # x [P, I], weight [E, O, I] -> [P, O]
y = multiply_packed(x, weight, ends, bias, Gate("silu"), tiles)     # unpacked in registers, and gated_activate of it
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from atom.graph import PackedWeight
from atom.graph.formats import block_of
from atom.kernels.triton.activations import Gate, activate_rounded, constants_of
from atom.kernels.triton.attention.common import find_owner, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.experts.grouped_tiles import Tiles, max_tiles
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.linear.packed import are_minima
from atom.kernels.triton.unpack import (
    as_bytes,
    offsets_of,
    packing_of,
    spread,
    unpack_bytes,
    unpack_pairs,
    unpack_scales,
)


def multiply_plain(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, gate: Gate | None,
                   tiles: Tiles) -> Tensor:  # fmt: skip
    """`Experts.multiply` of a plain weight"""
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows have gaps"
    (rows, inner), (experts, out, _) = x.shape, weight.shape
    y, (kind, limit, alpha) = x.new_empty(rows, out if gate is None else out // 2), constants_of(gate)
    _grouped_linear_kernel[(max_tiles(rows, experts, tiles.rows) * -(-out // tiles.out),)](
        x, weight, ends, bias, y, x.stride(0), EXPERTS=experts, OUT=out, INNER=inner, KIND=kind,
        LIMIT=limit, ALPHA=alpha, BLOCK_E=next_power_of_2(experts), BLOCK_R=tiles.rows, BLOCK_O=tiles.out,
        BLOCK_I=tiles.inner, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **find_gpu(x.device).options,
    )  # fmt: skip
    return y


def multiply_packed(x: Tensor, weight: PackedWeight, ends: Tensor, bias: Tensor | None, gate: Gate | None,
                    tiles: Tiles) -> Tensor:  # fmt: skip
    """`Experts.multiply` of a packed weight, whose tiles are unpacked in registers"""
    parts = weight.parts
    assert x.stride(1) == 1 and all(part.is_contiguous() for part in parts.values()), "rows have gaps"
    (rows, inner), (experts, out, _) = x.shape, weight.shape
    y, (kind, limit, alpha) = x.new_empty(rows, out if gate is None else out // 2), constants_of(gate)
    gpu = find_gpu(x.device)
    block_rows, group = block_of(weight.type)[-2:]
    factor = parts.get("factor", parts.get("divisor"))
    strides = (0, 0) if factor is None else factor.expand(experts, out).stride()
    _packed_grouped_linear_kernel[(max_tiles(rows, experts, tiles.rows) * -(-out // tiles.out),)](
        x, as_bytes(parts["values"]), as_bytes(parts["scales"]), parts.get("zeros", parts.get("mins")), factor, ends,
        bias, y, x.stride(0),
        EXPERTS=experts, OUT=out, INNER=inner, PACKING=packing_of(weight), SCALE_ROWS=block_rows, GROUP=group,
        FACTOR_E=strides[0], FACTOR_O=strides[1], HAS_DIVISOR="divisor" in parts,
        KIND=kind, LIMIT=limit, ALPHA=alpha, BLOCK_E=next_power_of_2(experts), BLOCK_R=tiles.rows, BLOCK_O=tiles.out,
        BLOCK_I=tiles.inner, HAS_PTX=gpu.capability > (0, 0), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **gpu.options,
    )  # fmt: skip
    return y


@jit
def _find_expert(ends, EXPERTS: tl.constexpr, OUT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_O: tl.constexpr):  # fmt: skip
    """The expert of this program's tile, EXPERTS if there is none, and the number of its tile of rows."""
    experts = tl.arange(0, BLOCK_E)
    their_ends = tl.load(ends + experts, mask=experts < EXPERTS, other=0).to(tl.int32)
    their_begins = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0).to(tl.int32)
    tile = tl.program_id(0) // ((OUT + BLOCK_O - 1) // BLOCK_O)
    expert, tiles_before = find_owner(tl.cdiv(their_ends - their_begins, BLOCK_R), tile)
    return expert, tile - tiles_before


@jit
def _rows_and_columns(ends, expert, tile, OUT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr):
    """The rows of an expert's tile, where its rows end, and this program's columns, which may lie after the last."""
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int32)
    end = tl.load(ends + expert).to(tl.int32)
    rows = begin + tile * BLOCK_R + tl.arange(0, BLOCK_R)
    return rows, end, (tl.program_id(0) % ((OUT + BLOCK_O - 1) // BLOCK_O)) * BLOCK_O + tl.arange(0, BLOCK_O)


@jit
def _grouped_linear_kernel(x, weight, ends, bias, out, x_stride, EXPERTS: tl.constexpr, OUT: tl.constexpr,
                           INNER: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
                           BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
                           PDL: tl.constexpr):  # fmt: skip
    """One tile of one expert's rows and outputs. Tiles of the same rows are neighbours, so that caches hold those.

    With a KIND each gate projection is next to its up projection.
    """
    wait_for_inputs(PDL)
    expert, tile = _find_expert(ends, EXPERTS, OUT, BLOCK_E, BLOCK_R, BLOCK_O)
    if expert >= EXPERTS:
        return
    rows, end, columns = _rows_and_columns(ends, expert, tile, OUT, BLOCK_R, BLOCK_O)
    inner = tl.arange(0, BLOCK_I)[None, :]
    # what lies after the last row or column is that row or column again: nothing of it is stored
    x_pointers = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride + inner
    column = tl.minimum(columns, OUT - 1)
    if KIND is not None:
        column = column // 2 + column % 2 * (OUT // 2)
    weight_rows = expert.to(tl.int64) * OUT + column
    weight_pointers = weight + weight_rows[:, None] * INNER + inner
    total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    for first in range(0, INNER, BLOCK_I):
        if INNER % BLOCK_I == 0:
            a, b = tl.load(x_pointers), tl.load(weight_pointers)
        else:
            a = tl.load(x_pointers, mask=inner < INNER - first, other=0.0)
            b = tl.load(weight_pointers, mask=inner < INNER - first, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        x_pointers += BLOCK_I
        weight_pointers += BLOCK_I
    if bias is not None:
        total += tl.load(bias + weight_rows)[None, :].to(tl.float32)
    y = total.to(out.dtype.element_ty)
    if KIND is None:
        pointers = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
        tl.store(pointers, y, mask=(rows < end)[:, None] & (columns < OUT)[None, :])
    else:
        width: tl.constexpr = OUT // 2
        gate, up = tl.split(y.reshape([BLOCK_R, BLOCK_O // 2, 2]))
        first_column = tl.program_id(0) % ((OUT + BLOCK_O - 1) // BLOCK_O) * (BLOCK_O // 2)
        columns = first_column + tl.arange(0, BLOCK_O // 2)
        pointers = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
        m = activate_rounded(gate, up, KIND, LIMIT, ALPHA)
        tl.store(pointers, m, mask=(rows < end)[:, None] & (columns < width)[None, :])


@jit
def _packed_grouped_linear_kernel(
    x, values, scales, zeros, factor, ends, bias, out, x_stride, EXPERTS: tl.constexpr, OUT: tl.constexpr,
    INNER: tl.constexpr, PACKING: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, FACTOR_E: tl.constexpr,
    FACTOR_O: tl.constexpr, HAS_DIVISOR: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, HAS_PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As above, with the weight as the left operand of the MMA, so that few rows are padded to 16 and not to 64.

    A scale of e2m1, of fewer columns than a step or next to a minimum multiplies the unpacked numbers, another the sums
    of a step, in fp32.

    zeros: zero points, or minima in floating point
    FACTOR_E, FACTOR_O: the strides of factor, by expert and row
    """
    wait_for_inputs(PDL)
    expert, tile = _find_expert(ends, EXPERTS, OUT, BLOCK_E, BLOCK_R, BLOCK_O)
    if expert >= EXPERTS:
        return
    rows, end, columns = _rows_and_columns(ends, expert, tile, OUT, BLOCK_R, BLOCK_O)
    column = tl.minimum(columns, OUT - 1)
    if KIND is not None:
        column = column // 2 + column % 2 * (OUT // 2)
    weight_rows = expert.to(tl.int64) * OUT + column
    dtype: tl.constexpr = x.dtype.element_ty
    PER_BYTE: tl.constexpr = 1 if PACKING == "fp8" or PACKING == "i8" or PACKING == "int8" else 2
    IS_E2M1: tl.constexpr = PACKING == "mxfp4" or PACKING == "nvfp4"
    HAS_MINIMA: tl.constexpr = are_minima(zeros)
    # scales multiply numbers, not sums
    IS_FOLDED: tl.constexpr = IS_E2M1 or HAS_MINIMA or (GROUP < BLOCK_I and GROUP < INNER)
    HAS_SUMS: tl.constexpr = not IS_FOLDED and GROUP < INNER  # of a step
    NUM_GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    inner, byte = tl.arange(0, BLOCK_I)[None, :], tl.arange(0, BLOCK_I // PER_BYTE)[None, :]
    group = tl.arange(0, BLOCK_I // GROUP if IS_FOLDED and GROUP < BLOCK_I else 1)[None, :]
    scale_rows = expert.to(tl.int64) * ((OUT + SCALE_ROWS - 1) // SCALE_ROWS) + column // SCALE_ROWS
    first_groups = scale_rows[:, None] * NUM_GROUPS
    x_pointers = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride + inner
    value_pointers = values + weight_rows[:, None] * (INNER // PER_BYTE) + byte

    # a step loads the scales of the next, since loads of less than 4 bytes are not pipelined
    scale, zero = tl.load(scales + first_groups + group, mask=group < NUM_GROUPS, other=0), None
    if zeros is not None:
        zero = tl.load(zeros + first_groups + group, mask=group < NUM_GROUPS, other=0)
    total = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    for first in range(0, INNER, BLOCK_I):
        if INNER % BLOCK_I == 0:
            a, packed = tl.load(x_pointers), tl.load(value_pointers)
        else:
            a = tl.load(x_pointers, mask=inner < INNER - first, other=0.0)
            packed = tl.load(value_pointers, mask=byte < (INNER - first) // PER_BYTE, other=0)
        next_groups = (first + BLOCK_I) // GROUP + group
        next_scale = tl.load(scales + first_groups + next_groups, mask=next_groups < NUM_GROUPS, other=0)
        times = unpack_scales(scale, PACKING, dtype)
        part = tl.zeros([BLOCK_O, BLOCK_R], tl.float32) if HAS_SUMS else total
        if PER_BYTE == 2:
            even, odd = unpack_pairs(packed, None if HAS_MINIMA else zero, PACKING, dtype, HAS_PTX)
            if HAS_MINIMA:
                offset = spread(offsets_of(zero, times), packed.shape[1])
                times = spread(times, packed.shape[1])
                even, odd = (even * times + offset).to(dtype), (odd * times + offset).to(dtype)
            elif IS_FOLDED:
                times = spread(times, packed.shape[1])
                even, odd = (even * times).to(dtype), (odd * times).to(dtype)
            even_a, odd_a = tl.split(a.reshape([BLOCK_R, BLOCK_I // 2, 2]))
            part = tl.dot(even, tl.trans(even_a), part, input_precision="ieee")
            part = tl.dot(odd, tl.trans(odd_a), part, input_precision="ieee")
        else:
            numbers = unpack_bytes(packed, zero, PACKING, dtype, HAS_PTX)
            if IS_FOLDED:
                numbers = (numbers * spread(times, packed.shape[1])).to(dtype)
            part = tl.dot(numbers, tl.trans(a), part, input_precision="ieee")
        total = total + part * times if HAS_SUMS else part
        scale = next_scale
        if zeros is not None:
            zero = tl.load(zeros + first_groups + next_groups, mask=next_groups < NUM_GROUPS, other=0)
        x_pointers += BLOCK_I
        value_pointers += BLOCK_I // PER_BYTE
    if IS_E2M1:
        total *= 2.0**63
        if factor is not None:
            factors = tl.load(factor + expert * FACTOR_E + column * FACTOR_O)[:, None]
            total = total / factors if HAS_DIVISOR else total * factors
    elif GROUP >= INNER and not IS_FOLDED:
        total *= tl.load(scales + scale_rows)[:, None].to(tl.float32)
    if bias is not None:
        total += tl.load(bias + weight_rows)[:, None].to(tl.float32)
    y = total.to(out.dtype.element_ty)
    if KIND is None:
        pointers = out + rows.to(tl.int64)[None, :] * OUT + columns[:, None]
        tl.store(pointers, y, mask=(rows < end)[None, :] & (columns < OUT)[:, None])
    else:
        width: tl.constexpr = OUT // 2
        gate, up = tl.split(y.reshape([BLOCK_O // 2, 2, BLOCK_R]).permute((0, 2, 1)))
        first_column = tl.program_id(0) % ((OUT + BLOCK_O - 1) // BLOCK_O) * (BLOCK_O // 2)
        columns = first_column + tl.arange(0, BLOCK_O // 2)
        pointers = out + rows.to(tl.int64)[None, :] * width + columns[:, None]
        m = activate_rounded(gate, up, KIND, LIMIT, ALPHA)
        tl.store(pointers, m, mask=(rows < end)[None, :] & (columns < width)[:, None])

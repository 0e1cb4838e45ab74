"""Grouped GEMM of many rows an expert on NVIDIA's Hopper, in Gluon.

Biases and the gated activation are in the same kernel.

    y = multiply(x, weight, ends, bias)                    # x [P, I], sorted by expert, weight [E, O, I] -> [P, O]
    m = multiply(x, weight, ends, bias, Gate("silu"))         # weight [E, 2 W, I], gate before up -> [P, W]
    plan = plan_fp8(ends, len(x))                             # shared by GEMMs of the same rows
    y = multiply_fp8(x, x_scales, weight, plan)               # both in fp8, by rows, or 1 x 128 by 128 x 128
    m, m_scales = multiply_and_quantize(x, x_scales, weight, plan, Gate("silu"))    # m, too

Programs take one tile after another of all experts, as `_plan_kernel` lays them out: rows of an expert by outputs.
One warp loads tiles of x and of the weight by TMA, two groups of warps multiply half of a tile's rows each. Where a
tile has gate projections, the left half of an MMA's outputs are these, the right half the matching up projections, so
that a thread holds both of a pair. A tile ends where its expert's rows do: those after are multiplied and not stored,
and a group that has none waits.

If nothing is added to the GEMM, a tile stays in registers, rounded, and is stored while the tensor cores multiply
the next one: with few columns, storing takes as long as several steps.

In fp8 by blocks the tensor cores sum over the 128 columns that share a scale, and those sums are added in float32. A
tile has 128 gated columns, so that it can be quantized before it is stored. By rows the tensor cores sum over all
columns, as the library does, and a tile is scaled before it is rounded.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.graph import PackedWeight
from atom.graph.formats import block_of
from atom.kernels.hopper.gated_linear import SILU
from atom.kernels.hopper.gluon import async_load, async_store, jit, reinterpret
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors
from atom.kernels.hopper.warp_groups import (
    GROUPS,
    STAGES,
    end_steps,
    make_barriers,
    multiply_steps,
    start_steps,
    take_steps,
)
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.attention.common import find_owner, wait_for_inputs
from atom.kernels.triton.compile.jit import jit as triton_jit
from atom.kernels.triton.experts.grouped_tiles import max_tiles
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.linear.row_kernels import FP8, activate_gates

ROWS = gl.constexpr(64)  # of x, which an MMA has
BAND = 2048  # rows of an expert that all outputs are made of before the next ones: they and the weight stay in L2
ENTRY = gl.constexpr(8)  # numbers of an entry of the plan, of which five are used
DELAY = gl.constexpr(3)  # steps between the stores of two halves of a tile, the first of which has been read by then
SPAN = gl.constexpr(128)  # columns and outputs that share a scale in fp8
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# gate and up projections in bf16, two at a time, rounded at each step as `activations.gated` does
SWIGLUOAI = """{{
    .reg .b32 g, u, p, s, low, high;
    .reg .f32 a, b, s0, s1;
    mov.b32 high, {limit};
    mov.b32 low, {minus_limit};
    min.NaN.bf16x2 g, $1, high;
    min.NaN.bf16x2 u, $2, high;
    max.NaN.bf16x2 u, u, low;
    shl.b32 p, g, 16;
    mov.b32 a, p;
    and.b32 p, g, 0xffff0000;
    mov.b32 b, p;
    mul.f32 a, a, {alpha};
    mul.f32 b, b, {alpha};
    cvt.rn.bf16x2.f32 p, b, a;
    shl.b32 s, p, 16;
    mov.b32 a, s;
    and.b32 s, p, 0xffff0000;
    mov.b32 b, s;
    mul.f32 s0, a, 0fBFB8AA3B;
    mul.f32 s1, b, 0fBFB8AA3B;
    ex2.approx.ftz.f32 s0, s0;
    ex2.approx.ftz.f32 s1, s1;
    add.f32 s0, s0, 0f3F800000;
    add.f32 s1, s1, 0f3F800000;
    rcp.approx.ftz.f32 s0, s0;
    rcp.approx.ftz.f32 s1, s1;
    cvt.rn.bf16x2.f32 s, s1, s0;
    mul.rn.bf16x2 g, g, s;
    mov.b32 p, 0x3f803f80;
    add.rn.bf16x2 u, u, p;
    mul.rn.bf16x2 $0, g, u;
    }}"""


class Tile(NamedTuple):
    """What a program multiplies at a time, of GROUPS * ROWS rows."""

    mmas: int  # for each group
    outs: int  # of the weight in an MMA; if gated, half of them gate projections
    columns: int  # of x and of the weight in a stage


BLOCK_ROWS = int(GROUPS.value * ROWS.value)
PLAIN, BY_ROWS, BY_BLOCKS = Tile(1, 256, 64), Tile(1, 256, 128), Tile(2, 128, 128)


class Plan(NamedTuple):
    """The tiles of rows of all experts, which GEMMs of the same rows share."""

    tiles: Tensor  # i32[num + 1, ENTRY], as `_plan_kernel` says
    num: int  # tiles that there is room for
    block_rows: int  # of a tile


@triton_jit(do_not_specialize=["num"])
def _plan_kernel(ends, plan, num, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
                 BAND: tl.constexpr, ENTRY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """An entry for each tile of rows: its expert, the first row of its band, the end of the expert's rows, the first
    tile of the band, and how many it has; after all `num` places the number of tiles."""
    wait_for_inputs(PDL)
    each = tl.arange(0, BLOCK_E)
    their_ends = tl.load(ends + each, mask=each < EXPERTS, other=0).to(tl.int32)
    begins = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0).to(tl.int32)
    counts = tl.where(each < EXPERTS, tl.cdiv(their_ends - begins, BLOCK_R), 0)
    tile = tl.program_id(0)
    expert, before = find_owner(counts, tile)
    is_own = each == expert
    first = (tile - before) // BAND * BAND
    entry = plan + tile * ENTRY
    tl.store(entry, expert)
    tl.store(entry + 1, tl.sum(tl.where(is_own, begins, 0)) + first * BLOCK_R)
    tl.store(entry + 2, tl.sum(tl.where(is_own, their_ends, 0)))
    tl.store(entry + 3, before + first)
    tl.store(entry + 4, tl.minimum(tl.sum(tl.where(is_own, counts, 0)) - first, BAND))
    tl.store(plan + num * ENTRY, tl.sum(counts), mask=tile == 0)


@jit
def _find_place(tile, plan, out_tiles, BLOCK_R: gl.constexpr):
    """The expert of a tile, its first row, the end of the expert's rows, and the number of its tile of outputs."""
    return _place_in(_load_entry(tile, plan, out_tiles), tile, out_tiles, BLOCK_R)


@jit
def _load_entry(tile, plan, out_tiles):
    entry = plan + tile // out_tiles * ENTRY
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)


@jit
def _place_in(entry, tile, out_tiles, BLOCK_R: gl.constexpr):
    expert, first_row, end, first_tile, height = entry
    within = tile - first_tile * out_tiles
    return expert, first_row + within % height * BLOCK_R, end, within // height


@jit
def _find_scaled(row, end, order, top_k, LAYOUT: gl.constexpr):
    """The rows of x's scales, for ROWS rows from this one on."""
    rows = gl.minimum(row + gl.arange(0, ROWS, layout=LAYOUT), end - 1)
    if order is not None:
        rows = gl.load(order + gl.maximum(rows, 0)).to(gl.int32) // top_k  # of no tile, there need be no rows
    return rows


@jit
def _produce(x, weight, plan, sizes, memory, IS_GATED: gl.constexpr, MMAS: gl.constexpr, HALF: gl.constexpr):
    """Load tiles of x and of the weight, in two halves, for each tile of this program."""
    out, steps, out_tiles, num = sizes
    x_boxes, w_boxes, _, ready, free = memory
    COLUMNS: gl.constexpr = x_boxes.shape[2]
    BYTES: gl.constexpr = (GROUPS * ROWS + MMAS * 2 * HALF) * 128  # of a stage
    iteration = 0
    for tile in range(gl.program_id(0), gl.load(plan + num * ENTRY) * out_tiles, gl.num_programs(0)):
        expert, row, _end, out_tile = _find_place(tile, plan, out_tiles, GROUPS * ROWS)
        if IS_GATED:
            first = expert * 2 * out + out_tile * MMAS * HALF
            after, further = out, HALF
        else:
            first = expert * out + out_tile * MMAS * 2 * HALF
            after, further = HALF, 2 * HALF
        for step in range(steps):
            slot, column = iteration % STAGES, step * COLUMNS
            bar = ready.index(slot)
            mbarrier.wait(free.index(slot), iteration // STAGES & 1 ^ 1)
            mbarrier.expect(bar, BYTES)
            for number in gl.static_range(GROUPS):
                async_load(x, [row + number * ROWS, column], bar, x_boxes.index(slot * GROUPS + number))
            for number in gl.static_range(MMAS):
                left, box = first + number * further, (slot * MMAS + number) * 2
                async_load(weight, [left, column], bar, w_boxes.index(box))
                async_load(weight, [left + after, column], bar, w_boxes.index(box + 1))
            iteration += 1


@jit
def _pass_over(first, steps, memory):
    """Let the steps of a tile go by, as a group without rows of it."""
    _, _, _, ready, free = memory
    for iteration in range(first, first + steps):
        slot = iteration % STAGES
        mbarrier.wait(ready.index(slot), iteration // STAGES & 1)
        mbarrier.arrive(free.index(slot))


@jit
def _scale_rows(acc, scales, row, end):
    """Multiply [ROWS, outs] by the scales of rows of x, or of their tokens."""
    x_scales, _, _, _, order, top_k = scales
    if x_scales is not None:
        rows = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout)), end - 1)
        if order is not None:
            rows = gl.load(order + rows).to(gl.int32) // top_k
        acc *= gl.load(x_scales + rows)[:, None]
    return acc


@jit
def _consume(y, y_rows, bias, scales, plan, sizes, memory, WHO: gl.constexpr, GATE: gl.constexpr, HALF: gl.constexpr):
    """ROWS rows of each tile, in bf16, or in fp8 with scales by rows."""
    out, steps, out_tiles, num = sizes
    x_boxes, w_boxes, y_boxes, ready, free = memory
    COLUMNS: gl.constexpr = x_boxes.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, COLUMNS // 4])
    weights = reinterpret(w_boxes, x_boxes.dtype, [STAGES, 2 * HALF, COLUMNS], w_boxes.layout)
    first = 0
    for tile in range(gl.program_id(0), gl.load(plan + num * ENTRY) * out_tiles, gl.num_programs(0)):
        expert, row, end, out_tile = _find_place(tile, plan, out_tiles, GROUPS * ROWS)
        row += WHO * ROWS
        if row < end:
            acc = multiply_steps(x_boxes, weights, ready, free, first, steps, WHO, ACC)
            acc = _scale_rows(acc, scales, row, end)
            _finish(acc, y, y_rows, scales[1], bias, y_boxes.index(WHO), expert, row, end, out, out_tile, GATE)
        else:
            _pass_over(first, steps, memory)
        first += steps
    tma.store_wait(0)


@jit
def _consume_late(y, y_rows, scales, plan, sizes, memory, WHO: gl.constexpr, HALF: gl.constexpr):
    """As `_consume`, with nothing added: a tile is rounded, and stored while the next one is multiplied."""
    out, steps, out_tiles, num = sizes
    x_boxes, w_boxes, y_boxes, ready, free = memory
    COLUMNS: gl.constexpr = x_boxes.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, COLUMNS // 4])
    weights = reinterpret(w_boxes, x_boxes.dtype, [STAGES, 2 * HALF, COLUMNS], w_boxes.layout)
    w_scales = scales[1]
    outs = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, ACC))
    box, out = y_boxes.index(WHO), out // 8 * 8  # which it is a multiple of: rows are stored in words of 16 bytes
    rounded = gl.zeros([ROWS, 2 * HALF], y_rows.dtype.element_ty, ACC)
    its_row, its_end, its_column = 0, 0, 0  # no rows yet
    first = 0
    for tile in range(gl.program_id(0), gl.load(plan + num * ENTRY) * out_tiles, gl.num_programs(0)):
        expert, row, end, out_tile = _find_place(tile, plan, out_tiles, GROUPS * ROWS)
        row += WHO * ROWS
        if row < end:
            left, right = _halves(rounded)
            acc, slot = start_steps(x_boxes, weights, ready, first, WHO, ACC)
            _store(left, y, y_rows, box, its_row, its_end, its_column, out)
            later = first + 1 + gl.minimum(DELAY, steps - 1)
            acc, slot = take_steps(acc, slot, x_boxes, weights, ready, free, first + 1, later, WHO)
            _store(right, y, y_rows, box, its_row, its_end, its_column + HALF, out)
            acc, slot = take_steps(acc, slot, x_boxes, weights, ready, free, later, first + steps, WHO)
            acc = _scale_rows(end_steps(acc, slot, free), scales, row, end)
            if w_scales is not None:
                its_outs = expert * out + gl.minimum(out_tile * 2 * HALF + outs, out - 1)
                acc *= gl.load(w_scales + its_outs).to(gl.float32)[None, :]
            rounded = acc.to(y_rows.dtype.element_ty)
            its_row, its_end, its_column = row, end, out_tile * 2 * HALF
        else:
            _pass_over(first, steps, memory)
        first += steps
    left, right = _halves(rounded)
    _store(left, y, y_rows, box, its_row, its_end, its_column, out)
    _store(right, y, y_rows, box, its_row, its_end, its_column + HALF, out)
    tma.store_wait(0)


@jit
def _consume_blocks(y, y_rows, y_scales, y_stride, scales, plan, sizes, memory, WHO: gl.constexpr, GATE: gl.constexpr,
                    HALF: gl.constexpr):  # fmt: skip
    """ROWS rows of each tile, in fp8 with scales by blocks, in two MMAs of SPAN outputs, or of SPAN / 2 if gated.

    Where the next tile is, and which scales its rows have, is loaded while this one is stored.
    """
    x_scales, w_scales, x_stride, blocks, order, top_k = scales
    out, steps, out_tiles, num = sizes
    x_boxes, w_boxes, y_boxes, ready, free = memory
    COLUMNS: gl.constexpr = x_boxes.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 32])
    weights = reinterpret(w_boxes, x_boxes.dtype, [STAGES * 2, 2 * HALF, COLUMNS], w_boxes.layout)
    is_gate = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, ACC))[None, :] < HALF
    LAYOUT: gl.constexpr = gl.SliceLayout(1, ACC)
    BLOCK_R: gl.constexpr = GROUPS * ROWS
    tiles = gl.load(plan + num * ENTRY) * out_tiles
    begin = gl.maximum(gl.minimum(gl.program_id(0), tiles - 1), 0)
    expert, row, end, out_tile = _find_place(begin, plan, out_tiles, BLOCK_R)
    row += WHO * ROWS
    rows = _find_scaled(row, end, order, top_k, LAYOUT)
    first = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        if row < end:
            if GATE is None:
                block = out_tile * 2
                other = block + 1
            else:
                block = out_tile
                other = block + out // SPAN
            own_scales = w_scales + (expert * blocks + block) * steps
            other_scales = w_scales + (expert * blocks + gl.minimum(other, blocks - 1)) * steps
            left = gl.zeros([ROWS, 2 * HALF], gl.float32, ACC)
            right = gl.zeros([ROWS, 2 * HALF], gl.float32, ACC)
            for step in range(steps):
                iteration = first + step
                slot = iteration % STAGES
                mbarrier.wait(ready.index(slot), iteration // STAGES & 1)
                x, w = x_boxes.index(slot * GROUPS + WHO), slot * 2
                part = gl.zeros([ROWS, 2 * HALF], gl.float32, ACC)
                part = warpgroup_mma(x, weights.index(w).permute((1, 0)), part, use_acc=False, is_async=True)
                # meanwhile; if loaded a step ahead, they would be waited for before the MMA
                x_scale = gl.load(x_scales + step * x_stride + rows)
                scale = (x_scale * gl.load(own_scales + step).to(gl.float32))[:, None]
                other_scale = (x_scale * gl.load(other_scales + step).to(gl.float32))[:, None]
                if GATE is not None:
                    scale = gl.where(is_gate, scale, other_scale)
                    other_scale = scale
                part = warpgroup_mma_wait(0, deps=(part,))
                left += part * scale
                part = warpgroup_mma(x, weights.index(w + 1).permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(free.index(slot))
                right += part * other_scale
            box, half_tile = y_boxes.index(WHO), out_tile * 2
            entry = _load_entry(following, plan, out_tiles)
            if y_scales is None:
                _finish(left, y, y_rows, None, None, box, expert, row, end, out, half_tile, GATE)
            else:
                left, right = _activate_rounded(left, GATE), _activate_rounded(right, GATE)
                scale = _find_scale(left, right)
                own = row + gl.arange(0, ROWS, layout=scale.type.layout)
                gl.store(y_scales + out_tile * y_stride + own, scale, mask=own < end)
                dtype: gl.constexpr = y_rows.dtype.element_ty
                _store(_quantize(left, scale, dtype), y, y_rows, box, row, end, half_tile * HALF, out)
            next_expert, next_row, next_end, next_tile = _place_in(entry, following, out_tiles, BLOCK_R)
            next_row += WHO * ROWS
            rows = _find_scaled(next_row, next_end, order, top_k, LAYOUT)
            if y_scales is None:
                _finish(right, y, y_rows, None, None, box, expert, row, end, out, half_tile + 1, GATE)
            else:
                _store(_quantize(right, scale, dtype), y, y_rows, box, row, end, half_tile * HALF + HALF, out)
        else:
            _pass_over(first, steps, memory)
            next_expert, next_row, next_end, next_tile = _find_place(following, plan, out_tiles, BLOCK_R)
            next_row += WHO * ROWS
            rows = _find_scaled(next_row, next_end, order, top_k, LAYOUT)
        first += steps
        expert, row, end, out_tile = next_expert, next_row, next_end, next_tile
    tma.store_wait(0)


@jit
def _halves(values):
    HALF: gl.constexpr = values.shape[1] // 2
    left, right = values.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
    return left, right


@jit
def _finish(acc, y, y_rows, scales, bias, box, expert, row, end, out, out_tile, GATE: gl.constexpr):
    """Scale by outputs, add biases, activate gates, round, and store: [ROWS, outs] of a tile."""
    HALF: gl.constexpr = acc.shape[1] // 2
    left, right = _halves(acc)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, left.type.layout))
    if GATE is None:
        first = out_tile * 2 * HALF
        left_outs = expert * out + gl.minimum(first + column, out - 1)
        right_outs = expert * out + gl.minimum(first + HALF + column, out - 1)
    else:
        first = out_tile * HALF
        left_outs = expert * 2 * out + gl.minimum(first + column, out - 1)
        right_outs = left_outs + out
    if scales is not None:
        left *= gl.load(scales + left_outs).to(gl.float32)[None, :]
        right *= gl.load(scales + right_outs).to(gl.float32)[None, :]
    if bias is not None:
        left += gl.load(bias + left_outs).to(gl.float32)[None, :]
        right += gl.load(bias + right_outs).to(gl.float32)[None, :]
    left, right = left.to(y_rows.dtype.element_ty), right.to(y_rows.dtype.element_ty)
    if GATE is None:
        _store(left, y, y_rows, box, row, end, first, out)
        _store(right, y, y_rows, box, row, end, first + HALF, out)
    else:
        _store(_activate(left, right, GATE), y, y_rows, box, row, end, first, out)


@jit
def _activate(gates, ups, GATE: gl.constexpr):
    """gated_activate of projections in bf16."""
    return gl.inline_asm_elementwise(GATE, "=r,r,r", [gates, ups], dtype=gl.bfloat16, is_pure=True, pack=2)


@jit
def _activate_rounded(acc, GATE: gl.constexpr):
    """gated_activate of projections [ROWS, outs], which are rounded, in float32."""
    gates, ups = _halves(acc)
    return _activate(gates.to(gl.bfloat16), ups.to(gl.bfloat16), GATE).to(gl.float32)


@jit
def _find_scale(left, right):
    """The scales of rows of x for fp8, as `row_kernels.quantize_rows` computes them, by the halves of SPAN columns."""
    largest = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
    return gl.maximum(largest, 1e-4) / 448.0 + gl.sum(left * 0.0 + right * 0.0, 1)  # NaN where x has one, or an inf


@jit
def _quantize(x, scale, dtype: gl.constexpr):
    """Numbers of [ROWS, 64] in fp8, which keeps those above its largest there, in the order of the layout wgmma."""
    scaled = x / scale[:, None]
    return scaled.reshape([ROWS, 4, 2, 4, 2]).permute((0, 3, 1, 4, 2)).reshape([ROWS, 64]).to(dtype)


@jit
def _store(values, y, y_rows, box, row, end, column, out):
    """Store [ROWS, N] values: a whole tile by TMA, one that the expert's rows end in by row."""
    tma.store_wait(0)  # of the tile before
    box.store(values)
    if row + ROWS <= end:
        fence_async_shared()
        async_store(y, [row, column], box)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
        columns = column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))
        places = y_rows + rows.to(gl.int64)[:, None] * out + columns[None, :]
        gl.store(places, box.load(STORED), mask=(rows < end)[:, None] & (columns < out)[None, :])


@jit(do_not_specialize=["out", "steps", "out_tiles", "num", "x_stride", "blocks", "top_k", "y_stride"])
def _multiply(x, weight, y, y_rows, y_scales, bias, x_scales, w_scales, order, plan, out, steps, out_tiles, num,
              x_stride, blocks, top_k, y_stride, GATE: gl.constexpr, MMAS: gl.constexpr, HALF: gl.constexpr,
              COLUMNS: gl.constexpr):  # fmt: skip
    """Some tiles of a plan of `num` entries, over steps of COLUMNS columns.

    out: columns of y. In fp8 there are scales, of rows or, with an order, of tokens: one each, or one for each step,
    x_stride apart. If y is in fp8, it has scales y_stride apart.
    """
    wait_for_inputs(True)
    BITS: gl.constexpr = 1024 // COLUMNS
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    STORED_BITS: gl.constexpr = y.dtype.primitive_bitwidth
    y_layout: gl.constexpr = gl.NVMMASharedLayout(min(HALF * STORED_BITS // 8, 128), STORED_BITS, 2)
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, ROWS, COLUMNS], OPERAND)
    w_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * MMAS * 2, HALF, COLUMNS], OPERAND)
    y_boxes = gl.allocate_shared_memory(y.dtype, [GROUPS, ROWS, HALF], y_layout)
    ready, free = make_barriers()

    sizes = (out, steps, out_tiles, num)
    memory = (x_boxes, w_boxes, y_boxes, ready, free)
    scales = (x_scales, w_scales, x_stride, blocks, order, top_k)
    if MMAS == 2:
        gl.warp_specialize(
            [
                (_consume_blocks, (y, y_rows, y_scales, y_stride, scales, plan, sizes, memory, 0, GATE, HALF)),
                (_consume_blocks, (y, y_rows, y_scales, y_stride, scales, plan, sizes, memory, 1, GATE, HALF)),
                (_produce, (x, weight, plan, sizes, memory, GATE is not None, MMAS, HALF)),
            ],
            [4, 1],  # warps
            [232, 40],  # registers a thread
        )
    elif bias is None and GATE is None:
        gl.warp_specialize(
            [
                (_consume_late, (y, y_rows, scales, plan, sizes, memory, 0, HALF)),
                (_consume_late, (y, y_rows, scales, plan, sizes, memory, 1, HALF)),
                (_produce, (x, weight, plan, sizes, memory, False, MMAS, HALF)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (y, y_rows, bias, scales, plan, sizes, memory, 0, GATE, HALF)),
                (_consume, (y, y_rows, bias, scales, plan, sizes, memory, 1, GATE, HALF)),
                (_produce, (x, weight, plan, sizes, memory, GATE is not None, MMAS, HALF)),
            ],
            [4, 1],
            [232, 40],
        )


@cache
def write_gate(gate: Gate | None) -> str | None:
    """The instructions of a gated activation for the kernel; None: it has none of this kind."""
    if gate is None:
        return None
    kind, limit, alpha = gate
    if kind == "silu" and limit is None:
        return str(SILU.value)
    if kind != "swigluoai" or limit is None or alpha is None:
        return None
    bits = int(torch.tensor(limit, dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF
    pair, float_bits = bits << 16 | bits, struct.unpack("<I", struct.pack("<f", alpha))[0]
    return SWIGLUOAI.format(
        limit=f"0x{pair:08x}", minus_limit=f"0x{pair | 0x80008000:08x}", alpha=f"0f{float_bits:08X}"
    )


@cache
def _descriptors(block_rows: int, columns: int, bits: int) -> TensorDescriptors:
    return TensorDescriptors((block_rows, columns), gl.NVMMASharedLayout(min(columns * bits // 8, 128), bits, 2))


def make_plan(ends: Tensor, rows: int, block_rows: int) -> Plan:
    """Lay out tiles of this many rows; ends i64[E]: where each expert's end."""
    experts, gpu = len(ends), find_gpu(ends.device)
    num = max_tiles(rows, experts, block_rows)
    tiles = ends.new_empty(num + 1, ENTRY.value, dtype=torch.int32)
    _plan_kernel[(num,)](
        ends, tiles, num, EXPERTS=experts, BLOCK_E=next_power_of_2(experts), BLOCK_R=block_rows,
        BAND=BAND // block_rows, ENTRY=ENTRY.value, num_warps=1, **gpu.options,
    )  # fmt: skip
    return Plan(tiles, num, block_rows)


def plan_fp8(ends: Tensor, rows: int) -> Plan:
    """The plan of `multiply_fp8`, by weights in any format."""
    return make_plan(ends, rows, BLOCK_ROWS)


def multiply(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None) -> Tensor:
    """x [P, I], sorted by expert, weight [E, O, I], ends i64[E], bias [E, O] -> [P, O], or [P, O / 2] with a gate, some
    kinds of which are a launch of their own"""
    plan, written = make_plan(ends, len(x), BLOCK_ROWS), write_gate(gate)
    y, _ = _launch(x, weight, plan, bias, None, None, None, 1, written, PLAIN)
    return activate_gates(y, *gate) if gate is not None and written is None else y


def multiply_fp8(
    x: Tensor, x_scales: Tensor, weight: PackedWeight, plan: Plan, bias: Tensor | None = None, gate: Gate | None = None,
    order: Tensor | None = None, top_k: int = 1,
) -> Tensor:  # fmt: skip
    """multiply of a weight in fp8 by x fp8[P, I], in bf16: a weight in blocks of 128 x 128 with x_scales
    fp32[P, I / 128], whose columns lie together, or one with a scale for each row with x_scales fp32[P, 1]

    order: i64[P], the pair of token and expert of each row; then x_scales are of tokens, which have top_k pairs each
    """
    values, scales, written = weight.parts["values"].view(FP8), weight.parts["scales"], write_gate(gate)
    tile = _tile_of(weight)
    assert gate is None or written is not None, f"the kernel has no {gate}"
    assert bias is None or tile is BY_ROWS, "the kernel of blocks has no biases"
    return _launch(x, values, plan, bias, x_scales, scales, order, top_k, written, tile)[0]


def multiply_and_quantize(
    x: Tensor, x_scales: Tensor, weight: PackedWeight, plan: Plan, gate: Gate, order: Tensor | None = None,
    top_k: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`quantize_rows` in fp8 by 128 columns, in the order of the layout wgmma, of `multiply_fp8`, to the bit

    The weight is in blocks, and has a multiple of 128 gate projections. -> fp8[P, O / 2], and scales as x_scales
    """
    values, scales, written = weight.parts["values"].view(FP8), weight.parts["scales"], write_gate(gate)
    assert written is not None, f"the kernel has no {gate}"
    made, made_scales = _launch(x, values, plan, None, x_scales, scales, order, top_k, written, BY_BLOCKS, FP8)
    assert made_scales is not None, "numbers in fp8 have scales"
    return made, made_scales


def _tile_of(weight: PackedWeight) -> Tile:
    return BY_ROWS if block_of(weight.type)[-2] == 1 else BY_BLOCKS


def _launch(x: Tensor, weight: Tensor, plan: Plan, bias: Tensor | None, x_scales: Tensor | None,
            w_scales: Tensor | None, order: Tensor | None, top_k: int, gate: str | None, tile: Tile,
            dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    (rows, inner), (experts, outs, _), gpu = x.shape, weight.shape, find_gpu(x.device)
    assert plan.block_rows == BLOCK_ROWS, "the plan is of other tiles"
    out = outs if gate is None else outs // 2
    assert tile.mmas == 1 or out % SPAN.value == 0, "gate and up projections share no block"
    y = x.new_empty(rows, out, dtype=dtype)
    y_scales = x.new_empty(out // SPAN.value, rows, dtype=torch.float32).t() if dtype == FP8 else None
    half, bits = tile.outs // 2, 1024 // tile.columns
    out_tiles = -(-out // (tile.mmas * (tile.outs if gate is None else half)))
    _multiply[(min(gpu.units, plan.num * out_tiles),)](
        _descriptors(ROWS.value, tile.columns, bits).find(x, (rows, inner), x.stride()),
        _descriptors(half, tile.columns, bits).find(weight, (experts * outs, inner), (inner, 1)),
        _descriptors(ROWS.value, half, 8 * dtype.itemsize).find(y, (rows, out), (out, 1)),
        y, y_scales, bias, x_scales, w_scales, order, plan.tiles, out, -(-inner // tile.columns), out_tiles, plan.num,
        0 if x_scales is None else x_scales.stride(1), 0 if w_scales is None else w_scales.shape[1], top_k,
        0 if y_scales is None else y_scales.stride(1), gate, tile.mmas, half, tile.columns, num_warps=4,
        maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return y, y_scales

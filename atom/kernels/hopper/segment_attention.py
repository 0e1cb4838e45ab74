"""Segment attention on NVIDIA's Hopper, in Gluon: an image's patches attend to each other.

    out = segment_attention(q, k, v, starts, scale=0.1)     # by Triton's kernel where that is faster

A program on each multiprocessor takes one tile of a segment's queries, by one head, after another. One of its warps
finds the tile and loads its queries by TMA, then its keys and values, ahead of the two groups of warps that have half
of the tile's rows each. These alternate: while one's matmuls run, the other computes its softmax (Shah 2024,
FlashAttention-3). Heads of towers have 72, 80 or 88 dims: the first 64 are multiplied apart from the rest, of which
the TMA makes a power of two with zeros.

Rows of the next segment that the last tile of keys has get a weight of 0. What is there is finite, as all that a tower
computes in bf16 is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.kernels.hopper.gluon import async_load, jit, reinterpret
from atom.kernels.hopper.prefill_attention import SEQUENCES, SOUGHT, multiply_keys, read_plan, write_plan
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors, align_rows
from atom.kernels.triton.attention import segments
from atom.kernels.triton.attention.common import LOG2E, NOTHING, wait_for_inputs
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

ROWS = gl.constexpr(128)  # queries of a tile
HALF = gl.constexpr(64)  # of them, which a group of warps has
KEYS = gl.constexpr(128)  # of a tile of keys and values
COLUMNS = gl.constexpr(64)  # dims of a head that are multiplied first
STAGES = gl.constexpr(2)
SIDES = gl.constexpr(2)  # tiles of queries in memory
MAX_PATCHES = gl.constexpr(0x7FFFFFFF)
MIN_REST = 16  # dims after these, of a product
MIN_PATCHES = 512  # of a segment on average, from which on it is faster than Triton's kernel


@jit
def add(a, b):
    return a + b


@jit
def count_tiles(starts, num_segments, some):
    """Of segments from `some` on: their ends, tiles of queries, and which of them there are."""
    each = some + gl.arange(0, SOUGHT, layout=SEQUENCES)
    is_there = each < num_segments
    begins = gl.load(starts + each, mask=is_there, other=0)
    ends = gl.load(starts + each + 1, mask=is_there, other=0)
    return ends, gl.cdiv(ends - begins, ROWS), is_there


@jit
def count_all_tiles(starts, num_segments):
    total = 0
    for some in range(0, num_segments, SOUGHT):
        total += gl.sum(count_tiles(starts, num_segments, some)[1], 0)
    return total


@jit
def find_tile(starts, num_segments, tile):
    """The first patch of the segment that a tile is of, its end, and the tile's first query."""
    first, end, num_before, num_counted = 0, MAX_PATCHES, 0, 0
    for some in range(0, num_segments, SOUGHT):
        ends, counts, is_there = count_tiles(starts, num_segments, some)
        counted = num_counted + gl.associative_scan(counts, 0, add)
        is_before = is_there & (counted <= tile)
        num_before = gl.maximum(num_before, gl.max(gl.where(is_before, counted, 0), 0))
        first = gl.maximum(first, gl.max(gl.where(is_before, ends, 0), 0))
        end = gl.minimum(end, gl.min(gl.where(is_there & (counted > tile), ends, MAX_PATCHES), 0))
        num_counted += gl.sum(counts, 0)
    return first, end, first + (tile - num_before) * ROWS


@jit
def load(boxed, rest, row, head, boxes, rest_boxes, index, ready, REST: gl.constexpr):
    """Load the rows of a head from `row` on by TMA."""
    async_load(boxed, [row, head, 0], ready, boxes.index(index))
    if REST:
        async_load(rest, [row, head, COLUMNS], ready, rest_boxes.index(index))


@jit
def produce(q, k, v, q_rest, k_rest, v_rest, starts, num_segments, memory, HEADS: gl.constexpr,
            REST: gl.constexpr):  # fmt: skip
    """Produce this program's tiles one after another: the plan and queries of each, and its keys and values, the last
    ones first."""
    plans, boxes, rests, ready, free, _ = memory
    q_boxes, k_boxes, v_boxes = boxes
    q_rests, k_rests, v_rests = rests
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    BYTES: gl.constexpr = (COLUMNS + REST) * 2  # of a row
    total = count_all_tiles(starts, num_segments)
    number, base = 0, 0
    for item in range(gl.program_id(0), total * HEADS, gl.num_programs(0)):
        head = item // total
        first, end, begin = find_tile(starts, num_segments, item % total)
        side = number % SIDES
        mbarrier.wait(q_free.index(side), number // SIDES & 1 ^ 1)
        for half in gl.static_range(2):
            load(q, q_rest, begin + half * HALF, head, q_boxes, q_rests, side * 2 + half, q_ready.index(side), REST)
        num_tiles = gl.cdiv(end - first, KEYS)
        write_plan(plans.index(side), num_tiles, first, head, begin, end, 0)
        mbarrier.expect(q_ready.index(side), ROWS * BYTES)  # after the plan, whose arrival it signals too
        for step in range(num_tiles):
            slot, phase = (base + step) % STAGES, (base + step) // STAGES & 1 ^ 1
            row = first + (num_tiles - 1 - step) * KEYS
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_ready.index(slot), KEYS * BYTES)
            load(k, k_rest, row, head, k_boxes, k_rests, slot, k_ready.index(slot), REST)
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_ready.index(slot), KEYS * BYTES)
            load(v, v_rest, row, head, v_boxes, v_rests, slot, v_ready.index(slot), REST)
        number += 1
        base += num_tiles
    side = number % SIDES
    mbarrier.wait(q_free.index(side), number // SIDES & 1 ^ 1)
    write_plan(plans.index(side), 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_ready.index(side))


@jit
def soften(scores, best, total, num_seen, SCALE: gl.constexpr, MASKED: gl.constexpr):
    """Scores of queries and keys, of which num_seen count -> their weights, and the softmax so far."""
    factor: gl.constexpr = SCALE * LOG2E
    if MASKED:
        columns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((columns < num_seen)[None, :], scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - higher[:, None])
    fade = gl.exp2(best - higher)
    return weights, higher, fade, total * fade + gl.sum(weights, 1)


@jit
def multiply_values(weights, values, slot, acc, acc_rest, REST: gl.constexpr):
    """The matmuls of weights and a stage's values, in flight."""
    acc = warpgroup_mma(weights, values[0].index(slot), acc, is_async=True)
    if REST:
        own: gl.constexpr = gl.DotOperandLayout(0, acc_rest.type.layout, 2)
        acc_rest = warpgroup_mma(gl.convert_layout(weights, own), values[1].index(slot), acc_rest, is_async=True)
    return acc, acc_rest


@jit
def fade_sums(acc, acc_rest, fade, REST: gl.constexpr):
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    if REST:
        acc_rest = acc_rest * gl.convert_layout(fade, gl.SliceLayout(1, acc_rest.type.layout))[:, None]
    return acc, acc_rest


@jit
def wait_for_sums(acc, acc_rest, weights, REST: gl.constexpr):
    if REST:
        acc, acc_rest, weights = warpgroup_mma_wait(0, deps=(acc, acc_rest, weights))
    else:
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    return acc, acc_rest, weights


@jit
def store(x, staged, rows, end, out, stride, columns_left, DIM: gl.constexpr):
    """Store x [HALF, DIM] by way of `staged`, which brings the columns of a row together."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    staged.store(x)
    lines = rows + gl.arange(0, HALF, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    places = lines.to(gl.int64)[:, None] * stride + columns[None, :]
    gl.store(out + places, staged.load(LINES), mask=(lines < end)[:, None] & (columns < columns_left)[None, :])


@jit
def consume_tile(out, plan, queries, free, keys, values, num_tiles, base, memory, SCALE: gl.constexpr,
                 HEADS: gl.constexpr, DIM: gl.constexpr, REST: gl.constexpr, WHO: gl.constexpr):  # fmt: skip
    """Half of the rows of a tile attend to all tiles of keys and values; `base` of these went before."""
    k_ready, v_ready, k_free, v_free, pingpong = memory[3][1], memory[3][2], memory[4][1], memory[4][2], memory[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ATTENDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ATTENDED, 2)
    first, head, begin, end = read_plan(plan, 1), read_plan(plan, 2), read_plan(plan, 3), read_plan(plan, 4)
    best = gl.full([HALF], NOTHING, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    acc, acc_rest = gl.zeros([HALF, COLUMNS], gl.float32, ATTENDED), best
    if REST:
        acc_rest = gl.zeros([HALF, REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16]))

    slot = base % STAGES
    mbarrier.wait(k_ready.index(slot), base // STAGES & 1)
    mbarrier.wait(pingpong.index(WHO), base & 1 ^ (1 - WHO))
    scores = multiply_keys(queries, keys, slot, SCORES)
    mbarrier.arrive(pingpong.index(1 - WHO))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(slot))
    weights, best, _, total = soften(scores, best, total, end - first - (num_tiles - 1) * KEYS, SCALE, True)
    weights = gl.convert_layout(weights.to(out.dtype.element_ty), WEIGHTS)
    for step in range(1, num_tiles):
        iteration = base + step
        slot, last = iteration % STAGES, (iteration - 1) % STAGES
        mbarrier.wait(k_ready.index(slot), iteration // STAGES & 1)
        mbarrier.wait(pingpong.index(WHO), iteration & 1 ^ (1 - WHO))
        scores = multiply_keys(queries, keys, slot, SCORES)
        mbarrier.wait(v_ready.index(last), (iteration - 1) // STAGES & 1)
        acc, acc_rest = multiply_values(weights, values, last, acc, acc_rest, REST)
        mbarrier.arrive(pingpong.index(1 - WHO))
        scores = warpgroup_mma_wait(2 if REST else 1, deps=(scores,))
        mbarrier.arrive(k_free.index(slot))
        new_weights, best, fade, total = soften(scores, best, total, 0, SCALE, False)
        acc, acc_rest, weights = wait_for_sums(acc, acc_rest, weights, REST)
        mbarrier.arrive(v_free.index(last))
        acc, acc_rest = fade_sums(acc, acc_rest, fade, REST)
        weights = gl.convert_layout(new_weights.to(out.dtype.element_ty), WEIGHTS)
    last = base + num_tiles - 1
    mbarrier.wait(v_ready.index(last % STAGES), last // STAGES & 1)
    acc, acc_rest = multiply_values(weights, values, last % STAGES, acc, acc_rest, REST)
    acc, acc_rest, weights = wait_for_sums(acc, acc_rest, weights, REST)
    mbarrier.arrive(v_free.index(last % STAGES))

    acc, acc_rest = fade_sums(acc, acc_rest, 1.0 / total, REST)
    rows, places = begin + WHO * HALF, out + head * DIM
    store(acc.to(out.dtype.element_ty), queries[0], rows, end, places, HEADS * DIM, DIM, COLUMNS)
    if REST:
        store(acc_rest.to(out.dtype.element_ty), queries[1], rows, end, places + COLUMNS, HEADS * DIM, DIM - COLUMNS,
              REST)  # fmt: skip
    fence_async_shared()
    mbarrier.arrive(free)


@jit
def consume(out, memory, SCALE: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, REST: gl.constexpr,
            WHO: gl.constexpr):  # fmt: skip
    """Attend half of the rows of each of this program's tiles."""
    plans, boxes, rests, ready, free, _ = memory
    q_boxes, k_boxes, v_boxes = boxes
    q_ready, q_free = ready[0], free[0]
    dtype: gl.constexpr = out.dtype.element_ty
    MAIN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = reinterpret(q_boxes, dtype, [2 * SIDES, HALF, COLUMNS], MAIN)
    keys = reinterpret(k_boxes, dtype, [STAGES, KEYS, COLUMNS], MAIN), None
    values = reinterpret(v_boxes, dtype, [STAGES, KEYS, COLUMNS], MAIN), None
    more_queries = queries
    if REST:
        OTHER: gl.constexpr = gl.NVMMASharedLayout(REST * 2, 16, 2)
        more_queries = reinterpret(rests[0], dtype, [2 * SIDES, HALF, REST], OTHER)
        keys = keys[0], reinterpret(rests[1], dtype, [STAGES, KEYS, REST], OTHER)
        values = values[0], reinterpret(rests[2], dtype, [STAGES, KEYS, REST], OTHER)
    number, base = 0, 0
    mbarrier.wait(q_ready.index(0), 0)
    num_tiles = read_plan(plans.index(0), 0)
    while num_tiles > 0:
        side = number % SIDES
        own = queries.index(side * 2 + WHO), None
        if REST:
            own = own[0], more_queries.index(side * 2 + WHO)
        consume_tile(out, plans.index(side), own, q_free.index(side), keys, values, num_tiles, base, memory, SCALE,
                     HEADS, DIM, REST, WHO)  # fmt: skip
        number += 1
        base += num_tiles
        mbarrier.wait(q_ready.index(number % SIDES), number // SIDES & 1)
        num_tiles = read_plan(plans.index(number % SIDES), 0)


@jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["starts"])
def _segment_attention(
    q, k, v, q_rest, k_rest, v_rest, starts, out, num_segments, SCALE: gl.constexpr, HEADS: gl.constexpr,
    DIM: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Tiles of ROWS queries by one of HEADS heads, all of a head before those of the next: they read the same keys."""
    wait_for_inputs(True)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    MAIN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    dtype: gl.constexpr = out.dtype.element_ty
    plans = gl.allocate_shared_memory(gl.int32, [SIDES, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_boxes = gl.allocate_shared_memory(dtype, [2 * SIDES, HALF, 1, COLUMNS], MAIN)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, COLUMNS], MAIN)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, COLUMNS], MAIN)
    q_rests, k_rests, v_rests = None, None, None
    if REST:
        OTHER: gl.constexpr = gl.NVMMASharedLayout(REST * 2, 16, 3)
        q_rests = gl.allocate_shared_memory(dtype, [2 * SIDES, HALF, 1, REST], OTHER)
        k_rests = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, REST], OTHER)
        v_rests = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, REST], OTHER)
    q_ready = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [SIDES, 1], BARRIER)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    pingpong = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for side in gl.static_range(SIDES):
        mbarrier.init(q_ready.index(side), count=1)
        mbarrier.init(q_free.index(side), count=2)
    for who in gl.static_range(2):
        mbarrier.init(pingpong.index(who), count=1)
    fence_async_shared()

    boxes, rests = (q_boxes, k_boxes, v_boxes), (q_rests, k_rests, v_rests)
    memory = plans, boxes, rests, (q_ready, k_ready, v_ready), (q_free, k_free, v_free), pingpong
    gl.warp_specialize(
        [
            (consume, (out, memory, SCALE, HEADS, DIM, REST, 0)),
            (consume, (out, memory, SCALE, HEADS, DIM, REST, 1)),
            (produce, (q, k, v, q_rest, k_rest, v_rest, starts, num_segments, memory, HEADS, REST)),
        ],
        [4, 1],  # warps
        [208, 88],  # registers a thread
    )  # fmt: skip


def suits(q: Tensor, starts: Tensor) -> bool:
    """Whether the kernel in Gluon takes these and is faster than Triton's, as it is for images of many patches."""
    num_patches, _, dim = q.shape
    return (
        q.dtype == torch.bfloat16
        and COLUMNS.value <= dim <= 2 * COLUMNS.value
        and dim % 8 == 0
        and num_patches >= MIN_PATCHES * (len(starts) - 1)
    )


@functools.cache
def _descriptors(rows: int, columns: int) -> TensorDescriptors:
    return TensorDescriptors((rows, 1, columns), gl.NVMMASharedLayout(columns * 2, 16, 3))


def _find(x: Tensor, rows: int, columns: int) -> Any:
    """The descriptor of x [P, N, D], whose tokens and heads may lie apart."""
    heads, dim = x.shape[1:]
    return _descriptors(rows, columns).find(x, tuple(x.shape), (x.stride(0), x.stride(1) if heads > 1 else dim, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
    """As `segment_attention`, by the kernel in Gluon."""
    q, k, v = map(align_rows, (q, k, v))
    num_patches, heads, dim = q.shape
    rest = 0 if dim == COLUMNS.value else max(MIN_REST, next_power_of_2(dim - COLUMNS.value))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    boxes = [_find(x, rows.value, COLUMNS.value) for x, rows in ((q, HALF), (k, KEYS), (v, KEYS))]
    rests = [_find(x, rows.value, rest) if rest else None for x, rows in ((q, HALF), (k, KEYS), (v, KEYS))]
    num_segments = len(starts) - 1
    num_items = (num_patches // ROWS.value + num_segments + 1) * heads
    _segment_attention[(min(find_gpu(q.device).units, num_items),)](
        *boxes, *rests, starts, out, num_segments, scale, heads, dim, rest, num_warps=4, maxnreg=168,
        launch_pdl=True,
    )  # fmt: skip
    return out


def segment_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float) -> Tensor:
    """q, k, v [P, N, D], which may be views of one output, starts i32[S + 1] -> [P, N, D]"""
    if suits(q, starts):
        return attend(q, k, v, starts, scale)
    return segments.segment_attention(q, k, v, starts, scale=scale)

"""Decode attention over entries in fp8 on NVIDIA's Hopper, in Gluon.

It computes what decode.py does where all keys are there, and cuts sequences up in the same way.

    args = q, cache, table, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window
    decode(*args, query_len, programs, memory)

Keys and values come by TMA, some tiles ahead and, but for the newest, while the kernel ahead still runs. A tile's keys
are the left operand of one product and its values, transposed, that of the other: the tensor cores take left operands
from registers, where fp8 becomes bf16. Which column is which is free in a sum over columns, and which row in what is
stored in the end. So a thread takes neighbouring bytes: of keys those of its columns, and of values those of its rows,
at each of its positions.
"""

from __future__ import annotations

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

from atom.kernels.triton.attention.common import LOG2E, NOTHING, find_owner, sequence_bucket
from atom.kernels.triton.gluon import jit
from atom.kernels.triton.gpu import next_power_of_2
from atom.kernels.triton.tensor_descriptors import TensorDescriptors

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # as later versions call it
PROGRAMS_PER_UNIT = 4  # on a multiprocessor
STAGES = 3  # tiles in memory at a time
DIM = gl.constexpr(128)
POSITIONS = gl.constexpr(64)  # of keys and values in a tile
PIECE = gl.constexpr(16)  # of them, which one copy brings
PIECES = gl.constexpr(4)  # POSITIONS / PIECE
ENTRIES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
OPERANDS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
KEYS = gl.constexpr(  # a thread has 32 neighbours of two rows, 8 apart
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]], [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )
)  # fmt: skip
VALUES = gl.constexpr(  # a thread has 4 neighbours of 16 rows
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]], [], [64, 128],
    )
)  # fmt: skip
QUERIES_BY = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))  # to load by
PARTS_BY = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]))
SEQUENCES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# of 4 neighbours, as bf16, whose exponents are those of e4m3 less a power of 2: the even ones, then the odd ones
KEYS_ASM = gl.constexpr("""{
.reg .b32 a, b, t;
shl.b32 t, $2, 8;
and.b32 a, t, 0x7f007f00;
and.b32 b, $2, 0x7f007f00;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 a, t, 0x80008000, a, 0xEA;
lop3.b32 b, $2, 0x80008000, b, 0xEA;
mov.b32 t, 0x7b807b80;
mul.rn.bf16x2 $0, a, t;
mul.rn.bf16x2 $1, b, t;
}""")
# of 4 neighbours in two rows, as bf16: a pair of rows for each
VALUES_ASM = gl.constexpr("""{
.reg .b32 a, b, c, d, e, f, g, h, t;
prmt.b32 a, $4, $5, 0x4000;
prmt.b32 b, $4, $5, 0x5010;
prmt.b32 c, $4, $5, 0x6020;
prmt.b32 d, $4, $5, 0x7030;
and.b32 e, a, 0x7f007f00;
and.b32 f, b, 0x7f007f00;
and.b32 g, c, 0x7f007f00;
and.b32 h, d, 0x7f007f00;
shr.u32 e, e, 4;
shr.u32 f, f, 4;
shr.u32 g, g, 4;
shr.u32 h, h, 4;
lop3.b32 e, a, 0x80008000, e, 0xEA;
lop3.b32 f, b, 0x80008000, f, 0xEA;
lop3.b32 g, c, 0x80008000, g, 0xEA;
lop3.b32 h, d, 0x80008000, h, 0xEA;
mov.b32 t, 0x7b807b80;
mul.rn.bf16x2 $0, e, t;
mul.rn.bf16x2 $1, f, t;
mul.rn.bf16x2 $2, g, t;
mul.rn.bf16x2 $3, h, t;
}""")


@jit
def _find_column(place):
    """The column of keys and queries at a place of the sum over columns."""
    return place // 2 % 4 * 32 + place // 16 * 4 + place % 2 * 2 + place // 8 % 2


@jit
def _find_dim(row):
    """The column of values that is a row of the transposed product."""
    return row // 16 % 4 * 32 + row % 8 * 4 + row // 64 * 2 + row // 8 % 2


@jit
def _unpack_keys(tile, LEFT: gl.constexpr):
    """Bytes [positions, columns] -> [positions, places], as `_find_column` has them"""
    numbers = gl.inline_asm_elementwise(KEYS_ASM, "=r,=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=4)
    numbers = numbers.reshape([POSITIONS, 4, 8, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([POSITIONS, DIM])
    return gl.convert_layout(numbers, LEFT)


@jit
def _unpack_values(tile, LEFT: gl.constexpr):
    """Bytes [positions, columns] -> [rows, positions], as `_find_dim` has them"""
    numbers = gl.inline_asm_elementwise(VALUES_ASM, "=r,=r,=r,=r,r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=8)
    # a thread's numbers lie by position, then by column; they are called the other way round
    numbers = numbers.reshape([POSITIONS // 2, 2, 4, 8, 2, 2]).permute((1, 2, 4, 3, 0, 5)).reshape([DIM, POSITIONS])
    return gl.convert_layout(numbers, LEFT)


@jit
def _find_span(lengths, sequence, before, WINDOW: gl.constexpr, QUERIES: gl.constexpr):
    """A sequence's length, the first position of its tiles, which come from `before` on, and the tile behind them."""
    length = gl.load(lengths + sequence)
    start = 0
    if WINDOW is not None:
        start = gl.maximum(length - (WINDOW + QUERIES - 1), 0) // PIECE * PIECE
    return length, start, before + gl.maximum(gl.cdiv(length - start, POSITIONS), 1)


@jit
def _send(pieces, blocks, position, length, head, slot, memory, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr):
    """Send for the keys and values of a tile."""
    keys, values, ready = memory
    rows = ()
    for piece in gl.static_range(PIECES):
        at = position + piece * PIECE
        block = gl.load(blocks + at // BLOCK_SIZE, mask=at < length, other=0)
        rows += (gl.where(at < length, block * BLOCK_SIZE + at % BLOCK_SIZE, -PIECE),)  # type: ignore[assignment]
    mbarrier.expect(ready.index(slot), 2 * POSITIONS * DIM)
    for piece in gl.static_range(PIECES):
        box, bar = slot * PIECES + piece, ready.index(slot)
        tma.async_copy_global_to_shared(pieces, [rows[piece], head * DIM], bar, keys.index(box))
        tma.async_copy_global_to_shared(pieces, [rows[piece], (HEADS + head) * DIM], bar, values.index(box))


@jit
def _store_attended(acc, best, total, sinks, v_scale, out, dims, rows, HEADS: gl.constexpr, GROUP: gl.constexpr,
                    QUERIES: gl.constexpr, BY_ROW: gl.constexpr):  # fmt: skip
    """acc [rows, dims] or, unless BY_ROW, [dims, rows] over its total, and sinks', to the heads of a group at `out`."""
    AXIS: gl.constexpr = 1 if BY_ROW else 0
    if sinks is not None:
        sink = gl.load(sinks + rows % GROUP, mask=rows < GROUP * QUERIES, other=0.0).to(gl.float32) * LOG2E
        sink = gl.minimum(gl.maximum(sink, NOTHING), -NOTHING)  # infinite ones would give NaN
        higher = gl.maximum(best, sink)
        fade = gl.exp2(best - higher)
        total = total * fade + gl.exp2(sink - higher)
        acc = acc * gl.expand_dims(fade, AXIS)
    acc = acc * gl.expand_dims(v_scale / gl.where(total > 0, total, 1.0), AXIS)
    places = rows // GROUP * (HEADS * GROUP * DIM) + rows % GROUP * DIM
    is_row = gl.expand_dims(rows < GROUP * QUERIES, AXIS)
    pointers = out + gl.expand_dims(places, AXIS) + gl.expand_dims(dims, 1 - AXIS)
    gl.store(pointers, acc.to(out.dtype.element_ty), mask=is_row)


@jit
def _merge(sums, stats, sinks, v_scale, out, head, first, last, PROGRAMS: gl.constexpr, HEADS: gl.constexpr,
           GROUP: gl.constexpr, QUERIES: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """The parts that programs first to last left of one sequence, as one softmax, to its queries' heads at `out`."""
    BY_PART: gl.constexpr = gl.SliceLayout(2, PARTS_BY)
    ROWS: gl.constexpr = GROUP * QUERIES
    SUM: gl.constexpr = gl.SliceLayout(0, PARTS_BY)
    each = gl.arange(0, PARTS, layout=gl.SliceLayout(1, BY_PART))
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, BY_PART))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUM))
    best = gl.full([BLOCK_M], NOTHING, gl.float32, gl.SliceLayout(0, BY_PART))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, BY_PART))
    acc = gl.zeros([BLOCK_M, DIM], gl.float32, SUM)
    for part in range(first, last + 1, PARTS):
        programs = part + each
        slots = (head * PROGRAMS + programs) * 2 + (programs == first).to(gl.int32)
        is_row = (programs <= last)[:, None] & (rows < ROWS)[None, :]
        at = slots[:, None] * ROWS + rows[None, :]
        bests = gl.load(stats + 2 * at, mask=is_row, other=NOTHING, cache_modifier=".cg")
        totals = gl.load(stats + 2 * at + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        places = gl.expand_dims(at, 2) * DIM + gl.expand_dims(gl.expand_dims(dims, 0), 0)
        parts = gl.load(sums + places, mask=gl.expand_dims(is_row, 2), other=0.0, cache_modifier=".cg")
        higher = gl.maximum(best, gl.max(bests, 0))
        fades, fade = gl.exp2(bests - higher[None, :]), gl.exp2(best - higher)
        total = total * fade + gl.sum(totals * fades, 0)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUM))[:, None] + gl.sum(
            parts * gl.expand_dims(fades, 2), 0
        )
        best = higher
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    _store_attended(acc, gl.convert_layout(best, BY_ROW), gl.convert_layout(total, BY_ROW), sinks, v_scale, out,
                    _find_dim(dims), gl.convert_layout(rows, BY_ROW), HEADS, GROUP, QUERIES, True)  # fmt: skip


@jit(
    do_not_specialize=["num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["table", "lengths"],
)
def _decode(
    q, pieces, table, lengths, sinks, k_scale, v_scale, out, sums, stats, tickets, num_decodes, table_stride, q_stride,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    QUERIES: gl.constexpr, PROGRAMS: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program: a run of tiles of the kv head program_id(0). HEADS of keys, GROUP query heads to each, and QUERIES
    of each sequence."""
    ROWS: gl.constexpr = GROUP * QUERIES
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, TILE)  # of queries
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tl.extra.cuda.gdc_launch_dependents()
    head, program = gl.program_id(0), gl.program_id(1)
    sequences = gl.arange(0, BLOCK_S, layout=SEQUENCES)
    counts = gl.load(lengths + sequences, mask=sequences < num_decodes, other=0)
    if WINDOW is not None:
        counts -= gl.maximum(counts - (WINDOW + QUERIES - 1), 0) // PIECE * PIECE
    counts = gl.where(sequences < num_decodes, gl.maximum(gl.cdiv(counts, POSITIONS), 1), 0)
    num_tiles = gl.sum(counts, 0)
    # to merge a part costs as much as a tile or two, and more the more parts a sequence has
    share = gl.maximum(gl.cdiv(num_tiles, PROGRAMS), gl.minimum(gl.cdiv(gl.max(counts, 0), 16), 4))
    tile = program * share
    end = gl.minimum(tile + share, num_tiles)
    if tile >= end:
        return
    sequence, before = find_owner(counts, tile)

    keys = gl.allocate_shared_memory(gl.uint8, [STAGES * PIECES, PIECE, DIM], ENTRIES)
    values = gl.allocate_shared_memory(gl.uint8, [STAGES * PIECES, PIECE, DIM], ENTRIES)
    key_tiles = keys._reinterpret(gl.uint8, [STAGES, POSITIONS, DIM], ENTRIES)
    value_tiles = values._reinterpret(gl.uint8, [STAGES, POSITIONS, DIM], ENTRIES)
    queries = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, DIM], OPERANDS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, POSITIONS], OPERANDS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    barrier()
    memory = (keys, values, ready)

    next_tile, next_sequence, next_before = tile, sequence, before  # to be sent for
    next_length, next_start, next_after = _find_span(lengths, next_sequence, next_before, WINDOW, QUERIES)
    for stage in gl.static_range(STAGES):
        if next_tile < end:
            if next_tile >= next_after:
                next_sequence += 1
                next_before = next_after
                next_length, next_start, next_after = _find_span(lengths, next_sequence, next_before, WINDOW, QUERIES)
            position = next_start + (next_tile - next_before) * POSITIONS
            if position + POSITIONS > next_length - QUERIES:
                tl.extra.cuda.gdc_wait()  # the kernel ahead writes the newest
            _send(pieces, table + next_sequence.to(gl.int64) * table_stride, position, next_length, head, stage, memory,
                  BLOCK_SIZE, HEADS)  # fmt: skip
            next_tile += 1
    tl.extra.cuda.gdc_wait()

    factor = SCALE * LOG2E
    if k_scale is not None:
        factor = factor * gl.load(k_scale)
    v_scale = 1.0 if v_scale is None else gl.load(v_scale)
    if sinks is not None:
        sinks += head * GROUP
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES_BY))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, QUERIES_BY))
    q_places = rows // GROUP * q_stride + (head * GROUP + rows % GROUP) * DIM
    q_places = q_places[:, None] + _find_column(columns)[None, :]
    own_rows = gl.arange(0, BLOCK_M, layout=BY_ROW)
    own_places = gl.arange(0, POSITIONS, layout=gl.SliceLayout(1, TILE))
    places = gl.arange(0, DIM, layout=gl.SliceLayout(1, TILE))
    step = 0
    while tile < end:
        length, start, after = _find_span(lengths, sequence, before, WINDOW, QUERIES)
        run_end = gl.minimum(end, after)
        row = sequence.to(gl.int64)
        queries.store(gl.load(q + row * QUERIES * q_stride + q_places, mask=(rows < ROWS)[:, None], other=0.0))
        fence_async_shared()
        barrier()
        best = gl.full([BLOCK_M], NOTHING, gl.float32, BY_ROW)
        total = gl.zeros([POSITIONS, BLOCK_M], gl.float32, TILE)
        acc = gl.zeros([DIM, BLOCK_M], gl.float32, TILE)
        ends = length - (QUERIES - 1) + own_rows // GROUP
        for at in range(tile, run_end):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            scores = gl.zeros([POSITIONS, BLOCK_M], gl.float32, TILE)
            scores = warpgroup_mma(_unpack_keys(key_tiles.index(slot).load(KEYS), LEFT), queries.permute((1, 0)),
                                   scores, use_acc=False, is_async=True)  # fmt: skip
            tile_values = _unpack_values(value_tiles.index(slot).load(VALUES), LEFT)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            positions = (start + (at - before) * POSITIONS + own_places)[:, None]
            is_seen = positions < ends[None, :]
            if WINDOW is not None:
                is_seen = is_seen & (positions >= ends[None, :] - WINDOW)
            scores = gl.where(is_seen, scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 0) * factor)
            new_weights = gl.exp2(scores * factor - higher[None, :])
            fade = gl.exp2(best - higher)
            total = total * fade[None, :] + new_weights
            weights.store(new_weights.to(gl.bfloat16).permute((1, 0)))
            best = higher
            fence_async_shared()
            barrier()  # all have read the tile and written their weights
            acc = warpgroup_mma(tile_values, weights.permute((1, 0)), acc * fade[None, :], is_async=True)
            if next_tile < end:
                if next_tile >= next_after:
                    next_sequence += 1
                    next_before = next_after
                    next_length, next_start, next_after = _find_span(
                        lengths, next_sequence, next_before, WINDOW, QUERIES
                    )
                position = next_start + (next_tile - next_before) * POSITIONS
                _send(pieces, table + next_sequence.to(gl.int64) * table_stride, position, next_length, head, slot,
                      memory, BLOCK_SIZE, HEADS)  # fmt: skip
                next_tile += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            step += 1
        sum_total = gl.sum(total, 0)
        out_row = out + row * (QUERIES * HEADS * GROUP * DIM) + head * (GROUP * DIM)
        first_part, last_part = before // share, (after - 1) // share
        if first_part == last_part:
            _store_attended(acc, best, sum_total, sinks, v_scale, out_row, _find_dim(places), own_rows, HEADS, GROUP,
                            QUERIES, False)  # fmt: skip
        else:
            part = ((head * PROGRAMS + program) * 2 + (program == first_part).to(gl.int32)) * ROWS + own_rows
            gl.store(stats + 2 * part, best, mask=own_rows < ROWS)
            gl.store(stats + 2 * part + 1, sum_total, mask=own_rows < ROWS)
            gl.store(sums + part[None, :] * DIM + places[:, None], acc, mask=(own_rows < ROWS)[None, :])
            barrier()  # all threads' parts are written before one thread takes the ticket
            ticket = tickets + head * PROGRAMS + first_part
            if gl.atomic_add(ticket, 1, sem="acq_rel") == last_part - first_part:
                _merge(sums, stats, sinks, v_scale, out_row, head, first_part, last_part, PROGRAMS, HEADS, GROUP,
                       QUERIES, PARTS, BLOCK_M)  # fmt: skip
                gl.store(ticket, 0)
        tile = run_end
        before = after
        sequence += 1


_piece_descriptors = TensorDescriptors((PIECE.value, DIM.value), ENTRIES.value)


def decode(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int, sinks: Tensor | None,
           k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor, scale: float, window: int | None,
           query_len: int, programs: int, memory: tuple[Tensor, Tensor, Tensor]) -> None:  # fmt: skip
    """As `decode.Decode`, with its memory; programs: of a kv head"""
    num_blocks, block_size, _, kv_heads, dim = cache.shape
    group, row = q.shape[1] // kv_heads, 2 * kv_heads * dim
    pieces = _piece_descriptors.find(cache.view(torch.uint8), (num_blocks * block_size, row), (row, 1))
    block_m = max(8, next_power_of_2(group * query_len))
    _decode[(kv_heads, programs)](
        q, pieces, table, lengths, sinks, k_scale, v_scale, out, *memory, num_decodes, table.stride(0), q.stride(0),
        scale, window, block_size, kv_heads, group, query_len, programs, sequence_bucket(num_decodes), block_m,
        max(1, 32 // block_m), STAGES, num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip

"""Decode attention on NVIDIA's Hopper, in Gluon.

It computes what triton/attention/decode.py does, and cuts sequences up in the same way.

    args = q, cache, table, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window, softcap
    decode(*args, newest, query_len, find_memory)

A warp of its own loads keys and values by TMA, some tiles ahead and, but for the newest, while the preceding kernel
still runs; four others attend. A tile's keys are the left operand of one MMA and its values, transposed, that of the
other, so that a tile of few queries wastes nothing. The tensor cores take both from shared memory; where entries are in
fp8, of which a copy brings both, from registers, where they become fp16. So do queries, each row of them scaled by a
power of 2. Which column is which is free in a sum over columns, and which row in what is stored in the end: a thread
takes neighbouring bytes, of keys those of its columns, and of values those of its rows at each of its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.kernels.hopper.gluon import async_load, barrier, jit, reinterpret
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors
from atom.kernels.triton.attention.common import (
    LOG2E,
    NOTHING,
    cap_scores,
    find_owner,
    find_run,
    score_factor,
    sequence_bucket,
)
from atom.kernels.triton.attention.rope import rotate_heads
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

MANY = 64  # sequences from which on heads of 256 dims, a tile at a time on a multiprocessor, take longer than Triton's
MERGED = 4096  # numbers of parts that are added at once
FEW = 8  # fewer sequences in fp8 have fewer programs, with more tiles in memory
PAIRED = 64  # sequences from which on a tile in fp8 has the keys of two kv heads, if there are no more than 8 queries
ROWS_OF_TILE = gl.constexpr(64)  # keys and values
PIECE = gl.constexpr(16)  # positions that one copy brings
BYTES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 4))  # keys and values of a piece, and of all of a tile's
OPERANDS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


def _tile_layout(registers: list[tuple[int, int]], lanes: list[tuple[int, int]], warps: list[tuple[int, int]],
                 heads: int) -> Any:  # fmt: skip
    """The layout of bytes [pieces, 1, rows of a piece, 128] by bases of rows and columns of a tile."""
    rows = PIECE.value * heads
    bases = ([[row // rows, 0, row % rows, column] for row, column in each] for each in (registers, lanes, warps))
    return gl.constexpr(gl.DistributedLinearLayout(*bases, [], [ROWS_OF_TILE.value // rows, 1, rows, 128]))


# a thread has 32 neighbours of two rows, 8 apart
_OF_KEYS = (
    [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (8, 0)],
    [(0, 32), (0, 64), (1, 0), (2, 0), (4, 0)],
    [(16, 0), (32, 0)],
)
# a thread has 4 neighbours of 16 rows
_OF_VALUES = (
    [(0, 1), (0, 2), (1, 0), (8, 0), (16, 0), (32, 0)],
    [(2, 0), (4, 0), (0, 4), (0, 8), (0, 16)],
    [(0, 32), (0, 64)],
)
KEYS, KEYS_OF_TWO = _tile_layout(*_OF_KEYS, 1), _tile_layout(*_OF_KEYS, 2)
VALUES, VALUES_OF_TWO = _tile_layout(*_OF_VALUES, 1), _tile_layout(*_OF_VALUES, 2)
QUERIES_BY = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))  # to load by
PARTS_BY = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # to clear values by
SEQUENCES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# of 4 neighbours, as fp16
KEYS_ASM = gl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
# of 4 neighbours in two rows, as fp16: a pair of rows for each
VALUES_ASM = gl.constexpr("""{
.reg .b32 s, t;
.reg .b16 a, b, c, d;
prmt.b32 s, $4, $5, 0x5140;
prmt.b32 t, $4, $5, 0x7362;
mov.b32 {a, b}, s;
mov.b32 {c, d}, t;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")


@jit
def _find_column(place, IS_FP8: gl.constexpr):
    """The column of keys and queries at a place of the sum over columns."""
    return place // 2 % 4 * 32 + place // 16 * 4 + place // 8 % 2 * 2 + place % 2 if IS_FP8 else place


@jit
def _find_dim(row, IS_FP8: gl.constexpr):
    """The column of values that is a row of the transposed result."""
    return row // 16 % 4 * 32 + row % 8 * 4 + row // 64 * 2 + row // 8 % 2 if IS_FP8 else row


@jit
def _unpack_keys(tile, LEFT: gl.constexpr):
    """Bytes of KEYS -> [positions, places], as `_find_column` has them"""
    tile = tile.reshape([ROWS_OF_TILE, 128])
    numbers = gl.inline_asm_elementwise(KEYS_ASM, "=r,=r,r", [tile], dtype=gl.float16, is_pure=True, pack=4)
    numbers = numbers.reshape([ROWS_OF_TILE, 4, 8, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([ROWS_OF_TILE, 128])
    return gl.convert_layout(numbers, LEFT)


@jit
def _unpack_values(tile, LEFT: gl.constexpr):
    """Bytes [positions, dims] of VALUES -> [rows, positions], as `_find_dim` has them"""
    numbers = gl.inline_asm_elementwise(VALUES_ASM, "=r,=r,=r,=r,r,r", [tile], dtype=gl.float16, is_pure=True, pack=8)
    # a thread's numbers lie by position, then by column; they are called the other way round
    numbers = numbers.reshape([ROWS_OF_TILE // 2, 2, 4, 8, 2, 2]).permute((1, 2, 4, 3, 0, 5))
    return gl.convert_layout(numbers.reshape([128, ROWS_OF_TILE]), LEFT)


@jit
def _scale_queries(queries):
    """queries [BLOCK_M, places] in fp16, each row times the power of 2 by which its largest number has an exponent of
    14, so that all of bf16 fits; and the inverse powers."""
    wide = queries.to(gl.float32)
    exponent = gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent, 15), 254)  # both powers are normal numbers
    power = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    return (wide * power[:, None]).to(gl.float16), inverse


@jit
def _clear_unseen(stored, position, oldest, stop, STORED: gl.constexpr, TOGETHER: gl.constexpr):
    """Zeros to the values of a tile from `position` on that nobody sees: what is there may be no number, and as such
    would not vanish under a weight of 0."""
    values = stored.load(STORED)
    rows = values.reshape([ROWS_OF_TILE, values.shape[-1]])
    seen = position + gl.arange(0, ROWS_OF_TILE, layout=gl.SliceLayout(1, rows.type.layout)) // TOGETHER
    is_seen = (seen >= oldest) & (seen < stop)
    stored.store(gl.where(is_seen[:, None], rows, gl.zeros_like(rows)).reshape(values.shape))


@jit
def _find_span(lengths, sequence, before, NEWEST: gl.constexpr, WINDOW: gl.constexpr, QUERIES: gl.constexpr,
               POSITIONS: gl.constexpr):  # fmt: skip
    """The end of a sequence's tiles, their first position, and the tile after them, which come from `before` on."""
    length = gl.load(lengths + sequence)
    start = 0
    if WINDOW is not None:
        start = gl.maximum(length - (WINDOW + QUERIES - 1), 0) // PIECE * PIECE
    return length - NEWEST, start, before + gl.maximum(gl.cdiv(length - NEWEST - start, POSITIONS), 1)


@jit
def _load_blocks(blocks, position, stop, BLOCK_SIZE: gl.constexpr, POSITIONS: gl.constexpr):
    """The block of each piece of a tile."""
    found = ()
    for piece in gl.static_range(POSITIONS // PIECE):
        at = position + piece * PIECE
        found += (gl.load(blocks + at // BLOCK_SIZE, mask=at < stop, other=0),)  # type: ignore[assignment]
    return found


@jit
def _send(pieces, found, position, stop, head, slot, memory, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
          DIM: gl.constexpr, COLUMNS: gl.constexpr, TOGETHER: gl.constexpr):  # fmt: skip
    """Fetch the keys and values of a tile, of whose pieces these are the blocks."""
    keys, values, ready, _ = memory
    PIECES: gl.constexpr = ROWS_OF_TILE // (PIECE * TOGETHER)
    PARTS: gl.constexpr = DIM // COLUMNS
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * ROWS_OF_TILE * DIM * (128 // COLUMNS))
    for piece in gl.static_range(PIECES):
        at = position + piece * PIECE
        row = gl.where(at < stop, found[piece] * BLOCK_SIZE + at % BLOCK_SIZE, -PIECE)  # there it is all zeros
        if COLUMNS == 128:  # of bytes
            async_load(pieces, [0, row, head * TOGETHER, 0], bar, keys.index(slot * PIECES + piece))
        else:
            for part in gl.static_range(PARTS):
                column = head * DIM + part * COLUMNS
                async_load(pieces, [row, column], bar, keys.index((slot * PARTS + part) * PIECES + piece))
            for part in gl.static_range(PARTS):
                column = (HEADS + head) * DIM + part * COLUMNS
                async_load(pieces, [row, column], bar, values.index((slot * PARTS + part) * PIECES + piece))


@jit
def _produce(given, run, memory, NEWEST: gl.constexpr, WINDOW: gl.constexpr, QUERIES: gl.constexpr,
             BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr,
             TOGETHER: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fetch the keys and values of a run of tiles, each once its memory is free."""
    POSITIONS: gl.constexpr = ROWS_OF_TILE // TOGETHER
    pieces, table, lengths, table_stride = given
    tile, end, sequence, before, _, head, _ = run
    free = memory[3]
    if tile < end:
        stop, start, after = _find_span(lengths, sequence, before, NEWEST, WINDOW, QUERIES, POSITIONS)
        blocks = table + sequence.to(gl.int64) * table_stride
        found = _load_blocks(blocks, start + (tile - before) * POSITIONS, stop, BLOCK_SIZE, POSITIONS)
        step = 0
        while tile < end:
            slot, position = step % STAGES, start + (tile - before) * POSITIONS
            mbarrier.wait(free.index(slot), step // STAGES & 1 ^ 1)
            if (NEWEST == 0) & (position + POSITIONS > stop - QUERIES):
                tl.extra.cuda.gdc_wait()  # for the preceding kernel, which writes the newest keys and values
            _send(pieces, found, position, stop, head, slot, memory, BLOCK_SIZE, HEADS, DIM, COLUMNS, TOGETHER)
            step += 1
            tile += 1
            if (tile >= after) & (tile < end):
                sequence += 1
                before = after
                stop, start, after = _find_span(lengths, sequence, before, NEWEST, WINDOW, QUERIES, POSITIONS)
            # a tile ahead, since a load takes long
            blocks = table + sequence.to(gl.int64) * table_stride
            found = _load_blocks(blocks, start + (tile - before) * POSITIONS, stop, BLOCK_SIZE, POSITIONS)


@jit
def _store_attended(acc, best, total, sinks, v_scale, out, dims, rows, HEADS: gl.constexpr, GROUP: gl.constexpr,
                    QUERIES: gl.constexpr, DIM: gl.constexpr, BY_ROW: gl.constexpr):  # fmt: skip
    """acc [rows, dims] or, unless BY_ROW, [dims, rows] over its total, and sinks', to the heads of a group at `out`."""
    AXIS: gl.constexpr = 1 if BY_ROW else 0
    if sinks is not None:
        sink = gl.load(sinks + rows % GROUP, mask=rows < GROUP * QUERIES, other=0.0).to(gl.float32) * LOG2E
        sink = gl.minimum(gl.maximum(sink, NOTHING), -NOTHING)  # infinite ones would give NaN
        higher = gl.maximum(best, sink)
        fade = gl.exp2(best - higher)
        total = total * fade + gl.exp2(sink - higher)
        acc = acc * gl.expand_dims(fade, AXIS)
    share = 1.0 / gl.where(total > 0, total, 1.0)
    if v_scale is not None:
        share = share * v_scale
    acc = acc * gl.expand_dims(share, AXIS)
    places = rows // GROUP * (HEADS * GROUP * DIM) + rows % GROUP * DIM
    is_row = gl.expand_dims(rows < GROUP * QUERIES, AXIS)
    pointers = out + gl.expand_dims(places, AXIS) + gl.expand_dims(dims, 1 - AXIS)
    gl.store(pointers, acc.to(out.dtype.element_ty), mask=is_row)


@jit
def _merge(sums, stats, sinks, v_scale, out, head, first, last, PROGRAMS: gl.constexpr, HEADS: gl.constexpr,
           GROUP: gl.constexpr, QUERIES: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
           IS_FP8: gl.constexpr):  # fmt: skip
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
    best, total = gl.convert_layout(best, BY_ROW), gl.convert_layout(total, BY_ROW)
    rows = gl.convert_layout(rows, BY_ROW)
    _store_attended(acc, best, total, sinks, v_scale, out, _find_dim(dims, IS_FP8), rows, HEADS, GROUP, QUERIES, DIM,
                    True)  # fmt: skip


@jit
def _load_queries(q, q_stride, row, head, cos, sin, q_norm, EPS: gl.constexpr, INTERLEAVED: gl.constexpr,
                  HALF: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, NEWEST: gl.constexpr, DIM: gl.constexpr,
                  BLOCK_M: gl.constexpr, IS_FP8: gl.constexpr):  # fmt: skip
    """The queries of sequence `row` [BLOCK_M, places], with NEWEST normed and rotated."""
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES_BY))
    columns = _find_column(gl.arange(0, DIM, layout=gl.SliceLayout(0, QUERIES_BY)), IS_FP8)[None, :]
    heads = q + (row * (ROWS // GROUP) + rows // GROUP) * q_stride + (head * GROUP + rows % GROUP) * DIM
    if not NEWEST:
        return gl.load(heads[:, None] + columns, mask=(rows < ROWS)[:, None], other=0.0)
    else:
        norms = None if q_norm is None else q_norm + 0 * rows
        rotated = rotate_heads(
            heads, columns, row + 0 * rows, rows < ROWS, cos, sin, norms, EPS, INTERLEAVED, DIM, HALF
        )
        return rotated.to(q.dtype.element_ty)


@jit
def _attend_newest(
    queries, k_row, v_row, cos, sin, k_norm, entry, row, EPS: gl.constexpr, INTERLEAVED: gl.constexpr,
    HALF: gl.constexpr, SCALE: gl.constexpr, SOFTCAP: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Write the newest key and value of sequence `row` to `entry` -> the scores [BLOCK_M] of its key, and its value."""
    first = gl.arange(0, 1, layout=gl.SliceLayout(1, QUERIES_BY))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, QUERIES_BY))[None, :]
    norms = None if k_norm is None else k_norm + 0 * first
    rotated = rotate_heads(k_row + 0 * first, columns, row + 0 * first, first == 0, cos, sin, norms, EPS, INTERLEAVED,
                           DIM, HALF)  # fmt: skip
    key = rotated.to(queries.dtype)
    gl.store(entry + columns, key)
    products = gl.sum(queries.to(gl.float32) * key.to(gl.float32), 1)
    scores = cap_scores(products, None, SCALE, SOFTCAP) * score_factor(None, SCALE, SOFTCAP)
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(1, TILE))
    value = gl.load(v_row + dims)
    gl.store(entry + HEADS * DIM + dims, value)
    return gl.convert_layout(scores, gl.SliceLayout(0, TILE)), value.to(gl.float32)


@jit
def _consume(given, run, memory, queries, weights, EPS: gl.constexpr, INTERLEAVED: gl.constexpr, HALF: gl.constexpr,
             SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr,
             GROUP: gl.constexpr, TOGETHER: gl.constexpr, QUERIES: gl.constexpr, DIM: gl.constexpr,
             PROGRAMS: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Attend to a run of tiles; queries and weights: memory for operands."""
    POSITIONS: gl.constexpr = ROWS_OF_TILE // TOGETHER
    (q, k, v, cos, sin, q_norm, k_norm, slots, cache, lengths, sinks, k_scale, v_scale, out, sums, stats, tickets,
     q_stride, k_stride, v_stride) = given  # fmt: skip
    tile, end, sequence, before, share, head, program = run
    keys, values, ready, free = memory
    ROWS: gl.constexpr = GROUP * QUERIES
    NEWEST: gl.constexpr = 0 if k is None else 1
    ENTRY: gl.constexpr = cache.dtype.element_ty
    IS_FP8: gl.constexpr = gl.uint8 == ENTRY
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, TILE)  # of queries
    STORED: gl.constexpr = LINES if not IS_FP8 else VALUES if TOGETHER == 1 else VALUES_OF_TWO
    if IS_FP8:
        PIECES: gl.constexpr = POSITIONS // PIECE
        key_tiles = reinterpret(keys, ENTRY, [STAGES, PIECES, 2, PIECE * TOGETHER, 128], BYTES)
        value_tiles = key_tiles
    else:
        key_tiles = reinterpret(keys, ENTRY, [STAGES, ROWS_OF_TILE, DIM], OPERANDS)
        value_tiles = reinterpret(values, ENTRY, [STAGES, ROWS_OF_TILE, DIM], OPERANDS)
    tl.extra.cuda.gdc_wait()

    if k_scale is not None:
        k_scale = gl.load(k_scale)
    if v_scale is not None:
        v_scale = gl.load(v_scale)
    if sinks is not None:
        sinks += head * GROUP
    factor = score_factor(k_scale, SCALE, SOFTCAP)
    rows = gl.arange(0, BLOCK_M, layout=BY_ROW)
    lines = gl.arange(0, ROWS_OF_TILE, layout=gl.SliceLayout(1, TILE))[
        :, None
    ]  # of a tile: positions, of each its heads
    places = gl.arange(0, DIM, layout=gl.SliceLayout(1, TILE))
    step = 0
    while tile < end:
        stop, start, after = _find_span(lengths, sequence, before, NEWEST, WINDOW, QUERIES, POSITIONS)
        run_end = gl.minimum(end, after)
        row = sequence.to(gl.int64)
        own = _load_queries(q, q_stride, row, head, cos, sin, q_norm, EPS, INTERLEAVED, HALF, GROUP, ROWS, NEWEST, DIM,
                            BLOCK_M, IS_FP8)  # fmt: skip
        if IS_FP8:
            own, inverse = _scale_queries(own)
            inverse = gl.convert_layout(inverse, BY_ROW)
        queries.store(own)
        best = gl.full([BLOCK_M], NOTHING, gl.float32, BY_ROW)
        total = gl.zeros([ROWS_OF_TILE, BLOCK_M], gl.float32, TILE)  # of each thread's lines
        acc = gl.zeros([DIM, BLOCK_M], gl.float32, TILE)
        if NEWEST and run_end == after:
            entry = cache + (gl.load(slots + row) * (2 * HEADS) + head) * DIM
            scores, value = _attend_newest(
                own, k + row * k_stride + head * DIM, v + row * v_stride + head * DIM, cos, sin, k_norm, entry, row,
                EPS, INTERLEAVED, HALF, SCALE, SOFTCAP, HEADS, DIM, TILE,
            )  # fmt: skip
            is_seen = stop >= 0
            best = gl.where(is_seen, scores, best)
            total = gl.where((lines == 0) & is_seen, 1.0, total)
            acc = gl.where(is_seen, value[:, None], acc)
        fence_async_shared()
        barrier()
        ends = stop - (QUERIES - 1) + rows // GROUP
        own_head = rows % GROUP // (GROUP // TOGETHER)
        oldest = 0 if WINDOW is None else stop + (NEWEST - WINDOW - (QUERIES - 1))
        for at in range(tile, run_end):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            position = start + (at - before) * POSITIONS
            stored = value_tiles.index(slot).slice(1, 1, dim=1) if IS_FP8 else value_tiles.index(slot)
            if (position < oldest) | (position + POSITIONS > stop):
                _clear_unseen(stored, position, oldest, stop, STORED, TOGETHER)
            scores = gl.zeros([ROWS_OF_TILE, BLOCK_M], gl.float32, TILE)
            if IS_FP8:
                tile_keys = key_tiles.index(slot).slice(0, 1, dim=1).load(KEYS if TOGETHER == 1 else KEYS_OF_TWO)
                tile_keys = _unpack_keys(tile_keys, LEFT)
            else:
                tile_keys, tile_values = key_tiles.index(slot), value_tiles.index(slot).permute((1, 0))
            scores = warpgroup_mma(tile_keys, queries.permute((1, 0)), scores, use_acc=False, is_async=True)
            if IS_FP8:
                tile_values = stored.load(STORED).reshape([ROWS_OF_TILE, 128])
                tile_values = _unpack_values(tile_values, LEFT)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            if IS_FP8:
                scores = scores * inverse[None, :]
            scores = cap_scores(scores, k_scale, SCALE, SOFTCAP)
            seen = position + lines // TOGETHER
            is_seen = seen < ends[None, :]
            if TOGETHER > 1:  # a query sees the keys of its own head
                is_seen = is_seen & (lines % TOGETHER == own_head[None, :])
            if WINDOW is not None:
                is_seen = is_seen & (seen >= ends[None, :] + (NEWEST - WINDOW))
            scores = gl.where(is_seen, scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 0) * factor)
            new_weights = gl.exp2(scores * factor - higher[None, :])
            fade = gl.exp2(best - higher)
            total = total * fade[None, :] + new_weights
            best = higher
            weights.store(new_weights.to(weights.dtype).permute((1, 0)))
            fence_async_shared()
            barrier()  # all have written their weights and, in fp8, read the tile
            if IS_FP8:
                mbarrier.arrive(free.index(slot))
            acc = warpgroup_mma(tile_values, weights.permute((1, 0)), acc * fade[None, :], is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if not IS_FP8:
                mbarrier.arrive(free.index(slot))
            step += 1
        sum_total = gl.sum(total, 0)
        out_row = out + row * (QUERIES * HEADS * GROUP * DIM) + head * (GROUP * DIM)
        first_part, last_part = before // share, (after - 1) // share
        if first_part == last_part:
            _store_attended(acc, best, sum_total, sinks, v_scale, out_row, _find_dim(places, IS_FP8), rows, HEADS,
                            GROUP, QUERIES, DIM, False)  # fmt: skip
        else:
            part = ((head * PROGRAMS + program) * 2 + (program == first_part).to(gl.int32)) * ROWS + rows
            gl.store(stats + 2 * part, best, mask=rows < ROWS)
            gl.store(stats + 2 * part + 1, sum_total, mask=rows < ROWS)
            gl.store(sums + part[None, :] * DIM + places[:, None], acc, mask=(rows < ROWS)[None, :])
            barrier()  # all threads' parts are written before one thread takes the ticket
            ticket = tickets + head * PROGRAMS + first_part
            if gl.atomic_add(ticket, 1, sem="acq_rel") == last_part - first_part:
                _merge(sums, stats, sinks, v_scale, out_row, head, first_part, last_part, PROGRAMS, HEADS, GROUP,
                       QUERIES, DIM, PARTS, BLOCK_M, IS_FP8)  # fmt: skip
                gl.store(ticket, 0)
        tile = run_end
        before = after
        sequence += 1


@jit(
    do_not_specialize=["num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["table", "lengths", "slots"],
)
def _decode(
    q, k, v, cos, sin, q_norm, k_norm, slots, cache, pieces, table, lengths, sinks, k_scale, v_scale, out, sums, stats,
    tickets, num_decodes, table_stride, q_stride, k_stride, v_stride, EPS: gl.constexpr, INTERLEAVED: gl.constexpr,
    HALF: gl.constexpr, SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr,
    BLOCK_S: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """As the kernel of triton/attention/decode.py: one program, a run of tiles of the kv head program_id(0).

    TOGETHER: kv heads that are one here, of GROUP heads in all: each position of a tile has a line of each
    REGISTERS: of a thread of the warp that loads
    """
    NEWEST: gl.constexpr = 0 if k is None else 1  # positions that are in no tile
    ENTRY: gl.constexpr = cache.dtype.element_ty
    IS_FP8: gl.constexpr = gl.uint8 == ENTRY
    dtype: gl.constexpr = gl.float16 if IS_FP8 else q.dtype.element_ty  # of what is multiplied
    COLUMNS: gl.constexpr = 128 if IS_FP8 else 64  # that one copy brings
    POSITIONS: gl.constexpr = ROWS_OF_TILE // TOGETHER
    BOXES: gl.constexpr = STAGES * (DIM // COLUMNS) * (POSITIONS // PIECE)
    tl.extra.cuda.gdc_launch_dependents()
    head, program = gl.program_id(0), gl.program_id(1)
    sequences = gl.arange(0, BLOCK_S, layout=SEQUENCES)
    counts = gl.load(lengths + sequences, mask=sequences < num_decodes, other=0)
    if WINDOW is not None:
        counts -= gl.maximum(counts - (WINDOW + QUERIES - 1), 0) // PIECE * PIECE
    counts = gl.where(sequences < num_decodes, gl.maximum(gl.cdiv(counts - NEWEST, POSITIONS), 1), 0)
    tile, end, share = find_run(counts, program, PROGRAMS, TOGETHER)
    sequence, before = find_owner(counts, tile)

    if IS_FP8:
        keys = gl.allocate_shared_memory(ENTRY, [BOXES, 2, PIECE, TOGETHER, COLUMNS], BYTES)
        values = keys
    else:
        keys = gl.allocate_shared_memory(ENTRY, [BOXES, PIECE, COLUMNS], OPERANDS)
        values = gl.allocate_shared_memory(ENTRY, [BOXES, PIECE, COLUMNS], OPERANDS)
    queries = gl.allocate_shared_memory(dtype, [BLOCK_M, DIM], OPERANDS)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_M, ROWS_OF_TILE], OPERANDS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()

    run, memory = (tile, end, sequence, before, share, head, program), (keys, values, ready, free)
    given = (q, k, v, cos, sin, q_norm, k_norm, slots, cache, lengths, sinks, k_scale, v_scale, out, sums, stats,
             tickets, q_stride, k_stride, v_stride)  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (given, run, memory, queries, weights, EPS, INTERLEAVED, HALF, SCALE, SOFTCAP, WINDOW, HEADS,
                        GROUP, TOGETHER, QUERIES, DIM, PROGRAMS, BLOCK_M, PARTS, STAGES)),
            (_produce, ((pieces, table, lengths, table_stride), run, memory, NEWEST, WINDOW, QUERIES, BLOCK_SIZE,
                        HEADS, DIM, COLUMNS, TOGETHER, STAGES)),
        ],
        [1],  # warps
        [REGISTERS],
    )  # fmt: skip


_byte_descriptors = {heads: TensorDescriptors((2, PIECE.value, heads, 128), BYTES.value) for heads in (1, 2)}
_descriptors = TensorDescriptors((PIECE.value, 64), OPERANDS.value)


def suits(q: Tensor, cache: Tensor, num_decodes: int, query_len: int) -> bool:
    """Whether `decode` takes these and is faster than Triton's: heads of 128 dims, or of 256 not in fp8 of up to MANY
    sequences, and rows that fill its tile."""
    dim, is_fp8 = cache.shape[-1], cache.dtype == torch.float8_e4m3fn
    rows = q.shape[1] // cache.shape[3] * query_len
    return (
        q.dtype in ((torch.bfloat16,) if is_fp8 else (torch.bfloat16, torch.float16))
        and (is_fp8 or cache.dtype == q.dtype)
        and (dim == 128 or (dim == 256 and not is_fp8 and num_decodes <= MANY))
        and (1 if is_fp8 else 8) <= rows <= 32
        and cache.shape[1] % 16 == 0
        and cache.data_ptr() % 16 == 0
    )


class Tiling(NamedTuple):
    programs_per_unit: int  # on a multiprocessor
    stages: int  # tiles in memory at a time
    max_registers: int  # a thread, as a program starts: of four warps that attend, and as many, of which one loads
    loading_registers: int  # a thread of the latter


def choose(entry_size: int, dim: int, num_decodes: int, block_m: int) -> Tiling:
    """entry_size: of a number of the cache, in bytes; block_m: queries of a tile"""
    if entry_size == 1 and block_m > 8:
        return Tiling(3, 3, 80, 24) if block_m == 16 else Tiling(2, 4, 128, 40)
    if entry_size == 1:
        return Tiling(3, 4, 80, 24) if num_decodes < FEW else Tiling(4, 2 if num_decodes >= PAIRED else 3, 64, 24)
    return Tiling(2, 3, 128, 40) if dim == 128 else Tiling(1, 3, 144, 40)


def choose_together(q: Tensor, cache: Tensor, num_decodes: int, query_len: int) -> int:
    """How many kv heads share a tile: two in fp8, whose entries are neighbours in memory, if the tile has room for the
    queries of both anyway."""
    kv_heads = cache.shape[3]
    is_paired = cache.element_size() == 1 and kv_heads % 2 == 0 and num_decodes >= PAIRED
    return 2 if is_paired and 2 * q.shape[1] // kv_heads * query_len <= 8 else 1


def decode(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int, sinks: Tensor | None,
           k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor, scale: float, window: int | None,
           softcap: float | None, newest: tuple[Any, ...] | None, query_len: int, find_memory: Callable[..., Any],
           tiling: Tiling | None = None) -> None:  # fmt: skip
    """As `decode.Decode`.

    newest: None for entries in fp8
    find_memory: finds the memory for parts: of kv heads, rows, dims and programs, as `decode.Decode.find_memory`
    """
    num_blocks, block_size, _, kv_heads, dim = cache.shape
    row = 2 * kv_heads * dim
    together = choose_together(q, cache, num_decodes, query_len)
    kv_heads //= together
    group = q.shape[1] // kv_heads
    block_m = max(8, next_power_of_2(group * query_len))
    per_unit, stages, max_registers, loading = tiling or choose(cache.element_size(), dim, num_decodes, block_m)
    programs = -(-find_gpu(q.device).units * per_unit // kv_heads)
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)
        sizes = (2, num_blocks * block_size, kv_heads * together, dim)
        pieces = _byte_descriptors[together].find(cache, sizes, (row // 2, row, dim, 1))
    else:
        pieces = _descriptors.find(cache, (num_blocks * block_size, row), (row, 1))
    k = v = cos = sin = q_norm = k_norm = slots = None
    eps, interleaved, half, k_stride, v_stride = 0.0, False, 0, 0, 0
    if newest is not None:
        k, v, cos, sin, q_norm, k_norm, slots, eps, interleaved = newest
        half, k_stride, v_stride = 0 if cos is None else cos.shape[1], k.stride(0), v.stride(0)
    _decode[(kv_heads, programs)](
        q, k, v, cos, sin, q_norm, k_norm, slots, cache, pieces, table, lengths, sinks, k_scale, v_scale, out,
        *find_memory(kv_heads, group * query_len, dim, programs), num_decodes, table.stride(0), q.stride(0), k_stride,
        v_stride, eps, interleaved, half,
        scale, softcap, window, block_size, kv_heads, group, query_len, dim, programs, sequence_bucket(num_decodes),
        block_m, max(1, MERGED // (block_m * dim)), stages, loading, together, num_warps=4, maxnreg=max_registers,
        launch_pdl=True,
    )  # fmt: skip

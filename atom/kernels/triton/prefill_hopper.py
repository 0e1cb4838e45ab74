"""Paged attention of prompts on NVIDIA's Hopper: what prefill.py computes, for many tokens, a third faster.

    prefill(q, cache, table, starts, lengths, num_decodes, sinks, out, scale)

One warp has the TMA bring keys and values, some positions of a block at a time. Two groups of warps have half of a
tile's rows each and take turns: while one's products run, the other is at its softmax (Shah 2024, FlashAttention-3).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom.kernels.triton.tiles import LOG2E, NOTHING, wait_for_inputs

ROWS = gl.constexpr(128)  # of a tile: queries times heads
HALF = gl.constexpr(64)  # of them, which a group of warps has
POSITIONS = gl.constexpr(128)  # of keys and values in a tile
PIECE = gl.constexpr(16)  # of them, which one copy brings
COLUMNS = gl.constexpr(64)  # that it brings of them
STAGES = gl.constexpr(2)
PIECES = gl.constexpr(8)  # POSITIONS / PIECE
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # to load and store by


@gluon.jit
def find_tile(starts, num_sequences, num_decodes, tile, QUERIES: gl.constexpr):
    """The sequence that a tile falls to, and the place in it of the tile's first query; there may be none.

    A sequence has room for its tiles from the number of whole ones in the tokens before it, and one for each sequence.
    """
    sequence, last = num_decodes, num_sequences
    while sequence < last:
        middle = (sequence + last + 1) // 2
        is_behind = (gl.load(starts + middle) - num_decodes) // QUERIES + middle - num_decodes > tile
        sequence = gl.where(is_behind, sequence, middle)
        last = gl.where(is_behind, middle - 1, last)
    first = gl.load(starts + sequence)
    begin = (first - num_decodes) // QUERIES + sequence - num_decodes
    return sequence, first, (tile - begin) * QUERIES


@gluon.jit
def fill_last_piece(
    cache, blocks, length, values, column, BLOCK_SIZE: gl.constexpr, ROW: gl.constexpr, DIM: gl.constexpr
):
    """The values of the piece that a sequence ends within, to the first stage, with zeros behind the end: what is there
    may be no number, and as such would not vanish under a weight of 0."""
    begin = length // PIECE * PIECE
    positions = begin + gl.arange(0, PIECE, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES))
    row = gl.load(blocks + begin // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + begin % BLOCK_SIZE
    rows = cache + (row + positions - begin) * ROW + column
    for part in gl.static_range(DIM // COLUMNS):
        x = gl.load(rows[:, None] + part * COLUMNS + columns[None, :], mask=(positions < length)[:, None], other=0.0)
        values.index(part * PIECES + begin % POSITIONS // PIECE).store(x)
    fence_async_shared()


@gluon.jit
def copy_tile(pieces, rows, column, boxes, slot, ready, skipped, DIM: gl.constexpr):
    """Rows i32[PIECES] of the cache, DIM columns of each, to a stage; all pieces but the one `skipped`."""
    mbarrier.expect(ready.index(slot), POSITIONS * DIM * 2, pred=skipped < 0)
    mbarrier.expect(ready.index(slot), (POSITIONS - PIECE) * DIM * 2, pred=skipped >= 0)
    for part in gl.static_range(DIM // COLUMNS):
        for piece in gl.static_range(PIECES):
            box = boxes.index((slot * (DIM // COLUMNS) + part) * PIECES + piece)
            place = [rows[piece], column + part * COLUMNS]
            tma.async_copy_global_to_shared(pieces, place, ready.index(slot), box, pred=piece != skipped)


@gluon.jit
def produce(pieces, blocks, stop, head, last_piece, num_tiles, memory, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
            DIM: gl.constexpr):  # fmt: skip
    """Keys and values of the positions before `stop`, the last tile first."""
    _, keys, values, k_ready, k_free, v_ready, v_free, _ = memory
    for turn in range(num_tiles):
        rows = ()
        for piece in gl.static_range(PIECES):
            position = (num_tiles - 1 - turn) * POSITIONS + piece * PIECE
            block = gl.load(blocks + position // BLOCK_SIZE, mask=position < stop, other=0)
            row = block * BLOCK_SIZE + position % BLOCK_SIZE
            rows += (gl.where(position < stop, row, -PIECE),)  # type: ignore[assignment]  # there it is all zeros
        slot, phase = turn % STAGES, turn // STAGES & 1 ^ 1
        mbarrier.wait(k_free.index(slot), phase)
        copy_tile(pieces, rows, head * DIM, keys, slot, k_ready, -1, DIM)
        mbarrier.wait(v_free.index(slot), phase)
        skipped = gl.where(turn == 0, last_piece, -1)
        copy_tile(pieces, rows, (HEADS + head) * DIM, values, slot, v_ready, skipped, DIM)


@gluon.jit
def soften(scores, best, total, position, newest, FACTOR: gl.constexpr, MASKED: gl.constexpr):
    """Products of queries and keys from `position` on -> their weights, and the softmax so far."""
    if MASKED:
        positions = position + gl.arange(0, POSITIONS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(positions[None, :] <= newest[:, None], scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 1) * FACTOR)
    weights = gl.exp2(scores * FACTOR - higher[:, None])
    fade = gl.exp2(best - higher)
    return weights, higher, fade, total * fade + gl.sum(weights, 1)


@gluon.jit
def take_turn(queries, keys, values, memory, acc, weights, best, total, turn, position, newest, FACTOR: gl.constexpr,
              MASKED: gl.constexpr, WHO: gl.constexpr):  # fmt: skip
    """The product with the keys of this turn, and beside it the one of the last turn's weights with its values."""
    _, _, _, k_ready, k_free, v_ready, v_free, turns = memory
    slot, last = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(k_ready.index(slot), turn // STAGES & 1)
    mbarrier.wait(turns.index(WHO), turn & 1 ^ (1 - WHO))
    SCORES: gl.constexpr = best.type.layout.parent
    scores = gl.zeros([HALF, POSITIONS], gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(last), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(last), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WHO))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(slot))
    new_weights, best, fade, total = soften(scores, best, total, position, newest, FACTOR, MASKED)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(v_free.index(last))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(new_weights.to(queries.dtype), weights.type.layout)
    return acc, weights, best, total


@gluon.jit
def consume(q, q_stride, out, sinks, head, rows, num_tiles, memory, FACTOR: gl.constexpr, HEADS: gl.constexpr,
            GROUP: gl.constexpr, DIM: gl.constexpr, WHO: gl.constexpr):  # fmt: skip
    """Half of the rows attend to all tiles of keys and values.

    rows: the sequence's first token and its end, the tile's first query in it, and the position of that.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, POSITIONS, 16])
    ATTENDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ATTENDED, 2)
    first, end, place, oldest = rows
    q_tiles, k_boxes, v_boxes, k_ready, k_free, v_ready, _, turns = memory
    queries = q_tiles.index(WHO)
    keys = k_boxes._reinterpret(queries.dtype, [STAGES, POSITIONS, DIM], SHARED)
    values = v_boxes._reinterpret(queries.dtype, [STAGES, POSITIONS, DIM], SHARED)

    lines = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    tokens = (first + place + lines // GROUP).to(gl.int64)
    line_heads = head * GROUP + lines % GROUP
    is_row = (tokens < end)[:, None]
    q_rows = q + tokens * q_stride + line_heads * DIM
    queries.store(gl.load(q_rows[:, None] + columns[None, :], mask=is_row, other=0.0))
    fence_async_shared()

    row = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    newest = oldest + row // GROUP
    best = gl.full([HALF], NOTHING, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([HALF, DIM], gl.float32, ATTENDED)
    num_whole = gl.maximum(oldest + WHO * HALF // GROUP + 1, 0) // POSITIONS  # every row sees these
    num_masked = gl.maximum(num_tiles - num_whole, 1)

    mbarrier.wait(k_ready.index(0), 0)
    mbarrier.wait(turns.index(WHO), 1 - WHO)
    scores = gl.zeros([HALF, POSITIONS], gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - WHO))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0))
    weights, best, _, total = soften(scores, best, total, (num_tiles - 1) * POSITIONS, newest, FACTOR, True)
    weights = gl.convert_layout(weights.to(queries.dtype), WEIGHTS)
    for turn in range(1, num_masked):
        position = (num_tiles - 1 - turn) * POSITIONS
        acc, weights, best, total = take_turn(
            queries, keys, values, memory, acc, weights, best, total, turn, position, newest, FACTOR, True, WHO
        )
    for turn in range(num_masked, num_tiles):
        acc, weights, best, total = take_turn(
            queries, keys, values, memory, acc, weights, best, total, turn, 0, newest, FACTOR, False, WHO
        )
    slot = (num_tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(slot), (num_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(slot), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))

    fade = 1.0
    if sinks is not None:
        sink = gl.load(sinks + head * GROUP + row % GROUP).to(gl.float32) * LOG2E
        sink = gl.minimum(gl.maximum(sink, NOTHING), -NOTHING)  # infinite ones would give NaN
        higher = gl.maximum(best, sink)
        fade = gl.exp2(best - higher)
        total = total * fade + gl.exp2(sink - higher)
    share = fade / gl.where(total > 0, total, 1.0)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, ATTENDED))[:, None]
    queries.store(acc.to(queries.dtype))  # their memory serves to bring the columns of a row together
    out_rows = out + (tokens * (HEADS * GROUP) + line_heads) * DIM
    gl.store(out_rows[:, None] + columns[None, :], queries.load(LINES), mask=is_row)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _prefill(
    q, cache, pieces, table, starts, lengths, sinks, out, num_tokens, num_sequences, num_decodes, table_stride,
    q_stride, FACTOR: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """One tile: ROWS // GROUP queries by GROUP heads of the kv head program_id(1), of HEADS; the last ones come first.

    Tokens behind the last sequence are one more, which sees nothing and gives zeros.
    """
    wait_for_inputs(True)
    QUERIES: gl.constexpr = ROWS // GROUP
    tile, head = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)
    sequence, first, place = find_tile(starts, num_sequences, num_decodes, tile, QUERIES)
    end = gl.load(starts + sequence + 1, mask=sequence < num_sequences, other=num_tokens)
    if (place < 0) | (first + place >= end):
        return
    length = gl.load(lengths + sequence, mask=sequence < num_sequences, other=0)
    blocks = table + sequence.to(gl.int64) * table_stride
    oldest = length - (end - first) + place
    stop = gl.minimum(oldest + QUERIES, length)
    num_tiles = gl.maximum(gl.cdiv(stop, POSITIONS), 1)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BOXES: gl.constexpr = STAGES * (DIM // COLUMNS) * PIECES
    q_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [2, HALF, DIM], SHARED)
    k_boxes = gl.allocate_shared_memory(q.dtype.element_ty, [BOXES, PIECE, COLUMNS], SHARED)
    v_boxes = gl.allocate_shared_memory(q.dtype.element_ty, [BOXES, PIECE, COLUMNS], SHARED)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for who in gl.static_range(2):
        mbarrier.init(turns.index(who), count=1)
    fence_async_shared()

    last_piece = gl.where(length // PIECE * PIECE < stop, length % POSITIONS // PIECE, -1)
    if last_piece >= 0:
        fill_last_piece(cache, blocks, length, v_boxes, (HEADS + head) * DIM, BLOCK_SIZE, 2 * HEADS * DIM, DIM)
    memory = (q_tiles, k_boxes, v_boxes, k_ready, k_free, v_ready, v_free, turns)
    rows = (first, end, place, oldest)
    gl.warp_specialize(
        [
            (consume, (q, q_stride, out, sinks, head, rows, num_tiles, memory, FACTOR, HEADS, GROUP, DIM, 0)),
            (consume, (q, q_stride, out, sinks, head, rows, num_tiles, memory, FACTOR, HEADS, GROUP, DIM, 1)),
            (produce, (pieces, blocks, stop, head, last_piece, num_tiles, memory, BLOCK_SIZE, HEADS, DIM)),
        ],
        [4, 1],  # warps
        [232, 40],  # registers a thread
    )


def prefill(q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
            sinks: Tensor | None, out: Tensor, scale: float) -> None:  # fmt: skip
    """Rows from num_decodes on of q and out [T, N, D]; shapes as in ops.paged_attention."""
    num_tokens, heads, dim = q.shape
    num_blocks, block_size, _, kv_heads, _ = cache.shape
    num_sequences, group, row = len(lengths), heads // kv_heads, 2 * kv_heads * dim
    pieces = TensorDescriptor(
        cache, [num_blocks * block_size, row], [row, 1], [PIECE.value, COLUMNS.value], SHARED.value
    )
    num_tiles = (num_tokens - num_decodes) // (ROWS.value // group) + num_sequences - num_decodes + 1
    _prefill[(num_tiles, kv_heads)](
        q, cache, pieces, table, starts, lengths, sinks, out, num_tokens, num_sequences, num_decodes, table.stride(0),
        q.stride(0), scale * LOG2E.value, block_size, kv_heads, group, dim, num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip

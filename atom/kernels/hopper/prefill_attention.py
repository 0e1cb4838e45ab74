"""Prefill attention on NVIDIA's Hopper, in Gluon.

It computes what triton/attention/prefill.py does, for many tokens a third faster, and latent attention of prompts.

    args = q, cache, table, starts, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window, softcap
    prefill(*args, tickets)
    prefill(*args, tickets, plan)    # of what context.py unpacked
    prefill_expanded(q_nope, q_rope, cache, table, plan, starts, lengths, num_decodes, out, scale, tickets)

A program on each multiprocessor takes one tile after another, by tickets, the longest of a sequence first. One of its
warps finds the tile and loads its queries by TMA and, some positions of a block at a time, its keys and values, ahead
of the two groups of warps that have half of a tile's rows each. These alternate: while one's matmuls run, the other
computes its softmax, or ends its tile (Shah 2024, FlashAttention-3).
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

from atom.kernels.hopper.gluon import async_load, barrier, jit, reinterpret
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors, align_rows
from atom.kernels.triton.attention.common import LOG2E, NOTHING, cap_scores, score_factor, wait_for_inputs
from atom.kernels.triton.gpu import find_gpu

ROWS = gl.constexpr(128)  # of a tile: queries times heads
HALF = gl.constexpr(64)  # of them, which a group of warps has
PIECE = gl.constexpr(16)  # positions of a tile of keys and values, which one copy brings
COLUMNS = gl.constexpr(64)  # that it brings of them
STAGES = gl.constexpr(2)
LONG = 4096  # tokens of a sequence in a step
FEW_TOKENS = 512  # of prompts in a step, or of a window, up to which Triton's kernel is as fast
WIDE_TOKENS, WIDE_MEAN = 2048, 1024  # of a step, and of a prompt or window: from which heads of 256 dims are faster
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
GROUPED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))  # queries by heads by columns
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # to store by
PIECE_LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))  # to load by, in one warp
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of one warp
SOUGHT = gl.constexpr(128)  # sequences that it looks at together
SEQUENCES = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
FIELDS = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # each thread has all


@jit
def find_tile(starts, num_sequences, num_decodes, num_tokens, tile, QUERIES: gl.constexpr):
    """The sequence that a tile belongs to, its first token and its end, and the index of the tile's first query in it;
    the tile may be empty.

    A sequence has room for its tiles from the number of whole ones in the tokens before it, and one for each sequence.
    Loads are made at once, since the time of a short tile is that of loads that wait for each other.
    """
    sequence, first, end = num_decodes - 1, 0, num_tokens
    for some in range(num_decodes, num_sequences + 1, SOUGHT):
        each = some + gl.arange(0, SOUGHT, layout=SEQUENCES)
        own = gl.load(starts + each, mask=each <= num_sequences, other=num_tokens).to(gl.int32)
        is_begun = (each <= num_sequences) & ((own - num_decodes) // QUERIES + each - num_decodes <= tile)
        sequence += gl.sum(is_begun.to(gl.int32), 0)
        first = gl.maximum(first, gl.max(gl.where(is_begun, own, 0), 0))
        end = gl.minimum(end, gl.min(gl.where(is_begun, num_tokens, own), 0))
    begin = (first - num_decodes) // QUERIES + sequence - num_decodes
    return sequence, first, end, (tile - begin) * QUERIES


@jit
def take_ticket(ticket, ORDER: gl.constexpr):
    """Increment a counter; its former value, in the first lane."""
    lanes = gl.arange(0, 32, layout=LANES)
    return gl.atomic_add(ticket + lanes * 0, lanes * 0 + 1, mask=lanes == 0, sem=ORDER)


@jit
def read_ticket(taken):
    return gl.sum(gl.where(gl.arange(0, 32, layout=LANES) == 0, taken, 0), 0)


@jit
def write_plan(plan, num_tiles, oldest, head, begin, end, first_tile):
    """Write a tile's plan for the other warps; num_tiles of keys is 0 when no tile of queries is left."""
    field = gl.arange(0, 8, layout=LANES)
    x = gl.where(field == 0, num_tiles, gl.where(field == 1, oldest, gl.where(field == 2, head, 0)))
    x = gl.where(field == 3, begin, gl.where(field == 4, end, gl.where(field == 5, first_tile, x)))
    plan.store(x)
    barrier()  # one lane tells of it


@jit
def read_plan(plan, which: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, layout=FIELDS) == which, plan.load(FIELDS), 0), 0)


@jit
def fill_piece(rows, begin, start, length, values, slot, ROW: gl.constexpr, VALUE_DIM: gl.constexpr):
    """The values from position `begin` on, `rows` of the cache, with zeros before `start` and after the end: what is
    there may be no number, and as such would not vanish under a weight of 0."""
    lines = gl.arange(0, PIECE, layout=gl.SliceLayout(1, PIECE_LINES))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PIECE_LINES))
    places = lines[:, None] * ROW + columns[None, :]
    is_seen = (begin + lines >= start) & (begin + lines < length)
    PARTS: gl.constexpr = VALUE_DIM // COLUMNS
    PIECES: gl.constexpr = values.shape[0] // (STAGES * PARTS)
    for part in gl.static_range(PARTS):
        x = gl.load(rows + part * COLUMNS + places, mask=is_seen[:, None], other=0.0)
        values.index((slot * PARTS + part) * PIECES + begin // PIECE % PIECES).store(x)
    fence_async_shared()
    barrier()  # one lane tells of it


@jit
def copy_tile(pieces, rows, column, boxes, slot, ready, skipped, also_skipped, DIM: gl.constexpr):
    """Rows i32[PIECES] of the cache, DIM columns of each, to a stage; all pieces but two, -1 for none."""
    PIECES: gl.constexpr = boxes.shape[0] // (STAGES * (DIM // COLUMNS))
    for part in gl.static_range(DIM // COLUMNS):
        for piece in gl.static_range(PIECES):
            box = boxes.index((slot * (DIM // COLUMNS) + part) * PIECES + piece)
            place = [rows[piece], column + part * COLUMNS]
            async_load(pieces, place, ready.index(slot), box, pred=(piece != skipped) & (piece != also_skipped))


@jit
def produce_tile(cache, pieces, blocks, start, length, stop, head, num_tiles, first_tile, base, memory,
                 WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROW: gl.constexpr, HEAD_ROW: gl.constexpr,
                 FIRST_VALUE: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr):  # fmt: skip
    """Keys and values of the positions from `start` to `stop`, the last tile first; `base` tiles went before."""
    _, _, _, keys, rotated_keys, values, _, _, k_ready, k_free, v_ready, v_free, _ = memory
    ROTATED: gl.constexpr = 0 if rotated_keys is None else COLUMNS
    PIECES: gl.constexpr = keys.shape[0] // (STAGES * (KEY_DIM // COLUMNS))
    column = FIRST_VALUE + head * HEAD_ROW
    ending = length // PIECE * PIECE  # of the piece that the sequence ends within
    opening = start // PIECE * PIECE  # of the piece that the window begins within
    for step in range(num_tiles):
        rows = ()
        first = (first_tile + num_tiles - 1 - step) * (PIECES * PIECE)
        for piece in gl.static_range(PIECES):
            position = first + piece * PIECE
            is_there = position < stop
            if WINDOW is not None:
                is_there = is_there & (position >= opening)
            block = gl.load(blocks + position // BLOCK_SIZE, mask=is_there, other=0)
            row = block * BLOCK_SIZE + position % BLOCK_SIZE
            rows += (gl.where(is_there, row, -PIECE),)  # type: ignore[assignment]  # there it is all zeros
        slot, phase = (base + step) % STAGES, (base + step) // STAGES & 1 ^ 1
        mbarrier.wait(k_free.index(slot), phase)
        mbarrier.expect(k_ready.index(slot), PIECES * PIECE * (KEY_DIM + ROTATED) * 2)
        copy_tile(pieces, rows, head * HEAD_ROW, keys, slot, k_ready, -1, -1, KEY_DIM)
        if ROTATED:
            copy_tile(pieces, rows, head * HEAD_ROW + KEY_DIM, rotated_keys, slot, k_ready, -1, -1, ROTATED)
        mbarrier.wait(v_free.index(slot), phase)
        skipped = gl.where((step == 0) & (ending < stop), ending // PIECE % PIECES, -1)
        if skipped >= 0:
            last_row = gl.load(blocks + ending // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + ending % BLOCK_SIZE
            fill_piece(cache + last_row * ROW + column, ending, start, length, values, slot, ROW, VALUE_DIM)
        num_skipped, also_skipped = (skipped >= 0).to(gl.int32), -1
        if WINDOW is not None:
            is_open = (step == num_tiles - 1) & (start > opening) & ((step > 0) | (opening != ending))
            also_skipped = gl.where(is_open, opening // PIECE % PIECES, -1)
            num_skipped += (also_skipped >= 0).to(gl.int32)
            if also_skipped >= 0:
                first_row = gl.load(blocks + opening // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + opening % BLOCK_SIZE
                fill_piece(cache + first_row * ROW + column, opening, start, length, values, slot, ROW, VALUE_DIM)
        for count in gl.static_range(3):
            mbarrier.expect(v_ready.index(slot), (PIECES - count) * PIECE * VALUE_DIM * 2, pred=num_skipped == count)
        copy_tile(pieces, rows, column, values, slot, v_ready, skipped, also_skipped, VALUE_DIM)


@jit
def produce(cache, pieces, queries, rotated, table, plan, starts, lengths, tickets, num_tokens, num_sequences,
            num_decodes, table_stride, together, memory, WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr,
            ROW: gl.constexpr, HEAD_ROW: gl.constexpr, FIRST_VALUE: gl.constexpr, HEADS: gl.constexpr,
            GROUP: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr):  # fmt: skip
    """Produce this program's tiles one after another: the plan, queries, keys and values of each."""
    plans, q_boxes, rotated_boxes, k_boxes, _, _, q_ready, q_free, _, _, _, _, _ = memory
    QUERIES: gl.constexpr = ROWS // GROUP
    PARTS: gl.constexpr = KEY_DIM // COLUMNS
    ROTATED: gl.constexpr = 0 if rotated is None else COLUMNS
    SIDES: gl.constexpr = q_boxes.shape[0] // (2 * PARTS)
    POSITIONS: gl.constexpr = k_boxes.shape[0] // (STAGES * PARTS) * PIECE
    num_places = (num_tokens - num_decodes) // QUERIES + num_sequences - num_decodes + 1
    item, number, base = gl.program_id(0), 0, 0
    while item < num_places * HEADS:
        taken = take_ticket(tickets, "relaxed")
        heads, within = item // (num_places * together), item % (num_places * together)
        tile, head = num_places - 1 - within // together, heads * together + within % together
        sequence, first, end, place = find_tile(starts, num_sequences, num_decodes, num_tokens, tile, QUERIES)
        first_block = 0
        if plan is not None:
            first_block = gl.load(plan + sequence)
        if (place >= 0) & (first + place < end) & (first_block >= 0):
            length = gl.load(lengths + sequence, mask=sequence < num_sequences, other=0)
            side = number % SIDES
            mbarrier.wait(q_free.index(side), number // SIDES & 1 ^ 1)
            for half in gl.static_range(2):
                token = first + place + half * (HALF // GROUP)
                for part in gl.static_range(PARTS):
                    corner = [token, head * GROUP, part * COLUMNS]
                    box = q_boxes.index((side * 2 + half) * PARTS + part)
                    async_load(queries, corner, q_ready.index(side), box)
                if ROTATED:
                    box = rotated_boxes.index(side * 2 + half)
                    async_load(rotated, [token, head * GROUP, 0], q_ready.index(side), box)

            blocks = table + sequence.to(gl.int64) * table_stride
            if plan is not None:
                blocks = table + first_block
            oldest = length - (end - first) + place
            stop = gl.minimum(oldest + QUERIES, length)
            start, first_tile = 0, 0
            if WINDOW is not None:
                start = gl.maximum(oldest - (WINDOW - 1), 0)
                first_tile = start // POSITIONS
            num_tiles = gl.maximum(gl.cdiv(stop, POSITIONS) - first_tile, 1)
            write_plan(plans.index(side), num_tiles, oldest, head, first + place, end, first_tile)
            mbarrier.expect(
                q_ready.index(side), ROWS * (KEY_DIM + ROTATED) * 2
            )  # after the plan, whose arrival it signals too

            produce_tile(cache, pieces, blocks, start, length, stop, head, num_tiles, first_tile, base, memory, WINDOW,
                         BLOCK_SIZE, ROW, HEAD_ROW, FIRST_VALUE, KEY_DIM, VALUE_DIM)  # fmt: skip
            number += 1
            base += num_tiles
        item = gl.num_programs(0) + read_ticket(taken)

    side = number % SIDES
    mbarrier.wait(q_free.index(side), number // SIDES & 1 ^ 1)
    write_plan(plans.index(side), 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_ready.index(side))
    if read_ticket(take_ticket(tickets + 1, "acq_rel")) == gl.num_programs(0) - 1:
        gl.store(tickets, 0)
        gl.store(tickets + 1, 0)


@jit
def soften(scores, best, total, position, newest, k_scale, SCALE: gl.constexpr, SOFTCAP: gl.constexpr,
           WINDOW: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of queries and keys from `position` on -> their weights, and the softmax so far."""
    factor = score_factor(k_scale, SCALE, SOFTCAP)
    scores = cap_scores(scores, k_scale, SCALE, SOFTCAP)
    if MASKED:
        positions = position + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        is_seen = positions[None, :] <= newest[:, None]
        if WINDOW is not None:
            is_seen = is_seen & (positions[None, :] > newest[:, None] - WINDOW)
        scores = gl.where(is_seen, scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - higher[:, None])
    fade = gl.exp2(best - higher)
    return weights, higher, fade, total * fade + gl.sum(weights, 1)


@jit
def multiply_keys(queries, keys, slot, LAYOUT: gl.constexpr):
    """The matmuls of queries and a stage's keys, in flight; both have a second part, or None."""
    POSITIONS: gl.constexpr = keys[0].shape[1]
    scores = gl.zeros([HALF, POSITIONS], gl.float32, LAYOUT)
    scores = warpgroup_mma(queries[0], keys[0].index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
    if queries[1] is not None:
        scores = warpgroup_mma(queries[1], keys[1].index(slot).permute((1, 0)), scores, is_async=True)
    return scores


@jit
def pingpong_step(queries, keys, values, memory, acc, weights, best, total, iteration, position, newest, k_scale,
                  SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr,
                  WHO: gl.constexpr):  # fmt: skip
    """The MMA with the keys of this iteration, overlapped with that of the last one's weights with its values."""
    _, _, _, _, _, _, _, _, k_ready, k_free, v_ready, v_free, pingpong = memory
    slot, last = iteration % STAGES, (iteration - 1) % STAGES
    mbarrier.wait(k_ready.index(slot), iteration // STAGES & 1)
    mbarrier.wait(pingpong.index(WHO), iteration & 1 ^ (1 - WHO))
    SCORES: gl.constexpr = best.type.layout.parent
    scores = multiply_keys(queries, keys, slot, SCORES)
    mbarrier.wait(v_ready.index(last), (iteration - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(last), acc, is_async=True)
    mbarrier.arrive(pingpong.index(1 - WHO))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(slot))
    new_weights, best, fade, total = soften(
        scores, best, total, position, newest, k_scale, SCALE, SOFTCAP, WINDOW, MASKED
    )
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(v_free.index(last))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(new_weights.to(values.dtype), weights.type.layout)
    return acc, weights, best, total


@jit
def consume_tile(out, out_stride, sinks, plan, queries, free, keys, values, num_tiles, base, memory, k_scale, v_scale,
                 SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr,
                 VALUE_DIM: gl.constexpr, WHO: gl.constexpr):  # fmt: skip
    """Half of the rows of a tile attend to all tiles of keys and values; `base` of these went before."""
    POSITIONS: gl.constexpr = keys[0].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, POSITIONS, 16])
    ATTENDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ATTENDED, 2)
    _, _, _, _, _, _, _, _, k_ready, k_free, v_ready, v_free, pingpong = memory

    oldest, first_tile = read_plan(plan, 1), read_plan(plan, 5)
    stop_tile = first_tile + num_tiles
    row = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    newest = oldest + row // GROUP
    best = gl.full([HALF], NOTHING, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([HALF, VALUE_DIM], gl.float32, ATTENDED)
    # every row sees all of the tiles up to whole_end, but for those before its window
    whole_end = gl.maximum(oldest + WHO * HALF // GROUP + 1, 0) // POSITIONS
    num_masked = gl.maximum(stop_tile - whole_end, 1)
    num_seen = num_tiles
    if WINDOW is not None:
        last_newest = oldest + (WHO * HALF + HALF - 1) // GROUP
        whole_start = gl.maximum(last_newest - WINDOW + POSITIONS, 0) // POSITIONS
        num_seen = gl.maximum(stop_tile - whole_start, num_masked)

    slot = base % STAGES
    mbarrier.wait(k_ready.index(slot), base // STAGES & 1)
    mbarrier.wait(pingpong.index(WHO), base & 1 ^ (1 - WHO))
    scores = multiply_keys(queries, keys, slot, SCORES)
    mbarrier.arrive(pingpong.index(1 - WHO))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(slot))
    weights, best, _, total = soften(
        scores, best, total, (stop_tile - 1) * POSITIONS, newest, k_scale, SCALE, SOFTCAP, WINDOW, True
    )
    weights = gl.convert_layout(weights.to(values.dtype), WEIGHTS)
    for step in range(1, num_masked):
        acc, weights, best, total = pingpong_step(
            queries, keys, values, memory, acc, weights, best, total, base + step, (stop_tile - 1 - step) * POSITIONS,
            newest, k_scale, SCALE, SOFTCAP, WINDOW, True, WHO,
        )  # fmt: skip
    for step in range(num_masked, num_seen):
        acc, weights, best, total = pingpong_step(
            queries, keys, values, memory, acc, weights, best, total, base + step, 0, newest, k_scale, SCALE, SOFTCAP,
            WINDOW, False, WHO,
        )  # fmt: skip
    if WINDOW is not None:
        for step in range(num_seen, num_tiles):
            acc, weights, best, total = pingpong_step(
                queries, keys, values, memory, acc, weights, best, total, base + step,
                (stop_tile - 1 - step) * POSITIONS, newest, k_scale, SCALE, SOFTCAP, WINDOW, True, WHO,
            )  # fmt: skip
    head, begin, end = read_plan(plan, 2), read_plan(plan, 3), read_plan(plan, 4)
    last = base + num_tiles - 1
    mbarrier.wait(v_ready.index(last % STAGES), last // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(last % STAGES), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(v_free.index(last % STAGES))

    fade = 1.0
    if sinks is not None:
        sink = gl.load(sinks + head * GROUP + row % GROUP).to(gl.float32) * LOG2E
        sink = gl.minimum(gl.maximum(sink, NOTHING), -NOTHING)  # infinite ones would give NaN
        higher = gl.maximum(best, sink)
        fade = gl.exp2(best - higher)
        total = total * fade + gl.exp2(sink - higher)
    share = fade / gl.where(total > 0, total, 1.0)
    if v_scale is not None:
        share = share * v_scale
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, ATTENDED))[:, None]
    queries[0].store(acc.to(values.dtype))  # in their place, to bring the columns of a row together
    lines = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, VALUE_DIM, layout=gl.SliceLayout(0, LINES))
    tokens = (begin + lines // GROUP).to(gl.int64)
    is_row = (tokens < end)[:, None]
    out_rows = out + tokens * out_stride + (head * GROUP + lines % GROUP) * VALUE_DIM
    gl.store(out_rows[:, None] + columns[None, :], queries[0].load(LINES), mask=is_row)
    fence_async_shared()
    mbarrier.arrive(free)


@jit
def consume(out, out_stride, sinks, k_scale, v_scale, memory, SCALE: gl.constexpr, SOFTCAP: gl.constexpr,
            WINDOW: gl.constexpr, GROUP: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
            WHO: gl.constexpr):  # fmt: skip
    """Attend half of the rows of each of this program's tiles."""
    if k_scale is not None:
        k_scale = gl.load(k_scale)
    if v_scale is not None:
        v_scale = gl.load(v_scale)
    plans, q_boxes, rotated_boxes, k_boxes, rotated_k_boxes, v_boxes, q_ready, q_free, _, _, _, _, _ = memory
    SIDES: gl.constexpr = q_boxes.shape[0] // (2 * (KEY_DIM // COLUMNS))
    POSITIONS: gl.constexpr = k_boxes.shape[0] // (STAGES * (KEY_DIM // COLUMNS)) * PIECE
    q_tiles = reinterpret(q_boxes, q_boxes.dtype, [2 * SIDES, HALF, KEY_DIM], SHARED)
    keys = reinterpret(k_boxes, k_boxes.dtype, [STAGES, POSITIONS, KEY_DIM], SHARED), None
    values = reinterpret(v_boxes, v_boxes.dtype, [STAGES, POSITIONS, VALUE_DIM], SHARED)
    if rotated_boxes is not None:
        rotated_tiles = reinterpret(rotated_boxes, q_boxes.dtype, [2 * SIDES, HALF, COLUMNS], SHARED)
        keys = keys[0], reinterpret(rotated_k_boxes, k_boxes.dtype, [STAGES, POSITIONS, COLUMNS], SHARED)
    number, base = 0, 0
    mbarrier.wait(q_ready.index(0), 0)
    num_tiles = read_plan(plans.index(0), 0)
    while num_tiles > 0:
        side = number % SIDES
        queries = q_tiles.index(side * 2 + WHO), None
        if rotated_boxes is not None:
            queries = queries[0], rotated_tiles.index(side * 2 + WHO)
        consume_tile(
            out, out_stride, sinks, plans.index(side), queries, q_free.index(side), keys, values, num_tiles, base,
            memory, k_scale, v_scale, SCALE, SOFTCAP, WINDOW, GROUP, VALUE_DIM, WHO,
        )  # fmt: skip
        number += 1
        base += num_tiles
        mbarrier.wait(q_ready.index(number % SIDES), number // SIDES & 1)
        num_tiles = read_plan(plans.index(number % SIDES), 0)


@jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_decodes", "table_stride", "out_stride", "together"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _prefill(
    queries, rotated, cache, pieces, table, plan, starts, lengths, sinks, k_scale, v_scale, out, tickets, num_tokens,
    num_sequences, num_decodes, table_stride, out_stride, together, SCALE: gl.constexpr, SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_ROW: gl.constexpr, FIRST_VALUE: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
):  # fmt: skip
    """Tiles of ROWS // GROUP queries by the GROUP heads of one of HEADS kv heads; `together` of these before the next.

    Tokens after the last sequence are one more, which sees nothing and gives zeros. tickets i32[2]: of tiles and of
    programs that are done; the last of these leaves zeros. plan: of context.py, where the cache is what it unpacked;
    sequences that are not there are left out. In a position's row the key of a head begins at HEAD_ROW times its
    number, its value FIRST_VALUE later. rotated: COLUMNS more dims of queries; keys have them after KEY_DIM others.
    """
    wait_for_inputs(True)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PARTS: gl.constexpr = KEY_DIM // COLUMNS
    VALUE_PARTS: gl.constexpr = VALUE_DIM // COLUMNS
    ROTATED: gl.constexpr = 0 if rotated is None else COLUMNS
    ROW: gl.constexpr = HEADS * (KEY_DIM + ROTATED + VALUE_DIM)
    dtype: gl.constexpr = out.dtype.element_ty
    PIECES: gl.constexpr = 8 if KEY_DIM <= 128 else 4  # of a tile of keys and values
    SIDES: gl.constexpr = 2 if KEY_DIM + ROTATED <= 128 else 1  # tiles of queries in memory
    plans = gl.allocate_shared_memory(gl.int32, [SIDES, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_boxes = gl.allocate_shared_memory(dtype, [2 * SIDES * PARTS, HALF // GROUP, GROUP, COLUMNS], GROUPED)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * PARTS * PIECES, PIECE, COLUMNS], SHARED)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * VALUE_PARTS * PIECES, PIECE, COLUMNS], SHARED)
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

    rotated_boxes, rotated_k_boxes = None, None
    if ROTATED:
        rotated_boxes = gl.allocate_shared_memory(dtype, [2 * SIDES, HALF // GROUP, GROUP, COLUMNS], GROUPED)
        rotated_k_boxes = gl.allocate_shared_memory(dtype, [STAGES * PIECES, PIECE, COLUMNS], SHARED)
    memory = (
        plans,
        q_boxes,
        rotated_boxes,
        k_boxes,
        rotated_k_boxes,
        v_boxes,
        q_ready,
        q_free,
        k_ready,
        k_free,
        v_ready,
        v_free,
        pingpong,
    )
    gl.warp_specialize(
        [
            (consume, (out, out_stride, sinks, k_scale, v_scale, memory, SCALE, SOFTCAP, WINDOW, GROUP, KEY_DIM,
                       VALUE_DIM, 0)),
            (consume, (out, out_stride, sinks, k_scale, v_scale, memory, SCALE, SOFTCAP, WINDOW, GROUP, KEY_DIM,
                       VALUE_DIM, 1)),
            (produce, (cache, pieces, queries, rotated, table, plan, starts, lengths, tickets, num_tokens,
                       num_sequences, num_decodes, table_stride, together, memory, WINDOW, BLOCK_SIZE, ROW, HEAD_ROW,
                       FIRST_VALUE, HEADS, GROUP, KEY_DIM, VALUE_DIM)),
        ],
        [4, 1],  # warps
        [208, 88],  # registers a thread
    )  # fmt: skip


_piece_descriptors = TensorDescriptors((PIECE.value, COLUMNS.value), SHARED.value)


def suits(q: Tensor, cache: Tensor, num_decodes: int, num_prompts: int, window: int | None) -> bool:
    """Whether `prefill` takes these and is faster than Triton's kernel, as it is for long prompts.

    With heads of 256 dims it holds fewer tiles, and is faster for longer prompts only. It is given a cache in fp8
    unpacked.
    """
    num_tokens, heads, dim = q.shape
    _, block_size, _, kv_heads, _ = cache.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype in (q.dtype, torch.float8_e4m3fn)
        and num_tokens - num_decodes > FEW_TOKENS
        and (dim in (64, 128) or (dim == 256 and cache.dtype == q.dtype))
        and (dim < 256 or num_tokens - num_decodes >= max(WIDE_TOKENS, WIDE_MEAN * num_prompts))
        and 64 % (heads // kv_heads) == 0
        and block_size % 16 == 0
        and cache.data_ptr() % 16 == 0
        and (window is None or (window >= (FEW_TOKENS if dim < 256 else WIDE_MEAN) and cache.dtype == q.dtype))
    )


@functools.cache
def _query_descriptors(group: int) -> TensorDescriptors:
    return TensorDescriptors((HALF.value // group, group, COLUMNS.value), GROUPED.value)


def prefill(q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
            sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor, scale: float,
            window: int | None, softcap: float | None, tickets: Tensor,
            plan: Tensor | None = None) -> None:  # fmt: skip
    """Rows from num_decodes on of q and out [T, N, D]; shapes as in ops.paged_attention.

    tickets: i32[2] of zeros, which are zeros again after it: calls that have the same must run one after another.
    plan: of context.py, where the cache and table are what it unpacked from fp8 of k_scale and v_scale.
    """
    _, _, _, kv_heads, dim = cache.shape
    _launch(q, None, cache.flatten(2), table, plan, starts, lengths, num_decodes, sinks, k_scale, v_scale, out, scale,
            window, softcap, tickets, (dim, kv_heads * dim), kv_heads)  # fmt: skip


def prefill_expanded(q_nope: Tensor, q_rope: Tensor, cache: Tensor, table: Tensor, plan: Tensor, starts: Tensor,
                     lengths: Tensor, num_decodes: int, out: Tensor, scale: float,
                     tickets: Tensor) -> None:  # fmt: skip
    """Latent attention over what expand.py has expanded.

    Rows from num_decodes on of q_nope [T, N, P], q_rope [T, N, 64] and out [T, N, U], by a cache [blocks, block size,
    N, P + 64 + U]; plan and tickets as in `prefill`.
    """
    plain, (heads, head_row) = q_nope.shape[2], cache.shape[2:]
    _launch(q_nope, q_rope, cache.flatten(2), table, plan, starts, lengths, num_decodes, None, None, None, out, scale,
            None, None, tickets, (head_row, plain + q_rope.shape[2]), heads)  # fmt: skip


def _launch(q: Tensor, rotated: Tensor | None, cache: Tensor, table: Tensor, plan: Tensor | None, starts: Tensor,
            lengths: Tensor, num_decodes: int, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
            out: Tensor, scale: float, window: int | None, softcap: float | None, tickets: Tensor,
            places: tuple[int, int], kv_heads: int) -> None:  # fmt: skip
    """cache [blocks, block size, row]; places: HEAD_ROW and FIRST_VALUE of the kernel."""
    num_tokens, heads, dim = q.shape
    num_blocks, block_size, row = cache.shape
    num_sequences, group, value_dim = lengths.shape[0], heads // kv_heads, out.shape[2]
    num_prefills = num_sequences - num_decodes
    # the keys and values of long sequences stay in L2 for some heads at a time; of an odd number one by one
    together = 2 - kv_heads % 2 if num_tokens - num_decodes >= LONG * num_prefills else kv_heads
    queries, rotated_queries = _find_queries(q, group), None if rotated is None else _find_queries(rotated, group)
    pieces = _piece_descriptors.find(cache, (num_blocks * block_size, row), (row, 1))
    num_places = (num_tokens - num_decodes) // (ROWS.value // group) + num_prefills + 1
    _prefill[(min(find_gpu(q.device).units, num_places * kv_heads),)](
        queries, rotated_queries, cache, pieces, table, plan, starts, lengths, sinks, k_scale, v_scale, out, tickets,
        num_tokens, num_sequences, num_decodes, table.stride(0), out.stride(0), together, scale, softcap, window,
        block_size, *places, kv_heads, group, dim, value_dim, num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip


def _find_queries(q: Tensor, group: int) -> Any:
    """The descriptor of q [T, N, D], whose tokens and heads may lie apart."""
    q = align_rows(q)
    _, heads, dim = q.shape
    return _query_descriptors(group).find(q, tuple(q.shape), (q.stride(0), q.stride(1) if heads > 1 else dim, 1))

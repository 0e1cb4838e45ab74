"""Choose the top k of each query's index scores, exactly.

    selected = paged_index_topk(q, weights, cache, batch, top_k=2048)             # i32[T, 1, k]
    runs = paged_index_topk(q, weights, cache, batch, top_k=512, every=4)         # numbers of runs of tokens

A program holds a segment of a row in registers, bisects the integers that its scores are in order of until as many as
are chosen lie above, and keeps these. What is left of all segments is a shorter row, of which another launch chooses,
until one segment holds all. If there are rows for all multiprocessors, a program reads all of one, and chooses
whenever it has kept too many of what could still be chosen. So no program waits for another, no counter is kept from
one launch to the next, and chosen positions ascend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.attention.index_scores import score_queries
from atom.kernels.triton.attention.rows import Rows, count_seen, split_rows
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

Score = Callable[[Tensor, Tensor | None, Tensor, Rows, Tensor], None]  # see `score_queries`
SCRATCH_BYTES = 256 << 20  # of scores at a time
SEGMENT, LAST_SEGMENT = 8192, 16384  # scores of a program; of one that has a row's last
KEPT, KEPT_EACH = 8192, 32  # scores that the best are chosen of, if a program reads a row; of a thread
STEP = 2048  # scores that it reads at a time
REGISTERS = 128
THREAD_SCORES = 16  # of a segment
SIGN, LARGEST = tl.constexpr(0x80000000), tl.constexpr(0xFFFFFFFF)


def paged_index_topk(q: Tensor, weights: Tensor | None, cache: PagedCache, batch: Batch, *, top_k: int,
                     every: int = 1) -> Tensor:  # fmt: skip
    """q [T, M, D], weights [T, M], None: 1, cache [blocks, entries of a block, E] -> i32[T, 1, k]; all -1 of a token of
    no sequence

    every: tokens that have an entry together
    """
    return choose_by(score_queries, q, weights, cache, batch, top_k, every)


def choose_by(
    score: Score, q: Tensor, weights: Tensor | None, cache: PagedCache, batch: Batch, top_k: int, every: int = 1
) -> Tensor:
    """`paged_index_topk` by scores of another kernel."""
    selected = torch.empty(len(q), 1, top_k, dtype=torch.int32, device=q.device)
    row_bytes = 4 * batch.tables[cache.kind].shape[1] * cache.blocks.shape[1]
    for rows, own in split_rows(cache.kind, batch, len(q), SCRATCH_BYTES // max(1, row_bytes), every):
        _choose(q[own], None if weights is None else weights[own], cache.blocks, rows, selected[own], score)
    return selected


def _choose(q: Tensor, weights: Tensor | None, cache: Tensor, rows: Rows, selected: Tensor, score: Score) -> None:
    """Choose some rows' positions."""
    width, top_k = rows.table.shape[1] * cache.shape[1], selected.shape[2]
    segment, last = find_segments(width, top_k)
    scores, positions = None, None
    if width > top_k:  # else each query chooses all that it sees
        scores = torch.empty(rows.num, -(-width // 16) * 16, dtype=torch.float32, device=q.device)
        score(q, weights, cache, rows, scores)
        if rows.starts is not None and rows.num >= find_gpu(q.device).units:
            return _select_from_stream(scores, rows, selected)
    level = 0
    while width > last:
        width = -(-width // segment) * top_k
        left = torch.empty(rows.num, width, dtype=torch.float32, device=q.device)
        left_positions = torch.empty(rows.num, width, dtype=torch.int32, device=q.device)
        _select(scores, positions, left, left_positions, rows, top_k, segment, segment, level, -(-width // top_k))
        scores, positions, level = left, left_positions, level + 1
    _select(scores, positions, None, selected, rows, top_k, segment, last, level, 1)


def find_segments(width: int, top_k: int) -> tuple[int, int]:
    """Scores of a program, and of one that has a row's last: powers of 2, so that two launches do for long rows."""
    least = 2 * next_power_of_2(top_k)
    segment, last = max(SEGMENT, least), max(LAST_SEGMENT, least)
    if width <= segment:
        return segment, max(16, next_power_of_2(width))
    if -(-width // segment) * top_k > last:
        segment = max(LAST_SEGMENT, least)
    return segment, last


def _select(scores: Tensor | None, positions: Tensor | None, left: Tensor | None, chosen: Tensor, rows: Rows,
            top_k: int, segment: int, tile: int, level: int, num_segments: int) -> None:  # fmt: skip
    _select_kernel[(rows.num, num_segments)](
        scores, positions, left, chosen, rows.starts, rows.lengths, len(rows.lengths), rows.first,
        0 if scores is None else scores.stride(0), chosen.stride(0), TOP_K=top_k, SEGMENT=segment, TILE=tile,
        LEVEL=level, QUERIES=rows.queries, EVERY=rows.every, BLOCK_S=rows.bucket, BLOCK_K=next_power_of_2(top_k),
        num_warps=min(32, max(1, tile // (32 * THREAD_SCORES))), **find_gpu(chosen.device).options,
    )  # fmt: skip


def _select_from_stream(scores: Tensor, rows: Rows, selected: Tensor) -> None:
    """Choose of each row by one program, of enough rows for all multiprocessors."""
    top_k, gpu = selected.shape[2], find_gpu(scores.device)
    # fewer registers a thread, so that other programs run while one waits for its sums
    registers = {"maxnreg": REGISTERS} if gpu.capability >= (8, 0) and REGISTERS else {}
    kept = max(KEPT, 2 * next_power_of_2(top_k))
    buffer, positions = torch.empty(2, rows.num, kept, dtype=torch.int32, device=scores.device)
    _stream_kernel[(rows.num,)](
        scores, selected, buffer, positions, rows.starts, rows.lengths, len(rows.lengths), rows.first, scores.stride(0),
        selected.stride(0), TOP_K=top_k, KEPT=kept, STEP=min(STEP, kept // 2), PIECE=min(STEP, kept // 2),
        EVERY=rows.every, BLOCK_S=rows.bucket, BLOCK_K=next_power_of_2(top_k),
        num_warps=min(32, max(1, kept // (32 * KEPT_EACH))), **registers, **gpu.options,
    )  # fmt: skip


@jit
def to_order(x):
    """Numbers in fp32 as integers u32 in the same order; none is 0."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, LARGEST, SIGN)


@jit
def find_border(order, low, num, num_chosen):
    """The integer of `order` u32[N] below which none of the num_chosen largest is; fewer are above it.

    low: the smallest of these num ones
    """
    high = tl.where(num > num_chosen, tl.max(order, 0), low)
    while low < high:  # num_chosen or more are at least low, fewer are above high
        middle = high - ((high - low) >> 1)
        num_above = tl.sum((order >= middle).to(tl.int32), 0)
        high = tl.where(num_above > num_chosen, high, tl.where(num_above == num_chosen, middle, middle - 1))
        low = tl.where(num_above >= num_chosen, middle, low)
    return low


@jit
def place_chosen(order, border, num_chosen):
    """Which of `order` u32[N] are the num_chosen largest, down to the border, and how many of these are before each."""
    is_above, is_border = order > border, order == border
    num_border = num_chosen - tl.sum(is_above.to(tl.int32), 0)
    before = tl.cumsum(is_above.to(tl.int32) + (is_border.to(tl.int32) << 16), 0)
    above_before = (before & 0xFFFF) - is_above.to(tl.int32)
    border_before = ((before >> 16) & 0xFFFF) - is_border.to(tl.int32)
    return is_above | (is_border & (border_before < num_border)), above_before + tl.minimum(border_before, num_border)


@jit(
    do_not_specialize=["num_sequences", "first_token"],
    do_not_specialize_on_alignment=["starts", "lengths"],
)
def _stream_kernel(scores, chosen, buffer, positions, starts, lengths, num_sequences, first_token, score_stride,
                   chosen_stride, TOP_K: tl.constexpr, KEPT: tl.constexpr, STEP: tl.constexpr, PIECE: tl.constexpr,
                   EVERY: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A row of scores, STEP at a time: those above all known borders are kept, in order as integers, in a buffer
    i32[KEPT], with their positions i32[KEPT], and when that is full the best TOP_K of them."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    _, num = count_seen(starts, lengths, num_sequences, first_token + row, 0, BLOCK_S, EVERY)
    row = row.to(tl.int64)
    chosen += row * chosen_stride
    numbers = tl.arange(0, BLOCK_K)
    if num <= TOP_K:
        tl.store(chosen + numbers, tl.where(numbers < num, numbers, -1), mask=numbers < TOP_K)
        return
    scores += row * score_stride
    buffer += row * KEPT
    positions += row * KEPT
    steps, pieces, places = tl.arange(0, STEP), tl.arange(0, PIECE), tl.arange(0, KEPT)
    num_kept = 0
    border = tl.min(tl.zeros([1], tl.uint32), 0)
    following = tl.load(scores + steps, mask=steps < num, other=0.0)
    for first in range(0, num + STEP, STEP):  # the last has no scores: it chooses of what is kept
        x = following
        following = tl.load(scores + first + STEP + steps, mask=first + STEP + steps < num, other=0.0)
        order = tl.where(first + steps < num, to_order(x), 0)
        num_better = tl.sum((order > border).to(tl.int32), 0)
        if (first >= num) | (num_kept + num_better > KEPT):
            tl.debug_barrier()  # what other threads have kept is there
            is_there = places < num_kept
            kept = tl.load(buffer + places, mask=is_there, other=0).to(tl.uint32, bitcast=True)
            low = tl.min(tl.where(is_there, kept, LARGEST), 0)
            border = find_border(kept, low, num_kept, TOP_K)
            num_border = TOP_K - tl.sum((kept > border).to(tl.int32), 0)
            num_above, num_equal = 0, 0  # of what was gone through
            for start in range(0, num_kept, PIECE):
                is_own = start + pieces < num_kept
                own = tl.load(buffer + start + pieces, mask=is_own, other=0).to(tl.uint32, bitcast=True)
                own_positions = tl.load(positions + start + pieces, mask=is_own, other=0)
                tl.debug_barrier()  # what is kept takes the place of what others have read
                is_above, is_border = own > border, own == border
                before = tl.cumsum(is_above.to(tl.int32) + (is_border.to(tl.int32) << 16), 0)
                above_before = num_above + (before & 0xFFFF) - is_above.to(tl.int32)
                equal_before = num_equal + ((before >> 16) & 0xFFFF) - is_border.to(tl.int32)
                is_chosen = is_above | (is_border & (equal_before < num_border))
                place = above_before + tl.minimum(equal_before, num_border)
                tl.store(buffer + place, own.to(tl.int32, bitcast=True), mask=is_chosen)
                tl.store(positions + place, own_positions, mask=is_chosen)
                num_above += tl.sum(is_above.to(tl.int32), 0)
                num_equal += tl.sum(is_border.to(tl.int32), 0)
            num_kept = tl.minimum(num_kept, TOP_K)
            num_better = tl.sum((order > border).to(tl.int32), 0)
        if num_better > 0:
            is_better = order > border
            target = num_kept + tl.cumsum(is_better.to(tl.int32), 0) - 1
            tl.store(buffer + target, order.to(tl.int32, bitcast=True), mask=is_better)
            tl.store(positions + target, first + steps, mask=is_better)
            num_kept += num_better
    tl.debug_barrier()
    tl.store(chosen + numbers, tl.load(positions + numbers, mask=numbers < TOP_K, other=0), mask=numbers < TOP_K)


@jit(
    do_not_specialize=["num_sequences", "first_token"],
    do_not_specialize_on_alignment=["starts", "lengths"],
)
def _select_kernel(scores, positions, left, chosen, starts, lengths, num_sequences, first_token, score_stride,
                   chosen_stride, TOP_K: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, LEVEL: tl.constexpr,
                   QUERIES: tl.constexpr, EVERY: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """A segment of TILE scores of a row, which LEVEL launches have made shorter by segments of SEGMENT.

    positions: of scores; None: their places in the row. left: where scores of chosen ones go; None: this is the last
    launch, and -1 follows the chosen ones. scores: None: all are chosen
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    _, num = count_seen(starts, lengths, num_sequences, first_token + row, QUERIES, BLOCK_S, EVERY)
    for _ in tl.static_range(LEVEL):
        whole = tl.maximum(num - 1, 0) // SEGMENT
        num = whole * TOP_K + tl.minimum(num - whole * SEGMENT, TOP_K)
    begin = tl.program_id(1) * TILE
    num = tl.minimum(num - begin, TILE)
    num_chosen = tl.maximum(tl.minimum(num, TOP_K), 0)
    chosen += row.to(tl.int64) * chosen_stride + tl.program_id(1) * TOP_K
    if left is None:
        rest = tl.arange(0, BLOCK_K)
        tl.store(chosen + rest, tl.full([BLOCK_K], -1, tl.int32), mask=(rest >= num_chosen) & (rest < TOP_K))
    if num <= 0:
        return
    places = tl.arange(0, TILE)
    is_there = places < num
    if scores is None:
        tl.store(chosen + places, places, mask=is_there)
    else:
        source = row.to(tl.int64) * score_stride + begin + places
        x = tl.load(scores + source, mask=is_there, other=0.0)
        order = tl.where(is_there, to_order(x), 0)
        low = find_border(order, tl.min(tl.where(is_there, order, LARGEST), 0), num, num_chosen)
        is_chosen, target = place_chosen(order, low, num_chosen)
        if positions is None:
            tl.store(chosen + target, begin + places, mask=is_chosen)
        else:
            tl.store(chosen + target, tl.load(positions + source, mask=is_chosen, other=0), mask=is_chosen)
        if left is not None:
            left += row.to(tl.int64) * chosen_stride + tl.program_id(1) * TOP_K
            tl.store(left + target, x, mask=is_chosen)

"""Group tokens by expert, and combine the experts' outputs, in Triton.

    grouped, order, ends = group(h, ids, experts=128)           # 1 launch for a batch of decodes
    out = combine(y, weights, order)                            # 1 launch for a batch of decodes
    rows, order, ends, places = group_pairs(h, ids, None, 128)  # places: the row of each pair
    out = combine_rows(y, weights, places)                      # which is not searched then

The host never learns how many rows an expert has, so that a graph can hold a step.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

SEARCHED = 2048  # pairs of token and expert in which each row searches its position; those of more are counted
COUNTED, PLACED = 1024, 16  # pairs that a program counts, and whose rows it copies
SUMMED = 1024  # columns of a token that a program sums up, if it need not search the rows


def group(x: Tensor, ids: Tensor, first: Tensor | None = None, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], ids i64[T, k] -> rows [k T, H] by expert, order i64[k T], ends i64[E]

    first: i64[1], the first of the experts that are here; after the rows of these, order is k T, and combine takes
    such rows for zeros
    """
    rows, order, ends, _ = group_pairs(x, ids, first, experts)
    return rows, order, ends


def group_pairs(x: Tensor, ids: Tensor, first: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """group, and the row of each pair, i64[k T], or -1 if its expert is on another rank."""
    assert x.stride(1) == 1 and ids.is_contiguous(), "rows have gaps"
    (pairs, top_k), width, gpu = (ids.numel(), ids.shape[1]), x.shape[1], find_gpu(x.device)
    rows, order, ends = x.new_empty(pairs, width), ids.new_empty(pairs), ids.new_empty(experts)
    places = ids.new_empty(pairs)
    if pairs <= SEARCHED:
        _group_kernel[(pairs + experts,)](
            x, ids, first, rows, order, ends, places, pairs, x.stride(0), EXPERTS=experts, TOP_K=top_k, WIDTH=width,
            BLOCK_P=256 if pairs <= 256 else 1024, BLOCK_W=next_power_of_2(width), **gpu.options,
        )  # fmt: skip
        return rows, order, ends, places
    blocks = -(-pairs // COUNTED)
    counts = ids.new_empty((experts + 1) * blocks, dtype=torch.int32)  # of the pairs of an expert in each block
    _count_kernel[(blocks,)](
        ids, first, counts, pairs, blocks, EXPERTS=experts, BLOCK_E=next_power_of_2(experts + 2), BLOCK_P=COUNTED,
        **gpu.options,
    )  # fmt: skip
    _place_kernel[(-(-pairs // PLACED),)](
        x, ids, first, counts.cumsum(0, dtype=torch.int32), rows, order, ends, places, pairs, blocks, x.stride(0),
        EXPERTS=experts, TOP_K=top_k, WIDTH=width, BLOCK_E=next_power_of_2(experts), BLOCK_P=PLACED, COUNTED=COUNTED,
        BLOCK_W=512, **gpu.options,
    )  # fmt: skip
    return rows, order, ends, places


def combine(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """x [k T, H], weights fp32[T, k], order i64[k T] -> [T, H]"""
    if len(order) > SEARCHED:
        places = order.new_full((len(order) + 1,), -1)
        return combine_rows(x, weights, places.scatter_(0, order, torch.arange(len(order), device=order.device)))
    assert x.stride(1) == 1 and weights.is_contiguous(), "rows have gaps"
    (tokens, top_k), width = weights.shape, x.shape[1]
    out, gpu = x.new_empty(tokens, width), find_gpu(x.device)
    block_k = next_power_of_2(top_k)
    block_w = max(64, 4096 // block_k)
    _combine_kernel[(tokens, -(-width // block_w))](
        x, weights, order, out, tokens * top_k, x.stride(0), TOP_K=top_k, WIDTH=width, BLOCK_P=256, BLOCK_K=block_k,
        BLOCK_W=block_w, **gpu.options,
    )  # fmt: skip
    return out


def combine_rows(x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """combine; places: the row of each pair, as group_pairs gives it"""
    assert x.stride(1) == 1 and weights.is_contiguous(), "rows have gaps"
    (tokens, top_k), width = weights.shape, x.shape[1]
    out, block_w = x.new_empty(tokens, width), min(SUMMED, next_power_of_2(width))
    _sum_rows_kernel[(tokens * -(-width // block_w),)](
        x, weights, places, out, x.stride(0), TOP_K=top_k, WIDTH=width, BLOCK_W=block_w, **find_gpu(x.device).options
    )
    return out


@jit(do_not_specialize=["pairs"])
def _group_kernel(x, ids, base, rows, order, ends, places, pairs, x_stride, EXPERTS: tl.constexpr,
                  TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """A program for each pair, which counts those before it, and one for each expert, which counts up to its last."""
    wait_for_inputs(PDL)
    pair = tl.program_id(0)
    columns = tl.arange(0, BLOCK_W)
    is_column = (columns < WIDTH) & (pair < pairs)
    row = tl.load(x + (pair // TOP_K).to(tl.int64) * x_stride + columns, mask=is_column)  # not after the count
    expert = _own_expert(tl.load(ids + pair), base, EXPERTS) if pair < pairs else (pair - pairs).to(tl.int64)
    earlier = tl.zeros([BLOCK_P], tl.int64)
    for first in range(0, pairs, BLOCK_P):
        others = first + tl.arange(0, BLOCK_P)
        theirs = tl.load(ids + others, mask=others < pairs, other=1 << 62)
        theirs = tl.where(others < pairs, _own_expert(theirs, base, EXPERTS), 1 << 62)
        earlier += (theirs < expert) | ((theirs == expert) & (others < pair))
    position = tl.sum(earlier)
    if pair >= pairs:
        tl.store(ends + expert, position)
    elif expert >= EXPERTS:
        tl.store(order + position, pairs.to(tl.int64))
        tl.store(places + pair, tl.full([], -1, tl.int64))
    else:
        tl.store(order + position, pair.to(tl.int64))
        tl.store(places + pair, position)
        tl.store(rows + position * WIDTH + columns, row, mask=is_column)


@jit(do_not_specialize=["pairs", "blocks"])
def _count_kernel(ids, base, counts, pairs, blocks, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
                  BLOCK_P: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """How many of a block's pairs have each expert, or none that is here: counts [E + 1, blocks]."""
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    pair = block * BLOCK_P + tl.arange(0, BLOCK_P)
    own = _own_expert(tl.load(ids + pair, mask=pair < pairs, other=0), base, EXPERTS).to(tl.int32)
    each = tl.arange(0, BLOCK_E)
    num = tl.histogram(tl.where(pair < pairs, own, BLOCK_E - 1), BLOCK_E)
    tl.store(counts + each * blocks + block, num, mask=each <= EXPERTS)


@jit(do_not_specialize=["pairs", "blocks"])
def _place_kernel(x, ids, base, reached, rows, order, ends, places, pairs, blocks, x_stride, EXPERTS: tl.constexpr,
                  TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
                  COUNTED: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK_P pairs, whose rows are copied after those of pairs before them. reached: sums of `_count_kernel`'s"""
    wait_for_inputs(PDL)
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_pair = pair < pairs
    expert = _own_expert(tl.load(ids + pair, mask=is_pair, other=0), base, EXPERTS).to(tl.int32)
    block = tl.program_id(0) * BLOCK_P // COUNTED
    others = block * COUNTED + tl.arange(0, COUNTED)
    theirs = _own_expert(tl.load(ids + others, mask=others < pairs, other=0), base, EXPERTS).to(tl.int32)
    is_earlier = (theirs[None, :] == expert[:, None]) & (others[None, :] < pair[:, None])
    cell = expert * blocks + block
    position = tl.sum(is_earlier.to(tl.int32), 1) + tl.load(reached + cell - 1, mask=cell > 0, other=0)
    is_here = expert < EXPERTS
    tl.store(order + position, tl.where(is_here, pair, pairs).to(tl.int64), mask=is_pair)
    tl.store(places + pair, tl.where(is_here, position, -1).to(tl.int64), mask=is_pair)
    if tl.program_id(0) == 0:
        each = tl.arange(0, BLOCK_E)
        last = tl.load(reached + (each + 1) * blocks - 1, mask=each < EXPERTS, other=0)
        tl.store(ends + each, last.to(tl.int64), mask=each < EXPERTS)
    source = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    target = rows + position.to(tl.int64)[:, None] * WIDTH
    is_copied = (is_pair & is_here)[:, None]
    for first in range(0, WIDTH, BLOCK_W):
        columns = first + tl.arange(0, BLOCK_W)[None, :]
        values = tl.load(source + columns, mask=is_copied & (columns < WIDTH), other=0)
        tl.store(target + columns, values, mask=is_copied & (columns < WIDTH))


@jit
def _own_expert(ids, base, EXPERTS: tl.constexpr):
    """The numbers of experts among those that are here, EXPERTS for those that are not."""
    if base is not None:
        ids -= tl.load(base)
        ids = tl.where((ids >= 0) & (ids < EXPERTS), ids, EXPERTS)
    return ids


@jit(do_not_specialize=["pairs"])
def _combine_kernel(x, weights, order, out, pairs, x_stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
                    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """Some columns of a token, whose pairs are searched in the order of the rows.

    A pair that has no row, as its expert is not here, gives zeros.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    chosen = tl.arange(0, BLOCK_K)
    own = token.to(tl.int64) * TOP_K + chosen
    is_own = chosen < TOP_K
    found = tl.full([BLOCK_K, BLOCK_P], -1, tl.int32)
    for first in range(0, pairs, BLOCK_P):
        others = first + tl.arange(0, BLOCK_P)
        theirs = tl.load(order + others, mask=others < pairs, other=-1)
        found = tl.where(theirs[None, :] == own[:, None], others[None, :], found)
    rows = tl.max(found, axis=1).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_column = columns < WIDTH
    is_value = (is_own & (rows >= 0))[:, None] & is_column[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=is_value, other=0.0)
    shares = tl.load(weights + own, mask=is_own, other=0.0)
    total = tl.sum(values.to(tl.float32) * shares[:, None], axis=0)
    tl.store(out + token.to(tl.int64) * WIDTH + columns, total.to(out.dtype.element_ty), mask=is_column)


@jit
def _sum_rows_kernel(x, weights, places, out, x_stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
                     BLOCK_W: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Sum some columns of a token's rows.

    A thread has the same columns of all rows, so that no sum crosses threads, and all loads are in flight at once.
    Nothing is loaded ahead of the wait: GEMMs let the next kernel start before the grouping must have ended.

    places: the row of each pair, or -1 if its expert is on another rank
    """
    wait_for_inputs(PDL)
    tiles: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    token = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK_W + tl.arange(0, BLOCK_W)
    is_column = columns < WIDTH
    total = tl.zeros([BLOCK_W], tl.float32)
    rows, shares = (), ()
    for choice in tl.static_range(TOP_K):  # all of them before the first values, which must wait for their row
        rows += (tl.load(places + token * TOP_K + choice),)  # type: ignore[assignment]
        shares += (tl.load(weights + token * TOP_K + choice),)  # type: ignore[assignment]
    for choice in tl.static_range(TOP_K):
        is_value = is_column & (rows[choice] >= 0)
        values = tl.load(x + rows[choice] * x_stride + columns, mask=is_value, other=0.0)
        total += values.to(tl.float32) * shares[choice]
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=is_column)

"""Shared by the attention kernels: tiles, block table lookups, online softmax.

owner, before = find_owner(counts, tile)                                        # whose tile it is
best, total, acc = attend_keys(q, best, total, acc, keys, values, row, ...)     # a run of positions
store_attended(acc, best, total, sinks, out, offsets, mask)                     # with its sink, divided, rounded

Scores are in units of log2, so that exp2 serves. The best starts finite, so that rows that see nothing give no NaN.
"""

from __future__ import annotations

import torch
import triton.language as tl

from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import next_power_of_2

NOTHING = tl.constexpr(-1e38)  # below any score
LOG2E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)


def has_rows(x: torch.Tensor) -> bool:
    """Whether the heads of each token of x [T, N, D] lie side by side; tokens may lie apart."""
    (_, heads, dim), (_, apart, step) = x.shape, x.stride()
    return step == 1 and (apart == dim or heads == 1)


def product_size(q: torch.Tensor, cache: torch.Tensor) -> int:
    """The bytes of an element of what is multiplied: in q's dtype, if the cache has it or fp8, else in fp32."""
    return q.element_size() if cache.dtype in (q.dtype, torch.float8_e4m3fn) else 4


def sequence_bucket(num: int) -> int:
    """The number of sequences that a kernel is compiled for: one of few values, since each costs a compilation."""
    return 32 if num <= 32 else max(512, next_power_of_2(num))


@jit
def to_entry(x, scale, dtype: tl.constexpr):
    """x as a cache of this dtype keeps it: in fp8 over its scale (None: 1) and at most 448."""
    if dtype.is_fp8():
        x = x.to(tl.float32)
        if scale is not None:
            x = x / scale
        x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the preceding kernel, which may still run (PDL), and let the next kernel start early too."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def find_owner(counts, tile):
    """counts i32[S] of tiles laid end to end: the entry that tile number `tile` falls to, and the tiles before it."""
    ends = tl.cumsum(counts, 0)
    is_before = ends <= tile
    return tl.sum(is_before.to(tl.int32), 0), tl.max(tl.where(is_before, ends, 0), 0)


@jit
def find_run(counts, program, PROGRAMS: tl.constexpr, SMALL: tl.constexpr = 1):
    """A program's run of tiles, of counts i32[S] laid end to end: its first, its end, and how many a program has.

    SMALL: tiles that have the positions of one of usual size
    """
    num_tiles = tl.sum(counts, 0)
    # to merge a part costs as much as a tile or two, and more the more parts a sequence has
    length = tl.maximum(tl.cdiv(num_tiles, PROGRAMS), SMALL * tl.minimum(tl.cdiv(tl.max(counts, 0), 16 * SMALL), 4))
    first = program * length
    return first, tl.minimum(first + length, num_tiles), length


@jit
def look_up(blocks, positions, stop, BLOCK_SIZE: tl.constexpr):
    """The blocks of these positions in a sequence's row of the table, which is not read from `stop` on."""
    return tl.load(blocks + positions // BLOCK_SIZE, mask=positions < stop, other=0)


@jit
def load_keys(keys, values, blocks, block, positions, stop, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
              ROW: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Keys and values [N, BLOCK_D] at positions i32[N] in blocks i32[N], and the blocks of the next N positions.

    They lie ROW apart. With MASKED those from `stop` on are zero; without, there are none.
    """
    columns = tl.arange(0, BLOCK_D)
    offsets = (block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * ROW
    next_block = look_up(blocks, positions + positions.shape[0], stop, BLOCK_SIZE)  # ahead of the keys
    key_rows, value_rows = (keys + offsets)[:, None], (values + offsets)[:, None]
    if MASKED or BLOCK_D != DIM:
        is_there = (positions < stop)[:, None] & (columns < DIM)[None, :]
        k = tl.load(key_rows + columns[None, :], mask=is_there, other=0.0)
        v = tl.load(value_rows + columns[None, :], mask=is_there, other=0.0)
    else:
        k = tl.load(key_rows + columns[None, :])
        v = tl.load(value_rows + columns[None, :])
    return k, v, next_block


@jit
def find_first(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that a query at this one sees, maybe below 0: by WINDOW, or chunks of that size."""
    if CHUNKED:
        return position // WINDOW * WINDOW
    return position - WINDOW + 1


@jit
def load_slopes(slopes, heads, mask):
    """The slopes of `heads` i32[M] in units of log2."""
    return tl.load(slopes + heads, mask=mask, other=0.0) * LOG2E


@jit
def cap_scores(qk, k_scale, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Dot products of queries and keys in fp8 of k_scale (None: 1) -> scores, but for `score_factor`."""
    if SOFTCAP is not None:
        factor = 2.0 * SCALE / SOFTCAP * LOG2E
        if k_scale is not None:
            factor = factor * k_scale
        qk = 1.0 - 2.0 / (1.0 + tl.exp2(qk * factor))  # the hyperbolic tangent
    return qk


@jit
def score_factor(k_scale, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The factor that turns the result of cap_scores into scores in units of log2."""
    factor = (SCALE if SOFTCAP is None else SOFTCAP) * LOG2E
    if SOFTCAP is None and k_scale is not None:
        factor = factor * k_scale
    return factor


@jit
def attend_tile(q, k, v, best, total, acc, is_seen, k_scale, slopes, distances, SCALE: tl.constexpr,
                SOFTCAP: tl.constexpr):  # fmt: skip
    """Rows q [M, BLOCK_D] attend to k and v [N, BLOCK_D] where is_seen bool[M or 1, N]; None: everywhere (Dao 2023).

    best and total fp32[M], acc fp32[M, BLOCK_D]: the softmax so far; k_scale fp32, None: 1; slopes fp32[M], of
    load_slopes, by the distances i32[M or 1, N] of keys from queries, None: 0.
    """
    factor = score_factor(k_scale, SCALE, SOFTCAP)
    scores = cap_scores(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee"), k_scale, SCALE, SOFTCAP)
    if slopes is not None:
        scores = scores * factor - slopes[:, None] * distances
        factor = 1.0
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    fade = tl.exp2(best - higher)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@jit
def attend_keys(
    q, best, total, acc, keys, values, blocks, block, start, stop, newest, seen, k_scale, slopes,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows q [M, BLOCK_D] attend to positions start to stop of one sequence, as in attend_tile.

    newest i32[M]: each row's own position; seen i32[M]: the last one that it sees; keys and values of a position lie
    ROW apart, in the blocks listed at `blocks`; block i32[BLOCK_N]: those of the first iteration. Without MASKED every
    row sees every position, and there are a multiple of BLOCK_N.
    """
    for first in range(start, stop, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        k, v, block = load_keys(keys, values, blocks, block, positions, stop, MASKED, BLOCK_SIZE, ROW, DIM, q.shape[1])
        is_seen = None
        if MASKED:
            is_seen = positions[None, :] <= seen[:, None]
            if WINDOW is not None:
                is_seen = is_seen & (positions[None, :] >= find_first(newest, WINDOW, CHUNKED)[:, None])
        distances = newest[:, None] - positions[None, :]
        best, total, acc = attend_tile(q, k, v, best, total, acc, is_seen, k_scale, slopes, distances, SCALE, SOFTCAP)
    return best, total, acc


@jit
def begin_softmax(sinks, heads, mask, is_first):
    """The highest score in log2 of rows, and their totals, ahead of all positions: of the sinks of `heads` i32[M], if
    there are any, in the first part of a context."""
    best = tl.full(heads.shape, NOTHING, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * LOG2E
        best = tl.where(is_first, tl.clamp(sink, NOTHING, -NOTHING), best)  # infinite ones would give NaN
        total = tl.where(is_first, 1.0, total)
    return best, total


@jit
def store_attended(acc, best, total, sinks, v_scale, out, heads, rows, mask, DIM: tl.constexpr):
    """acc [M, BLOCK_D] of values of v_scale (None: 1), divided by its total and the sinks' of `heads` i32[M], to `out`
    at the offsets `rows` [M]."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * LOG2E
        sink = tl.clamp(sink, NOTHING, -NOTHING)  # infinite ones would give NaN
        higher = tl.maximum(best, sink)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.exp2(sink - higher)
        acc = acc * fade[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if v_scale is not None:
        acc = acc * v_scale
    columns = tl.arange(0, acc.shape[1])
    is_there = mask[:, None] & (columns < DIM)[None, :]
    tl.store(out + rows[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=is_there)

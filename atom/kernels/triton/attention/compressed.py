"""Pool runs of tokens, attend to tokens and runs.

    pooled = paged_compress(kv, gate, bias, cache, batch, overlaps=True)
    tokens = run_tokens(selected, positions, every=4)    # that latent attention attends to
    a = paged_mqa_attention(q, cache, batch, sinks, None, runs, selected, scale=0.04, window=128, every=4)

A program of either has a token, whose sequence and position it finds by counting, so that a launch depends on the
number of tokens only. Most tokens end no run: their programs write zeros. All heads of a token read one key, so that a
tile of the attention is of heads, and each key is read once for them (DeepSeek-AI 2026). What few tokens see is split,
and the parts are merged.

The place in a table of the block with a run's entry is that of the run's last token, whatever the size of a block.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import write_entries
from atom.graph.ops.compressed import to_pool
from atom.kernels.triton.attention.common import (
    LOG2E,
    NOTHING,
    begin_softmax,
    has_rows,
    sequence_bucket,
    wait_for_inputs,
)
from atom.kernels.triton.attention.latent import MAX_SPLITS, Sums, choose_tiles, merge_sums
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

COUNTED = 512  # sequences at a time
COLUMNS = 64  # of an entry that a program pools
ROWS = 32  # tokens that are pooled at a time
MIN_PART = 64  # entries of a split
TOKENS = 1024  # that a program finds


@jit
def _find_row(starts, num_rows, token, BLOCK_S: tl.constexpr):
    """The row of the batch that a token is of; num_rows for padding."""
    count = 0
    for first in range(0, num_rows, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        ends = tl.load(starts + 1 + rows, mask=rows < num_rows, other=2147483647)
        count += tl.sum((ends <= token).to(tl.int32), 0)
    return count


@jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["starts", "lengths"])
def _pool_runs(
    cache, bias, table, starts, lengths, out, num_rows, table_stride, EVERY: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Columns program_id(1) of what token program_id(0) ends, by an online softmax over its run, column by column.

    bias None: entries have no gate, and what is pooled is their mean
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    row = _find_row(starts, num_rows, token, BLOCK_S)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column = columns < DIM
    target = out + token.to(tl.int64) * DIM + columns
    tl.store(target, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=is_column)
    if row >= num_rows:
        return
    position = tl.load(lengths + row) - tl.load(starts + row + 1) + token
    if (position < 0) | ((position + 1) % EVERY != 0):  # padding's are before the first
        return
    parts: tl.constexpr = 2 if OVERLAPS else 1
    width: tl.constexpr = DIM * parts
    ENTRY: tl.constexpr = 1 if bias is None else 2
    begin = position + 1 - EVERY * parts
    best, total = tl.full([BLOCK_D], NOTHING, tl.float32), tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, EVERY * parts, BLOCK_N):
        places = first + tl.arange(0, BLOCK_N)
        positions = begin + places
        is_there = (places < EVERY * parts) & (positions >= 0)
        blocks = tl.load(table + row * table_stride + positions // SIZE, mask=is_there, other=0).to(tl.int64)
        entries = cache + (blocks * SIZE + positions % SIZE)[:, None] * (ENTRY * width)
        own = columns[None, :] + tl.where(places < EVERY * (parts - 1), 0, width - DIM)[:, None]
        mask = is_there[:, None] & is_column[None, :]
        kv = tl.load(entries + own, mask=mask, other=0.0).to(tl.float32)
        gate = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if bias is not None:
            gate = tl.load(entries + width + own, mask=mask, other=0.0).to(tl.float32)
            gate += tl.load(bias + (places % EVERY)[:, None] * width + own, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(mask, gate * LOG2E, NOTHING)
        higher = tl.maximum(best, tl.max(scores, 0))
        weights = tl.where(mask, tl.exp2(scores - higher[None, :]), 0.0)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights * kv, 0)
        best = higher
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=is_column)


def paged_compress(kv: Tensor, gate: Tensor | None, bias: Tensor | None, cache: PagedCache, batch: Batch, *,
                   overlaps: bool = False, every: int = 0) -> Tensor:  # fmt: skip
    """The op of this name."""
    blocks = cache.blocks
    write_entries(cache, batch, to_pool(kv, gate).to(blocks.dtype))
    every, width = every if bias is None else len(bias), kv.shape[1]
    dim, table, gpu = width // 2 if overlaps else width, batch.tables[cache.kind], find_gpu(kv.device)
    out = kv.new_empty(len(kv), dim)
    columns = min(COLUMNS, next_power_of_2(dim))
    _pool_runs[(len(kv), -(-dim // columns))](
        blocks, None if bias is None else bias.contiguous(), table, batch.starts, batch.lengths, out, len(table),
        table.stride(0), every, dim, blocks.shape[1], overlaps,
        min(ROWS, next_power_of_2(every * (2 if overlaps else 1))), columns, COUNTED, num_warps=4, **gpu.options,
    )  # fmt: skip
    return out


def paged_mqa_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                        k_scale: Tensor | None = None, runs: PagedCache | None = None,
                        selected: Tensor | None = None, *, scale: float, window: int | None = None,
                        every: int = 1) -> Tensor:  # fmt: skip
    """The op of this name."""
    assert has_rows(q) and cache.blocks.is_contiguous(), "rows have gaps"
    assert selected is None or selected.is_contiguous(), "rows have gaps"
    (tokens, heads, dim), table, gpu = q.shape, batch.tables[cache.kind], find_gpu(q.device)
    size, block_d = cache.blocks.shape[1], max(16, next_power_of_2(dim))
    num_entries = table.shape[1] * size if window is None else window
    runs_table, top_k = table, 0 if selected is None else selected.shape[2]
    if runs is not None:
        runs_table = batch.tables[runs.kind]
        num_entries += top_k or runs_table.shape[1] * batch.block_size // every
    tiles = choose_tiles(heads, block_d, q.element_size(), gpu.shared_memory, takes_64=gpu.capability < (10, 0))
    num_tiles = tokens * -(-heads // tiles.rows)
    num_splits = max(1, min(gpu.units // max(1, num_tiles), num_entries // MIN_PART, MAX_SPLITS))
    out, weights = torch.empty_like(q, memory_format=torch.contiguous_format), None
    if num_splits > 1:
        out = q.new_empty(num_splits, *q.shape, dtype=torch.float32)
        weights = q.new_empty(num_splits, tokens, heads, dtype=torch.float32)
    _attend_kernel[(num_tiles, num_splits)](
        q, cache.blocks, table, k_scale, sinks, None if runs is None else runs.blocks, runs_table, selected,
        batch.starts, batch.lengths, out, weights, tokens, len(table), num_splits, q.stride(0), table.stride(0),
        runs_table.stride(0), SCALE=scale, HEADS=heads, DIM=dim, WINDOW=window or 0, SIZE=size, EVERY=every,
        ENTRIES=1 if runs is None else runs.blocks.shape[1], TOP_K=top_k, BLOCK_H=tiles.rows, BLOCK_N=tiles.positions,
        BLOCK_D=block_d, BLOCK_S=min(COUNTED, sequence_bucket(len(table))), num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **gpu.options,
    )  # fmt: skip
    return merge_sums(Sums(out, weights), q.dtype)


@jit(do_not_specialize=["num_tokens", "num_rows", "num_splits", "table_stride", "runs_stride"],
     do_not_specialize_on_alignment=["starts", "lengths"])  # fmt: skip
def _attend_kernel(
    q, cache, table, k_scale, sinks, runs, runs_table, selected, starts, lengths, out, weights, num_tokens, num_rows,
    num_splits, q_stride, table_stride, runs_stride, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr, ENTRIES: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of a token over what it sees: tiles of its window, then those of its runs; WINDOW, TOP_K: 0 for all.

    q [T, N, D] -> out [T, N, D] or, with weights fp32[splits, T, N], parts fp32[splits, T, N, D] and the log2 of what
    each weighs. ENTRIES: of a block of runs
    """
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    wait_for_inputs(PDL)
    tiles_each: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0) // tiles_each
    heads, columns = tl.program_id(0) % tiles_each * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head = heads < HEADS
    row, stop = _find_row(starts, num_rows, token, BLOCK_S), 0
    if row < num_rows:
        stop = tl.load(lengths + row) - tl.load(starts + row + 1) + token + 1  # the first position that it does not see
    start = 0
    if WINDOW > 0:
        start = tl.maximum(stop - WINDOW, 0)
    num_window = tl.cdiv(stop - start, BLOCK_N)
    num_tiles, num_runs = num_window, 0
    if runs is not None:
        num_runs = stop // EVERY
        if TOP_K > 0:
            num_runs = tl.minimum(num_runs, TOP_K)
        num_tiles += tl.cdiv(num_runs, BLOCK_N)
    part = tl.cdiv(num_tiles, num_splits)
    tile = tl.program_id(1) * part
    end_tile = tl.minimum(tile + part, num_tiles)
    rows = token.to(tl.int64) * HEADS + heads
    out_rows = rows
    if weights is not None:
        out_rows += tl.program_id(1).to(tl.int64) * num_tokens * HEADS
        if tile >= end_tile:
            tl.store(weights + out_rows, tl.full([BLOCK_H], NOTHING, tl.float32), mask=is_head)
            return

    mask = is_head[:, None] & (columns < DIM)[None, :]
    places = q + token.to(tl.int64) * q_stride + heads[:, None] * DIM + columns[None, :]
    queries = tl.load(places, mask=mask, other=0.0)
    best, total = begin_softmax(sinks, heads, is_head, tl.program_id(1) == 0)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    best, total, acc = _attend_entries(
        queries, best, total, acc, cache, table + row.to(tl.int64) * table_stride, None, k_scale,
        start + tile * BLOCK_N, tl.minimum(start + end_tile * BLOCK_N, stop), SCALE, DIM, SIZE, 1, SIZE, BLOCK_N,
    )  # fmt: skip
    if runs is not None:
        if TOP_K > 0:
            selected += token.to(tl.int64) * TOP_K
        best, total, acc = _attend_entries(
            queries, best, total, acc, runs, runs_table + row.to(tl.int64) * runs_stride, selected, None,
            tl.maximum(tile - num_window, 0) * BLOCK_N, tl.minimum((end_tile - num_window) * BLOCK_N, num_runs),
            SCALE, DIM, SIZE, EVERY, ENTRIES, BLOCK_N,
        )  # fmt: skip
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    if weights is not None:
        tl.store(weights + out_rows, tl.where(has_seen, best + tl.log2(total), NOTHING), mask=is_head)
    acc = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_rows[:, None] * DIM + columns[None, :], acc, mask=mask)


@jit
def _attend_entries(
    q, best, total, acc, cache, table, selected, k_scale, begin, end, SCALE: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, EVERY: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows q [H, BLOCK_D] attend to a sequence's entries begin to end or, of those `selected`, to the ones there.

    An entry is of EVERY tokens, and a key and a value; a place in the table is for SIZE tokens, or ENTRIES entries.
    Numbers of entries are read two tiles ahead of these, and blocks one, so that a tile waits for neither.
    """
    factor = SCALE * LOG2E
    if k_scale is not None:
        factor = factor * k_scale
    columns = tl.arange(0, q.shape[1])
    slots = _find_slots(table, _find_numbers(selected, begin, end, BLOCK_N), SIZE, EVERY, ENTRIES)
    numbers = _find_numbers(selected, begin + BLOCK_N, end, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        is_there = slots >= 0
        mask = is_there[:, None]
        if q.shape[1] != DIM:
            mask = mask & (columns < DIM)[None, :]
        keys = tl.load(cache + slots[:, None] * DIM + columns[None, :], mask=mask, other=0.0).to(q.dtype)
        slots = _find_slots(table, numbers, SIZE, EVERY, ENTRIES)
        numbers = _find_numbers(selected, first + 2 * BLOCK_N, end, BLOCK_N)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(shares, 1)
        if k_scale is not None:
            shares *= k_scale
        acc = tl.dot(shares.to(q.dtype), keys, acc * fade[:, None], input_precision="ieee")
        best = higher
    return best, total, acc


@jit
def _find_numbers(selected, begin, end, BLOCK_N: tl.constexpr):
    """The entries i32[BLOCK_N] from `begin` on, or those selected there; -1 from `end` on."""
    places = begin + tl.arange(0, BLOCK_N)
    numbers = tl.where(places < end, places, -1)
    if selected is not None:
        numbers = tl.load(selected + places, mask=places < end, other=-1)
    return numbers


@jit
def _find_slots(table, numbers, SIZE: tl.constexpr, EVERY: tl.constexpr, ENTRIES: tl.constexpr):
    """Where in the cache the entries of these numbers are, i64; -1 if there are none."""
    is_there = numbers >= 0
    block = tl.load(table + (numbers * EVERY + EVERY - 1) // SIZE, mask=is_there, other=0).to(tl.int64)
    # multiples of 1 only: Triton takes sums of a block's start and places in it for multiples of the block's size
    return tl.where(is_there, tl.multiple_of(block * ENTRIES + numbers % ENTRIES, 1), -1)


@jit
def _run_tokens_kernel(runs, positions, out, GROUPS: tl.constexpr, TOP_K: tl.constexpr, EVERY: tl.constexpr,
                       WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some tokens of a row: those that no whole run has, then those of the runs that are selected."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(positions + row // GROUPS) + 1
    ended = seen // EVERY * EVERY
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = columns - (seen - ended)  # among the tokens of runs
    is_of_run = (places >= 0) & (places < TOP_K * EVERY)
    run = tl.load(runs + row * TOP_K + places // EVERY, mask=is_of_run, other=-1)
    token = tl.where(run < 0, -1, run * EVERY + places % EVERY)
    token = tl.where(places < 0, ended + columns, token)
    tl.store(out + row * WIDTH + columns, token.to(tl.int32), mask=columns < WIDTH)


def run_tokens(selected: Tensor, positions: Tensor, *, every: int) -> Tensor:
    """selected i32[T, G, k], positions i64[T] -> i32[T, G, k * every + every - 1]"""
    assert selected.is_contiguous() and positions.is_contiguous(), "rows have gaps"
    tokens, groups, top_k = selected.shape
    width = top_k * every + every - 1
    out = selected.new_empty(tokens, groups, width)
    block = min(TOKENS, next_power_of_2(width))
    if tokens:
        _run_tokens_kernel[(tokens * groups, -(-width // block))](
            selected, positions, out, GROUPS=groups, TOP_K=top_k, EVERY=every, WIDTH=width, BLOCK=block,
            **find_gpu(selected.device).options,
        )  # fmt: skip
    return out

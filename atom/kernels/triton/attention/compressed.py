"""Pool runs of tokens, choose among runs, attend to tokens and runs.

    pooled = paged_compress(kv, gate, bias, cache, batch, overlaps=True)
    selected = paged_index_topk(index_q, weights, keys, batch, top_k=512, every=4)
    tokens = run_tokens(selected, positions, every=4)    # that latent attention attends to
    a = paged_mqa_attention(q, cache, batch, sinks, None, runs, selected, scale=0.04, window=128, every=4)

A program of either has a token, whose sequence and position it finds by counting, so that a launch depends on the
number of tokens only. Most tokens end no run: their programs write zeros. All heads of a token read one key, so that a
tile of the attention is of heads, and each key is read once for them (DeepSeek-AI 2026).

Scores of an indexer are written for all runs that a table has room for, so that no launch waits for lengths.

The place in a table of the block with a run's entry is that of the run's last token, whatever the size of a block.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import write_entries
from atom.graph.ops.compressed import to_pool
from atom.kernels.triton.attention.common import LOG2E, NOTHING, has_rows, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

COUNTED = 512  # sequences at a time
COLUMNS = 64  # of an entry that a program pools
ROWS = 32  # tokens at a time, and keys
KEYS = 64  # of an indexer at a time
SCORES = 1 << 26  # in memory at a time
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
    if (position + 1) % EVERY != 0:
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


@jit
def _attend(q, best, total, acc, entries, columns, is_there, SCALE: tl.constexpr, DIM: tl.constexpr):
    """Queries of heads [H, D] attend to entries at pointers [N], which are keys and values."""
    factor: tl.constexpr = SCALE * LOG2E
    keys = tl.load(entries[:, None] + columns[None, :], mask=is_there[:, None] & (columns < DIM)[None, :], other=0.0)
    keys = keys.to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
    scores = tl.where(is_there[None, :], scores, NOTHING)
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.where(is_there[None, :], tl.exp2(scores - higher[:, None]), 0.0)
    fade = tl.exp2(best - higher)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), keys, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@jit(do_not_specialize=["num_rows", "table_stride", "runs_stride"],
     do_not_specialize_on_alignment=["starts", "lengths"])  # fmt: skip
def _attend_both(
    q, cache, table, sinks, runs, runs_table, selected, starts, lengths, out, num_rows, q_stride, table_stride,
    runs_stride, SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    EVERY: tl.constexpr, ENTRIES: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads program_id(1) of token program_id(0). ENTRIES: of a block of runs; WINDOW, TOP_K: 0 for all"""
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    row = _find_row(starts, num_rows, token, BLOCK_S)
    heads, columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (heads < HEADS)[:, None] & (columns < DIM)[None, :]
    target = out + (token.to(tl.int64) * HEADS + heads)[:, None] * DIM + columns[None, :]
    if row >= num_rows:
        tl.store(target, tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty), mask=mask)
        return
    stop = tl.load(lengths + row) - tl.load(starts + row + 1) + token + 1  # the first position that it does not see
    queries = tl.load(q + token.to(tl.int64) * q_stride + heads[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
    best, total = tl.full([BLOCK_H], NOTHING, tl.float32), tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(stop - WINDOW, 0)
    for first in range(start, stop, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        is_there = positions < stop
        blocks = tl.load(table + row * table_stride + positions // SIZE, mask=is_there, other=0).to(tl.int64)
        entries = cache + (blocks * SIZE + positions % SIZE) * DIM
        best, total, acc = _attend(queries, best, total, acc, entries, columns, is_there, SCALE, DIM)
    if runs is not None:
        num_runs = stop // EVERY
        if TOP_K > 0:
            num_runs = tl.minimum(num_runs, TOP_K)
        for first in range(0, num_runs, BLOCK_N):
            numbers = first + tl.arange(0, BLOCK_N)
            is_there = numbers < num_runs
            if TOP_K > 0:
                numbers = tl.load(selected + token.to(tl.int64) * TOP_K + numbers, mask=is_there, other=-1)
                is_there = numbers >= 0
            places = (numbers * EVERY + EVERY - 1) // SIZE
            blocks = tl.load(runs_table + row * runs_stride + places, mask=is_there, other=0).to(tl.int64)
            entries = runs + (blocks * ENTRIES + numbers % ENTRIES) * DIM
            best, total, acc = _attend(queries, best, total, acc, entries, columns, is_there, SCALE, DIM)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=heads < HEADS, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(best, sink)
        fade = tl.exp2(best - higher)
        total, acc = total * fade + tl.exp2(sink - higher), acc * fade[:, None]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def paged_mqa_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                        k_scale: Tensor | None = None, runs: PagedCache | None = None,
                        selected: Tensor | None = None, *, scale: float, window: int | None = None,
                        every: int = 1) -> Tensor:  # fmt: skip
    """The op of this name, of a cache that is not in fp8."""
    assert k_scale is None and has_rows(q), "entries in fp8 are not accepted, and heads lie side by side"
    (tokens, heads, dim), table, gpu = q.shape, batch.tables[cache.kind], find_gpu(q.device)
    runs_table = table if runs is None else batch.tables[runs.kind]
    rows = 16 if heads <= 16 else 32
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _attend_both[(tokens, -(-heads // rows))](
        q, cache.blocks, table, sinks, None if runs is None else runs.blocks, runs_table, selected, batch.starts,
        batch.lengths, out, len(table), q.stride(0), table.stride(0), runs_table.stride(0), scale, heads, dim,
        window or 0, cache.blocks.shape[1], every, 1 if runs is None else runs.blocks.shape[1],
        0 if selected is None else selected.shape[2], rows, ROWS if q.element_size() == 2 else 16,
        max(16, next_power_of_2(dim)), COUNTED, num_warps=4 if rows == 16 else 8, num_stages=2, **gpu.options,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["num_rows", "table_stride", "first_token"],
     do_not_specialize_on_alignment=["starts", "lengths"])  # fmt: skip
def _score_runs(
    q, weights, cache, table, starts, lengths, scores, num_rows, q_stride, weights_stride, table_stride, first_token,
    width, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores program_id(1) of token first_token + program_id(0), -inf of runs that have not ended.

    weights None: each head's is 1
    """
    wait_for_inputs(PDL)
    token = first_token + tl.program_id(0)
    row = _find_row(starts, num_rows, token, BLOCK_S)
    numbers = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = scores + tl.program_id(0).to(tl.int64) * width + numbers
    num_runs = 0
    if row < num_rows:
        num_runs = (tl.load(lengths + row) - tl.load(starts + row + 1) + token + 1) // EVERY
    summed = tl.full([BLOCK_N], float("-inf"), tl.float32)
    if tl.program_id(1) * BLOCK_N < num_runs:
        is_there, columns = numbers < num_runs, tl.arange(0, BLOCK_D)
        places = (numbers * EVERY + EVERY - 1) // SIZE
        blocks = tl.load(table + row * table_stride + places, mask=is_there, other=0).to(tl.int64)
        entries = cache + (blocks * ENTRIES + numbers % ENTRIES) * DIM
        seen = is_there[:, None] & (columns < DIM)[None, :]
        keys = tl.load(entries[:, None] + columns[None, :], mask=seen, other=0.0)
        summed = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, HEADS, BLOCK_H):
            heads = first + tl.arange(0, BLOCK_H)
            mask = (heads < HEADS)[:, None] & (columns < DIM)[None, :]
            queries = tl.load(q + token.to(tl.int64) * q_stride + heads[:, None] * DIM + columns[None, :], mask=mask,
                              other=0.0)  # fmt: skip
            products = tl.dot(keys.to(queries.dtype), tl.trans(queries), input_precision="ieee")
            products = tl.maximum(products, 0.0)
            if weights is not None:
                by_head = tl.load(weights + token.to(tl.int64) * weights_stride + heads, mask=heads < HEADS, other=0.0)
                products *= by_head.to(tl.float32)[None, :]
            summed += tl.sum(products, 1)
        summed = tl.where(is_there, summed, float("-inf"))
    tl.store(target, summed, mask=numbers < width)


def paged_index_topk(q: Tensor, weights: Tensor | None, cache: PagedCache, batch: Batch, *, top_k: int,
                     every: int = 1) -> Tensor:  # fmt: skip
    """The op of this name, of keys that are not in fp8: all scores of some tokens at a time, then the best of them."""
    assert has_rows(q) and (weights is None or weights.stride(1) == 1), "heads lie side by side"
    (tokens, heads, dim), table, gpu = q.shape, batch.tables[cache.kind], find_gpu(q.device)
    width = table.shape[1] * batch.block_size // every
    out = torch.full((tokens, 1, top_k), -1, dtype=torch.int32, device=q.device)
    at_once = max(1, SCORES // max(width, 1))
    for first in range(0, tokens, at_once):
        num = min(at_once, tokens - first)
        scores = torch.empty(num, width, dtype=torch.float32, device=q.device)
        _score_runs[(num, -(-width // KEYS))](
            q, weights, cache.blocks, table, batch.starts, batch.lengths, scores, len(table), q.stride(0),
            0 if weights is None else weights.stride(0), table.stride(0), first, width, heads, dim, batch.block_size,
            every, cache.blocks.shape[1], 16 if heads <= 16 else 32, KEYS, max(16, next_power_of_2(dim)), COUNTED,
            num_warps=4, **gpu.options,
        )  # fmt: skip
        best = scores.topk(min(top_k, width))
        ids = best.indices.masked_fill(best.values == float("-inf"), -1)
        out[first : first + num, 0, : ids.shape[1]] = ids.int()
    return out


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

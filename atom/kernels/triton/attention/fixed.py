"""Attention of prompts and decodes alike, by one order of sums, for batch-invariant runs.

    out = paged_attention(q, cache, batch, scale=0.125)

A tile has consecutive queries of one sequence, a decode's has one, each with all query heads of one kv head. Its keys
come in tiles of BLOCK_N from a multiple of BLOCK_N on, all of them masked: those that a query does not see change
nothing of its softmax. So a query's bits follow from its own position, not from how its prompt was cut, nor from other
sequences. Nothing is split by positions, and no prefix is shared.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.kernels.triton.attention.common import (
    NOTHING,
    attend_keys,
    find_first,
    find_owner,
    has_rows,
    load_slopes,
    look_up,
    product_size,
    sequence_bucket,
    store_attended,
    wait_for_inputs,
)
from atom.kernels.triton.attention.prefill import Parameters
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.padded_alloc import new_rows


def choose(dim: int, element_size: int, gpu: Gpu) -> Parameters:
    """The tiles, by a head's dims, a power of two, and the bytes of an element of what is multiplied: not by rows."""
    if element_size == 4:
        return Parameters(32, 16, 8, 2) if dim <= 256 else Parameters(16, 16, 8, 1)
    if gpu.shared_memory <= 99 << 10:
        return Parameters(64, 16 if dim > 128 else 32, 4, 2)
    return Parameters(64, 32, 8 if dim > 256 else 4, 2) if dim > 128 else Parameters(64, 64, 4, 3)


@jit(
    do_not_specialize=["num_tokens", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _attend(
    q, cache, table, starts, lengths, sinks, k_scale, v_scale, slopes, out, num_tokens, num_sequences, table_stride,
    q_stride, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M // GROUP queries of one sequence by GROUP heads of the kv head program_id(1), of HEADS.

    Tokens after the last sequence are one more, which sees nothing and gives zeros.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    wait_for_inputs(PDL)
    sequences = tl.arange(0, BLOCK_S)
    firsts = tl.load(starts + sequences, mask=sequences <= num_sequences, other=num_tokens)
    stops = tl.load(starts + sequences + 1, mask=sequences < num_sequences, other=num_tokens)
    counts = tl.cdiv(stops - firsts, QUERIES)
    tile = tl.sum(counts, 0) - 1 - tl.program_id(0)  # the longest of a prompt first
    if tile < 0:
        return
    sequence, before = find_owner(counts, tile)
    head = tl.program_id(1)
    first = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1, mask=sequence < num_sequences, other=num_tokens)
    length = tl.load(lengths + sequence, mask=sequence < num_sequences, other=0)
    place = (tile - before) * QUERIES
    columns, rows = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    tokens = first + place + rows // GROUP
    heads = head * GROUP + rows % GROUP
    is_row = (rows < QUERIES * GROUP) & (tokens < end)
    q_rows = q + tokens.to(tl.int64) * q_stride + heads * DIM
    queries = tl.load(q_rows[:, None] + columns[None, :], mask=is_row[:, None] & (columns < DIM)[None, :], other=0.0)
    if cache.dtype.element_ty != q.dtype.element_ty and not cache.dtype.element_ty.is_fp8():
        queries = queries.to(tl.float32)
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    if v_scale is not None:
        v_scale = tl.load(v_scale)
    if slopes is not None:
        slopes = load_slopes(slopes, heads, is_row)
    keys = cache + head * DIM
    blocks = table + sequence.to(tl.int64) * table_stride
    oldest = length - (end - first) + place
    newest = oldest + rows // GROUP
    stop = tl.minimum(oldest + QUERIES, length)
    start = 0
    if WINDOW is not None:
        start = tl.maximum(find_first(oldest, WINDOW, False), 0) // BLOCK_N * BLOCK_N
    best = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
    best, total, acc = attend_keys(
        queries, best, total, acc, keys, keys + HEADS * DIM, blocks, block, start, stop, newest, newest, k_scale,
        slopes, SCALE, SOFTCAP, WINDOW, False, True, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_N,
    )  # fmt: skip
    offsets = (tokens.to(tl.int64) * (HEADS * GROUP) + heads) * DIM
    store_attended(acc, best, total, sinks, v_scale, out, heads, offsets, is_row, DIM)


def paged_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                    k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                    *_absent: None, scale: float, window: int | None = None, softcap: float | None = None,
                    **_attributes: object) -> Tensor:  # fmt: skip
    """Shapes as in the op; the rows of q may lie apart."""
    (num_tokens, heads, dim), (block_size, _two, kv_heads, _dim) = q.shape, cache.blocks.shape[1:]
    assert has_rows(q) and cache.blocks.is_contiguous(), "heads and blocks must lie side by side"
    out, table, gpu = new_rows(q, *q.shape), batch.tables[cache.kind], find_gpu(q.device)
    num_sequences, group, width = batch.lengths.shape[0], heads // kv_heads, max(16, next_power_of_2(dim))
    rows, positions, num_warps, num_stages, _registers = choose(width, product_size(q, cache.blocks), gpu)
    rows = max(rows, next_power_of_2(group))
    num_tiles = num_tokens // (rows // group) + num_sequences + 1
    _attend[(num_tiles, kv_heads)](
        q, cache.blocks, table, batch.starts, batch.lengths, sinks, k_scale, v_scale, slopes, out, num_tokens,
        num_sequences, table.stride(0), q.stride(0), scale, softcap, window, block_size, kv_heads, group, dim,
        sequence_bucket(num_sequences + 1), rows, positions, width, num_warps=num_warps, num_stages=num_stages,
        **gpu.options,
    )  # fmt: skip
    return out

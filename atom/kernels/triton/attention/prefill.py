"""Prefill attention: causal tiles of queries over the paged context.

    args = q, cache, table, starts, lengths, num_decodes, sinks, k_scale, v_scale, out
    prefill(*args, scale, window, softcap)
    prefill(*args, scale, window, softcap, ends=ends)       # some queries see later tokens, too: those of an image

A tile has consecutive queries of one sequence, each with all query heads of one kv head, so that keys and values are
read once for the group. The launch depends on the numbers of tokens and sequences only: each program finds its tile in
`starts`, and the longest tiles of a sequence come first.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import (
    NOTHING,
    attend_keys,
    find_first,
    find_owner,
    load_slopes,
    look_up,
    product_size,
    sequence_bucket,
    store_attended,
    wait_for_inputs,
)
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2


class Parameters(NamedTuple):
    rows: int = 128  # queries times heads in a tile
    positions: int = 64  # of keys and values in a tile
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = None  # a thread; NVIDIA only


def choose(dim: int, element_size: int, entry_size: int, gpu: Gpu) -> Parameters:
    """dim: of a head, a power of two; bytes of an element: element_size of products, entry_size of the cache"""
    if element_size == 4:
        return Parameters(32, 16, 8, 2) if dim <= 256 else Parameters(16, 16, 8, 1)  # without tensor cores
    if gpu.shared_memory <= 99 << 10:
        if dim > 256:
            return Parameters(32, 16, 4, 2)
        return Parameters(128, 32, 4, 2) if dim <= 128 else Parameters(64, 16, 4, 2)
    if dim > 256:
        return Parameters(64, 32, 8, 2)
    if dim > 128:
        return Parameters(128, 32, 8, 2)
    if gpu.shared_memory > 200 << 10 and (dim <= 64 or entry_size == element_size):  # to convert takes more registers
        return Parameters(num_stages=2, max_registers=128)  # measured on an H200
    return Parameters()


@jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths", "ends"],
)
def _prefill(
    q, cache, table, plan, starts, lengths, sinks, k_scale, v_scale, slopes, ends, out, num_tokens, num_sequences,
    num_decodes, table_stride, q_stride, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M // GROUP queries by GROUP heads of the kv head program_id(1), of HEADS.

    Tokens after the last sequence are one more, which sees nothing and gives zeros.

    plan: of context.py; few programs share the tiles of sequences that are not unpacked, since mostly all are. None:
        a program has one tile
    """
    wait_for_inputs(PDL)
    sequences = num_decodes + tl.arange(0, BLOCK_S)
    firsts = tl.load(starts + sequences, mask=sequences <= num_sequences, other=num_tokens)
    stops = tl.load(starts + sequences + 1, mask=sequences < num_sequences, other=num_tokens)
    counts = tl.cdiv(stops - firsts, BLOCK_M // GROUP)
    if plan is None:
        tile = tl.sum(counts, 0) - 1 - tl.program_id(0)
        if tile < 0:
            return
        owner, before = find_owner(counts, tile)
        _attend_tile(
            q, cache, table, starts, lengths, sinks, k_scale, v_scale, slopes, ends, out, num_tokens, num_sequences,
            table_stride, q_stride, num_decodes + owner, tile - before, tl.program_id(1), SCALE, SOFTCAP, WINDOW,
            CHUNKED, BLOCK_SIZE, HEADS, GROUP, DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        is_left = tl.load(plan + sequences, mask=sequences <= num_sequences, other=0) < 0
        counts = tl.where(is_left, counts, 0)
        num_tiles = tl.sum(counts, 0)
        for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            tile = num_tiles - 1 - number
            owner, before = find_owner(counts, tile)
            _attend_tile(
                q, cache, table, starts, lengths, sinks, k_scale, v_scale, slopes, ends, out, num_tokens, num_sequences,
                table_stride, q_stride, num_decodes + owner, tile - before, tl.program_id(1), SCALE, SOFTCAP, WINDOW,
                CHUNKED, BLOCK_SIZE, HEADS, GROUP, DIM, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip


@jit
def _attend_tile(
    q, cache, table, starts, lengths, sinks, k_scale, v_scale, slopes, ends, out, num_tokens, num_sequences,
    table_stride, q_stride, sequence, tile, head, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    place = tile * QUERIES  # of its first query in the sequence
    first = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1, mask=sequence < num_sequences, other=num_tokens)
    length = tl.load(lengths + sequence, mask=sequence < num_sequences, other=0)
    context = length - (end - first)

    columns = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
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
    keys = cache + head * DIM
    values = keys + HEADS * DIM
    blocks = table + sequence.to(tl.int64) * table_stride
    newest = context + place + rows // GROUP
    oldest_query = context + place
    stop = tl.minimum(oldest_query + QUERIES, length)
    seen = newest
    if ends is not None:
        seen = tl.maximum(newest, tl.load(ends + tokens, mask=is_row, other=-1))
        stop = tl.minimum(tl.maximum(stop, tl.max(seen, 0) + 1), length)
    if slopes is not None:
        slopes = load_slopes(slopes, heads, is_row)
    start = 0
    best = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW is not None:
        start = tl.maximum(find_first(oldest_query, WINDOW, CHUNKED), 0)
    block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
    if WINDOW is None or CHUNKED:
        whole = start + tl.maximum(oldest_query + 1 - start, 0) // BLOCK_N * BLOCK_N  # every row sees these
        if CHUNKED:  # none, if a chunk begins among the rows
            whole = tl.where(oldest_query // WINDOW == (oldest_query + QUERIES - 1) // WINDOW, whole, start)
        best, total, acc = attend_keys(
            queries, best, total, acc, keys, values, blocks, block, start, whole, newest, seen, k_scale, slopes,
            SCALE, SOFTCAP, WINDOW, CHUNKED, False, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_N,
        )  # fmt: skip
        start = whole
        block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
    best, total, acc = attend_keys(
        queries, best, total, acc, keys, values, blocks, block, start, stop, newest, seen, k_scale, slopes,
        SCALE, SOFTCAP, WINDOW, CHUNKED, True, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_N,
    )  # fmt: skip
    offsets = (tokens.to(tl.int64) * (HEADS * GROUP) + heads) * DIM
    store_attended(acc, best, total, sinks, v_scale, out, heads, offsets, is_row, DIM)


def prefill(q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
            sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor, scale: float,
            window: int | None, softcap: float | None, parameters: Parameters | None = None,
            plan: Tensor | None = None, slopes: Tensor | None = None, chunked: bool = False,
            ends: Tensor | None = None) -> None:  # fmt: skip
    """Rows from num_decodes on of q and out [T, N, D]; shapes as in the op.

    plan: of context.py; only the sequences that are not unpacked are attended. None: all
    ends: i32[T], as in the op
    """
    num_tokens, heads, dim = q.shape
    _, block_size, _, kv_heads, _ = cache.shape
    num_sequences, group = lengths.shape[0], heads // kv_heads
    gpu = find_gpu(q.device)
    rows, positions, num_warps, num_stages, max_registers = parameters or choose(
        max(16, next_power_of_2(dim)), product_size(q, cache), cache.element_size(), gpu
    )
    options = gpu.options if max_registers is None else {**gpu.options, "maxnreg": max_registers}
    rows = max(rows, next_power_of_2(group))
    num_prefills = num_sequences - num_decodes
    num_tiles = (num_tokens - num_decodes) // (rows // group) + num_prefills + 1
    if plan is not None:
        num_tiles = min(num_tiles, -(-2 * gpu.units // kv_heads))
    _prefill[(num_tiles, kv_heads)](
        q, cache, table, plan, starts, lengths, sinks, k_scale, v_scale, slopes, ends, out, num_tokens, num_sequences,
        num_decodes, table.stride(0), q.stride(0), scale, softcap, window, chunked, block_size, kv_heads, group, dim,
        sequence_bucket(num_prefills + 1), rows, positions, max(16, next_power_of_2(dim)), num_warps=num_warps,
        num_stages=num_stages, **options,
    )  # fmt: skip

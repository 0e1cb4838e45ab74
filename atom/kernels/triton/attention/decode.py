"""Decode attention: each program reads an equal share of all keys and values.

    decode = Decode()
    args = q, cache, table, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window, softcap
    decode(*args)            # all keys are there
    decode(*args, newest)    # but for one each

The tiles of all sequences are laid end to end and cut into equal runs, one for each program, whatever the lengths are
(as in Sanovar et al. 2024). If a cut falls into a sequence, its parts go through memory, and the last program to
arrive merges them. So the launch depends on neither the lengths nor the width of the table.

With `newest`, programs norm and rotate the queries that they need themselves, and the one with a sequence's last run
writes its newest key and value, from which its softmax starts: no tile has them. On NVIDIA from sm_90 the kernel then
starts while the preceding one still runs, and loads the first tiles meanwhile. PDL contract: lengths, table and all
older entries must be written at least two kernels upstream; only the immediately preceding kernel may still be running.
So a decode reads no entry that a prompt of its step writes: `KVCache` sees to that. In a step, the embedding, which
waits for all earlier kernels, lies between the step's inputs and the first layer.

A sequence may have several queries, its last positions: they share a tile of queries with the heads of a group, so that
keys and values are read once for all of them. Their own keys are in the cache, without `newest`, and so are those of a
cache in fp8: Triton 3.6 gives wrong numbers for what it has just rounded to fp8.

Of sequences that share a prefix, tiles are laid out from its end on, and the program with a sequence's last run adds
what shared_prefix.py has left of the prefix. Their newest keys are in the cache, too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import (
    NOTHING,
    attend_tile,
    cap_scores,
    find_first,
    find_owner,
    find_run,
    load_keys,
    load_slopes,
    look_up,
    product_size,
    score_factor,
    sequence_bucket,
    store_attended,
)
from atom.kernels.triton.attention.rope import rotate_heads
from atom.kernels.triton.attention.shared_prefix import PrefixParts, add_prefix
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.unpack import unpack_bytes

MANY = 64  # sequences: with more, a program has the ends of several


class Parameters(NamedTuple):
    tile_bytes: int = 16384  # of the keys of a tile: 64 positions of 128 dims in bf16
    programs_per_unit: int = 2  # programs a multiprocessor
    num_warps: int = 4
    num_stages: int = 3


MANY_SMALL = Parameters(8192, programs_per_unit=4, num_warps=2)


class Newest(NamedTuple):
    """The arguments of norm_rope_write, whose work the kernel does: q is given without norm and position."""

    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    slots: Tensor
    eps: float
    interleaved: bool


def choose(num_sequences: int, dim: int, element_size: int, entry_size: int, gpu: Gpu) -> Parameters:
    """Choose the tiles.

    element_size: bytes of a number that is multiplied
    entry_size: bytes of a number in the cache
    """
    if dim > 256:  # whose sums and queries take twice the registers
        return Parameters(num_warps=8, num_stages=2 if element_size == 4 or gpu.shared_memory < 99 << 10 else 3)
    if element_size == 4 or gpu.shared_memory < 99 << 10:
        return Parameters(tile_bytes=8192, num_stages=2)
    if entry_size < element_size:
        is_fit = num_sequences < 4 and dim <= 128  # ptxas 12.9 crashes on what larger heads take of registers
        return Parameters(programs_per_unit=4, num_stages=2) if is_fit else MANY_SMALL
    return MANY_SMALL if num_sequences > MANY else Parameters()


@jit
def _merge(sums, stats, sinks, v_scale, out, head, first, last, PROGRAMS: tl.constexpr, HEADS: tl.constexpr,
           GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK_G: tl.constexpr,
           BLOCK_D: tl.constexpr):  # fmt: skip
    """The parts that programs first to last left of one sequence, as one softmax, to its queries' heads at `out`."""
    ROWS: tl.constexpr = GROUP * QUERIES
    rows, columns = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_G], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for part in range(first, last + 1, PARTS):
        programs = part + tl.arange(0, PARTS)
        slots = (head * PROGRAMS + programs) * 2 + (programs == first).to(tl.int32)
        is_row = (programs <= last)[:, None] & (rows < ROWS)[None, :]
        at = slots[:, None] * ROWS + rows[None, :]
        bests = tl.load(stats + 2 * at, mask=is_row, other=NOTHING, cache_modifier=".cg")
        totals = tl.load(stats + 2 * at + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        is_there = is_row[:, :, None] & (columns < DIM)[None, None, :]
        parts = tl.load(sums + at[:, :, None] * DIM + columns[None, None, :], mask=is_there, other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        higher = tl.maximum(best, tl.max(bests, 0))
        fades, fade = tl.exp2(bests - higher[None, :]), tl.exp2(best - higher)
        total = total * fade + tl.sum(totals * fades, 0)
        acc = acc * fade[:, None] + tl.sum(parts * fades[:, :, None], 0)
        best = higher
    heads = head * GROUP + rows % GROUP
    store_attended(acc, best, total, sinks, v_scale, out, heads, _find_rows(rows, HEADS, GROUP, DIM), rows < ROWS, DIM)


@jit
def _find_rows(rows, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Where rows of a tile of queries, the heads of a group for each query, are in a tensor [queries, heads, DIM]."""
    return rows // GROUP * (HEADS * GROUP * DIM) + rows % GROUP * DIM


@jit
def _attend_newest(
    q_rows, k_row, v_row, cos, sin, q_norm, k_norm, entry, row, is_last, is_seen, DOT: tl.constexpr,
    EPS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The queries [M, BLOCK_D] of sequence `row`, and their softmax over its newest key if is_seen, else none.

    If is_last, that key and its value go to `entry` of the cache. The key is row GROUP of what is rotated at a time.
    """
    rows, columns = tl.arange(0, q_rows.shape[0]), tl.arange(0, BLOCK_D)[None, :]
    is_column = columns < DIM
    value = tl.load((v_row + 0 * rows)[:, None] + columns, mask=is_column, other=0.0)
    value = value.to(entry.dtype.element_ty)
    norms = None if q_norm is None else tl.where(rows < GROUP, q_norm, k_norm)
    rotated = rotate_heads(tl.where(rows < GROUP, q_rows, k_row), columns, row + 0 * rows, rows >= 0, cos, sin, norms,
                        EPS, INTERLEAVED, DIM, HALF)  # fmt: skip
    key = rotated.to(entry.dtype.element_ty)
    queries = tl.where((rows < GROUP)[:, None], rotated.to(q_rows.dtype.element_ty).to(DOT), key.to(DOT))
    is_written = is_last & (rows == GROUP)[:, None] & is_column
    places = (entry + 0 * rows)[:, None] + columns
    tl.store(places, key, mask=is_written)
    tl.store(places + HEADS * DIM, value, mask=is_written)

    qk = tl.dot(queries, tl.trans(queries), input_precision="ieee")
    scores = cap_scores(tl.sum(tl.where(rows[None, :] == GROUP, qk, 0.0), 1), None, SCALE, SOFTCAP)
    best = tl.where(is_seen, scores * score_factor(None, SCALE, SOFTCAP), NOTHING)
    total = tl.where(is_seen, 1.0, tl.zeros_like(best))
    return queries, best, total, tl.where(is_seen, value.to(tl.float32), 0.0)


@jit(
    do_not_specialize=["num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["table", "lengths", "slots", "prefixes", "places"],
)
def _decode(
    q, k, v, cos, sin, q_norm, k_norm, slots, cache, table, lengths, sinks, k_scale, v_scale, slopes, out, sums, stats,
    tickets, prefixes, prefix_sums, prefix_stats, places, num_decodes, table_stride, q_stride, k_stride, v_stride,
    EPS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a run of tiles of the kv head program_id(0). HEADS of keys, GROUP query heads to each, and QUERIES
    of each sequence.

    Without k the newest keys are in the cache, and q is as it shall be. prefixes i32[S]: leading positions that are in
    no tile, since others have attended to them, in SLOTS parts of TILE rows.
    """
    ROWS: tl.constexpr = GROUP * QUERIES
    NEWEST: tl.constexpr = 0 if k is None else 1  # positions that are in no tile
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if k is None:
            tl.extra.cuda.gdc_wait()
    head, program = tl.program_id(0), tl.program_id(1)
    sequences = tl.arange(0, BLOCK_S)
    counts = tl.load(lengths + sequences, mask=sequences < num_decodes, other=0)
    if WINDOW is not None:
        counts -= tl.maximum(find_first(counts - QUERIES, WINDOW, CHUNKED), 0)
    if prefixes is not None:
        counts -= tl.load(prefixes + sequences, mask=sequences < num_decodes, other=0)
    counts = tl.where(sequences < num_decodes, tl.maximum(tl.cdiv(counts - NEWEST, BLOCK_N), 1), 0)
    tile, end, share = find_run(counts, program, PROGRAMS)
    sequence, before = find_owner(counts, tile)

    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_q = (rows < ROWS)[:, None] & (columns < DIM)[None, :]
    keys = cache + head * DIM
    values = keys + HEADS * DIM
    ENTRY: tl.constexpr = cache.dtype.element_ty
    DOT: tl.constexpr = q.dtype.element_ty if q.dtype.element_ty == ENTRY or ENTRY.is_fp8() else tl.float32
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    if v_scale is not None:
        v_scale = tl.load(v_scale)
    if slopes is not None:
        slopes = load_slopes(slopes, head * GROUP + rows % GROUP, rows < ROWS)
    while tile < end:
        length = tl.load(lengths + sequence)
        oldest = 0
        if WINDOW is not None:
            oldest = tl.maximum(find_first(length - QUERIES, WINDOW, CHUNKED), 0)
        if prefixes is not None:
            oldest = tl.load(prefixes + sequence)
        after = before + tl.maximum(tl.cdiv(length - NEWEST - oldest, BLOCK_N), 1)
        run_end = tl.minimum(end, after)
        start = oldest + (tile - before) * BLOCK_N
        stop = tl.minimum(oldest + (run_end - before) * BLOCK_N, length - NEWEST)
        blocks = table + sequence.to(tl.int64) * table_stride
        block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
        row = sequence.to(tl.int64)
        queries = tl.zeros([BLOCK_M, BLOCK_D], DOT)
        best = tl.full([BLOCK_M], NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for first in range(start, tl.maximum(stop, start + 1), BLOCK_N):
            positions = first + tl.arange(0, BLOCK_N)
            tile_keys, tile_values, block = load_keys(
                keys, values, blocks, block, positions, stop, True, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_D
            )
            if first == start:  # inside the loop, so that the loads of the first tiles are issued before the wait
                query = rows % ROWS // GROUP
                q_rows = q + (row * QUERIES + query) * q_stride + (head * GROUP + rows % GROUP) * DIM
                if k is None:
                    is_column = columns[None, :] < DIM
                    queries = tl.load(q_rows[:, None] + columns[None, :], mask=is_column, other=0.0).to(DOT)
                else:
                    if PDL:
                        tl.extra.cuda.gdc_wait()
                    is_last = run_end == after
                    queries, best, total, acc = _attend_newest(
                        q_rows, k + row * k_stride + head * DIM, v + row * v_stride + head * DIM, cos, sin, q_norm,
                        k_norm, keys + tl.load(slots + row) * (2 * HEADS * DIM), row, is_last,
                        is_last & (length > 0), DOT, EPS, INTERLEAVED, HALF, SCALE, SOFTCAP, HEADS, GROUP, DIM, BLOCK_D,
                    )  # fmt: skip
            if ENTRY.is_fp8() and PDL:
                tile_keys = unpack_bytes(tile_keys.to(tl.uint8, bitcast=True), None, "fp8", DOT, True)
                tile_values = unpack_bytes(tile_values.to(tl.uint8, bitcast=True), None, "fp8", DOT, True)
            is_seen = (positions < stop)[None, :]
            newest = length - QUERIES + rows % ROWS // GROUP
            if QUERIES > 1:
                is_seen = is_seen & (positions[None, :] <= newest[:, None])
                if WINDOW is not None:
                    is_seen = is_seen & (positions[None, :] >= find_first(newest, WINDOW, CHUNKED)[:, None])
            distances = newest[:, None] - positions[None, :]
            best, total, acc = attend_tile(queries, tile_keys, tile_values, best, total, acc, is_seen, k_scale, slopes,
                                           distances, SCALE, SOFTCAP)  # fmt: skip
        if prefixes is not None:  # noqa: SIM102 - which is known when this is compiled
            if (run_end == after) & (oldest > 0):
                best, total, acc = add_prefix(best, total, acc, prefix_sums, prefix_stats, places + 3 * row, head, ROWS,
                                              SLOTS, TILE, DIM, PARTS)  # fmt: skip
        out_row = row * (QUERIES * HEADS * GROUP * DIM) + head * (GROUP * DIM)
        first_part, last_part = before // share, (after - 1) // share
        if first_part == last_part:
            store_attended(acc, best, total, sinks, v_scale, out + out_row, head * GROUP + rows % GROUP,
                           _find_rows(rows, HEADS, GROUP, DIM), rows < ROWS, DIM)  # fmt: skip
        else:
            at = ((head * PROGRAMS + program) * 2 + (program == first_part).to(tl.int32)) * ROWS + rows
            tl.store(stats + 2 * at, best, mask=rows < ROWS)
            tl.store(stats + 2 * at + 1, total, mask=rows < ROWS)
            tl.store(sums + at[:, None] * DIM + columns[None, :], acc, mask=is_q)
            tl.debug_barrier()  # all threads' parts are written before one thread takes the ticket
            ticket = tickets + head * PROGRAMS + first_part
            if tl.atomic_add(ticket, 1, sem="acq_rel") == last_part - first_part:
                _merge(sums, stats, sinks, v_scale, out + out_row, head, first_part, last_part, PROGRAMS, HEADS, GROUP,
                       QUERIES, DIM, PARTS, BLOCK_G, BLOCK_D)  # fmt: skip
                tl.store(ticket, 0)
        tile, before, sequence = run_end, after, sequence + 1


@functools.cache
def _cut_up(num_decodes: int, kv_heads: int, rows: int, dim: int, has_newest: bool, element_size: int, entry_size: int,
            gpu: Gpu, parameters: Parameters | None) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The kernel's arguments from PROGRAMS on, and options. rows: heads of a group, for each query of a sequence"""
    tile_bytes, programs_per_unit, num_warps, num_stages = parameters or choose(
        num_decodes, dim, element_size, entry_size, gpu
    )
    block_d, block_g, block_m = max(16, next_power_of_2(dim)), next_power_of_2(rows), next_power_of_2(rows + has_newest)
    if block_m > 32:  # of several queries: their sums take as many registers as two warps have
        num_warps = 8
    sizes = (
        -(-gpu.units * programs_per_unit // kv_heads),
        sequence_bucket(num_decodes),
        max(16, block_m),
        min(128, max(16, tile_bytes // (block_d * element_size))),
        max(1, 4096 // (block_g * block_d)),
        block_g,
        block_d,
    )
    return sizes, {"num_warps": num_warps, "num_stages": num_stages, **gpu.options}


class Decode:
    """Decode attention, with the memory for parts of sequences; its calls must run one after another."""

    def __init__(self, parameters: Parameters | None = None) -> None:
        self._parameters = parameters
        self._memory: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}  # by shape, for good: graphs hold it

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int, sinks: Tensor | None,
                 k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor, scale: float, window: int | None,
                 softcap: float | None, newest: Newest | None = None, query_len: int = 1,
                 slopes: Tensor | None = None, chunked: bool = False, prefixes: Tensor | None = None,
                 parts: PrefixParts | None = None) -> None:  # fmt: skip
        """Rows 0 to num_decodes * query_len of q and out [T, N, D]; shapes as in ops.norm_rope_attention.

        prefixes: i32[D], leading positions of each sequence that `parts` has; with them neither newest nor window
        """
        assert (prefixes is None) == (parts is None), "what is in no tile is in parts"
        assert prefixes is None or (newest is None and window is None), "parts are of all positions before an end"
        assert newest is None or (query_len == 1 and k_scale is v_scale is None), "their keys are in the cache"
        _, heads, dim = q.shape
        _, block_size, _, kv_heads, _ = cache.shape
        group = heads // kv_heads
        rows = group * query_len
        gpu = find_gpu(q.device)
        sizes, options = _cut_up(num_decodes, kv_heads, rows, dim, newest is not None, product_size(q, cache),
                                 cache.element_size(), gpu, self._parameters)  # fmt: skip
        programs = sizes[0]
        sums, stats, tickets = self.find_memory(q.device, kv_heads, rows, dim, programs)
        k = v = cos = sin = q_norm = k_norm = slots = None
        eps, interleaved, half, k_stride, v_stride = 0.0, False, 0, 0, 0
        if newest is not None:
            k, v, cos, sin, q_norm, k_norm, slots, eps, interleaved = newest
            half, k_stride, v_stride = 0 if cos is None else cos.shape[1], k.stride(0), v.stride(0)
        _decode[(kv_heads, programs)](
            q, k, v, cos, sin, q_norm, k_norm, slots, cache, table, lengths, sinks, k_scale, v_scale, slopes, out, sums,
            stats, tickets, prefixes, *(parts or (None, None, None)), num_decodes, table.stride(0), q.stride(0),
            k_stride, v_stride, eps, interleaved, half, scale, softcap, window, chunked, block_size, kv_heads, group,
            query_len, dim, *(parts.sums.shape[1:3] if parts else (0, 0)), *sizes, **options,
        )  # fmt: skip

    def find_memory(self, device: torch.device, kv_heads: int, rows: int, dim: int, programs: int
                    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """sums fp32[kv_heads, programs, 2, rows, dim], stats fp32[kv_heads, programs, 2, rows, 2] with the best score
        and the total, tickets i32[kv_heads, programs].

        A program has one part of the sequence that it begins in, and one of the sequence that it ends in.
        """
        key = (kv_heads, programs, rows, dim)
        if key not in self._memory:
            self._memory[key] = (
                torch.empty((kv_heads, programs, 2, rows, dim), device=device),
                torch.empty((kv_heads, programs, 2, rows, 2), device=device),
                torch.zeros((kv_heads, programs), dtype=torch.int32, device=device),
            )
        return self._memory[key]

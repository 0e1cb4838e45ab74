"""Paged attention of sequences with one query each: every program reads an equal share of all keys and values.

    decode = Decode()
    decode(q, cache, table, lengths, num_decodes, sinks, out, scale, window, softcap)

The tiles of all sequences are laid end to end and cut into equal runs, one a program, whatever the lengths are (as in
Sanovar et al. 2024). Where a cut falls into a sequence, its parts go through memory, and the last program to arrive
merges them. So the launch depends on neither the lengths nor the width of the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.tiles import (
    NOTHING,
    Gpu,
    attend_keys,
    find_gpu,
    find_owner,
    look_up,
    sequence_bucket,
    store_attended,
    wait_for_inputs,
)


class Parameters(NamedTuple):
    tile_bytes: int = 16384  # of the keys of a tile: 64 positions of 128 dims in bf16
    min_tiles: int = 4  # a program's share is no less: merging costs as much as some tiles
    programs_per_unit: int = 2  # programs a multiprocessor
    num_warps: int = 4
    num_stages: int = 3


def choose(element_size: int, gpu: Gpu) -> Parameters:
    """element_size: of what is multiplied, in bytes"""
    if element_size == 4 or gpu.shared_memory < 99 << 10:
        return Parameters(tile_bytes=8192, num_stages=2)
    return Parameters(num_stages=4) if gpu.shared_memory > 200 << 10 else Parameters()  # measured on an H200


@triton.jit
def _merge(sums, stats, sinks, out, head, first, last, PROGRAMS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
           PARTS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The parts that programs first to last left of one sequence, as one softmax, to its heads at `out`."""
    rows, columns = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_G], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for part in range(first, last + 1, PARTS):
        programs = part + tl.arange(0, PARTS)
        slots = (head * PROGRAMS + programs) * 2 + (programs == first).to(tl.int32)
        is_row = (programs <= last)[:, None] & (rows < GROUP)[None, :]
        at = slots[:, None] * GROUP + rows[None, :]
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
    store_attended(acc, best, total, sinks, out, head * GROUP + rows, rows * DIM, rows < GROUP, DIM)


@triton.jit(
    do_not_specialize=["num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["table", "lengths"],
)
def _decode(
    q, cache, table, lengths, sinks, out, sums, stats, tickets, num_decodes, table_stride, q_stride,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a run of tiles of the kv head program_id(0). HEADS of keys, GROUP query heads to each."""
    wait_for_inputs(PDL)
    head, program = tl.program_id(0), tl.program_id(1)
    sequences = tl.arange(0, BLOCK_S)
    counts = tl.load(lengths + sequences, mask=sequences < num_decodes, other=0)
    if WINDOW is not None:
        counts = tl.minimum(counts, WINDOW)
    counts = tl.where(sequences < num_decodes, tl.maximum(tl.cdiv(counts, BLOCK_N), 1), 0)
    num_tiles = tl.sum(counts, 0)
    share = tl.maximum(tl.cdiv(num_tiles, PROGRAMS), MIN_TILES)
    tile = program * share
    end = tl.minimum(tile + share, num_tiles)
    sequence, before = find_owner(counts, tile)

    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    keys = cache + head * DIM
    values = keys + HEADS * DIM
    while tile < end:
        length = tl.load(lengths + sequence)
        oldest = 0
        if WINDOW is not None:
            oldest = tl.maximum(length - WINDOW, 0)
        after = before + tl.maximum(tl.cdiv(length - oldest, BLOCK_N), 1)
        run_end = tl.minimum(end, after)
        start = oldest + (tile - before) * BLOCK_N
        stop = tl.minimum(oldest + (run_end - before) * BLOCK_N, length)
        blocks = table + sequence.to(tl.int64) * table_stride
        block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
        is_q = (rows < GROUP)[:, None] & (columns < DIM)[None, :]
        q_rows = q + sequence.to(tl.int64) * q_stride + (head * GROUP + rows)[:, None] * DIM
        queries = tl.load(q_rows + columns[None, :], mask=is_q, other=0.0)
        if cache.dtype.element_ty != q.dtype.element_ty:
            queries = queries.to(tl.float32)
        best, total, acc = attend_keys(
            queries, tl.full([BLOCK_M], NOTHING, tl.float32), tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), keys, values, blocks, block, start, stop,
            tl.full([BLOCK_M], 0, tl.int32) + (length - 1), SCALE, SOFTCAP, None, True, BLOCK_SIZE,
            2 * HEADS * DIM, DIM, BLOCK_N,
        )  # fmt: skip
        out_row = (sequence.to(tl.int64) * HEADS + head) * GROUP * DIM
        first, last = before // share, (after - 1) // share
        if first == last:
            store_attended(acc, best, total, sinks, out + out_row, head * GROUP + rows, rows * DIM, rows < GROUP, DIM)
        else:
            at = ((head * PROGRAMS + program) * 2 + (program == first).to(tl.int32)) * GROUP + rows
            tl.store(stats + 2 * at, best, mask=rows < GROUP)
            tl.store(stats + 2 * at + 1, total, mask=rows < GROUP)
            tl.store(sums + at[:, None] * DIM + columns[None, :], acc, mask=is_q)
            tl.debug_barrier()  # all threads' parts are written before one thread takes the ticket
            ticket = tickets + head * PROGRAMS + first
            if tl.atomic_add(ticket, 1, sem="acq_rel") == last - first:
                _merge(sums, stats, sinks, out + out_row, head, first, last, PROGRAMS, GROUP, DIM, PARTS, BLOCK_G,
                       BLOCK_D)  # fmt: skip
                tl.store(ticket, 0)
        tile, before, sequence = run_end, after, sequence + 1


class Decode:
    """Owns the memory that parts of sequences go through; its calls must run one after another."""

    def __init__(self, parameters: Parameters | None = None) -> None:
        self._parameters = parameters
        self._memory: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}  # by shape, for good: graphs hold it

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int, sinks: Tensor | None,
                 out: Tensor, scale: float, window: int | None, softcap: float | None) -> None:  # fmt: skip
        """Rows 0 to num_decodes of q and out [T, N, D]; shapes as in ops.paged_attention."""
        _, heads, dim = q.shape
        _, block_size, _, kv_heads, _ = cache.shape
        group = heads // kv_heads
        gpu, element_size = find_gpu(q.device), q.element_size() if q.dtype == cache.dtype else 4
        tile_bytes, min_tiles, programs_per_unit, num_warps, num_stages = self._parameters or choose(element_size, gpu)
        block_d, block_g = max(16, triton.next_power_of_2(dim)), triton.next_power_of_2(group)
        programs = triton.cdiv(gpu.units * programs_per_unit, kv_heads)
        sums, stats, tickets = self._find_memory(q.device, kv_heads, programs, group, dim)
        _decode[(kv_heads, programs)](
            q, cache, table, lengths, sinks, out, sums, stats, tickets, num_decodes, table.stride(0), q.stride(0),
            scale, softcap, window, block_size, kv_heads, group, dim, programs, min_tiles,
            sequence_bucket(num_decodes), max(16, block_g), min(128, max(16, tile_bytes // (block_d * element_size))),
            max(1, 4096 // (block_g * block_d)), block_g, block_d, gpu.has_dependent_launch,
            num_warps=num_warps, num_stages=num_stages, **gpu.options,
        )  # fmt: skip

    def _find_memory(self, device: torch.device, kv_heads: int, programs: int, group: int, dim: int
                     ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """sums fp32[kv_heads, programs, 2, group, dim], stats fp32[kv_heads, programs, 2, group, 2] with the best score
        and the total, tickets i32[kv_heads, programs].

        A program has a part of the sequence that it begins in, and one of that it ends in.
        """
        key = (kv_heads, programs, group, dim)
        if key not in self._memory:
            self._memory[key] = (
                torch.empty((kv_heads, programs, 2, group, dim), device=device),
                torch.empty((kv_heads, programs, 2, group, 2), device=device),
                torch.zeros((kv_heads, programs), dtype=torch.int32, device=device),
            )
        return self._memory[key]

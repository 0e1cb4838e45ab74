"""Shared-prefix attention (cascade): read blocks that sequences share once for all of them.

    attend = PrefixAttention()
    parts = attend(q, cache, table, prefixes, k_scale, scale, softcap, query_len)
    decode(..., prefixes=prefixes, parts=parts)      # attends the rest, and merges

The queries of a group's sequences, all heads of a kv head, are rows of tiles, and each tile attends to all positions of
the group's prefix (as in Juravsky et al. 2024). As in decode.py, the work of all tiles is laid end to end and cut into
equal runs, one for each program, whatever groups there are; so one CUDA graph serves any. A program leaves the part
that each of its runs gives, with where it is, for the kernel that attends the rest of each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.graph.batch import PREFIX_MULTIPLE, SharedPrefixes
from atom.kernels.triton.attention.common import (
    NOTHING,
    attend_tile,
    find_owner,
    find_run,
    load_keys,
    look_up,
    product_size,
    sequence_bucket,
    wait_for_inputs,
)
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.unpack import unpack_bytes

SLOTS = 16  # parts, of which memory has a multiple for each kv head


class Tiling(NamedTuple):
    rows: int  # of queries, at most
    positions: int  # a divisor of PREFIX_MULTIPLE
    programs_per_unit: int  # programs a multiprocessor
    num_warps: int
    num_stages: int


class PrefixParts(NamedTuple):
    """What the queries of groups attend to in their prefixes, in parts. R: rows of a tile"""

    sums: Tensor  # fp32[kv_heads, parts, R, D]
    stats: Tensor  # fp32[kv_heads, parts, R, 2]: the best score and the total
    places: Tensor  # i32[sequences, 3], of those in a group: its first part, how many, its first row in each


def choose(num_rows: int, dim: int, element_size: int, entry_size: int, gpu: Gpu) -> Tiling:
    """Choose the tiles.

    num_rows: of all decodes of a step, if they were as many as the next power of two
    element_size, entry_size: as in decode.py
    """
    rows = min(max(16, next_power_of_2(num_rows)), 64 if dim <= 128 else 32)
    if element_size == 4 or dim > 256 or gpu.shared_memory < 99 << 10:
        return Tiling(min(rows, 32), 32, programs_per_unit=1, num_warps=4 if dim <= 256 else 8, num_stages=2)
    room = gpu.shared_memory - rows * next_power_of_2(dim) * element_size - (8 << 10)  # apart from queries and sums
    position_bytes = 2 * next_power_of_2(dim) * entry_size
    positions = next((num for num in (128, 64) if dim * num <= 128 * 128 and room >= 2 * num * position_bytes), 32)
    num_stages = min(max(room // (positions * position_bytes), 2), 3)
    return Tiling(rows, positions, programs_per_unit=1, num_warps=4, num_stages=num_stages)


@jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "prefixes", "members", "starts", "places"],
)
def _attend_prefixes(
    q, cache, table, prefixes, members, starts, k_scale, sums, stats, places, table_stride, q_stride,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    SEQUENCES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a run of the work of the kv head program_id(0). GROUPS of up to all sequences, SEQUENCES to a tile.

    Runs of a tile that follow each other are parts that do, since no other tile's run is between them.
    """
    ROWS: tl.constexpr = GROUP * QUERIES
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    wait_for_inputs(PDL)
    head, program = tl.program_id(0), tl.program_id(1)
    groups = tl.arange(0, BLOCK_P)
    first_members = tl.load(starts + groups, mask=groups < GROUPS, other=0)
    sizes = tl.load(starts + groups + 1, mask=groups < GROUPS, other=0) - first_members
    leaders = tl.load(members + first_members, mask=sizes > 0, other=0)
    lengths = tl.load(prefixes + leaders, mask=sizes > 0, other=0)
    tiles = tl.cdiv(sizes, SEQUENCES)
    counts = tiles * (lengths // BLOCK_N)
    step, end, share = find_run(counts, program, PROGRAMS)

    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    keys = cache + head * DIM
    values = keys + HEADS * DIM
    ENTRY: tl.constexpr = cache.dtype.element_ty
    DOT: tl.constexpr = q.dtype.element_ty if q.dtype.element_ty == ENTRY or ENTRY.is_fp8() else tl.float32
    while step < end:
        group, before = find_owner(counts, step)
        first_member = tl.load(starts + group)
        leader = tl.load(members + first_member)
        num_steps = tl.load(prefixes + leader) // BLOCK_N
        number = (step - before) // num_steps  # of the tile in its group
        begin = before + number * num_steps
        run_end = tl.minimum(end, begin + num_steps)
        start, stop = (step - begin) * BLOCK_N, (run_end - begin) * BLOCK_N

        place = rows // ROWS
        member = first_member + number * SEQUENCES + place
        is_row = (place < SEQUENCES) & (member < tl.load(starts + group + 1))
        is_q = is_row[:, None] & (columns < DIM)[None, :]
        sequence = tl.load(members + member, mask=is_row, other=0).to(tl.int64)
        query = sequence * QUERIES + rows % ROWS // GROUP
        q_rows = q + query * q_stride + (head * GROUP + rows % GROUP) * DIM
        queries = tl.load(q_rows[:, None] + columns[None, :], mask=is_q, other=0.0).to(DOT)
        best = tl.full([BLOCK_M], NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        blocks = table + leader.to(tl.int64) * table_stride
        block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
        for first in range(start, stop, BLOCK_N):
            positions = first + tl.arange(0, BLOCK_N)
            tile_keys, tile_values, block = load_keys(
                keys, values, blocks, block, positions, stop, False, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_D
            )
            if ENTRY.is_fp8() and PDL:
                tile_keys = unpack_bytes(tile_keys.to(tl.uint8, bitcast=True), None, "fp8", DOT, True)
                tile_values = unpack_bytes(tile_values.to(tl.uint8, bitcast=True), None, "fp8", DOT, True)
            best, total, acc = attend_tile(queries, tile_keys, tile_values, best, total, acc, None, k_scale, None, 0,
                                           SCALE, SOFTCAP)  # fmt: skip
        part = program + tl.sum(tl.where(groups < group, tiles, 0), 0) + number
        at = (head * SLOTS + part) * BLOCK_M + rows
        tl.store(stats + 2 * at, best, mask=is_row)
        tl.store(stats + 2 * at + 1, total, mask=is_row)
        tl.store(sums + at[:, None] * DIM + columns[None, :], acc, mask=is_q)
        is_first = is_row & (rows % ROWS == 0) & (head == 0) & (step == begin)
        num_parts = (begin + num_steps - 1) // share - begin // share + 1
        tl.store(places + 3 * sequence, part + 0 * rows, mask=is_first)
        tl.store(places + 3 * sequence + 1, num_parts + 0 * rows, mask=is_first)
        tl.store(places + 3 * sequence + 2, rows, mask=is_first)
        step = run_end


@jit
def add_prefix(best, total, acc, sums, stats, places, head, ROWS: tl.constexpr, SLOTS: tl.constexpr,
               TILE: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Add the parts of one sequence, at `places`, to the softmax of its ROWS [M], [M] and [M, BLOCK_D] so far.

    SLOTS and TILE: the parts that there may be, and the rows of each; PARTS: that are added at a time
    """
    rows, columns = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    first_part, num_parts, first_row = tl.load(places), tl.load(places + 1), tl.load(places + 2)
    for number in range(0, num_parts, PARTS):
        parts = number + tl.arange(0, PARTS)
        is_row = (parts < num_parts)[:, None] & (rows < ROWS)[None, :]
        at = (head * SLOTS + first_part + parts)[:, None] * TILE + first_row + rows[None, :]
        bests = tl.load(stats + 2 * at, mask=is_row, other=NOTHING)
        totals = tl.load(stats + 2 * at + 1, mask=is_row, other=0.0)
        is_there = is_row[:, :, None] & (columns < DIM)[None, None, :]
        values = tl.load(sums + at[:, :, None] * DIM + columns[None, None, :], mask=is_there, other=0.0)
        higher = tl.maximum(best, tl.max(bests, 0))
        fades, fade = tl.exp2(bests - higher[None, :]), tl.exp2(best - higher)
        total = total * fade + tl.sum(totals * fades, 0)
        acc = acc * fade[:, None] + tl.sum(values * fades[:, :, None], 0)
        best = higher
    return best, total, acc


class PrefixAttention:
    """Attention to shared prefixes, with the memory for its parts; its calls must run one after another."""

    def __init__(self, tiling: Tiling | None = None) -> None:
        self._tiling = tiling
        self._memory: dict[tuple[int, ...], PrefixParts] = {}  # by shape, for good: graphs hold it

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, prefixes: SharedPrefixes, k_scale: Tensor | None,
                 scale: float, softcap: float | None, query_len: int) -> PrefixParts:  # fmt: skip
        """Rows 0 to D * query_len of q [T, N, D'], normed and rotated; the parts are overwritten by the next call."""
        _, heads, dim = q.shape
        _, block_size, _, kv_heads, _ = cache.shape
        num_decodes, num_groups = len(prefixes.lengths), len(prefixes.starts) - 1
        group, gpu = heads // kv_heads, find_gpu(q.device)
        num_rows, max_decodes = group * query_len, next_power_of_2(num_decodes)  # rows of a sequence; few launches
        tile, positions, per_unit, num_warps, num_stages = self._tiling or choose(
            max_decodes * num_rows, dim, product_size(q, cache), cache.element_size(), gpu
        )
        tile = max(tile, next_power_of_2(num_rows))
        assert PREFIX_MULTIPLE % positions == 0, "prefixes are whole tiles"
        programs, sequences = -(-gpu.units * per_unit // kv_heads), tile // num_rows
        slots = programs + num_groups + max_decodes // sequences  # each run begins at another program or tile
        slots = -(-slots // SLOTS) * SLOTS  # few shapes, so that graphs share memory
        parts = self._find_memory(q.device, kv_heads, slots, tile, dim, sequence_bucket(num_decodes))
        _attend_prefixes[(kv_heads, programs)](
            q, cache, table, prefixes.lengths, prefixes.members, prefixes.starts, k_scale, *parts, table.stride(0),
            q.stride(0), scale, softcap, block_size, kv_heads, group, query_len, dim, programs, slots, num_groups,
            sequences, next_power_of_2(num_groups), tile, positions, max(16, next_power_of_2(dim)),
            num_warps=num_warps, num_stages=num_stages, **gpu.options,
        )  # fmt: skip
        return parts

    def _find_memory(self, device: torch.device, kv_heads: int, slots: int, tile: int, dim: int, num_sequences: int
                     ) -> PrefixParts:  # fmt: skip
        key = (kv_heads, slots, tile, dim, num_sequences)
        if key not in self._memory:
            self._memory[key] = PrefixParts(
                torch.empty((kv_heads, slots, tile, dim), device=device),
                torch.empty((kv_heads, slots, tile, 2), device=device),
                torch.empty((num_sequences, 3), dtype=torch.int32, device=device),
            )
        return self._memory[key]

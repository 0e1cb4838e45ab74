"""Expand prompts' latent entries to keys and values of each head.

As in DeepSeek-AI 2024, section 2.1.

    expansion = Expansion()
    for heads in expansion.split(weight, rotated):    # slices; of as many heads as there is memory for
        expanded = expansion.expand(cache, keys, k_scale, table, starts, lengths, 0, weight[heads], plain, rotated)
        expanded.blocks      # [blocks, PIECE, N, P + R + U]: key without position, rotated key, value of each head
        expanded.table, expanded.plan                        # as in context.py

Attending to expanded keys and values multiplies 3.4 times less than to entries (DeepSeek-V2's and V3's sizes:
128 + 64 + 128 numbers of a position and head instead of 576 + 512), and to expand a position takes as many as 410
queries of it. So sequences of few queries after a long context are not expanded, nor are those that do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import find_owner, look_up, sequence_bucket, wait_for_inputs
from atom.kernels.triton.attention.context import PIECE, Pieces, Unpacked
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

TILE = 128  # positions of a sequence that a program expands at a time
MAX_BYTES = 1 << 30  # of what is expanded at a time
MAX_POSITIONS = 160 << 10  # for which there is memory, if that is enough for a head
ABSORBED = (
    1.5  # times the time of attending to expanded keys: of attending to entries; after a long context, 100 queries pay
)


@jit(do_not_specialize=["num_sequences", "num_decodes", "table_stride", "capacity"],
     do_not_specialize_on_alignment=["table", "starts", "lengths"])  # fmt: skip
def _expand(cache, keys, k_scale, weight, table, starts, lengths, out, plan, num_sequences, num_decodes, table_stride,
            capacity, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr,
            PLAIN: tl.constexpr, VALUE: tl.constexpr, ENTRY: tl.constexpr, KEY_ENTRY: tl.constexpr,
            BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
            BLOCK_R: tl.constexpr, BLOCK_U: tl.constexpr, PIECE: tl.constexpr, ABSORBED: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """Tiles of positions, each of one sequence, by heads. cache and keys: as in latent.py; weight [N, P + U, L]"""
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    wait_for_inputs(PDL)
    sequences = num_decodes + tl.arange(0, BLOCK_S)
    is_sequence = sequences < num_sequences
    queries = tl.load(starts + sequences + 1, mask=is_sequence, other=0)
    queries = (queries - tl.load(starts + sequences, mask=is_sequence, other=0)).to(tl.float32)
    contexts = tl.load(lengths + sequences, mask=is_sequence, other=0)
    gained = queries * (ABSORBED * (2 * RANK + ROTATED) - (PLAIN + ROTATED + VALUE)) - RANK * (PLAIN + VALUE)
    pays = contexts.to(tl.float32) * gained + queries * (ABSORBED * RANK * (PLAIN + VALUE)) >= 0
    counts = tl.where(pays, tl.cdiv(contexts, BLOCK_M), 0)
    ends = tl.cumsum(counts, 0)
    is_there = is_sequence & pays & (ends <= capacity)
    if tl.program_id(0) == 0:
        tl.store(plan + sequences, tl.where(is_there, (ends - counts) * (BLOCK_M // PIECE), -1), mask=is_sequence)
        tl.store(plan + num_sequences, 0)
    counts = tl.where(is_there, counts, 0)
    HEAD_ROW: tl.constexpr = PLAIN + ROTATED + VALUE
    plain, rotated, value = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_U)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * HEADS, tl.num_programs(0)):
        tile, head = item // HEADS, item % HEADS  # all heads of a tile at about the same time, which read the same
        owner, before = find_owner(counts, tile)
        sequence = num_decodes + owner
        length = tl.load(lengths + sequence)
        positions = (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        blocks = look_up(table + sequence.to(tl.int64) * table_stride, positions, length, BLOCK_SIZE)
        slots = tl.multiple_of(blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE, 1)
        is_position = (positions < length)[:, None]
        entries = cache + slots[:, None] * ENTRY
        key_rows = weight + (head * (PLAIN + VALUE) + plain)[:, None] * RANK
        value_rows = weight + (head * (PLAIN + VALUE) + PLAIN + value)[:, None] * RANK
        expanded_keys = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
        expanded_values = tl.zeros([BLOCK_M, BLOCK_U], tl.float32)
        for first in range(0, RANK, BLOCK_L):
            columns = first + tl.arange(0, BLOCK_L)
            is_column = (columns < RANK)[None, :]
            latents = tl.load(entries + columns[None, :], mask=is_position & is_column, other=0.0)
            if k_scale is not None:
                latents = latents.to(tl.float32) * k_scale
            latents = latents.to(weight.dtype.element_ty)
            w = tl.load(key_rows + columns[None, :], mask=(plain < PLAIN)[:, None] & is_column, other=0.0)
            expanded_keys = tl.dot(latents, tl.trans(w), expanded_keys, input_precision="ieee")
            w = tl.load(value_rows + columns[None, :], mask=(value < VALUE)[:, None] & is_column, other=0.0)
            expanded_values = tl.dot(latents, tl.trans(w), expanded_values, input_precision="ieee")
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        targets = out + ((rows * HEADS + head) * HEAD_ROW)[:, None]
        tl.store(targets + plain[None, :], expanded_keys.to(out.dtype.element_ty), mask=(plain < PLAIN)[None, :])
        is_rotated = (rotated < ROTATED)[None, :]
        key = keys + slots[:, None] * KEY_ENTRY + (KEY_ENTRY - ROTATED) + rotated[None, :]
        moved = tl.load(key, mask=is_position & is_rotated, other=0.0)
        tl.store(targets + PLAIN + rotated[None, :], moved.to(out.dtype.element_ty), mask=is_rotated)
        targets += PLAIN + ROTATED
        tl.store(targets + value[None, :], expanded_values.to(out.dtype.element_ty), mask=(value < VALUE)[None, :])


class Expansion:
    """Expands contexts; its calls must run one after another, and what one gave ends with the next."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._pieces = max_bytes, Pieces(max_bytes)

    def split(self, weight: Tensor, rotated: int) -> Iterator[slice]:
        """Heads that are expanded at a time: as many as leave memory for MAX_POSITIONS, and as divide them all.

        weight [N, P + U, L]"""
        heads, row = weight.shape[0], (weight.shape[1] + rotated) * weight.itemsize
        max_heads = max(1, self._max_bytes // (MAX_POSITIONS * row))
        at_once = next(num for num in range(min(heads, max_heads), 0, -1) if heads % num == 0)
        return (slice(first, first + at_once) for first in range(0, heads, at_once))

    def expand(self, cache: Tensor, keys: Tensor, k_scale: Tensor | None, table: Tensor, starts: Tensor,
               lengths: Tensor, num_decodes: int, weight: Tensor, plain: int, rotated: int) -> Unpacked:  # fmt: skip
        """Expand what pays. The first num_decodes sequences are left out.

        cache and keys [blocks, block size, E]: one memory, as latents and as rotated keys are read; table i32[S, blocks
        of a sequence], starts i32[S + 1], lengths i32[S]; weight [N, P + U, L]
        """
        (heads, rows, rank), gpu, num_sequences = weight.shape, find_gpu(cache.device), len(lengths)
        value, block_size = rows - plain, cache.shape[1]
        expanded = self._pieces.find(
            cache.device, sequence_bucket(num_sequences), (heads, rows + rotated), weight.dtype, TILE // PIECE
        )
        _expand[(gpu.units,)](
            cache, keys, k_scale, weight, table, starts, lengths, expanded.blocks, expanded.plan, num_sequences,
            num_decodes, table.stride(0), len(expanded.blocks) * PIECE // TILE, block_size, heads, rank, rotated, plain,
            value, cache.shape[2], keys.shape[2], sequence_bucket(num_sequences - num_decodes), TILE, 64,
            *(max(16, next_power_of_2(dim)) for dim in (plain, rotated, value)), PIECE, ABSORBED, num_warps=8,
            num_stages=3, **gpu.options,
        )  # fmt: skip
        return expanded

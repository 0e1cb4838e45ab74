"""Unpack the context of prompts from a cache in fp8.

It is for kernels that multiply what a cache keeps as it is.

    context = Context().unpack(cache, table, lengths, num_decodes, dtype)
    context.blocks, context.table    # in `dtype`, without scales; each sequence's blocks side by side
    context.plan                     # i32: for each sequence where its blocks begin, -1 if it is not there

The memory is taken once, for the context of as many sequences as it holds. In a step of many tokens to unpack them all
costs less than a hundredth of what attention over them does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import find_owner, look_up, sequence_bucket, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.unpack import unpack_bytes

MAX_BYTES = 512 << 20  # of what is unpacked at a time: 131,072 positions of Qwen3-8B
PIECE = 16  # positions that a program unpacks at a time, a block of what it makes
COLUMNS = 512
PROGRAMS_PER_UNIT = 8


class Unpacked(NamedTuple):
    blocks: Tensor  # [blocks, PIECE, 2, K, D]
    table: Tensor  # i32[1, blocks]: 0, 1, ...
    plan: Tensor  # i32[sequences + 1, or more]; tokens of no sequence count as one more, which is there


@jit(do_not_specialize=["num_sequences", "num_decodes", "table_stride"],
     do_not_specialize_on_alignment=["table", "lengths"])  # fmt: skip
def _unpack(cache, table, lengths, out, plan, num_sequences, num_decodes, table_stride, CAPACITY: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK_S: tl.constexpr, PIECE: tl.constexpr,
            COLUMNS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    wait_for_inputs(PDL)
    sequences = num_decodes + tl.arange(0, BLOCK_S)
    is_sequence = sequences < num_sequences
    counts = tl.cdiv(tl.load(lengths + sequences, mask=is_sequence, other=0), PIECE)
    ends = tl.cumsum(counts, 0)
    is_there = is_sequence & (ends <= CAPACITY)
    if tl.program_id(0) == 0:
        tl.store(plan + sequences, tl.where(is_there, ends - counts, -1), mask=is_sequence)
        tl.store(plan + num_sequences, 0)
    counts = tl.where(is_there, counts, 0)
    for piece in range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0)):
        owner, before = find_owner(counts, piece)
        sequence = num_decodes + owner
        length = tl.load(lengths + sequence)
        positions = (piece - before) * PIECE + tl.arange(0, PIECE)
        blocks = look_up(table + sequence.to(tl.int64) * table_stride, positions, length, BLOCK_SIZE)
        rows = cache + (blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * ROW
        targets = out + (piece * PIECE + tl.arange(0, PIECE)).to(tl.int64) * ROW
        for first in range(0, ROW, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            is_read = (positions < length)[:, None] & (columns < ROW)[None, :]
            tile = tl.load(rows[:, None] + columns[None, :], mask=is_read, other=0)
            numbers = unpack_bytes(tile, None, "fp8", out.dtype.element_ty, PDL)
            tl.store(targets[:, None] + columns[None, :], numbers, mask=(columns < ROW)[None, :])


class Pieces:
    """The memory for what is unpacked; its users run one after another, and what one was given ends with the next.

    It is as large whatever the cache is: a start measures what a step takes with a cache of few blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory: Tensor | None = None  # for good: graphs hold it
        self._views: dict[tuple[Any, ...], Unpacked] = {}

    def find(self, device: torch.device, num_sequences: int, entry: tuple[int, ...], dtype: torch.dtype,
             step: int = 1) -> Unpacked:  # fmt: skip
        """Blocks [blocks, PIECE, *entry], a multiple of `step` of them, with room in the plan for num_sequences."""
        size = step * PIECE * math.prod(entry) * dtype.itemsize
        if self._memory is None:
            self._memory = torch.empty(max(self._max_bytes, size), dtype=torch.uint8, device=device)
        key = (num_sequences, entry, dtype, step)
        if key not in self._views:
            count = self._memory.nbytes // size * step
            blocks = self._memory[: count // step * size].view(dtype)
            self._views[key] = Unpacked(
                blocks.view(count, PIECE, *entry),
                torch.arange(count, dtype=torch.int32, device=device)[None],
                torch.zeros(num_sequences + 1, dtype=torch.int32, device=device),
            )
        return self._views[key]


class Context:
    """Unpacks contexts; its calls must run one after another, and what one gave ends with the next."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._pieces = Pieces(max_bytes)

    def unpack(self, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int, dtype: torch.dtype) -> Unpacked:
        """cache fp8[blocks, block size, 2, K, D], table i32[S, blocks of a sequence], lengths i32[S]; the first
        num_decodes sequences are left out"""
        _, block_size, _, kv_heads, dim = cache.shape
        gpu, row, num_sequences = find_gpu(cache.device), 2 * kv_heads * dim, len(lengths)
        unpacked = self._pieces.find(cache.device, sequence_bucket(num_sequences), (2, kv_heads, dim), dtype)
        _unpack[(gpu.units * PROGRAMS_PER_UNIT,)](
            cache.view(torch.uint8), table, lengths, unpacked.blocks, unpacked.plan, num_sequences, num_decodes,
            table.stride(0), len(unpacked.blocks), block_size, row, sequence_bucket(num_sequences - num_decodes), PIECE,
            COLUMNS, num_warps=4, **gpu.options,
        )  # fmt: skip
        return unpacked

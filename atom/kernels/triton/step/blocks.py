"""Copy KV blocks to rows, recurrent states to blocks, and back, on a GPU.

copier = BlockCopier([cache.view(num_blocks, -1) for cache in caches])
copier.gather(blocks, rows)     # i64[N]: those blocks of all caches, one after the other in each row
copier.scatter(rows, blocks)

A launch copies the blocks of all caches. `atom.kernels.torch.step.blocks` says what each argument is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.compile.jit import jit

WORDS = 1024  # that a program copies at a time
PART = 8 * WORDS  # of a recurrent state, which is larger than a block of KV, that a program copies


class BlockCopier:
    def __init__(self, caches: Sequence[Tensor]) -> None:
        """caches: [num_blocks, width] each, contiguous, of one integer dtype; in memory that stays theirs"""
        widths = [cache.shape[1] for cache in caches]
        addresses = [cache.data_ptr() for cache in caches]
        begins = accumulate(widths[:-1], initial=0)
        self._table = _send(zip(addresses, widths, begins, strict=True), caches[0].device)

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        self._copy(blocks, rows, to_rows=True)

    def scatter(self, rows: Tensor, blocks: Tensor) -> None:
        self._copy(blocks, rows, to_rows=False)

    def _copy(self, blocks: Tensor, rows: Tensor, *, to_rows: bool) -> None:
        grid = len(blocks), len(self._table)
        _copy_block[grid](self._table, blocks, rows, rows.shape[1], TO_ROWS=to_rows, WORDS=WORDS)


class StateCopier:
    def __init__(self, slots: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
        """slots, blocks: [num, …] by state, contiguous; in memory that stays theirs"""
        sizes = [each[0].nbytes for each in slots]
        word = torch.int64 if math.gcd(*sizes) % torch.int64.itemsize == 0 else torch.uint8
        device = slots[0].device
        self._word = torch.empty(0, dtype=word, device=device)
        pairs = zip(slots, blocks, sizes, strict=True)
        self._table = _send(((a.data_ptr(), b.data_ptr(), size // word.itemsize) for a, b, size in pairs), device)
        self._num_parts = -(-max(sizes) // (PART * word.itemsize))

    def to_blocks(self, slots: Tensor, blocks: Tensor) -> None:
        self._copy(slots, blocks, to_blocks=True)

    def to_slots(self, slots: Tensor, blocks: Tensor) -> None:
        self._copy(slots, blocks, to_blocks=False)

    def _copy(self, slots: Tensor, blocks: Tensor, *, to_blocks: bool) -> None:
        grid = len(slots), len(self._table), self._num_parts
        _copy_state[grid](self._table, slots, blocks, self._word, TO_BLOCKS=to_blocks, WORDS=WORDS, PART=PART)


def _send(rows: Iterable[tuple[int, ...]], device: torch.device) -> Tensor:
    table = torch.tensor([*rows], dtype=torch.int64)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


@jit
def _copy_state(table, slots, blocks, word, TO_BLOCKS: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr):
    """A part of one state of a slot. table: i64[C, 3], of slots, of blocks, their width; word: of its dtype"""
    place = tl.program_id(0)
    entry = table + tl.program_id(1) * 3
    first = tl.program_id(2) * PART
    width = tl.load(entry + 2)
    pointer = tl.pointer_type(word.dtype.element_ty)
    slot = tl.load(entry).to(pointer) + tl.load(slots + place).to(tl.int64) * width
    block = tl.load(entry + 1).to(pointer) + tl.load(blocks + place).to(tl.int64) * width
    for start in range(first, min(first + PART, width), WORDS):
        each = start + tl.arange(0, WORDS)
        if TO_BLOCKS:
            tl.store(block + each, tl.load(slot + each, mask=each < width), mask=each < width)
        else:
            tl.store(slot + each, tl.load(block + each, mask=each < width), mask=each < width)


@jit
def _copy_block(table, blocks, rows, row_width, TO_ROWS: tl.constexpr, WORDS: tl.constexpr):
    """A block of one cache. table: i64[C, 3], each cache's address, its width, and where its part of a row begins"""
    place = tl.program_id(0).to(tl.int64)
    entry = table + tl.program_id(1) * 3
    width = tl.load(entry + 1)
    block = tl.load(entry).to(tl.pointer_type(rows.dtype.element_ty)) + tl.load(blocks + place) * width
    part = rows + place * row_width + tl.load(entry + 2)
    for start in range(0, width, WORDS):
        each = start + tl.arange(0, WORDS)
        if TO_ROWS:
            tl.store(part + each, tl.load(block + each, mask=each < width), mask=each < width)
        else:
            tl.store(block + each, tl.load(part + each, mask=each < width), mask=each < width)

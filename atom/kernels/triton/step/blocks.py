"""Copy blocks of several KV caches to rows and back, on a GPU.

copier = BlockCopier([cache.view(num_blocks, -1) for cache in caches])
copier.gather(blocks, rows)     # i64[N]: those blocks of all caches, one after the other in each row
copier.scatter(rows, blocks)

A launch copies the blocks of all caches. `atom.kernels.torch.step.blocks` says what each argument is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.compile.jit import jit

WORDS = 1024  # that a program copies at a time


class BlockCopier:
    def __init__(self, caches: Sequence[Tensor]) -> None:
        """caches: [num_blocks, width] each, contiguous, of one integer dtype; in memory that stays theirs"""
        widths = [cache.shape[1] for cache in caches]
        addresses = [cache.data_ptr() for cache in caches]
        begins = accumulate(widths[:-1], initial=0)
        table = torch.tensor([*zip(addresses, widths, begins, strict=True)], dtype=torch.int64)
        device = caches[0].device
        self._table = table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        self._copy(blocks, rows, to_rows=True)

    def scatter(self, rows: Tensor, blocks: Tensor) -> None:
        self._copy(blocks, rows, to_rows=False)

    def _copy(self, blocks: Tensor, rows: Tensor, *, to_rows: bool) -> None:
        grid = len(blocks), len(self._table)
        _copy_block[grid](self._table, blocks, rows, rows.shape[1], TO_ROWS=to_rows, WORDS=WORDS)


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

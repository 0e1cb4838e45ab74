"""Copy KV blocks to rows, recurrent states to blocks, and back, on a CPU.

copier = BlockCopier([cache.view(num_blocks, -1) for cache in caches])
copier.gather(blocks, rows)     # i64[N]: these blocks of all caches, concatenated per row
copier.scatter(rows, blocks)

copier = StateCopier(slots, copies)     # of each state, [num_slots, …] and [num_blocks, …]
copier.to_blocks(slots, blocks)     # i32[N] each: all states of each slot to its block
copier.to_slots(slots, blocks)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockCopier:
    def __init__(self, caches: Sequence[Tensor]) -> None:
        """caches: [num_blocks, width] each, of one integer dtype"""
        self._caches = caches
        self._widths = [cache.shape[1] for cache in caches]

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy blocks i64[N] to rows [N, sum of widths]."""
        for cache, part in zip(self._caches, torch.split(rows, self._widths, dim=1), strict=True):
            torch.index_select(cache, 0, blocks, out=part)

    def scatter(self, rows: Tensor, blocks: Tensor) -> None:
        """Copy rows [N, sum of widths] to blocks i64[N]."""
        for cache, part in zip(self._caches, torch.split(rows, self._widths, dim=1), strict=True):
            cache.index_copy_(0, blocks, part)


class StateCopier:
    def __init__(self, slots: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
        """slots, blocks: [num, …] by state"""
        self._states = [*zip(slots, blocks, strict=True)]

    def to_blocks(self, slots: Tensor, blocks: Tensor) -> None:
        """Copy all states of slots i32[N] to blocks i32[N]."""
        for held, copies in self._states:
            copies.index_copy_(0, blocks.long(), held.index_select(0, slots))

    def to_slots(self, slots: Tensor, blocks: Tensor) -> None:
        """Copy all states in blocks i32[N] to slots i32[N]."""
        for held, copies in self._states:
            held.index_copy_(0, slots.long(), copies.index_select(0, blocks))

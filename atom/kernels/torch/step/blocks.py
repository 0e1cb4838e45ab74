"""Copy blocks of several KV caches to rows and back, on a CPU.

copier = BlockCopier([cache.view(num_blocks, -1) for cache in caches])
copier.gather(blocks, rows)     # i64[N]: these blocks of all caches, concatenated per row
copier.scatter(rows, blocks)
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

"""Batches for paged attention: sequences whose tokens lie in scattered blocks, with NaN wherever nobody may look.

batch = make_batch(decodes=[17, 33], prefills=[(5, 40)], kv_heads=2, heads=6, dim=8)
out = attend(*batch, scale=0.5)
expected = reference(batch, scale=0.5)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atom.graph import ops


class Batch(NamedTuple):
    """The arguments of paged_attention."""

    q: Tensor
    cache: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    num_decodes: int


def make_batch(decodes: Sequence[int] = (), prefills: Sequence[tuple[int, int]] = (), *, kv_heads: int = 1, heads: int = 1,
               dim: int = 8, block_size: int = 16, window: int | None = None, dtype: torch.dtype = torch.float32,
               cache_dtype: torch.dtype | None = None, foreign: float = float("nan"), seed: int = 0) -> Batch:  # fmt: skip
    """Decodes by their lengths, prefills by (queries, length). What no query sees holds `foreign`, as does block 0."""
    random = torch.Generator().manual_seed(seed)
    counts = [1] * len(decodes) + [num for num, _ in prefills]
    lengths = [*decodes, *(length for _, length in prefills)]
    widths = [-(-length // block_size) for length in lengths]
    blocks = 1 + torch.randperm(sum(widths), generator=random)
    cache = torch.full((1 + len(blocks), block_size, 2, kv_heads, dim), foreign, dtype=cache_dtype or dtype)
    table = torch.zeros(len(lengths), max(widths, default=0), dtype=torch.int32)
    for row, (own, length, count) in enumerate(zip(blocks.split(widths), lengths, counts, strict=True)):
        first_seen = 0 if window is None else max(0, length - count - window + 1)
        entries = torch.randn(length, 2, kv_heads, dim, generator=random)
        for position in range(first_seen, length):
            block = table[row, position // block_size] = own[position // block_size]
            cache[block, position % block_size] = entries[position].to(cache.dtype)
    q = torch.randn(sum(counts), heads, dim, generator=random).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return Batch(q, cache, table, starts, torch.tensor(lengths, dtype=torch.int32), len(decodes))


def reference(batch: Batch, *, scale: float, window: int | None = None, wide: bool = False) -> Tensor:
    """The op's own body, which reads what it masks and so needs a number there; `wide`: on float32, the truth for bf16."""
    cache = batch.cache.nan_to_num()
    q, cache = (batch.q.float(), cache.float()) if wide else (batch.q, cache)
    return ops.paged_attention.body(q, cache, *batch[2:], scale=scale, window=window)

"""Cases of attention to chosen blocks, with NaN in those that no query of a sequence chose; and of what chooses them.

case, selected = choose(make_case([70], [(9, 40)], kv_heads=2, heads=6), groups=2, block=8, top_k=3)
out = attend(*case, None, None, None, None, selected, scale=0.5, block=8)
q, keys, batch = make_index_case([70], [(9, 40)], groups=2, dim=8)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernels.paged import KIND, NAN, Case, change, make_case
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.sparse import to_index_entries


def positions_of(batch: Batch) -> list[tuple[int, int]]:
    """Of each token its sequence and position."""
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    return [
        (row, lengths[row] - starts[row + 1] + token)
        for row in range(len(lengths))
        for token in range(starts[row], starts[row + 1])
    ]


def choose(case: Case, groups: int, block: int, top_k: int, seed: int = 0) -> tuple[Case, Tensor]:
    """Random blocks of each query, its own one among them; other blocks hold NaN."""
    random = torch.Generator().manual_seed(seed)
    selected = torch.full((len(case.q), groups, top_k), -1, dtype=torch.int32)
    blocks, size = case.cache.blocks, case.cache.blocks.shape[1]
    kept = torch.full_like(blocks, NAN)
    for token, (row, position) in enumerate(positions_of(case.batch)):
        own = position // block
        for group in range(groups):
            others = torch.randperm(own, generator=random)[: top_k - 1].tolist()
            numbers = torch.tensor(sorted([*others, own])).int()
            selected[token, group, : len(numbers)] = numbers
            for number in numbers.tolist():
                seen = torch.arange(number * block, min((number + 1) * block, int(case.batch.lengths[row])))
                places = case.batch.tables[KIND][row, seen // size].long(), seen % size
                kept[places] = blocks[places]
    return change(case, kept), selected


def make_index_case(
    decodes: Sequence[int] = (), prefills: Sequence[tuple[int, int]] = (), *, groups: int, dim: int,
    block_size: int = 16, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, seed: int = 0,
) -> tuple[Tensor, PagedCache, Batch]:  # fmt: skip
    """The arguments of `paged_index_blocks`; sequences as in `make_case`."""
    case = make_case(decodes, prefills, heads=groups, dim=dim, block_size=block_size, dtype=dtype, seed=seed)
    keys = case.cache.blocks[:, :, 0, 0]
    entries = to_index_entries(keys.flatten(0, 1), cache_dtype or dtype).unflatten(0, keys.shape[:2])
    return case.q, PagedCache(entries.contiguous(), KIND), case.batch

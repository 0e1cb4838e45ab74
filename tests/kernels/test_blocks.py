"""Blocks of several caches, copied to rows and back, are those that torch's indexing takes."""

from __future__ import annotations

import pytest
import torch
from conftest import Place

from atom.kernels import find_step_kernels


@pytest.mark.parametrize("widths", [[8], [16, 16, 16], [5, 3000, 1, 1024]])
@pytest.mark.parametrize("num_blocks", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_gathered_blocks_are_scattered_again(
    place: Place, dtype: torch.dtype, num_blocks: int, widths: list[int]
) -> None:
    caches = [torch.randint(0, 256, (9, width)).to(place.device, dtype) for width in widths]
    blocks = torch.tensor([4, 8, 0, 3, 7, 5, 1][:num_blocks], device=place.device, dtype=torch.int64)
    expected = torch.cat([cache[blocks] for cache in caches], 1)
    others = [each for each in range(9) if each not in blocks.tolist()]
    copier = find_step_kernels(place.device, place.backend).block_copier(caches)

    rows = torch.full((num_blocks + 1, sum(widths)), 77, device=place.device, dtype=dtype)
    copier.gather(blocks, rows[:num_blocks])
    assert torch.equal(rows[:num_blocks], expected)
    assert (rows[num_blocks:] == 77).all(), "rows behind those of the blocks are left as they are"

    before = [cache.clone() for cache in caches]
    for cache in caches:
        cache[blocks] = 55
    copier.scatter(rows[:num_blocks], blocks)
    assert all(map(torch.equal, caches, before))
    copier.scatter(rows[:num_blocks].roll(1, 0), blocks.clone())
    for cache, held in zip(caches, before, strict=True):
        assert torch.equal(cache[blocks], held[blocks].roll(1, 0)), "any row goes to any block"
        assert torch.equal(cache[others], held[others]), "other blocks are left as they are"

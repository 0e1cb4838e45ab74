"""Blocks of several caches, and recurrent states of slots, copied and copied back, are those of torch's indexing."""

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


@pytest.mark.parametrize("sizes", [[8], [3, 5], [4, 9000]])
@pytest.mark.parametrize("num_moved", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_slots_are_copied_to_blocks_and_back(
    place: Place, dtype: torch.dtype, num_moved: int, sizes: list[int]
) -> None:
    slots = [torch.randn(5, 3, size).to(place.device, dtype) for size in sizes]
    blocks = [torch.randn(7, 3, size).to(place.device, dtype) for size in sizes]
    some_slots, some_blocks = (
        torch.tensor(each[:num_moved], device=place.device, dtype=torch.int32) for each in ([4, 0, 2], [1, 6, 3])
    )
    copier = find_step_kernels(place.device, place.backend).state_copier(slots, blocks)

    expected = [
        each.index_copy(0, some_blocks.long(), held[some_slots]) for held, each in zip(slots, blocks, strict=True)
    ]
    copier.to_blocks(some_slots, some_blocks)
    assert all(map(torch.equal, blocks, expected)), "only these blocks have changed"

    moved = some_slots.roll(1)
    expected = [held.index_copy(0, moved.long(), each[some_blocks]) for held, each in zip(slots, blocks, strict=True)]
    copier.to_slots(moved, some_blocks)
    assert all(map(torch.equal, slots, expected)), "only these slots have changed"

"""A rank's parts of weights, against slices of the stored tensors by torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from atom import weights
from atom.checkpoint import SILENT, Checkpoint, open_checkpoint
from atom.graph import Cat, Mesh, Offset, Once, Recipe, Share, Slice, Stack, Transpose, Type, W
from atom.weights.localize import localize

torch.manual_seed(0)
TENSORS = {
    "a": torch.randn(12, 7),
    "b": torch.randn(6, 7),
    "bias": torch.randn(5),
    "experts": torch.randn(5, 4, 6),
    **{f"e.{expert}": torch.randn(4, 6) for expert in range(5)},
}
A, B, BIAS, EXPERTS = (W(name, Type("fp32", tuple(TENSORS[name].shape))) for name in ("a", "b", "bias", "experts"))
ONE_BY_ONE = Stack(W("e.{expert}", Type("fp32", (4, 6))), 0, 5)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return open_checkpoint(str(tmp_path))


def padded(whole: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Equal parts of a tensor with zeros past its end."""
    size = -(-whole.shape[dim] // ranks)
    shape = list(whole.shape)
    shape[dim] = size * ranks - whole.shape[dim]
    return list(torch.cat((whole, torch.zeros(shape)), dim).split(size, dim))


def on_each_rank(recipe: Recipe, mesh: Mesh, checkpoint: Checkpoint) -> list[Tensor]:
    """What a recipe is on each rank."""
    made = [
        weights.load([recipe], checkpoint, SILENT, coordinates=mesh.coordinates(rank))[recipe]
        for rank in range(mesh.num_ranks)
    ]
    assert all(isinstance(each, Tensor) and each.shape == recipe.type.shape for each in made)
    return made  # type: ignore[return-value]


EACH = torch.stack([TENSORS[f"e.{expert}"] for expert in range(5)])
CASES: list[tuple[Recipe, Mesh, list[Tensor]]] = [
    (Share(A, "tensor", 3), Mesh(3), list(TENSORS["a"].split(4))),
    (Share(A, "tensor", 3, dim=1), Mesh(3), padded(TENSORS["a"], 3, 1)),  # 7 columns
    (Share(B, "tensor", 5), Mesh(5), padded(TENSORS["b"], 5, 0)),  # 2 rows each: the last two have only padding
    (Share(B, "tensor", 4, copies=2), Mesh(4), [part for part in TENSORS["b"].split(3) for _ in range(2)]),
    (Once(BIAS, "tensor"), Mesh(3), [TENSORS["bias"], torch.zeros(5), torch.zeros(5)]),
    (Offset("tensor", 4, 3), Mesh(4), [torch.tensor([at]) for at in (0, 3, 6, 9)]),
    (Offset("experts", 2, 3), Mesh(4, 2), [torch.tensor([at]) for at in (0, 0, 3, 3)]),
    (Share(EXPERTS, "experts", 2), Mesh(2, 2), padded(TENSORS["experts"], 2, 0)),
    (Share(ONE_BY_ONE, "experts", 2), Mesh(2, 2), padded(EACH, 2, 0)),
    (
        Share(Share(ONE_BY_ONE, "width", 2, dim=2), "experts", 2),
        Mesh(4, 2),
        [part for group in padded(EACH, 2, 0) for part in group.split(3, 2)],
    ),
    (
        Cat((Share(A, "tensor", 2), Share(B, "tensor", 2))),
        Mesh(2),
        [torch.cat(parts) for parts in zip(TENSORS["a"].split(6), TENSORS["b"].split(3), strict=True)],
    ),
    (Slice(Share(A, "tensor", 2), 1, 4), Mesh(2), [part[1:4] for part in TENSORS["a"].split(6)]),
    (Transpose(Share(A, "tensor", 2)), Mesh(2), [part.T for part in TENSORS["a"].split(6)]),
    (A, Mesh(2), [TENSORS["a"], TENSORS["a"]]),
]


@pytest.mark.parametrize(("recipe", "mesh", "expected"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_each_rank_has_its_part(recipe: Recipe, mesh: Mesh, expected: list[Tensor], checkpoint: Checkpoint):
    made = on_each_rank(recipe, mesh, checkpoint)
    assert len(made) == len(expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, expected, strict=True))


def test_a_rank_reads_only_its_range():
    local = localize(Share(Cat((A, B)), "tensor", 3), Mesh(3).coordinates(2))
    assert local == B, "rows 12 to 18 of 18"
    assert localize(Share(A, "tensor", 3, dim=1), Mesh(3).coordinates(0)) == Slice(A, 0, 3, 1)


def test_random_weights_are_the_same_on_all_ranks_but_for_offsets():
    recipes: list[Recipe] = [A, Share(B, "tensor", 4), Offset("tensor", 4, 2), BIAS]
    first, last = (weights.load_dummy(recipes, 7, coordinates=Mesh(4).coordinates(rank)) for rank in (0, 3))
    for recipe in recipes:
        ours, theirs = first[recipe], last[recipe]
        assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
        assert torch.equal(ours, theirs) == (not isinstance(recipe, Offset))
    assert last[recipes[2]].tolist() == [6]  # type: ignore[union-attr]

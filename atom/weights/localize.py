"""Localize recipes: what one rank of a mesh has of a weight.

    localize(Share(W("o_proj.weight", bf16[576, 576]), "tensor", 3, dim=1), mesh.coordinates(1))
    # slice(W("o_proj.weight", bf16[576, 576]), 192, 384, dim=1)

The text is the same for all ranks; a rank enters here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from atom.graph import Cat, Full, Offset, Once, Recipe, Share, Slice, W
from atom.graph.recipes import Constant, cat, narrow


def localize(recipe: Recipe, coordinates: Mapping[str, int]) -> Recipe:
    """The recipe of one rank, which reads no more than its part. coordinates: of the rank, by axis"""
    if isinstance(recipe, Offset):
        return Full(coordinates[recipe.axis] * recipe.size, recipe.type)
    if isinstance(recipe, Cat):
        return cat(tuple(localize(part, coordinates) for part in recipe.parts), recipe.dim)
    if isinstance(recipe, W | Constant):
        return recipe
    part = localize(recipe.part, coordinates)
    if isinstance(recipe, Once):
        return Full(0, recipe.type) if coordinates[recipe.axis] else part
    if isinstance(recipe, Share):
        start = coordinates[recipe.axis] // recipe.copies * recipe.size
        return _padded(part, start, start + recipe.size, recipe.dim)
    if isinstance(recipe, Slice) and recipe.step == 1:
        return narrow(part, recipe.start, recipe.stop, recipe.dim)
    return replace(recipe, part=part)


def _padded(recipe: Recipe, start: int, stop: int, dim: int) -> Recipe:
    """A range of a tensor, with zeros where it goes beyond the end."""
    size = int(recipe.type.shape[dim])
    if stop <= size:
        return narrow(recipe, start, stop, dim)
    shape = (*recipe.type.shape[:dim], stop - max(start, size), *recipe.type.shape[dim + 1 :])
    zeros = Full(0, replace(recipe.type, shape=shape))
    return zeros if start >= size else Cat((narrow(recipe, start, size, dim), zeros), dim)

"""Localize recipes: one rank's part of each weight.

    localize(Share(W("o_proj.weight", bf16[576, 576]), "tensor", 3, dim=1), mesh.coordinates(1))
    # slice(W("o_proj.weight", bf16[576, 576]), 192, 384, dim=1)

The text is the same for all ranks; only here does a rank enter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from atom.graph import Cat, Full, Offset, Once, Recipe, Share, Slice, W
from atom.graph.recipe_ranges import cat, narrow, padded
from atom.graph.recipes import Constant


def localize(recipe: Recipe, coordinates: Mapping[str, int]) -> Recipe:
    """The recipe of one rank, which reads no more than its part.

    coordinates: of the rank, by axis.
    """
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
        return padded(part, start, start + recipe.size, recipe.dim)
    if isinstance(recipe, Slice) and recipe.step == 1:
        return narrow(part, recipe.start, recipe.stop, recipe.dim)
    return replace(recipe, part=part)

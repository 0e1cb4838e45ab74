"""The named parts of a packed weight (values, scales, zeros), each a recipe.

    parts_of(W("up", Type("bf16", (64, 96), "mxfp4")))
    # {"values": W("up_blocks", u8[64, 3, 16]), "scales": W("up_scales", u8[64, 3])}

A part has the dims of its weight, in blocks, and behind them what it has of a block. So a slice on the edges of blocks
is a slice of each part: parts_of(narrow(recipe, …)) has narrow(part, …) for each part of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atom.dtypes import FORMATS
from atom.errors import UnsupportedError
from atom.graph.formats import FormatError, block_of
from atom.graph.recipes import Cat, Dequantize, Recipe, Slice, Stack, Transpose, W, is_of_blocks, leaves
from atom.graph.types import Type

WITH_PARTS = frozenset(fmt for fmt, known in FORMATS.items() if known.parts)


def has_parts(recipe: Recipe) -> bool:
    """Whether a recipe is of a packed weight whose parts are known."""
    return recipe.type.fmt is not None and next(leaves(recipe)).type.fmt in WITH_PARTS


def stored_tensors(recipe: Recipe) -> Iterator[W]:
    """What a checkpoint has to have of a recipe: plain leaves, and the parts of packed ones."""
    for part in parts_of(recipe.part if isinstance(recipe, Dequantize) else recipe).values():
        for leaf in leaves(part):
            yield from [leaf] if leaf.type.fmt is None else stored_tensors(leaf)


def parts_of(recipe: Recipe) -> dict[str, Recipe]:
    """The parts of a weight by name: "values", and "scales" and "zeros" where its format has them.

    UnsupportedError where a slice cuts blocks, and for a format whose parts are not known yet.
    """
    if recipe.type.fmt is None:
        return {"values": recipe}
    if isinstance(recipe, W):
        return _stored_parts(recipe, recipe.type.fmt)
    if isinstance(recipe, Cat):
        each = [parts_of(part) for part in recipe.parts]
        return {name: Cat(tuple(parts[name] for parts in each), recipe.dim) for name in each[0]}
    if isinstance(recipe, Stack):
        return {name: replace(recipe, part=part) for name, part in parts_of(recipe.part).items()}
    if isinstance(recipe, Transpose):
        num_dims = len(recipe.type.shape)
        return {
            name: Transpose(part, num_dims - 2 - len(part.type.shape)) for name, part in parts_of(recipe.part).items()
        }
    if isinstance(recipe, Slice):
        whole, dim = recipe.part.type, recipe.dim
        size = block_of(whole)[dim]
        if not is_of_blocks(whole, recipe.start, recipe.stop, dim) or (size > 1 and recipe.step > 1):
            raise FormatError(f"slice: {recipe.start} to {recipe.stop} of dim {dim} cuts the blocks of {whole}")
        start, stop = recipe.start // size, -(-recipe.stop // size)
        return {name: Slice(part, start, stop, dim, recipe.step) for name, part in parts_of(recipe.part).items()}
    raise UnsupportedError(f"a weight stored as {recipe.type.fmt} cannot be read as {type(recipe).__name__.lower()}(…)")


def _stored_parts(leaf: W, fmt: str) -> dict[str, Recipe]:
    if fmt not in WITH_PARTS:
        raise UnsupportedError(f"the tensors of a weight stored as {fmt} are not known yet")
    shape = tuple(-(-int(dim) // size) for dim, size in zip(leaf.type.shape, block_of(leaf.type), strict=True))
    return {
        name: W(leaf.name + part.suffix, Type(part.dtype, (*shape, *part.block)))
        for name, part in FORMATS[fmt].parts.items()
    }

"""The named parts of a packed weight (values, scales, zeros), each a recipe.

    parts_of(W("up", Type("bf16", (64, 96), "mxfp4")))
    # {"values": W("up_blocks", u8[64, 3, 16]), "scales": W("up_scales", u8[64, 3])}
    parts_of(W("up", Type("bf16", (256, 384), "fp8[128, 128]")))
    # {"values": W("up", fp8_e4m3[256, 384]), "scales": W("up_scale_inv", fp32[2, 3])}

A part has the dims of its weight, in elements or in blocks, and if it has the bytes of a block, these in a last dim.
So a slice on the edges of blocks is a slice of each part: parts_of(narrow(recipe, …)) has narrow(part, …) for each part
of the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from atom.dtypes import Part
from atom.errors import UnsupportedError
from atom.graph import formats
from atom.graph.formats import FormatError, block_of, parse_format
from atom.graph.recipe_ranges import is_of_blocks, narrow
from atom.graph.recipes import (
    Cat,
    Quantize,
    Recipe,
    Regroup,
    Repack,
    Repeat,
    Share,
    Slice,
    Stack,
    Transpose,
    W,
    leaves,
    once,
)
from atom.graph.types import Type


def has_parts(recipe: Recipe) -> bool:
    """Whether a recipe is of a packed weight whose parts are known."""
    return recipe.type.fmt is not None and bool(parse_format(recipe.type.fmt).parts)


def stored_tensors(recipe: Recipe) -> Iterator[W]:
    """The tensors that a recipe needs of a checkpoint: plain leaves, and the parts of packed ones."""
    for leaf in leaves(recipe):
        for part in parts_of(leaf).values():
            yield from leaves(part)


@once
def parts_of(recipe: Recipe) -> Mapping[str, Recipe]:
    """The parts of a weight by name: "values", and "scales" and "zeros" if its format has them.

    UnsupportedError if a slice cuts blocks, and for a format whose parts are not known.
    """
    if recipe.type.fmt is None:
        return {"values": recipe}
    if isinstance(recipe, W):
        return _stored_parts(recipe, recipe.type.fmt)
    if isinstance(recipe, Cat):
        return _joined_parts(recipe)
    if isinstance(recipe, Stack):
        return {name: replace(recipe, part=part) for name, part in parts_of(recipe.part).items()}
    if isinstance(recipe, Transpose):
        known, num_dims = parse_format(recipe.part.type.fmt or "").parts, len(recipe.type.shape)
        if "groups" in known:
            raise FormatError(f"transpose: the columns of a block of {recipe.part.type} are not neighbours")
        return {
            name: part if known[name].holds == "tensor" else Transpose(part, num_dims - 2 - len(part.type.shape))
            for name, part in parts_of(recipe.part).items()
        }
    if isinstance(recipe, Slice):
        whole, dim = recipe.part.type, recipe.dim
        size = block_of(whole)[dim]
        if cuts_blocks(recipe):
            raise FormatError(f"slice: {recipe.start} to {recipe.stop} of dim {dim} cuts the blocks of {whole}")
        kinds = parse_format(str(whole.fmt)).parts
        return {name: _sliced(part, recipe, kinds[name], size) for name, part in parts_of(recipe.part).items()}
    if isinstance(recipe, Share):
        return _shared_parts(recipe)
    if isinstance(recipe, Regroup):
        parts = parts_of(recipe.part)
        return {**parts, "scales": _repeated(parts["scales"], recipe)}
    raise UnsupportedError(f"a weight stored as {recipe.type.fmt} cannot be read as {type(recipe).__name__.lower()}(…)")


def _joined_parts(recipe: Cat) -> dict[str, Recipe]:
    num_dims, known = len(recipe.type.shape), parse_format(str(recipe.type.fmt)).parts
    if any(part.holds == "columns" for part in known.values()):
        raise FormatError(f"cat: each tensor of {recipe.type} has an order of its own")
    for part in recipe.parts[:-1]:
        size = formats.block_size(recipe.type, recipe.dim)
        if size is None or int(part.type.shape[recipe.dim]) % size:
            raise FormatError(f"cat: {part.type} ends within a block along dim {recipe.dim}")
    each = [parts_of(part) for part in recipe.parts]
    joined: dict[str, Recipe] = {}
    for name, kind in known.items():
        parts = [parts[name] for parts in each]
        if kind.holds == "tensor":  # then each row has a number of its own
            if recipe.dim != num_dims - 2:
                raise FormatError(f"cat: each tensor of {recipe.type} has one {name}")
            rows = [int(part.type.shape[-2]) for part in recipe.parts]
            parts = [
                Repeat(part, size, num_dims - 2, size) if part.type.shape[-1] == 1 else part
                for part, size in zip(parts, rows, strict=True)
            ]
        joined[name] = Cat(tuple(parts), recipe.dim)
    return joined


def _shared_parts(recipe: Share) -> dict[str, Recipe]:
    size, known = formats.block_size(recipe.part.type, recipe.dim), parse_format(str(recipe.type.fmt)).parts
    if recipe.size % (size or 1) or (size is None and known["values"].holds != "elements"):
        raise FormatError(f"share: {recipe.size} of dim {recipe.dim} cut the blocks of {recipe.part.type}")
    parts = dict(parts_of(recipe.part))
    for name, kind in known.items():
        if kind.holds == "elements" or (size is not None and kind.holds in ("blocks", "bytes")):
            parts[name] = replace(recipe, part=parts[name])
    return parts


def _repeated(scales: Recipe, recipe: Regroup) -> Recipe:
    """The scales of larger blocks as those of the recipe's."""
    sizes, larger = block_of(recipe.type), block_of(recipe.part.type)
    for dim, (size, of) in enumerate(zip(sizes, larger, strict=True)):
        if of > size:
            scales = Repeat(scales, -(-of // size), dim, -(-int(recipe.type.shape[dim]) // size))
    return scales


def aligned(recipe: Recipe) -> Recipe:
    """A packed weight in blocks so small that the parts of joins are whole blocks, and a scale of all has a row each.

    FormatError if its format has no smaller ones.
    """
    if isinstance(recipe, Stack):
        return replace(recipe, part=aligned(recipe.part))
    first, last = len(recipe.type.shape) - 2, len(recipe.type.shape) - 1
    if isinstance(recipe, Cat) and recipe.dim < first:
        return replace(recipe, parts=tuple(map(aligned, recipe.parts)))
    known = parse_format(str(recipe.type.fmt))
    if any(part.holds not in ("elements", "blocks") for part in known.parts.values()):
        return recipe
    rows, columns = known.block
    if columns is None:
        rows = rows and 1
    if isinstance(recipe, Cat) and recipe.dim in (first, last):
        sizes = [int(part.type.shape[recipe.dim]) for part in recipe.parts]
        if recipe.dim == first:
            rows = None if rows is None else math.gcd(rows, *sizes)
        elif columns is not None:
            columns = math.gcd(columns, *sizes)
    rows = 1 if rows is None else rows
    if (rows, columns) == known.block:
        return recipe
    fmt = formats.with_block(str(recipe.type.fmt), rows, columns)
    if isinstance(recipe, Cat):
        return replace(recipe, parts=tuple(Regroup(part, fmt) for part in recipe.parts))
    return recipe if isinstance(recipe, Quantize) else Regroup(recipe, fmt)


def _sliced(part: Recipe, of: Slice, kind: Part, size: int) -> Recipe:
    if kind.holds in ("columns", "tensor"):  # rows are cut, or whole blocks
        return part
    if kind.holds == "elements":
        return replace(of, part=part)
    first, last = of.start // size, -(-of.stop // size)
    if isinstance(part, Repack) and of.step == 1:  # no more of the words than that
        return narrow(part, first, last, of.dim)
    return Slice(part, first, last, of.dim, of.step)


def cuts_blocks(recipe: Slice) -> bool:
    """Whether a slice of a packed weight is no slice of its parts."""
    if recipe.part.type.fmt is None or is_scaled_as_one(recipe.part.type, recipe.dim):
        return False
    has_gaps = recipe.step > 1 and block_of(recipe.part.type)[recipe.dim] > 1
    return has_gaps or not is_of_blocks(recipe.part, recipe.start, recipe.stop, recipe.dim)


def is_scaled_as_one(type: Type, dim: int) -> bool:
    """Whether all elements along a dim of a packed weight share a scale, and each is stored by itself."""
    values = parse_format(str(type.fmt)).parts.get("values") if type.fmt is not None else None
    return values is not None and values.holds == "elements" and formats.block_size(type, dim) is None


def _stored_parts(leaf: W, fmt: str) -> dict[str, Recipe]:
    if not has_parts(leaf):
        raise UnsupportedError(f"the tensors of a weight stored as {fmt} are not supported")
    return {name: _stored_part(leaf, part, parse_format(fmt).bits) for name, part in parse_format(fmt).parts.items()}


def _stored_part(leaf: W, part: Part, bits: int) -> Recipe:
    name = leaf.name.removesuffix(".weight") if part.suffix.startswith(".") else leaf.name
    type = Type(part.dtype, formats.part_shape(leaf.type, part))
    if part.words:
        stored = Type(*formats.words_type(leaf.type, part))
        return Repack(W(name + part.suffix, stored), part.words, bits, type)
    if part.is_transposed:
        return Transpose(W(name + part.suffix, replace(type, shape=(*type.shape[:-2], *type.shape[:-3:-1]))))
    return W(name + part.suffix, type)

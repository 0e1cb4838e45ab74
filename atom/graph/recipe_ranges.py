"""Concatenate and slice recipes, so that only the needed ranges are read."""

from __future__ import annotations

from dataclasses import replace

from atom.graph import formats
from atom.graph.recipes import (
    Apply,
    Cat,
    Dequantize,
    Full,
    Quantize,
    Recipe,
    Regroup,
    Repack,
    Shift,
    Shuffle,
    Slice,
    Stack,
    Transpose,
)


def cat(parts: tuple[Recipe, ...], dim: int = 0) -> Recipe:
    """Join parts; adjacent slices of one tensor that make up all of it become that tensor.

    Tensors that are packed while they load are joined before, if that changes no block.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    packed = [part for part in parts if isinstance(part, Quantize) and part.fmt == first.type.fmt]
    if len(packed) == len(parts):
        sizes = [formats.block_size(part.type, dim) for part in packed[:-1]]
        if all(size and int(part.type.shape[dim]) % size == 0 for part, size in zip(packed, sizes, strict=False)):
            return Quantize(cat(tuple(part.part for part in packed), dim), packed[0].fmt)
    if isinstance(first, Slice) and all(
        isinstance(part, Slice) and (part.part, part.dim, part.step) == (first.part, dim, 1) for part in parts
    ):
        bounds = [(part.start, part.stop) for part in parts if isinstance(part, Slice)]
        ends = [stop for _, stop in bounds]
        if [start for start, _ in bounds] == [0, *ends[:-1]] and ends[-1] == first.part.type.shape[dim]:
            return first.part
    return Cat(parts, dim)


def narrow(recipe: Recipe, start: int, stop: int, dim: int = 0) -> Recipe:
    """The recipe of a range of a tensor (experts, rows or columns), which reads no more than that range."""
    if (start, stop) == (0, recipe.type.shape[dim]):
        return recipe
    if isinstance(recipe, Full):
        return replace(recipe, type=recipe.type.with_size(dim, stop - start))
    if isinstance(recipe, Stack):
        if dim == 0:
            return Stack(recipe.part, recipe.start + start, recipe.start + stop)
        return Stack(narrow(recipe.part, start, stop, dim - 1), recipe.start, recipe.stop)
    if isinstance(recipe, Cat):
        if dim != recipe.dim:
            return Cat(tuple(narrow(part, start, stop, dim) for part in recipe.parts), recipe.dim)
        ends, parts = 0, []
        for part in recipe.parts:
            size, begin = int(part.type.shape[dim]), ends
            ends += size
            if begin < stop and start < ends:
                parts.append(narrow(part, max(start - begin, 0), min(stop - begin, size), dim))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts), dim)
    if isinstance(recipe, Slice) and dim == recipe.dim:
        first = recipe.start + start * recipe.step
        return replace(recipe, start=first, stop=min(first + (stop - start) * recipe.step, recipe.stop))
    if isinstance(recipe, Transpose):
        first = len(recipe.type.shape) + recipe.dim
        return replace(recipe, part=narrow(recipe.part, start, stop, dim + {first: 1, first + 1: -1}.get(dim, 0)))
    if isinstance(recipe, Dequantize):
        packed = recipe.part
        if is_of_blocks(packed, start, stop, dim):
            return Dequantize(narrow(packed, start, stop, dim))
        if isinstance(packed, Cat):
            return narrow(Cat(tuple(map(Dequantize, packed.parts)), packed.dim), start, stop, dim)
        if isinstance(packed, Stack):
            return narrow(replace(packed, part=Dequantize(packed.part)), start, stop, dim)
    if isinstance(recipe, Repack) and (words := _words_of(recipe, start, stop, dim)) is not None:
        return replace(recipe, part=words, type=recipe.type.with_size(dim, stop - start))
    if isinstance(recipe, Quantize | Regroup) and is_of_blocks(
        recipe if isinstance(recipe, Quantize) else recipe.part, start, stop, dim
    ):
        return replace(recipe, part=narrow(recipe.part, start, stop, dim))
    if isinstance(recipe, Slice | Shift | Apply | Shuffle):
        return replace(recipe, part=narrow(recipe.part, start, stop, dim))
    return Slice(recipe, start, stop, dim)


def padded(recipe: Recipe, start: int, stop: int, dim: int = 0) -> Recipe:
    """The recipe of a range of a plain tensor, with zeros where it goes beyond the end."""
    size = int(recipe.type.shape[dim])
    if stop <= size:
        return narrow(recipe, start, stop, dim)
    zeros = Full(0, recipe.type.with_size(dim, stop - max(start, size)))
    return zeros if start >= size else Cat((narrow(recipe, start, size, dim), zeros), dim)


def _words_of(recipe: Repack, start: int, stop: int, dim: int) -> Recipe | None:
    """The words of a range of rows, or the blocks or exponents of any range; None if the range cuts words."""
    if recipe.words in ("exponents", *formats.BLOCK_WORDS):
        return narrow(recipe.part, start, stop, dim)
    if dim:
        return None
    holds_values, per_word = len(recipe.type.shape) > len(recipe.part.type.shape), 32 // recipe.bits
    words_dim = 0 if recipe.words in ("columns", "rows") else 1
    if recipe.words == "columns" or (recipe.words.startswith("gptq") and holds_values):
        return narrow(recipe.part, start, stop, words_dim)
    if start % per_word or (stop % per_word and stop != recipe.type.shape[0]):
        return None
    return narrow(recipe.part, start // per_word, -(-stop // per_word), words_dim)


def is_of_blocks(recipe: Recipe, start: int, stop: int, dim: int) -> bool:
    """Whether a range of a packed tensor begins and ends where blocks do."""
    if isinstance(recipe, Cat) and dim != recipe.dim:
        return all(is_of_blocks(part, start, stop, dim) for part in recipe.parts)
    if isinstance(recipe, Cat):
        begins = 0
        for part in recipe.parts:
            size = int(part.type.shape[dim])
            first, last = max(start - begins, 0), min(stop - begins, size)
            if first < last and not is_of_blocks(part, first, last, dim):
                return False
            begins += size
        return True
    if isinstance(recipe, Stack):
        return dim == 0 or is_of_blocks(recipe.part, start, stop, dim - 1)
    size = formats.block_of(recipe.type)[dim]
    return start % size == 0 and (stop % size == 0 or stop == recipe.type.shape[dim])

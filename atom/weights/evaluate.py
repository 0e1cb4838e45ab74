"""Evaluate recipes: find the parts of one, and view them in stored tensors.

A part fills one place of the recipe's tensor.

for part, place in find_places(recipe, tensor):
    copy(part, place, lambda plain: view(plain, checkpoint))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.errors import UnsupportedError
from atom.graph import TORCH_DTYPES, Cat, Dequantize, Recipe, Shift, Slice, Stack, Transpose, W
from atom.graph.recipes import narrow
from atom.weights.dequantize import unpack


def find_places(recipe: Recipe, target: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """The parts of a recipe that are not joined of others, each with the view of the target that it fills."""
    if isinstance(recipe, Cat):
        start = 0
        for part in recipe.parts:
            size = int(part.type.shape[recipe.dim])
            yield from find_places(part, target.narrow(recipe.dim, start, size))
            start += size
    elif isinstance(recipe, Stack):
        for place, expert in enumerate(range(recipe.start, recipe.stop)):
            yield from find_places(recipe.of(expert), target[place])
    elif len(recipe.type.shape) == 3:  # one expert at a time, so that little is dequantized at once
        for place in range(int(recipe.type.shape[0])):
            yield narrow(recipe, place, place + 1), target[place : place + 1]
    else:
        yield recipe, target


def copy(recipe: Recipe, target: Tensor, see: Callable[[Recipe], Tensor]) -> None:
    """Fill a target with a recipe of one stored tensor; `see` gives that tensor's view, without a Shift."""
    if isinstance(recipe, Shift):
        copy(recipe.part, target, see)
        target.add_(recipe.by)
    else:
        target.copy_(see(recipe))


def view(recipe: Recipe, checkpoint: Checkpoint) -> Tensor:
    """A view of the stored tensor, where it need not be dequantized; nothing of it is read."""
    if isinstance(recipe, W):
        assert recipe.fmt is None, f"{recipe.name} is stored as {recipe.fmt}: refuse_packed comes first"
        return _stored(recipe.name, checkpoint)
    if isinstance(recipe, Transpose):
        return view(recipe.part, checkpoint).mT
    ranges, inner = _ranges(recipe)
    if isinstance(inner, Dequantize):
        last = len(inner.type.shape) - 1  # the dim along which it is packed
        others = [each for each in ranges if each.dim != last]
        packed = unpack(inner.part, lambda name: _stored(name, checkpoint), lambda part: _cut(part, others))
        return _cut(packed, [each for each in ranges if each.dim == last])
    if not ranges:
        raise UnsupportedError(f"a weight cannot be read as {type(recipe).__name__.lower()}(…) of several tensors")
    return _cut(view(inner, checkpoint), ranges)


def _ranges(recipe: Recipe) -> tuple[list[Slice], Recipe]:
    """Take the slices off a recipe: these, innermost first, and the recipe that they slice."""
    ranges: list[Slice] = []
    while isinstance(recipe, Slice):
        ranges.insert(0, recipe)
        recipe = recipe.part
    return ranges, recipe


def _cut(tensor: Tensor, ranges: Iterable[Slice]) -> Tensor:
    for each in ranges:
        tensor = tensor[(slice(None),) * each.dim + (slice(each.start, each.stop, each.step),)]
    return tensor


def _stored(name: str, checkpoint: Checkpoint) -> Tensor:
    stored = checkpoint.tensors[name]
    if stored.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"tensor {name} is stored as {stored.dtype}, which atom cannot load yet")
    data = checkpoint.read(name)
    if not data:
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)

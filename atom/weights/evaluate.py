"""Evaluate recipes: find the parts of one, and view them in stored tensors.

A part fills one place of the recipe's tensor.

for part, place in find_places(recipe, tensor):
    copy(part, place, lambda plain: view(plain, checkpoint))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.errors import UnsupportedError
from atom.graph import TORCH_DTYPES, Cat, Dequantize, Recipe, Shift, Slice, Stack, Transpose, W
from atom.graph.parts import parts_of
from atom.graph.recipes import narrow
from atom.weights.dequantize import unpack


def find_places(recipe: Recipe, target: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """The parts of a recipe that are not joined of others, each with the view of the target that it fills."""
    if isinstance(recipe, Dequantize):
        for packed, filled in find_places(recipe.part, target):
            yield Dequantize(packed), filled
    elif isinstance(recipe, Cat):
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
    match recipe:
        case W():
            assert recipe.type.fmt is None, f"{recipe.name} is stored as {recipe.type.fmt}: refuse_packed comes first"
            return _stored(recipe.name, checkpoint)
        case Transpose(part, dim):
            return view(part, checkpoint).transpose(dim, dim + 1)
        case Slice(part, start, stop, dim, step):
            return view(part, checkpoint)[(slice(None),) * dim + (slice(start, stop, step),)]
        case Dequantize(part):
            return unpack(str(part.type.fmt), {name: view(each, checkpoint) for name, each in parts_of(part).items()})
    raise UnsupportedError(f"a weight cannot be read as {type(recipe).__name__.lower()}(…) of several tensors")


def _stored(name: str, checkpoint: Checkpoint) -> Tensor:
    stored = checkpoint.tensors[name]
    if stored.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"tensor {name} is stored as {stored.dtype}, which atom cannot load yet")
    data = checkpoint.read(name)
    if not data:
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)

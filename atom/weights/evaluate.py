"""Evaluate recipes: split one into parts, and view each part in the stored tensors.

A part fills its target, a view of the recipe's tensor.

for part, target in split_recipe(recipe, tensor):
    copy(part, target, lambda plain: view(plain, checkpoint))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.errors import UnsupportedError
from atom.graph import TORCH_DTYPES, Cat, Dequantize, Recipe, Repack, Shift, Slice, Stack, Transpose, W
from atom.graph.formats import block_of
from atom.graph.parts import cuts_blocks, parts_of
from atom.graph.recipes import narrow
from atom.weights.dequantize import repack, unpack

Loaded = Tensor | list[Tensor]  # of a recipe; a list: one tensor per expert, each in a kernel's own layout


AT_ONCE = 1 << 20  # elements
WORD = 8  # rows at most that share int32 words


def split_recipe(recipe: Recipe, tensor: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """Split a recipe at its joins: each part, with its target, the view of the tensor that it fills."""
    if isinstance(recipe, Dequantize):
        for packed, target in split_recipe(recipe.part, tensor):
            yield from _split_rows(Dequantize(packed), target)
    elif isinstance(recipe, Cat):
        start = 0
        for part in recipe.parts:
            size = int(part.type.shape[recipe.dim])
            yield from split_recipe(part, tensor.narrow(recipe.dim, start, size))
            start += size
    elif isinstance(recipe, Stack):
        for index, expert in enumerate(range(recipe.start, recipe.stop)):
            yield from split_recipe(recipe.of(expert), tensor[index])
    elif len(recipe.type.shape) == 3:  # one expert at a time, so that little is dequantized at once
        for expert in range(int(recipe.type.shape[0])):
            yield narrow(recipe, expert, expert + 1), tensor[expert : expert + 1]
    else:
        yield recipe, tensor


def _split_rows(recipe: Dequantize, tensor: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """Split a matrix by rows, in whole blocks and words, so that what is dequantized at once stays in a CPU's cache."""
    is_cut = isinstance(recipe.part, Slice) and cuts_blocks(recipe.part)  # each range would dequantize the whole
    if len(recipe.type.shape) != 2 or not tensor.numel() or is_cut:
        yield recipe, tensor
        return
    step = math.lcm(block_of(recipe.part.type)[0], WORD)
    for start in range(0, len(tensor), rows := max(AT_ONCE // tensor.shape[1] // step * step, step)):
        stop = min(start + rows, len(tensor))
        yield narrow(recipe, start, stop), tensor[start:stop]


def copy(recipe: Recipe, target: Tensor, view_of: Callable[[Recipe], Tensor]) -> None:
    """Fill a target with a recipe of one stored tensor; `view_of` gives that tensor's view, without a Shift."""
    if isinstance(recipe, Shift):
        copy(recipe.part, target, view_of)
        target.add_(recipe.by)
    else:
        target.copy_(view_of(recipe))


def view(recipe: Recipe, checkpoint: Checkpoint) -> Tensor:
    """A view of the stored tensor, where it need not be dequantized; nothing of it is read."""
    match recipe:
        case W():
            assert recipe.type.fmt is None, f"{recipe.name} is stored as {recipe.type.fmt}: refuse_packed comes first"
            return _stored(recipe.name, checkpoint).view([int(dim) for dim in recipe.type.shape])
        case Transpose(part, dim):
            return view(part, checkpoint).transpose(dim, dim + 1)
        case Slice(part, start, stop, dim, step):
            return view(part, checkpoint)[(slice(None),) * dim + (slice(start, stop, step),)]
        case Repack(part, words, bits):
            return repack(view(part, checkpoint), words, bits, [int(dim) for dim in recipe.type.shape])
        case Dequantize(Slice() as part) if cuts_blocks(part):
            return view(replace(part, part=Dequantize(part.part)), checkpoint)
        case Dequantize(part):
            parts = {
                name: view(each, checkpoint).to(TORCH_DTYPES[each.type.dtype]) for name, each in parts_of(part).items()
            }
            return unpack(str(part.type.fmt), parts)
    raise UnsupportedError(f"a weight cannot be read as {type(recipe).__name__.lower()}(…) of several tensors")


def _stored(name: str, checkpoint: Checkpoint) -> Tensor:
    stored = checkpoint.tensors[name]
    if stored.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"tensor {name} is stored as {stored.dtype}, which atom cannot load yet")
    data = checkpoint.read(name)
    if not data:
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)

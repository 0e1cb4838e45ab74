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
from atom.graph import (
    TORCH_DTYPES,
    Apply,
    Cat,
    Dequantize,
    LearnedFreqs,
    Recipe,
    Repack,
    Repeat,
    Shift,
    Slice,
    Stack,
    Transpose,
    W,
)
from atom.graph.formats import block_of
from atom.graph.packed import LaidOut, PackedWeight
from atom.graph.parts import cuts_blocks, parts_of
from atom.graph.recipe_contents import packed_while_loading
from atom.graph.recipe_ranges import narrow
from atom.graph.unpack import unpack
from atom.kernels.host_memory import HostTensor
from atom.weights.arrived import ArrivedTensors, as_bytes
from atom.weights.repack import repack
from atom.weights.rope import rope_freqs

# a list: one per expert, each in a kernel's own layout
Loaded = Tensor | PackedWeight | LaidOut | HostTensor | list[Tensor | LaidOut | PackedWeight]
Place = Callable[[Recipe, Loaded], Loaded]  # takes a weight to another place


AT_ONCE = 1 << 20  # elements
WORD = 8  # max rows that share int32 words
LEAST_KEPT = 1e-3  # variance
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: x,
    "square": torch.square,
    "abs": torch.abs,
    "rest_of_abs": lambda x: 1 - x.abs(),
    "sigmoid": torch.sigmoid,
    "rest_of_sigmoid": lambda x: (torch.sigmoid(-x) * (1 + torch.sigmoid(x))).clamp(min=LEAST_KEPT).sqrt(),
}


def tensors_in(loaded: Loaded) -> list[Tensor]:
    """The tensors of a loaded weight, in order."""
    match loaded:
        case Tensor():
            return [loaded]
        case LaidOut():
            return [loaded.tensor]
        case HostTensor():
            return [loaded.on_host]
        case PackedWeight():
            return [*loaded.parts.values()]
    return [tensor for expert in loaded for tensor in tensors_in(expert)]


@torch.inference_mode()
def overwrite(old: Loaded, new: Loaded) -> Loaded:
    """Copy a recipe's new tensors into the memory of its old ones; the old ones."""
    for before, after in zip(tensors_in(old), tensors_in(new), strict=True):
        before.copy_(after)
    return old


def split_recipe(recipe: Recipe, tensor: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """Split a recipe at its joins: each part, with its target, the view of the tensor that it fills."""
    if isinstance(recipe, Dequantize):
        for packed, target in split_recipe(recipe.part, tensor):
            whole = Dequantize(packed)  # what is packed here is packed as a whole
            yield from [(whole, target)] if any(packed_while_loading(packed)) else _split_rows(whole, target)
    elif isinstance(recipe, Cat) and (rows := _deinterleave(recipe)) is not None:
        yield rows, tensor.unflatten(recipe.dim, (len(recipe.parts), -1))  # type: ignore[no-untyped-call]
    elif isinstance(recipe, Cat):
        start = 0
        for part in recipe.parts:
            size = int(part.type.shape[recipe.dim])
            yield from split_recipe(part, tensor.narrow(recipe.dim, start, size))
            start += size
    elif isinstance(recipe, Stack):
        for index, expert in enumerate(range(recipe.start, recipe.stop)):
            yield from split_recipe(recipe.of(expert), tensor[index])
    else:
        yield recipe, tensor


def _deinterleave(recipe: Cat) -> Recipe | None:
    """If the parts interleave along one dim of a stored tensor, read it once and reshape; else None"""
    first, dim, num_parts = recipe.parts[0], recipe.dim, len(recipe.parts)
    if not isinstance(first, Slice) or not isinstance(first.part, W) or first.part.type.fmt is not None:
        return None
    stored, (*before, size), after = first.part, map(int, recipe.type.shape[: dim + 1]), recipe.type.shape[dim + 1 :]
    is_all = size == stored.type.shape[dim] and size % num_parts == 0
    interleaved = tuple(Slice(stored, n, size, dim, num_parts) for n in range(num_parts)) if is_all else ()
    if num_parts == 1 or recipe.parts != interleaved:
        return None
    shape = (*before, size // num_parts, num_parts, *after)
    return Transpose(replace(stored, type=replace(stored.type, shape=shape)), dim - len(shape))


def _split_rows(recipe: Dequantize, tensor: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """Split by experts, and a matrix by rows, in whole blocks and words, so that what is dequantized at once stays in a
    CPU's cache."""
    if len(recipe.type.shape) == 3:
        for expert in range(len(tensor)):
            yield narrow(recipe, expert, expert + 1), tensor[expert : expert + 1]
        return
    is_cut = isinstance(recipe.part, Slice) and cuts_blocks(recipe.part)  # each range would dequantize the whole
    if len(recipe.type.shape) != 2 or not tensor.numel() or is_cut:
        yield recipe, tensor
        return
    step = math.lcm(block_of(recipe.part.type)[0], WORD)
    for start in range(0, len(tensor), rows := max(AT_ONCE // tensor.shape[1] // step * step, step)):
        stop = min(start + rows, len(tensor))
        yield narrow(recipe, start, stop), tensor[start:stop]


def copy(recipe: Recipe, target: Tensor, view_of: Callable[[Recipe], Tensor]) -> None:
    """Fill a target with a recipe of one stored tensor; `view_of` gives that tensor's view, as it is stored."""
    if isinstance(recipe, Shift):
        copy(recipe.part, target, view_of)
        target.add_(recipe.by)
    elif isinstance(recipe, Apply):
        copy(recipe.part, target, view_of)
        target.copy_(FUNCTIONS[recipe.function](target * recipe.factor))
    elif isinstance(recipe, LearnedFreqs):
        copy(recipe.part, target, view_of)
        target.exp_().mul_(rope_freqs(recipe.freqs).to(target.device))
    else:
        target.copy_(view_of(recipe))


def view(recipe: Recipe, checkpoint: Checkpoint) -> Tensor:
    """A view of the stored tensor, if it need not be dequantized; nothing of it is read."""
    match recipe:
        case W():
            assert recipe.type.fmt is None, f"{recipe.name} is stored as {recipe.type.fmt}: refuse_packed comes first"
            return _stored(recipe, checkpoint).view([int(dim) for dim in recipe.type.shape])
        case Transpose(part, dim):
            return view(part, checkpoint).transpose(dim, dim + 1)
        case Slice(part, start, stop, dim, step):
            return view(part, checkpoint)[(slice(None),) * dim + (slice(start, stop, step),)]
        case Repack(part, words, bits):
            return repack(view(part, checkpoint), words, bits, [int(dim) for dim in recipe.type.shape])
        case Repeat(part, times, dim, size):
            return view(part, checkpoint).repeat_interleave(times, dim).narrow(dim, 0, size)
        case Dequantize(Slice() as part) if cuts_blocks(part):
            return view(replace(part, part=Dequantize(part.part)), checkpoint)
        case Dequantize(part):
            parts = {
                name: view(each, checkpoint).to(TORCH_DTYPES[each.type.dtype]) for name, each in parts_of(part).items()
            }
            return unpack(str(part.type.fmt), parts)
    raise UnsupportedError(f"a weight cannot be read as {type(recipe).__name__.lower()}(…) of several tensors")


def _stored(leaf: W, checkpoint: Checkpoint) -> Tensor:
    if isinstance(checkpoint, ArrivedTensors) and (arrived := checkpoint.find(leaf.name)) is not None:
        return as_bytes(arrived) if leaf.type.dtype == "u8" else arrived
    name, stored = leaf.name, checkpoint.tensors[leaf.name]
    if stored.blocks is not None and leaf.type.dtype == "u8":
        return torch.frombuffer(checkpoint.read_blocks(name), dtype=torch.uint8)
    if stored.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"tensor {name} is stored as {stored.dtype}, which atom cannot load yet")
    data, dtype = checkpoint.read(name), TORCH_DTYPES["u8" if leaf.type.dtype == "u8" else stored.dtype]
    if not data:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(stored.shape)

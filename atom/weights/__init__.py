"""Recipes to tensors: the one place where weights are read, joined and made.

    check(graph, checkpoint.tensors, ignore=config.model.ignore)      # missing, left over, misshapen: a CheckpointError
    weights = load(graph.recipes(), checkpoint, progress)             # {recipe: tensor}; equal recipes are one tensor

Tensors are streamed: the bytes that a recipe needs are read from the mapped file, converted to the dtype that the graph
computes in, and put in their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Any, cast

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint, Progress, StoredTensor
from atom.errors import CheckpointError, UnsupportedError
from atom.graph import (
    TORCH_DTYPES,
    Cat,
    Dequantize,
    Graph,
    Recipe,
    RopeFreqs,
    Shift,
    Shuffle,
    Slice,
    Stack,
    Transpose,
    W,
)
from atom.graph.formats import stored_parts
from atom.graph.recipes import leaves, narrow, packed_leaves
from atom.kernels import shuffle
from atom.weights.packed import unpack
from atom.weights.rope import rope_freqs

Loaded = Tensor | list[Tensor]  # a list: experts, each in a kernel's own layout

NUM_READERS = 2  # threads that read and convert


def check(graph: Graph, stored: Mapping[str, StoredTensor], ignore: Iterable[str] = ()) -> None:
    """Hold the checkpoint against the graph: every tensor there, of the right shape, and none left over."""
    needed = {
        leaf.name + suffix: type
        for recipe in graph.recipes()
        for leaf in leaves(recipe)
        for suffix, type in stored_parts(leaf.type, leaf.fmt).items()
    }
    missing = [name for name in needed if name not in stored]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no tensor {_some(missing)}; is it whole, and is model= the right one?"
        )
    for name, type in needed.items():
        shape = tuple(stored[name].shape)
        if shape != type.shape:
            raise CheckpointError(f"tensor {name} is {list(shape)}, the model expects {list(type.shape)}")
    patterns = tuple(ignore)
    surplus = [
        name for name in stored if name not in needed and not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if surplus:
        raise CheckpointError(
            f"the model does not use tensor {_some(surplus)}; name it in model.ignore if it may be left out"
        )


def refuse_packed(graph: Graph) -> None:
    """UnsupportedError where a weight would have to be computed with in its stored format."""
    for recipe in graph.recipes():
        for leaf in packed_leaves(recipe):
            stored = f"{leaf.name} is stored as {leaf.fmt}"
            raise UnsupportedError(f"{stored}: running quantized weights is not built yet, job=explain reads them")


def load(recipes: Iterable[Recipe], checkpoint: Checkpoint, progress: Progress) -> dict[Recipe, Loaded]:
    """Every recipe's tensor, on the CPU."""
    ordered = sorted(recipes, key=lambda recipe: -recipe.type.num_bytes)  # the readers end together
    with progress.task("weights", sum(recipe.type.num_bytes for recipe in ordered)) as task:

        def fill(recipe: Recipe, target: Tensor) -> None:
            _copy(recipe, target, lambda name: _stored(checkpoint, name))
            task.advance(target.nbytes)

        with ThreadPoolExecutor(NUM_READERS) as readers, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
            return dict(zip(ordered, readers.map(lambda recipe: _make(recipe, fill), ordered), strict=True))


def load_dummy(recipes: Iterable[Recipe], seed: int) -> dict[Recipe, Loaded]:
    """Weights of normal(0, 0.02) in place of stored ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        recipe: _make(recipe, lambda _, target: target.normal_(0.0, 0.02, generator=generator)) for recipe in recipes
    }


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


@torch.inference_mode()
def _make(recipe: Recipe, fill: Callable[[Recipe, Tensor], Any]) -> Loaded:
    """A recipe's tensor; `fill` writes each part of it into its place."""
    if isinstance(recipe, RopeFreqs):
        return rope_freqs(recipe)
    if isinstance(recipe, Shuffle):
        return _shuffled(recipe, fill)
    tensor = torch.empty([int(dim) for dim in recipe.type.shape], dtype=TORCH_DTYPES[recipe.type.dtype])
    for part, place in _places(recipe, tensor):
        fill(part, place)
    return tensor


def _shuffled(recipe: Shuffle, fill: Callable[[Recipe, Tensor], Any]) -> Loaded:
    """In a kernel's layout; experts one by one, so that all of them are never there twice."""
    part = recipe.part
    if len(part.type.shape) == 2:
        return shuffle(cast(Tensor, _make(part, fill)), recipe.layout)
    num_experts, *shape = (int(dim) for dim in part.type.shape)
    plain = torch.empty([1, *shape], dtype=TORCH_DTYPES[part.type.dtype])  # one for all: freed ones would be holes
    experts: list[Tensor] = []
    for expert in range(num_experts):
        for each, place in _places(narrow(part, expert, expert + 1), plain):
            fill(each, place)
        experts.append(shuffle(plain[0], recipe.layout))
    return experts


def _places(recipe: Recipe, target: Tensor) -> Iterator[tuple[Recipe, Tensor]]:
    """The parts of a recipe, none of them joined of others, and the part of its tensor that each one fills."""
    if isinstance(recipe, Cat):
        start = 0
        for part in recipe.parts:
            size = int(part.type.shape[recipe.dim])
            yield from _places(part, target.narrow(recipe.dim, start, size))
            start += size
    elif isinstance(recipe, Stack):
        for place, expert in enumerate(range(recipe.start, recipe.stop)):
            yield from _places(recipe.of(expert), target[place])
    elif len(recipe.type.shape) == 3:  # one expert at a time: what is unpacked on the way stays small
        for place in range(int(recipe.type.shape[0])):
            yield narrow(recipe, place, place + 1), target[place : place + 1]
    else:
        yield recipe, target


def _copy(recipe: Recipe, target: Tensor, read: Callable[[str], Tensor]) -> None:
    """Fill a target with a recipe that is made of one stored tensor."""
    if isinstance(recipe, Shift):
        _copy(recipe.part, target, read)
        target.add_(recipe.by)
    else:
        target.copy_(_view(recipe, read))


def _view(recipe: Recipe, read: Callable[[str], Tensor]) -> Tensor:
    """A view of the stored tensor, where it need not be unpacked."""
    if isinstance(recipe, W):
        assert recipe.fmt is None, f"{recipe.name} is stored as {recipe.fmt}: refuse_packed comes first"
        return read(recipe.name)
    if isinstance(recipe, Transpose):
        return _view(recipe.part, read).mT
    ranges, inner = _ranges(recipe)
    if isinstance(inner, Dequantize):
        last = len(inner.type.shape) - 1  # the dim along which it is packed
        packed = unpack(inner.part, read, lambda part: _cut(part, [each for each in ranges if each.dim != last]))
        return _cut(packed, [each for each in ranges if each.dim == last])
    if not ranges:
        raise UnsupportedError(f"a weight cannot be read as {type(recipe).__name__.lower()}(…) of several tensors")
    return _cut(_view(inner, read), ranges)


def _ranges(recipe: Recipe) -> tuple[list[Slice], Recipe]:
    """The slices around a recipe, innermost first, and what they are of."""
    ranges: list[Slice] = []
    while isinstance(recipe, Slice):
        ranges.insert(0, recipe)
        recipe = recipe.part
    return ranges, recipe


def _cut(tensor: Tensor, ranges: Iterable[Slice]) -> Tensor:
    for each in ranges:
        tensor = tensor[(slice(None),) * each.dim + (slice(each.start, each.stop, each.step),)]
    return tensor


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    stored = checkpoint.tensors[name]
    if stored.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"tensor {name} is stored as {stored.dtype}, which atom cannot load yet")
    data = checkpoint.read(name)
    if not data:
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)

"""Load weights from tensors that arrive one by one, as another engine reads them.

    for recipe, loaded in load_incremental(graph.recipes(), tensors, stacked, "cuda:0"):
        ...

A recipe is made as soon as the last tensor that it reads is there. What no other recipe waits for is let go, so that
neither a whole checkpoint nor a weight twice has to be in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint, StoredTensor, Tokenizer
from atom.checkpoint.stacked import unstack
from atom.errors import UnsupportedError
from atom.graph import TORCH_DTYPES, Recipe
from atom.graph.parts import stored_tensors
from atom.weights.checks import check_stored, check_surplus
from atom.weights.evaluate import Loaded, copy, view
from atom.weights.localize import localize
from atom.weights.make import make_all
from atom.weights.sources import WeightSource

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class ArrivedCheckpoint(Checkpoint):
    """The tensors that are there so far."""

    location = "the weights that arrive"

    def __init__(self) -> None:
        self.config, self.generation_config = {}, {}
        self.tensors: dict[str, StoredTensor] = {}
        self._of: dict[str, Checkpoint] = {}  # of each tensor that is a part of one that has arrived

    def add(self, checkpoint: Checkpoint) -> None:
        self.tensors |= checkpoint.tensors
        self._of |= dict.fromkeys(checkpoint.tensors, checkpoint)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            del self.tensors[name], self._of[name]

    def read(self, name: str) -> memoryview:
        return self._of[name].read(name)

    def read_part(self, name: str, index: int, count: int) -> memoryview:
        return self._of[name].read_part(name, index, count)

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return None

    def close(self) -> None:
        self.drop([*self.tensors])


class _OneTensor(Checkpoint):
    location = ArrivedCheckpoint.location

    def __init__(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedError(f"tensor {name} is {tensor.dtype}, which atom cannot load yet")
        self.config, self.generation_config = {}, {}
        self.tensors = {name: StoredTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))}
        self._bytes: memoryview = tensor.detach().cpu().contiguous().view(-1).view(dtype=torch.uint8).numpy().data

    def read(self, name: str) -> memoryview:
        return self._bytes

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return None

    def close(self) -> None: ...


class _ArrivedSource(WeightSource):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def fill(self, part: Recipe, target: Tensor) -> None:
        copy(part, target, lambda plain: view(plain, self._checkpoint))


def load_incremental(
    recipes: Iterable[Recipe],
    tensors: Iterable[tuple[str, Tensor]],
    stacked: Mapping[str, Sequence[str]],
    device: str,
    coordinates: Mapping[str, int] | None = None,
    ignore: Iterable[str] = (),
) -> Iterator[tuple[Recipe, Loaded]]:
    """Each recipe with what is loaded of it to the device, in the order in which they can be made.

    stacked: see `unstack`.
    coordinates: of the rank whose parts are loaded; None: there is one rank.
    ignore: patterns of tensors that nothing reads.

    CheckpointError if one is missing, surplus, or of another shape.
    """
    own: dict[Recipe, list[Recipe]] = {}  # what this rank has, and the recipes that it is of
    names: set[str] = set()  # that some rank reads
    for recipe in recipes:
        own.setdefault(recipe if coordinates is None else localize(recipe, coordinates), []).append(recipe)
        names |= {leaf.name for leaf in stored_tensors(recipe)}
    waits = {recipe: {leaf.name for leaf in stored_tensors(recipe)} for recipe in own}
    readers: dict[str, list[Recipe]] = {}
    for recipe, read in waits.items():
        for name in read:
            readers.setdefault(name, []).append(recipe)
    left = {recipe: len(read) for recipe, read in waits.items()}
    uses = Counter({name: len(reading) for name, reading in readers.items()})
    arrived, seen = ArrivedCheckpoint(), set[str]()
    source = _ArrivedSource(arrived)

    def make(ready: Sequence[Recipe]) -> Iterator[tuple[Recipe, Loaded]]:
        check_stored(ready, arrived.tensors)
        for recipe, made in make_all(ready, source, device).items():
            uses.subtract(waits[recipe])
            arrived.drop(name for name in waits[recipe] if not uses[name])
            del left[recipe]
            yield from ((each, made) for each in own[recipe])

    yield from make([recipe for recipe, read in waits.items() if not read])
    for name, tensor in tensors:
        parts = unstack(_OneTensor(name, tensor), stacked)
        seen |= parts.tensors.keys()
        arrived.add(parts)
        arrived.drop(each for each in parts.tensors if not uses[each])
        ready = []
        for recipe in (each for part in parts.tensors for each in readers.get(part, ())):
            left[recipe] -= 1
            ready += [] if left[recipe] else [recipe]
        yield from make(ready)
        if any(each in arrived.tensors for each in parts.tensors):
            kept = unstack(_OneTensor(name, tensor.clone()), stacked)  # whoever reads may use its memory again
            arrived.add(kept)
            arrived.drop(each for each in parts.tensors if not uses[each])
    check_stored(left, arrived.tensors)
    check_surplus(names, seen, ignore)

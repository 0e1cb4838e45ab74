"""Sources of weights' values: files for a CPU or a GPU, random numbers.

    source = open_source(checkpoint, device, advance)
    tensors = source.map(make, recipes)       # `make` allocates a recipe's tensor and calls source.fill(part, target)

A CPU's threads copy from the mapped files, each a recipe of its own. For a GPU see `stream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.graph import Recipe
from atom.weights.evaluate import Loaded, copy, view
from atom.weights.stream import StreamedSource

NUM_READERS = 2  # threads that read and convert, on a CPU


class WeightSource(Protocol):
    def map(self, make: Callable[[Recipe], Loaded], recipes: Iterable[Recipe]) -> list[Loaded]:
        """Make each recipe's tensor; what `make` handed to `fill` is filled when this returns."""

    def fill(self, part: Recipe, target: Tensor) -> None:
        """Fill a target with a part of a recipe, see `split_recipe`, now or by the next `flush`."""

    def flush(self) -> None:
        """Return when all targets of this thread are filled, for what is launched from now on."""


def open_source(checkpoint: Checkpoint, device: str, advance: Callable[[int], None]) -> WeightSource:
    """The source of a checkpoint's weights for a device; `advance` gets the number of bytes done."""
    if device == "cpu":
        return MappedSource(checkpoint, advance)
    return StreamedSource(checkpoint, torch.device(device), advance)


class MappedSource:
    """Copies from the mapped files."""

    def __init__(self, checkpoint: Checkpoint, advance: Callable[[int], None]) -> None:
        self._checkpoint, self._advance = checkpoint, advance

    def map(self, make: Callable[[Recipe], Loaded], recipes: Iterable[Recipe]) -> list[Loaded]:
        with ThreadPoolExecutor(NUM_READERS) as readers:
            return list(readers.map(make, recipes))

    def fill(self, part: Recipe, target: Tensor) -> None:
        copy(part, target, lambda plain: view(plain, self._checkpoint))
        self._advance(target.nbytes)

    def flush(self) -> None:
        pass


class RandomSource:
    """Draws from normal(0, 0.02) on the device, in the order of the recipes."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def map(self, make: Callable[[Recipe], Loaded], recipes: Iterable[Recipe]) -> list[Loaded]:
        return list(map(make, recipes))

    def fill(self, part: Recipe, target: Tensor) -> None:
        target.normal_(0.0, 0.02, generator=self._generator)

    def flush(self) -> None:
        pass

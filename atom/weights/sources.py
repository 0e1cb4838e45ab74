"""Sources of weights: mapped files, tensors in memory, random numbers; `stream.py`: files for GPUs.

tensors = source.map(make, recipes)       # `make` allocates a recipe's tensor and calls source.fill(part, target)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.graph import Recipe, Repack, Repeat, W
from atom.graph.recipes import leaves, once
from atom.weights.arrived import ArrivedTensors, OnHost
from atom.weights.calibration import Calibration
from atom.weights.evaluate import Loaded, copy, view
from atom.weights.packed_store import PackedStore

NUM_READERS = 2  # threads that read and convert, on a CPU


class WeightSource(ABC):
    packed: PackedStore | None = None  # of what is packed while it loads
    calibration: Calibration | None = None  # of whose rounded weights the checkpoint has the tensors
    is_random = False  # whether parts of packed weights have no values of their own

    def find(self, recipe: Recipe) -> Mapping[str, Recipe] | None:
        """The parts of a weight that is packed while it loads; None if it has to be made."""
        parts = self.packed.find(recipe) if self.packed else None
        return self.calibration.find(recipe) if parts is None and self.calibration else parts

    def map(self, make: Callable[[Recipe], Loaded], recipes: Iterable[Recipe]) -> list[Loaded]:
        """Make each recipe's tensor; what `make` handed to `fill` is filled when this returns."""
        return list(map(make, recipes))

    @abstractmethod
    def fill(self, part: Recipe, target: Tensor) -> None:
        """Fill a target with a part of a recipe, see `split_recipe`, now or by the next `flush`."""

    def flush(self) -> None:  # noqa: B027
        """Return when all targets of this thread are filled, for what is launched from now on."""


class MappedSource(WeightSource):
    """Copies from the mapped files, in threads with a recipe each. advance: gets the number of bytes done"""

    def __init__(self, checkpoint: Checkpoint, advance: Callable[[int], None]) -> None:
        self._checkpoint, self._advance = checkpoint, advance

    def map(self, make: Callable[[Recipe], Loaded], recipes: Iterable[Recipe]) -> list[Loaded]:
        with ThreadPoolExecutor(NUM_READERS) as readers:
            return list(readers.map(make, recipes))

    def fill(self, part: Recipe, target: Tensor) -> None:
        copy(part, target, lambda plain: view(plain, self._checkpoint))
        self._advance(target.nbytes)


class ArrivedSource(WeightSource):
    """Copies from tensors in memory, maybe on the device; computes on the CPU what other sources compute there"""

    def __init__(self, arrived: ArrivedTensors) -> None:
        self._arrived, self._on_host = arrived, OnHost(arrived)

    def fill(self, part: Recipe, target: Tensor) -> None:
        source = self._on_host if is_computed(part) else self._arrived
        copy(part, target, lambda plain: view(plain, source))

    def find_arrived(self, leaf: W) -> Tensor | None:
        """A stored tensor that is loaded as it is, maybe in another dtype; None if it is not here, or a format's."""
        return self._arrived.find(leaf.name) if leaf.type.fmt is None and leaf.type.dtype != "u8" else None

    def drop(self, names: Iterable[str]) -> None:
        """Forget tensors that nothing reads any more."""
        dropped = list(names)
        self._on_host.drop(dropped)
        self._arrived.drop(dropped)


class RandomSource(WeightSource):
    """Draws from normal(0, 0.02) on the device, in the order of the recipes; whole numbers are 0.

    Biases are a hundredth of that: they are the same for all tokens, and of many layers would become all that a router
    sees.
    """

    is_random = True

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, part: Recipe, target: Tensor) -> None:
        if target.is_floating_point():
            is_bias = any(leaf.name.endswith("bias") for leaf in leaves(part))
            target.normal_(0.0, 0.0002 if is_bias else 0.02, generator=self._generator)
        else:
            target.zero_()  # of indices, which must stay within bounds


@once
def is_computed(part: Recipe) -> bool:
    """Whether a part is more than numbers of a stored tensor, converted and moved."""
    return next(leaves(part)).type.fmt is not None or isinstance(part, Repack | Repeat)

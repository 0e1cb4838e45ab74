"""Sleep mode: release the memory of weights and KV, and restore it.

    sleeper = GPUSleeper(runner, load, weights, memory, kv)      # weights and caches are in these memories
    sleeper.sleep(1)                    # weights go to host memory; 2: they are dropped, and read again
    sleeper.wake_up()

KV is dropped. On a GPU all addresses stay the same, so that CUDA graphs remain valid. On a CPU the weights are in host
memory already, and level 1 drops only KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from atom.errors import naming_a_lack_of_memory
from atom.graph import LaidOut, PackedWeight, Recipe
from atom.graph.recipes import Measured
from atom.kernels.host_memory import HostTensor, pin, unpin
from atom.kernels.stable_memory import StableMemory
from atom.runtime.step.runner import Runner
from atom.runtime.types import KV_CACHE, TAGS, WEIGHTS
from atom.weights.evaluate import Loaded, Place, overwrite

Load = Callable[[Place | None], dict[Recipe, Loaded]]  # of all weights


class Sleeper(ABC):
    """Puts one model to sleep, between two steps, while no sequence has blocks."""

    def __init__(self, runner: Runner, load: Load) -> None:
        """load: reads the weights again"""
        self._runner, self._load = runner, load
        self._asleep: set[str] = set()  # of TAGS
        self.level = 1  # at which the weights fell asleep last

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    @property
    def has_weights(self) -> bool:
        return WEIGHTS not in self._asleep

    def sleep(self, level: int) -> None:
        """Release the memory of weights and KV, unless it has been."""
        if WEIGHTS not in self._asleep:
            self._save_weights(level)
            self.level = level
            self._asleep.add(WEIGHTS)  # before what may fail halfway, and `wake_up` repairs
            self._drop_weights(level)
        if KV_CACHE not in self._asleep:
            self._asleep.add(KV_CACHE)
            self._drop_kv()

    def wake_up(self, tags: Sequence[str] = TAGS) -> None:
        """Take memory again, of the weights, of KV, or of both. CapacityError if there is too little."""
        with naming_a_lack_of_memory(
            "there is less memory than when this engine fell asleep: end what uses it, and wake it up again"
        ):
            for tag, wake in ((WEIGHTS, self._take_weights), (KV_CACHE, self._take_kv)):
                if tag in tags and tag in self._asleep:
                    wake()
                    self._asleep.discard(tag)

    @abstractmethod
    def _save_weights(self, level: int) -> None:
        """Save what `_take_weights` needs. Nothing is released yet."""

    @abstractmethod
    def _drop_weights(self, level: int) -> None: ...

    @abstractmethod
    def _drop_kv(self) -> None: ...

    @abstractmethod
    def _take_weights(self) -> None: ...

    @abstractmethod
    def _take_kv(self) -> None: ...


class CPUSleeper(Sleeper):
    def __init__(
        self, runner: Runner, load: Load, weights: MutableMapping[Recipe, Loaded], num_blocks: Mapping[str, int]
    ) -> None:
        """
        weights: those that the runner's model finds when it is bound
        num_blocks: of KV, by state kind
        """
        super().__init__(runner, load)
        self._weights, self._num_blocks = weights, num_blocks

    def wake_up(self, tags: Sequence[str] = TAGS) -> None:
        before = self._asleep.copy()
        super().wake_up(tags)
        if before and not self._asleep:
            try:
                self._runner.bind(self._num_blocks)
            except BaseException:
                self._asleep = before  # it can be woken up again
                raise

    def _save_weights(self, level: int) -> None:
        pass  # they are in host memory, or read again

    def _drop_weights(self, level: int) -> None:
        self._runner.model.unbind()
        if level == 2:
            for recipe in [each for each in self._weights if not isinstance(each, Measured)]:
                del self._weights[recipe]

    def _drop_kv(self) -> None:
        self._runner.model.unbind()

    def _take_weights(self) -> None:
        if not all(isinstance(each, Measured) for each in self._weights):
            return
        self._weights.update({**self._load(None), **self._weights})  # no file has what was measured

    def _take_kv(self) -> None:
        pass  # with the weights, in `bind`


class GPUSleeper(Sleeper):
    def __init__(
        self, runner: Runner, load: Load, weights: Mapping[Recipe, Loaded], memory: StableMemory, kv: StableMemory
    ) -> None:
        """
        memory: holds all weights
        kv: holds the caches
        """
        super().__init__(runner, load)
        self._weights, self._memory, self._kv = weights, memory, kv
        self._on_host: Tensor | None = None  # all weights
        self._measured: dict[Recipe, Loaded] = {}  # what no file has, on the host

    def _save_weights(self, level: int) -> None:
        self._measured = {
            recipe: each.cpu()
            for recipe, each in self._weights.items()
            if isinstance(recipe, Measured) and isinstance(each, Tensor)
        }
        if level == 1:
            on_host = torch.empty(self._memory.num_bytes, dtype=torch.uint8)
            pin(on_host, "sleep with level=2")
            self._on_host = on_host.copy_(self._memory.content())

    def _drop_weights(self, level: int) -> None:
        self._memory.release()

    def _drop_kv(self) -> None:
        self._kv.release()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def _take_weights(self) -> None:
        self._memory.take()
        if self._on_host is not None:
            self._memory.content().copy_(self._on_host, non_blocking=True)
            unpin(self._on_host.data_ptr())
            self._on_host = None
            return
        try:
            self._load(lambda recipe, made: overwrite(self._weights[recipe], made))
            for recipe, value in self._measured.items():
                overwrite(self._weights[recipe], value)
        except BaseException:
            self._memory.release()
            raise

    def _take_kv(self) -> None:
        torch.cuda.empty_cache()  # what loading weights has left
        self._kv.take()
        self._kv.content().zero_()


@torch.inference_mode()
def place_in(memory: StableMemory, _: Recipe | None, made: Loaded) -> Loaded:
    """A weight in this memory, unless it stays on the host."""

    def move(tensor: Tensor) -> Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return memory.tensor((extent,), tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    if isinstance(made, HostTensor):
        return made
    if isinstance(made, list):
        return [place_in(memory, None, each) for each in made]  # type: ignore[misc]
    if isinstance(made, PackedWeight):
        return PackedWeight(made.type, {name: move(part) for name, part in made.parts.items()}, made.layout)
    return LaidOut(made.type, move(made.tensor)) if isinstance(made, LaidOut) else move(made)

"""Load and unload LoRA adapters by name, while requests run.

loras = Loras(LoraWeights(graph, tensors, 8, 16))
loras.load("sql", loras.read("/adapters/sql"))      # between two steps; `read` may run in another thread
adapter = loras.find("sql")                         # for a request, which holds it from `acquire` to `release`
loras.unload("sql")                                 # no new request gets it; its place is free once none holds it

With several ranks this is the driver's: the others load an adapter before it does, and it is refused if one cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atom.checkpoint.lora import AdapterFiles
from atom.errors import RequestError
from atom.runtime.sleep import Sleeper
from atom.runtime.types import Adapter
from atom.weights.lora import LoraWeights


class Loras:
    def __init__(
        self,
        weights: LoraWeights,
        load_on_others: Callable[[int, AdapterFiles], None] | None = None,
        sleeper: Sleeper | None = None,
    ) -> None:
        """
        weights: the adapters' weights in memory
        load_on_others: makes the other ranks load an adapter; RequestError if one of them does not
        sleeper: releases the memory that holds adapters; None: nothing does
        """
        self._weights, self._load_on_others, self._sleeper = weights, load_on_others, sleeper
        self._adapters: dict[str, Adapter] = {}
        self._free = list(range(weights.max_loras))[::-1]

    @property
    def names(self) -> Sequence[str]:
        return list(self._adapters)

    def read(self, path: str) -> AdapterFiles:
        """Read and check an adapter's files. CheckpointError, UnsupportedError or ConfigError say what is wrong."""
        files = self._weights.read(path)
        self._weights.check(files)
        files.hash()
        return files

    def load(self, name: str, files: AdapterFiles) -> None:
        """Load an adapter. RequestError: the engine sleeps, the name is taken, there is no place, or a rank refuses."""
        if self._sleeper is not None and self._sleeper.is_sleeping:
            raise RequestError("the engine sleeps; wake it up first")
        if name in self._adapters:
            raise RequestError(f"the adapter {name} is loaded already; unload it first, or choose another name")
        if not self._free:
            room = f"there is room for {self._weights.max_loras}"
            raise RequestError(
                f"the adapter {name} has no place: {room} (serve.max_loras), of which requests may hold some"
            )
        number = self._free[-1]
        if self._load_on_others is not None:
            self._load_on_others(number, files)
        self._weights.write(number, files)
        self._adapters[name] = Adapter(name, self._free.pop(), files.digest)

    def unload(self, name: str) -> None:
        """Drop an adapter; requests that hold it go on. RequestError if there is none of that name."""
        adapter = self.find(name)
        del self._adapters[name]
        adapter.is_dropped = True
        self._free_unheld(adapter)

    def find(self, name: str) -> Adapter:
        """The adapter of this name. RequestError if there is none."""
        if (adapter := self._adapters.get(name)) is None:
            raise RequestError(f"there is no adapter {name} (loaded: {', '.join(self._adapters) or 'none'})")
        return adapter

    def acquire(self, adapter: Adapter) -> None:
        """Hold an adapter. RequestError if it has been dropped since it was found."""
        if adapter.is_dropped:
            raise RequestError(f"the adapter {adapter.name} has been unloaded")
        adapter.num_holders += 1

    def release(self, adapter: Adapter) -> None:
        adapter.num_holders -= 1
        self._free_unheld(adapter)

    def _free_unheld(self, adapter: Adapter) -> None:
        if adapter.is_dropped and not adapter.num_holders:
            self._free.append(adapter.number)

"""Hold tensors in memory, under the names that a checkpoint would store them by.

arrived = ArrivedTensors(stacked_parts(config.model))
arrived.add("layers.0.gate_up", tensor)     # and its parts under their names: views
view(recipe, arrived)                       # as of a checkpoint, on the tensor's device
arrived.drop(["layers.0.0.gate"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint, StoredTensor, Tokenizer
from atom.checkpoint.stacked import cut_tensor, find_stacked
from atom.errors import UnsupportedError
from atom.graph import TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class ArrivedTensors(Checkpoint):
    """The tensors that are there so far; `fall_back` has a checkpoint read others."""

    location = "the weights that arrive"

    def __init__(self, stacked: Mapping[str, Sequence[str]]) -> None:
        """stacked: see `unstack`"""
        self.config, self.generation_config = {}, {}
        self._stacked = stacked
        self._stored: Checkpoint | None = None
        self._parts: dict[
            str, list[str]
        ] = {}  # the names of parts of each tensor that was announced, see `find_stacked`
        self._arrived: dict[str, StoredTensor] = {}
        self._tensors: dict[str, Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:  # type: ignore[override]
        return self._arrived if self._stored is None else {**self._stored.tensors, **self._arrived}

    def fall_back(self, stored: Checkpoint) -> None:
        """Have tensors that do not arrive read from this checkpoint, which is closed with this one."""
        self._stored = stored

    def announce(self, names: Iterable[str]) -> None:
        """Find which of these are stacked, all at once."""
        every = list(names)
        self._parts |= {name: [] for name in every} | find_stacked(every, self._stacked)

    def add(self, name: str, tensor: Tensor) -> list[str]:
        """Add a tensor, or the parts of a stacked one; the names added. UnsupportedError for an unknown dtype."""
        if name not in self._parts:
            self.announce([name])
        added = cut_parts(name, describe(name, tensor), self._parts[name])
        parts = tensor.detach().reshape(len(added), *next(iter(added.values())).shape)
        self._arrived |= added
        self._tensors |= zip(added, parts.unbind(), strict=True)
        return list(added)

    def keep(self, names: Iterable[str]) -> None:
        """Copy tensors, whose memory may be written over from now on."""
        for name in names:
            self._tensors[name] = self._tensors[name].clone()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            del self._arrived[name], self._tensors[name]

    def find(self, name: str) -> Tensor | None:
        """A tensor that has arrived; None if it has not."""
        return self._tensors.get(name)

    def read(self, name: str) -> memoryview:
        assert self._stored is not None, f"{name} has arrived"
        return self._stored.read(name)

    def read_blocks(self, name: str) -> memoryview:
        assert self._stored is not None, f"{name} has arrived"
        return self._stored.read_blocks(name)

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return None

    def close(self) -> None:
        self._arrived, self._tensors = {}, {}
        if self._stored is not None:
            self._stored.close()


class OnHost(ArrivedTensors):
    """The same tensors in the host's memory, copied there once each."""

    def __init__(self, arrived: ArrivedTensors) -> None:
        super().__init__({})
        self._stored = self._of = arrived

    def find(self, name: str) -> Tensor | None:
        if name not in self._tensors and (tensor := self._of.find(name)) is not None:
            self._tensors[name] = tensor.cpu()
        return self._tensors.get(name)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._tensors.pop(name, None)


def describe(name: str, tensor: Tensor) -> StoredTensor:
    """A tensor as a checkpoint's header describes it. UnsupportedError for a dtype that atom cannot load."""
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedError(f"tensor {name} is {tensor.dtype}, which atom cannot load yet")
    return StoredTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def cut_parts(name: str, tensor: StoredTensor, parts: Sequence[str]) -> dict[str, StoredTensor]:
    """The parts of a tensor in the order of its bytes, or itself if it has none; CheckpointError if it cannot be cut.

    parts: their names, with {expert}, as `find_stacked` gives them
    """
    if not parts:
        return {name: tensor}
    num_experts, cut = cut_tensor(f"tensor {name}", tensor, parts)
    return {part.replace("{expert}", str(expert)): cut for expert in range(num_experts) for part in parts}


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor whose elements have one each."""
    return tensor.contiguous().view(torch.uint8)

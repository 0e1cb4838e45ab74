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
from atom.graph import TORCH_DTYPES, Recipe, W
from atom.graph.formats import parse_format
from atom.graph.parts import has_parts, parts_of
from atom.graph.recipes import leaves
from atom.weights.quantize import PACK, quantize

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PLAIN = ("fp64", "fp32", "fp16", "bf16")


class Naming:
    """Under which names a tensor that arrives is stored: its own, or those of parts."""

    def __init__(self, stacked: Mapping[str, Sequence[str]], packed: Mapping[str, W] | None = None) -> None:
        """
        stacked: see `unstack`
        packed: weights that are stored in a format, by their names; plain ones are packed when they arrive
        """
        self._stacked, self._packed = stacked, packed or {}
        self._parts: dict[
            str, list[str]
        ] = {}  # the names of parts of each tensor that was announced, see `find_stacked`

    def announce(self, names: Iterable[str]) -> None:
        """Find which of these are stacked, all at once."""
        every = [name for name in names if name not in self._parts]
        if every:
            self._parts |= {name: [] for name in every} | find_stacked(every, self._stacked)

    def cut(self, name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
        """The equal parts of a stacked tensor, in the order of its bytes; of others the tensor itself.

        CheckpointError if it cannot be cut
        """
        if name not in self._parts:
            self.announce([name])
        if not (parts := self._parts[name]):
            return {name: tensor}
        num_experts, cut = cut_tensor(f"tensor {name}", tensor, parts)
        return {part.replace("{expert}", str(expert)): cut for expert in range(num_experts) for part in parts}

    def find_packed(self, name: str, tensor: StoredTensor) -> W | None:
        """The weight that a tensor is packed for; None if it is stored as it is."""
        leaf = self._packed.get(name)
        is_plain = leaf is not None and tensor.dtype in PLAIN and tensor.shape == tuple(leaf.type.shape)
        return leaf if is_plain else None

    def find(self, name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
        """All stored tensors that a tensor becomes."""
        found: dict[str, StoredTensor] = {}
        for part, cut in self.cut(name, tensor).items():
            leaf = self.find_packed(part, cut)
            found |= {part: cut} if leaf is None else stored_parts(leaf)
        return found


class ArrivedTensors(Checkpoint):
    """The tensors that are there so far; `fall_back` has a checkpoint read others."""

    location = "the weights that arrive"

    def __init__(self, naming: Naming) -> None:
        self.config, self.generation_config = {}, {}
        self.naming = naming
        self._stored: Checkpoint | None = None
        self._arrived: dict[str, StoredTensor] = {}
        self._tensors: dict[str, Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:  # type: ignore[override]
        return self._arrived if self._stored is None else {**self._stored.tensors, **self._arrived}

    def fall_back(self, stored: Checkpoint) -> None:
        """Have tensors that do not arrive read from this checkpoint, which is closed with this one."""
        self._stored = stored

    def add(self, name: str, tensor: Tensor) -> list[str]:
        """Add a tensor, or its parts; the names added. UnsupportedError for an unknown dtype."""
        whole = describe(name, tensor)
        cut = self.naming.cut(name, whole)
        if cut.get(name) is whole and self.naming.find_packed(name, whole) is None:
            self._arrived[name], self._tensors[name] = whole, tensor.detach()
            return [name]
        parts = tensor.detach().reshape(len(cut), *next(iter(cut.values())).shape).unbind()
        added: list[str] = []
        for (part, stored), content in zip(cut.items(), parts, strict=True):
            leaf = self.naming.find_packed(part, stored)
            packed = {part: content} if leaf is None else pack_stored(leaf, content)
            self._arrived |= {part: stored} if leaf is None else stored_parts(leaf)
            self._tensors |= packed
            added += packed
        return added

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
        super().__init__(Naming({}))
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


def packed_leaves(recipes: Iterable[Recipe]) -> dict[str, W]:
    """The weights of recipes that are stored in a format to which `quantize` packs, each part as it makes it."""
    stored = {leaf.name: leaf for recipe in recipes for leaf in leaves(recipe) if leaf.type.fmt is not None}
    return {name: leaf for name, leaf in stored.items() if is_packable(leaf)}


def is_packable(leaf: W) -> bool:
    kind = parse_format(str(leaf.type.fmt)).kind
    return has_parts(leaf) and kind in PACK and all(isinstance(part, W) for part in parts_of(leaf).values())


def stored_parts(leaf: W) -> dict[str, StoredTensor]:
    """The parts of a weight as a checkpoint's header describes them."""
    types = {part.name: part.type for part in parts_of(leaf).values() if isinstance(part, W)}
    return {name: StoredTensor(type.dtype, tuple(map(int, type.shape))) for name, type in types.items()}


def pack_stored(leaf: W, plain: Tensor) -> dict[str, Tensor]:
    """A plain tensor as the parts in which a weight is stored, by their names."""
    made = quantize(str(leaf.type.fmt), plain)
    return {part.name: made[name] for name, part in parts_of(leaf).items() if isinstance(part, W)}


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor whose elements have one each."""
    return tensor.contiguous().view(torch.uint8)

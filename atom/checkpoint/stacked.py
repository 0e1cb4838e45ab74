"""Present a stacked tensor under the names of its parts.

    stacked = {"layers.{layer}.gate_up": ["layers.{layer}.{expert}.gate", "layers.{layer}.{expert}.up"]}
    checkpoint = unstack(checkpoint, stacked)
    checkpoint.tensors["layers.3.17.up"]
    checkpoint.read("layers.3.17.up")        # a view of the mapped file: nothing is copied

transformers 5 can save the experts of a layer as one tensor, while the hub, and so a graph, has a tensor for each
expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from atom.checkpoint.base import Checkpoint, FileRange, StoredTensor
from atom.checkpoint.tokenizer import Tokenizer
from atom.dtypes import DTYPES
from atom.errors import CheckpointError, ConfigError

# The stored tensor, which of its parts in the order of the bytes, and how many of one size there are. A plain tuple:
# the garbage collector soon skips those, and a checkpoint may have 50k of them.
Part = tuple[str, int, int]


LAYERS = {"{layer}": "([0-9]+)", "{even}": "([0-9]*[02468])", "{odd}": "([0-9]*[13579])"}  # numbers in stored names
EXPERT = "(?P<expert>[0-9]+)"


class StackedCheckpoint(Checkpoint):
    """parts: by their new names; a tensor without parts keeps its own name."""

    def __init__(self, stored: Checkpoint, tensors: Mapping[str, StoredTensor], parts: Mapping[str, Part]) -> None:
        self.location, self.tensors = stored.location, tensors
        self.config, self.generation_config = stored.config, stored.generation_config
        self._stored, self._parts = stored, parts
        self.reading = f"{stored.reading} {sorted(parts.items())}"

    def name_of(self, name: str) -> str | None:
        return self._stored.name_of(name)

    def read(self, name: str) -> memoryview:
        if name not in self.tensors:
            raise CheckpointError(f"{self.location} has no tensor {name}")
        return self.read_part(name, 0, 1)

    def read_blocks(self, name: str) -> memoryview:
        source, part, num_parts = self._parts.get(name, (name, 0, 1))
        whole = self._stored.read_blocks(source)
        size = len(whole) // num_parts
        return whole[part * size : (part + 1) * size]

    def read_part(self, name: str, index: int, count: int) -> memoryview:
        source, part, num_parts = self._parts.get(name, (name, 0, 1))
        return self._stored.read_part(source, part * count + index, num_parts * count)

    def locate(self, name: str) -> FileRange | None:
        source, part, num_parts = self._parts.get(name, (name, 0, 1))
        whole = self._stored.locate(source)
        if whole is None:
            return None
        size = whole.size // num_parts
        return FileRange(whole.path, whole.start + part * size, size)

    def files(self) -> Collection[Path]:
        return self._stored.files()

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return self._stored.tokenizer(trust_remote_code=trust_remote_code)

    def close(self) -> None:
        self._parts = {}  # so that errors after close name the part, not the stacked tensor
        self._stored.close()


def unstack(checkpoint: Checkpoint, stacked: Mapping[str, Sequence[str]]) -> Checkpoint:
    """Show a checkpoint's stacked tensors as their parts; the checkpoint itself if it has none.

    stacked: the stored name -> those of its parts, with {layer} for the same number on both sides. If the parts hold
    {expert}, the first dim counts the experts and goes. What is left is cut along its first dim into as many equal
    parts as there are names; equal names count once, and a single name is another name of the whole tensor. Raises
    CheckpointError for a tensor that cannot be cut so, or whose part is there by itself.
    """
    part_names = find_stacked(checkpoint.tensors, stacked)
    if not part_names:
        return checkpoint
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in part_names}
    parts: dict[str, Part] = {}
    for source, names in part_names.items():
        num_experts, cut = cut_tensor(f"{checkpoint.location}: tensor {source}", checkpoint.tensors[source], names)
        by_expert = [name.replace("{expert}", str(expert)) for expert in range(num_experts) for name in names]
        for part, name in enumerate(by_expert):
            if name in tensors:
                other = f"in {parts[name][0]}" if name in parts else "by itself"
                raise CheckpointError(f"{checkpoint.location} has the tensor {name} twice, {other} and in {source}")
            tensors[name], parts[name] = cut, (source, part, len(by_expert))
    return StackedCheckpoint(checkpoint, tensors, parts)


def find_stacked(names: Iterable[str], stacked: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The names that match a pattern, with the names of their parts, in which only {expert} is left open.

    A name with {even} or {odd} has such numbers only, and those of parts are half of them. One with {expert} is of one
    expert, whose number its parts have.
    """
    patterns = {}
    for key, listed in stacked.items():
        parts = list(dict.fromkeys(listed))
        if len({"{expert}" in part for part in parts}) != 1:
            raise ConfigError(f"stacked: {key}: either all of its parts hold {{expert}}, or none; they are {parts}")
        if parts != [key]:
            mark = next((mark for mark in LAYERS if mark in key), "{layer}")
            text = re.escape(key).replace(re.escape(mark), LAYERS[mark]).replace(re.escape("{expert}"), EXPERT)
            patterns[re.compile(text)] = key.partition("{")[0], parts, mark != "{layer}"
    part_names = {}
    for pattern, (start, parts, is_paired) in patterns.items():
        for name in names:
            if name.startswith(start) and (match := pattern.fullmatch(name)):  # the first, as most names have another
                layer = "".join(match.groups()[:1])
                layer = str(int(layer) // 2) if is_paired else layer
                expert = match.groupdict().get("expert", "{expert}")
                part_names[name] = [part.replace("{layer}", layer).replace("{expert}", expert) for part in parts]
    return part_names


def cut_tensor(at: str, tensor: StoredTensor, names: Sequence[str]) -> tuple[int, StoredTensor]:
    """The number of experts in a stacked tensor, 1 if the names have none, and the type of a part."""
    described, has_experts = f"{at} {tensor.dtype}{list(tensor.shape)}", "{expert}" in names[0]
    if len(tensor.shape) < has_experts + (len(names) > 1):
        raise CheckpointError(f"{described} has too few dims to hold {', '.join(names)}")
    num_experts, shape = (tensor.shape[0], tensor.shape[1:]) if has_experts else (1, tensor.shape)
    if len(names) > 1:
        if shape[0] % len(names):
            raise CheckpointError(f"{described}: its {shape[0]} rows are not {len(names)} equal parts")
        shape = (shape[0] // len(names), *shape[1:])
    if num_experts * len(names) > 1 and math.prod(shape) * DTYPES[tensor.dtype].bits % 8:
        raise CheckpointError(f"{described}: a part of it, {list(shape)}, is not a whole number of bytes")
    blocks = tensor.blocks and (*shape[:-1], *tensor.blocks[-2:])
    return num_experts, StoredTensor(tensor.dtype, shape, blocks)

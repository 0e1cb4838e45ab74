"""The tensors of a checkpoint, by names that all layers share.

    read_stored(checkpoint)["model.layers.{layer}.mlp.up_proj.weight"]      # Stored(shape=(80, 48), layers=(0, 1, 2))

Only names, dtypes and shapes are read, of an index or of the headers of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from atom.checkpoint import Checkpoint, StoredTensor

PLACES = ("{layer}", "{expert}")  # of the first and the second number in a name


class Stored(NamedTuple):
    """Tensors of one name but for their numbers."""

    shape: tuple[int, ...] | None  # of the first layer's; None: only names are known
    dtype: str | None
    layers: tuple[int, ...]  # that have it; () for a tensor outside of layers
    shapes: frozenset[tuple[int, ...]]  # of all layers
    blocks: tuple[int, ...] | None  # of a packed tensor of a GGUF file, as a model that keeps it packed reads it


def read_stored(checkpoint: Checkpoint) -> dict[str, Stored]:
    """The tensors of a checkpoint that is opened without weights, from headers if its files are on this disk."""
    whole = checkpoint.with_tensors()
    tensors: Mapping[str, StoredTensor | None] = whole.tensors if whole is not None else {}
    return group(tensors or dict.fromkeys(checkpoint.names()))


def group(tensors: Mapping[str, StoredTensor | None]) -> dict[str, Stored]:
    """Tensors by their names with {layer} and {expert} in place of numbers."""
    found: dict[str, list[tuple[int | None, StoredTensor | None]]] = {}
    for name, tensor in tensors.items():
        pattern, layer = pattern_of(name)
        found.setdefault(pattern, []).append((layer, tensor))
    return {pattern: describe(entries) for pattern, entries in sorted(found.items(), key=lambda item: item[0])}


def describe(entries: Iterable[tuple[int | None, StoredTensor | None]]) -> Stored:
    ordered = sorted(entries, key=lambda entry: entry[0] or 0)
    first = ordered[0][1]
    layers = tuple(dict.fromkeys(layer for layer, _ in ordered if layer is not None))
    shapes = frozenset(tensor.shape for _, tensor in ordered if tensor is not None)
    if first is None:
        return Stored(None, None, layers, shapes, None)
    return Stored(first.shape, first.dtype, layers, shapes, first.blocks)


def pattern_of(name: str) -> tuple[str, int | None]:
    """A name with {layer} and {expert} in place of its first two numbers, and the first number."""
    parts, numbers = name.split("."), list[int]()
    for at, part in enumerate(parts):
        if part.isdecimal() and len(numbers) < len(PLACES):
            parts[at] = PLACES[len(numbers)]
            numbers.append(int(part))
    return ".".join(parts), numbers[0] if numbers else None


def module_of(pattern: str) -> str:
    """The module of a tensor, which a role names: without .weight and .bias."""
    return pattern.removesuffix(".weight").removesuffix(".bias")


def tail_of(name: str) -> str:
    """What follows the number of the layer in a name, or a name outside of layers without the model's own."""
    return name.partition("{layer}.")[2] or name.rpartition("model.")[2]

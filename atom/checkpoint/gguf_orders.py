"""Find the tensors of a GGUF file with rows or columns in another order.

    orders = find_orders(path, metadata, tensors, GGUFFacts(interleaved={"q_proj": 9, "k_proj": 3}))
    in_order(numbers, orders["model.layers.0.self_attn.q_proj.weight"])

Four kinds: rotary rows in pairs; pairs of rows that turn by an image's columns ahead of those that turn by its rows,
where the hub has them in turns; value heads of a delta rule that take turns over the heads of their keys (the first of
each, then the second of each), where the hub has those of a key next to each other; and the rows of two numbers by
value head, which the hub of Qwen3-Next has by key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from atom.checkpoint.base import GGUFFacts
from atom.checkpoint.gguf_config import whole_number
from atom.checkpoint.gguf_reader import Array, GGUFTensor
from atom.checkpoint.gguf_types import SIZES
from atom.errors import CheckpointError

DELTA_SIZES = ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size")
IN_TURNS = "mixer.a_proj.weight"  # files that have this tensor have value heads in turns
BY_KEY_HEAD = "mixer.ba_proj.weight"


class Order(NamedTuple):
    """The place in the file of each row (dim 0) or column (dim 1) of the hub's tensor."""

    dim: int
    places: Array  # i64


def find_orders(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], facts: GGUFFacts
) -> dict[str, Order]:
    """facts: of which `interleaved` and `by_axis` are read"""
    orders = {}
    for name, tensor in tensors.items():
        for heads_of, places in ((facts.interleaved, _halves), (facts.by_axis, _axes_in_turns)):
            if heads := next((heads_of[part] for part in name.split(".") if part in heads_of), None):
                orders[name] = Order(0, places(path, name, tensor.shape[0], heads))
    if any(name.endswith((IN_TURNS, BY_KEY_HEAD)) for name in tensors):
        orders |= dict(_delta_orders(path, metadata, tensors))
    return orders


def _halves(path: Path, name: str, rows: int, heads: int) -> Array:
    """The places of rows in pairs: of each head, first those of its first half."""
    if rows % (2 * heads):
        raise CheckpointError(f"{path}: the {rows} rows of {name} are no pairs in {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _axes_in_turns(path: Path, name: str, rows: int, heads: int) -> Array:
    """The places of pairs of rows by axis: of each head, the first of columns and of rows, then the second ones."""
    if rows % (4 * heads):
        raise CheckpointError(f"{path}: the {rows} rows of {name} are no pairs of two axes in {heads} heads")
    return np.arange(rows).reshape(heads, 2, -1, 2).swapaxes(1, 2).reshape(-1)


def _delta_orders(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]
) -> Iterator[tuple[str, Order]]:
    prefix = f"{metadata.get('general.architecture')}."
    if missing := [key for key in DELTA_SIZES if prefix + key not in metadata]:
        raise CheckpointError(f"{path} has no {missing[0]}, which a delta rule needs; convert it again")
    keys, heads, key_dim, inner = (whole_number(path, key, metadata[prefix + key]) for key in DELTA_SIZES)
    if not keys or not heads or heads % keys or inner % heads:
        raise CheckpointError(f"{path}: {keys} key heads, {heads} value heads and {inner} values are no delta rule's")
    if any(name.endswith(BY_KEY_HEAD) for name in tensors):
        rows = np.arange(2 * heads).reshape(keys, 2, -1).swapaxes(0, 1).reshape(-1)
        yield from ((name, Order(0, rows)) for name in tensors if name.endswith(BY_KEY_HEAD))
        return
    in_turns = np.arange(heads).reshape(-1, keys).swapaxes(0, 1).reshape(-1)
    dims = (in_turns[:, None] * (inner // heads) + np.arange(inner // heads)).reshape(-1)
    after_keys = np.concatenate([np.arange(2 * keys * key_dim), 2 * keys * key_dim + dims])
    order_of = {
        "self_attn.qkv_proj.weight": Order(0, after_keys),
        "mixer.conv1d.weight": Order(0, after_keys),
        "mixer.gate_proj.weight": Order(0, dims),
        "mixer.out_proj.weight": Order(1, dims),
        "mixer.a_proj.weight": Order(0, in_turns),
        "mixer.b_proj.weight": Order(0, in_turns),
        "mixer.dt_proj.bias": Order(0, in_turns),
        "mixer.A_log": Order(0, in_turns),
    }
    for name, tensor in tensors.items():
        stem = name.split(".", 3)[-1]
        if (order := order_of.get(stem)) and keys < heads:
            if tensor.shape[order.dim] != len(order.places):
                count = f"{len(order.places)} {('rows', 'columns')[order.dim]}"
                raise CheckpointError(f"{path}: {name} is {list(tensor.shape)}, and has not {count}")
            yield name, order


def block_order(order: Order, tensor: GGUFTensor) -> Order | None:
    """The order of a tensor's blocks along the order's dim; None if a block has columns that part."""
    size = SIZES[tensor.type][0] if order.dim else 1
    if len(order.places) % size:
        return None
    runs = order.places.reshape(-1, size)
    is_whole = bool((runs[:, 0] % size == 0).all() and (runs == runs[:, :1] + np.arange(size)).all())
    return Order(order.dim, runs[:, 0] // size) if is_whole else None


def in_order(array: Array, order: Order | None) -> Array:
    return array if order is None else np.take(array, order.places, axis=order.dim)

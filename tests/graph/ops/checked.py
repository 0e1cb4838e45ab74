"""Run an op and hold its shape rule against what its body gives.

y = checked(ops.linear, x, weight)
out = checked(ops.paged_attention, q, Cache(kv, tensor), batch, scale=0.5)
out = checked(ops.causal_conv, x, Cache(state, zeros), weight)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from atom.graph import BATCH, TORCH_DTYPES, Batch, PagedCache, State, Type, ops

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Cache(NamedTuple):
    leaf: State
    tensor: Tensor | None  # None for semantic attention, which does not touch it


def checked(op: ops.Op, *args: Any, **attributes: Any) -> Any:
    result = op(*map(_value, args), **attributes)
    inferred = op.infer(*map(_type, args), **attributes)
    given = tuple(map(_type, result)) if isinstance(result, tuple) else _type(result)
    assert given == inferred, f"{op.name} gives {given}, its rule says {inferred}"
    return result


def _value(arg: Any) -> Any:
    if isinstance(arg, Cache) and not arg.leaf.rule.in_slot:
        return None if arg.tensor is None else PagedCache(arg.tensor, arg.leaf.kind)
    if isinstance(arg, Cache):
        return arg.tensor
    return arg


def _type(arg: Any) -> Any:
    if isinstance(arg, Cache):
        return arg.leaf
    if isinstance(arg, Batch):
        return BATCH
    return Type(NAMES[arg.dtype], tuple(arg.shape)) if isinstance(arg, Tensor) else arg

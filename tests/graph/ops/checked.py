"""Run an op and hold its shape rule against what its body gives.

y = checked(ops.linear, x, weight)
out = checked(ops.paged_attention, q, Cache(kv, tensor), batch, scale=0.5)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from atom.graph import BATCH, KV, TORCH_DTYPES, Batch, PagedCache, Type, ops

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Cache(NamedTuple):
    kv: KV
    tensor: Tensor | None  # None for a semantic op, which does not touch it


def checked(op: ops.Op, *args: Any, **attributes: Any) -> Any:
    result = op(*map(_value, args), **attributes)
    inferred = op.infer(*map(_type, args), **attributes)
    given = tuple(map(_type, result)) if isinstance(result, tuple) else _type(result)
    assert given == inferred, f"{op.name} gives {given}, its rule says {inferred}"
    return result


def _value(arg: Any) -> Any:
    if isinstance(arg, Cache):
        return None if arg.tensor is None else PagedCache(arg.tensor, arg.kv.kind)
    return arg


def _type(arg: Any) -> Any:
    if isinstance(arg, Cache):
        return arg.kv
    if isinstance(arg, Batch):
        return BATCH
    return Type(NAMES[arg.dtype], tuple(arg.shape)) if isinstance(arg, Tensor) else arg

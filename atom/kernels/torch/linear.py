"""Linears over weights in oneDNN's blocked layout.

With few rows they are 1.3 to 2.2 times as fast.

packed = pack(weight)                  # once: [O, I] in a layout of oneDNN's own, in place of the plain one
y = packed_linear(x, packed, bias)     # [T, I] -> [T, O]

oneDNN compiles a GEMM for each number of rows, and it and torch cache 1,024 of these, of 0.5 MB each: over a gigabyte
after steps of many sizes. Here they cache 128: compiling one again takes 0.4 ms, and no step needs many.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, library

from atom.graph.types import Type
from atom.kernels.backend import Target

ROWS = 64  # for which the layout is chosen; it works for any number

for name in (b"ONEDNN_PRIMITIVE_CACHE_CAPACITY", b"LRU_CACHE_CAPACITY"):  # read at the first GEMM of the process
    ctypes.CDLL(None).setenv(name, b"128", 0)  # 0: do not overwrite


def accepts(target: Target, x: Type, *_types: Any, **_attributes: Any) -> str | None:
    """dtypes that oneDNN multiplies on this CPU"""
    return None if f"onednn_{x.dtype}" in target.features else f"oneDNN has no {x.dtype} on this CPU"


def pack(weight: Tensor) -> Tensor:
    """A weight [O, I] in blocks."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I], packed weight [O, I], bias [O] -> [T, O]"""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


# packed_linear as an op for compiled code, in which a packed weight is a tensor of the plain weight's shape
LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


LIBRARY.impl("packed_linear", _shape, "Meta")  # type: ignore[no-untyped-call]


def trace_packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """packed_linear as a call in compiled code."""
    return torch.ops.atom.packed_linear(x, weight, bias)  # type: ignore[no-any-return]


def find_features() -> frozenset[str]:
    """The dtypes in which oneDNN multiplies on this CPU, as features of a target."""
    if not torch._C._has_mkldnn:
        return frozenset()
    supported = {
        "fp32": True,
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(f"onednn_{dtype}" for dtype, is_supported in supported.items() if is_supported)

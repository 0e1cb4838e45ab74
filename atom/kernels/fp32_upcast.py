"""The backend `widened`: GEMMs of 16-bit weights upcast to float32, on a CPU.

    y = widened_linear(x, weight, bias)     # x [..., I], weight [O, I] -> [..., O]

If oneDNN has no GEMM of a dtype (bf16: without AVX512), torch multiplies row by row. Here many rows of x are multiplied
in float32, by as many rows of the weight at a time as fit in a core's cache once upcast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library

from atom.graph import ops
from atom.graph.ops.moe import multiply_by_expert
from atom.graph.types import Type
from atom.kernels.backend import Backend, Kernel, Target, on_device

MIN_ROWS = 12  # with fewer, upcasting costs more than it saves
CHUNK_ELEMENTS = 1 << 18  # of the weight, upcast at a time


def accepts(target: Target, x: Type, *_types: Type | None) -> str | None:
    """bf16 and fp16, if oneDNN does not multiply that on this CPU"""
    if x.dtype not in ("bf16", "fp16"):
        return f"{x.dtype} is as wide as float32"
    return f"oneDNN multiplies {x.dtype} on this CPU" if f"onednn_{x.dtype}" in target.features else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.shape[:-1].numel() < MIN_ROWS:
        return F.linear(x, weight, bias)
    x32, y = x.float(), x.new_empty(*x.shape[:-1], len(weight))
    step = max(CHUNK_ELEMENTS // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        y[..., some] = F.linear(x32, weight[some].float(), None if bias is None else bias[some].float())
    return y


LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("widened_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("widened_linear", _linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


LIBRARY.impl("widened_linear", _shape, "Meta")  # type: ignore[no-untyped-call]


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O]"""
    return torch.ops.atom.widened_linear(x, weight, bias)  # type: ignore[no-any-return]


def widened_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [P, I], weight [E, O, I], ends i64[E], bias [E, O] -> [P, O]"""
    return multiply_by_expert(_linear, x, weight, weight.shape[1], ends, bias)


KERNELS = (
    Kernel(ops.linear, "widened", on_device("cpu", accepts), lambda _: widened_linear, trace=widened_linear),
    Kernel(ops.grouped_linear, "widened", on_device("cpu", accepts), lambda _: widened_grouped_linear),
)

BACKEND = Backend("widened", KERNELS)

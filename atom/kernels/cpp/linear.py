"""Linears, experts and embeddings, from packed weights in panels and plain ones in blocks.

kernel = find_kernel(ops.linear, "cpp")
y = kernel.load(LoadContext())(x, weight, bias)       # weight: a LaidOut, or a tensor in oneDNN's blocks
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atom.graph import LaidOut
from atom.graph.ops.moe import multiply_by_expert
from atom.graph.types import Type
from atom.kernels.backend import Target
from atom.kernels.cpp import blocks, panels
from atom.kernels.cpp.build import PACKED, PLAIN, build_library


def accepts(target: Target, x: Type, weight: Type, *_types: Type | None) -> str | None:
    """x of two dims, weights that have a layout of blocks or panels"""
    return "takes rows in two dims" if len(x.shape) != 2 else _refusal(target, weight)


def accepts_embedding(target: Target, tokens: Type, weight: Type) -> str | None:
    """tokens of one dim, weights that have a layout of blocks or panels"""
    return "takes tokens in one dim" if len(tokens.shape) != 1 else _refusal(target, weight)


def _refusal(target: Target, weight: Type) -> str | None:
    return blocks.refusal(target, weight) if weight.fmt is None else panels.refusal(weight)


def build_for(weight: Type) -> None:
    """Compile the library that multiplies by weights of this type."""
    build_library(PLAIN if weight.fmt is None else PACKED)


def linear(x: Tensor, weight: Tensor | LaidOut, bias: Tensor | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]"""
    if isinstance(weight, LaidOut):
        return panels.panel_linear(x, weight, bias)
    return blocks.block_linear(x, weight, bias)


def embedding(tokens: Tensor, weight: Tensor | LaidOut) -> Tensor:
    """tokens i64[T], weight [V, H] -> [T, H]"""
    if isinstance(weight, LaidOut):
        return panels.panel_embedding(tokens, weight)
    return blocks.block_embedding(tokens, weight)


def grouped_linear(x: Tensor, weight: Sequence[Tensor | LaidOut], ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [P, I], E weights of O rows, ends i64[E], bias [E, O] -> [P, O]; an expert without rows is not read"""
    first = weight[0]
    columns = int((first.type if isinstance(first, LaidOut) else first).shape[-2])
    return multiply_by_expert(linear, x, weight, columns, ends, bias)

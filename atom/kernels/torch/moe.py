"""Mixtures of experts on a CPU: linears over packed experts, weighted sums.

The linears are 1.2 to 2.7 times as fast; the sums work in chunks that stay in cache.

experts = [pack(expert) for expert in weight]           # once: [E, O, I] as E weights in a layout of oneDNN's own
y = packed_grouped_linear(x, experts, ends, bias)       # [P, I], sorted by expert -> [P, O]
out = combine(y, weights, order)                        # [k T, H] -> [T, H]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom.graph.ops.moe import multiply_by_expert
from atom.kernels.torch.linear import packed_linear

TOKENS = 32  # summed at once


def packed_grouped_linear(x: Tensor, weight: Sequence[Tensor], ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [P, I], E packed weights [O, I], ends i64[E], bias [E, O] -> [P, O]; an expert without rows is not read"""
    return multiply_by_expert(packed_linear, x, weight, weight[0].shape[0], ends, bias)


def combine(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """x [k T, H], weights fp32[T, k], order i64[k T] -> [T, H]"""
    top_k = weights.shape[1]
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))  # of rows, by token
    out = x.new_empty(len(weights), x.shape[1])
    for first in range(0, len(out), TOKENS):
        some = slice(first, first + TOKENS)
        rows = x.index_select(0, places[first * top_k : some.stop * top_k]).view(-1, top_k, x.shape[1])
        out[some] = torch.bmm(weights[some].unsqueeze(1), rows.float()).squeeze(1)
    return out

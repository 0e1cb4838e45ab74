"""Mixtures of experts by one order of sums, for batch-invariant runs.

    weights, ids = router(h, gate, top_k=8)
    out = FixedExperts().experts(h, weights, ids, gate_up, down, kind="silu")

One kernel each for any number of tokens, with the columns in the same steps; a token's experts are summed in the order
of its choice.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts.grouped_tiles import Shape, Tiles, with_whole_groups
from atom.kernels.triton.experts.grouping import combine_rows
from atom.kernels.triton.experts.moe import Experts
from atom.kernels.triton.experts.router import Rule, route
from atom.kernels.triton.gpu import Gpu, next_power_of_2
from atom.kernels.triton.linear.weight_encoding import Weight


def choose(shape: Shape, _gpu: Gpu) -> Tiles:
    """The tiles: columns in a step by the weight's format, rows of x and of the weight by how many an expert has."""
    rows, is_packed = ceil(shape.rows / shape.experts), shape.encoding.values is not None
    if shape.element_size == 4:
        tiles = Tiles(16, 32, 64 if is_packed else 32, 4, 2)
    elif not is_packed:  # whose rows of x are M of the tensor cores' instruction
        tiles = Tiles(64, 64, 128, 4, 4) if rows <= 64 else Tiles(128, 128, 64, 8, 4)
    elif rows <= 64:
        tiles = Tiles(min(max(16, next_power_of_2(rows)), 64), 64, 128, 4, 4)
    else:
        tiles = Tiles(128, 128, 128, 8, 3)
    return with_whole_groups(tiles, shape)


class FixedExperts(Experts):
    """The experts of one model."""

    def __init__(self) -> None:
        super().__init__(choose)

    def experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weight, down: Weight,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, first: Tensor | None = None, *, kind: str,
        limit: float | None = None, alpha: float | None = None, act: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Shapes as in the op."""
        assert act is None, "its entry declines"
        gate, biases = Gate(kind, limit, alpha), (gate_up_bias, down_bias)
        return self._multiply_by_groups(x, weights, ids, first, (gate_up, down), biases, gate)


def router(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Tensor | None = None, *, top_k: int,
    method: str = "greedy", score: str = "softmax", groups: int = 1, top_groups: int = 1, renormalize: bool = False,
    scale: float = 1.0, shared: int = 0, ranks: str = "scores", gated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, H], weight [E, H] or, if gated, [E + 1, H], bias and correction [E] -> weights fp32[T, k], ids i64[T, k]"""
    rule = Rule(top_k, method, score, groups, top_groups, renormalize, scale, shared, ranks, gated)
    return route(x, weight, bias, correction, rule, is_fixed=True)


def combine(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """x [k T, H], weights fp32[T, k], order i64[k T] -> [T, H]"""
    places = order.new_full((len(order) + 1,), -1)
    return combine_rows(x, weights, places.scatter_(0, order, torch.arange(len(order), device=order.device)))

"""Mixture-of-experts linears in Triton.

    weights, ids = router(h, gate, top_k=8)                     # router.py
    grouped, order, ends = group(h, ids, experts=128)           # grouping.py
    experts = Experts()                                         # of one model
    y = experts.grouped_linear(grouped, weight, ends)           # weight [E, O, I]; 1 launch for all experts
    out = combine(y, weights, order)                            # grouping.py
    out = experts.experts(h, weights, ids, gate_up, down, kind="silu")     # all three, 2 launches for few tokens

The signatures and results are those of the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts.few_experts import multiply_few, suits_few
from atom.kernels.triton.experts.grouped_linear import multiply_packed, multiply_plain
from atom.kernels.triton.experts.grouped_tiles import Find, Shape, Tiles, find
from atom.kernels.triton.experts.grouping import combine_rows, group_pairs
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.matrix import make_counters
from atom.kernels.triton.linear.weight_encoding import Weight, encoding_of_weight


class Experts:
    """The linears of experts of one model, with the tiles that `parameters` finds.

    They must run one after another, since they share the counters of splits.
    """

    def __init__(self, parameters: Find = find) -> None:
        self._parameters = parameters
        self._arrived: Tensor | None = None  # for good: graphs hold it

    def counters(self, device: torch.device) -> Tensor:
        if self._arrived is None:
            self._arrived = make_counters(device)
        return self._arrived

    def grouped_linear(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [P, I], sorted by expert, weight [E, O, I], ends i64[E], bias [E, O] -> [P, O]; an expert without rows is
        not read"""
        return self.multiply(x, weight, ends, bias)

    def experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weight, down: Weight,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, first: Tensor | None = None, *, kind: str,
        limit: float | None = None, alpha: float | None = None, act: str | None = None,
    ) -> Tensor:  # fmt: skip
        """x [T, H], weights fp32[T, k], ids i64[T, k], gate_up [E, 2 W, H], down [E, H, W], their biases [E, 2 W] and
        [E, H] -> [T, H]"""
        assert act is None, "its entry declines"
        matrices, biases, gate = (gate_up, down), (gate_up_bias, down_bias), Gate(kind, limit, alpha)
        has_bias = gate_up_bias is not None or down_bias is not None
        is_few = first is None and suits_few(len(x), ids.shape[1], *down.shape[1:])
        if is_few and not has_bias and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return multiply_few(x, weights, ids, gate_up, down, gate)
        return self._multiply_by_groups(x, weights, ids, first, matrices, biases, gate)

    def multiply(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None, *,
                 parameters: Find | None = None) -> Tensor:  # fmt: skip
        """grouped_linear; with a gate, gated_activate of it: weight [E, 2 W, I], gate before up projections, bias
        [E, 2 W] -> [P, W]"""
        if not len(x):
            return x.new_empty(0, weight.shape[1] if gate is None else weight.shape[1] // 2)
        tiles = (parameters or self._parameters)(describe(x, weight, gate), find_gpu(x.device))
        assert isinstance(tiles, Tiles), f"{tiles} are for shuffled weights"
        if isinstance(weight, PackedWeight):
            return multiply_packed(x, weight, ends, bias, gate, tiles)
        return multiply_plain(x, weight, ends, bias, gate, tiles)

    def _multiply_by_groups(
        self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor | None, matrices: tuple[Weight, Weight],
        biases: tuple[Tensor | None, Tensor | None], gate: Gate,
    ) -> Tensor:  # fmt: skip
        """experts with tokens grouped by expert."""
        (gate_up, down), (gate_up_bias, down_bias) = matrices, biases
        rows, _, ends, places = group_pairs(x, ids, first, gate_up.shape[0])
        m = self.multiply(rows, gate_up, ends, gate_up_bias, gate)
        return combine_rows(self.multiply(m, down, ends, down_bias), weights, places)


def describe(x: Tensor, weight: Weight, gate: Gate | None = None) -> Shape:
    """The shape of the grouped GEMM of x [P, I] by experts [E, O, I]."""
    experts, out, inner = weight.shape
    return Shape(len(x), experts, out, inner, 1 if gate is None else 2, x.element_size(), encoding_of_weight(weight))

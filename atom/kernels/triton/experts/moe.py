"""Products by experts in Triton.

    weights, ids = router(h, gate, top_k=8)                     # router.py
    grouped, order, ends = group(h, ids, experts=128)           # grouping.py
    products = Experts()                                        # of one model
    y = products.grouped_linear(grouped, weight, ends)          # weight [E, O, I]; 1 launch for all experts
    out = combine(y, weights, order)                            # grouping.py
    out = products.experts(h, weights, ids, gate_up, down, kind="silu")     # all three, 2 launches for few tokens

The signatures and results are those of the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.triton import SPAN
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts.few_experts import multiply_few, suits_few
from atom.kernels.triton.experts.grouped_linear import multiply_many, multiply_packed, multiply_plain, suits_hopper
from atom.kernels.triton.experts.grouped_tiles import Find, Shape, Tiles, find
from atom.kernels.triton.experts.grouping import combine_rows, group_pairs
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.matrix import make_counters
from atom.kernels.triton.linear.row_kernels import FP8, quantize_rows
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.weight_encoding import Weight, style_of_weight

# rows of an expert on average from which Hopper's products of many rows are faster: of packed weights in the layout
# wgmma, and of those with activations in fp8
MANY_PACKED_ROWS, MANY_FP8_ROWS = 128, 256


class Experts:
    """The products by experts of one model, with the tiles that `parameters` finds.

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
        if first is None and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            if find_gpu(x.device).runs_gluon:
                from atom.kernels.hopper import few_experts as few_hopper  # imports what only NVIDIA's GPUs need

                if few_hopper.suits_few(x, ids, gate_up):
                    return few_hopper.multiply_few(x, weights, ids, matrices, biases, gate, self.counters(x.device))
            if suits_few(len(x), ids.shape[1], *down.shape[1:]) and biases == (None, None) and kind != "swigluoai":
                return multiply_few(x, weights, ids, gate_up, down, kind)
        return self._multiply_by_groups(x, weights, ids, first, matrices, biases, gate)

    def multiply(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None, *,
                 parameters: Find | None = None) -> Tensor:  # fmt: skip
        """grouped_linear; with a gate, gated_activate of it: weight [E, 2 W, I], gates before ups, bias [E, 2 W] ->
        [P, W]"""
        if not len(x):
            return x.new_empty(0, weight.shape[1] if gate is None else weight.shape[1] // 2)
        if suits_hopper(x, weight, gate):
            return multiply_many(x, weight, ends, bias, gate)
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
    """What the tiles of a product of x [P, I] by experts [E, O, I] depend on."""
    experts, out, inner = weight.shape
    return Shape(len(x), experts, out, inner, 1 if gate is None else 2, x.element_size(), style_of_weight(weight))


class ShuffledExperts(Experts):
    """The products by shuffled experts of one model."""

    def experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weight, down: Weight,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, first: Tensor | None = None, *, kind: str,
        limit: float | None = None, alpha: float | None = None, act: str | None = None,
    ) -> Tensor:  # fmt: skip
        """As in `Experts`; act: as in the op, of many rows"""
        from atom.kernels.hopper import few_experts as few_hopper

        assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight), "plain weights are not shuffled"
        matrices, biases, gate = (gate_up, down), (gate_up_bias, down_bias), Gate(kind, limit, alpha)
        if first is None and few_hopper.suits_few(x, ids, gate_up):
            return few_hopper.multiply_few(x, weights, ids, matrices, biases, gate, self.counters(x.device))
        average = ids.numel() / gate_up.shape[0]  # rows of an expert
        if act is not None and average >= MANY_FP8_ROWS:
            return multiply_in_fp8(x, weights, ids, first, matrices, gate)
        if average >= MANY_PACKED_ROWS:
            return multiply_many_packed(x, weights, ids, first, matrices, biases, gate)
        return self._multiply_by_groups(x, weights, ids, first, matrices, biases, gate)

    def multiply(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None, *,
                 parameters: Find | None = None) -> Tensor:  # fmt: skip
        """As in `Experts`"""
        from atom.kernels.hopper import (
            grouped_packed_linear as grouped_packed_hopper,  # imports what only NVIDIA's GPUs need
        )
        from atom.kernels.hopper import packed_linear as packed_hopper

        assert isinstance(weight, PackedWeight), "plain weights are not shuffled"
        rows, (experts, out, _) = len(x), weight.shape
        if not rows:
            return x.new_empty(0, out if gate is None else out // 2)
        if rows >= MANY_PACKED_ROWS * experts and x.stride(0) % 8 == x.data_ptr() % 16 == 0:
            return grouped_packed_hopper.multiply(x, weight, grouped_packed_hopper.plan_tiles(ends, rows), bias, gate)
        tiles = (parameters or self._parameters)(describe(x, weight, gate), find_gpu(x.device))
        assert isinstance(tiles, Wgmma), f"{tiles} are for weights that are not shuffled"
        return packed_hopper.multiply_grouped(x, weight, ends, bias, gate, self.counters(x.device), tiles)


def multiply_many_packed(
    x: Tensor, weights: Tensor, ids: Tensor, first: Tensor | None, matrices: tuple[PackedWeight, PackedWeight],
    biases: tuple[Tensor | None, Tensor | None], gate: Gate,
) -> Tensor:  # fmt: skip
    """experts of many tokens by shuffled weights, which are unpacked in registers."""
    from atom.kernels.hopper import (
        grouped_packed_linear as grouped_packed_hopper,  # imports what only NVIDIA's GPUs need
    )

    (gate_up, down), (gate_up_bias, down_bias) = matrices, biases
    rows, _, ends, places = group_pairs(x, ids, first, gate_up.shape[0])
    plan = grouped_packed_hopper.plan_tiles(ends, len(rows))
    m = grouped_packed_hopper.multiply(rows, gate_up, plan, gate_up_bias, gate)
    return combine_rows(grouped_packed_hopper.multiply(m, down, plan, down_bias), weights, places)


def multiply_in_fp8(
    x: Tensor, weights: Tensor, ids: Tensor, first: Tensor | None, matrices: tuple[PackedWeight, PackedWeight],
    gate: Gate,
) -> Tensor:  # fmt: skip
    """experts of many tokens by shuffled weights in blocks of 128 x 128, with activations quantized by 128 columns."""
    from atom.kernels.hopper import grouped_linear as grouped_hopper  # imports what only NVIDIA's GPUs need

    gate_up, down = matrices
    tokens = quantize_rows(x, SPAN, FP8, is_shuffled=True)
    pairs = tokens.values[: len(x)].view(torch.bfloat16)  # of fp8, which not all copy
    rows, order, ends, places = group_pairs(pairs, ids, first, gate_up.shape[0])
    plan = grouped_hopper.plan_fp8(ends, len(rows))
    m = grouped_hopper.multiply_fp8(rows.view(FP8), tokens.scales, gate_up, plan, gate, order, ids.shape[1])
    values, scales, *_ = quantize_rows(m, SPAN, FP8, is_shuffled=True)
    return combine_rows(grouped_hopper.multiply_fp8(values[: len(m)], scales, down, plan), weights, places)

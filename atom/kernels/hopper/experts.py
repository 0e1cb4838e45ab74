"""Mixture-of-experts linears on NVIDIA's Hopper: Gluon kernels where they are faster, else Triton's.

    experts = Experts()                                                      # of one model
    out = experts.experts(h, weights, ids, gate_up, down, kind="silu")       # plain, as stored, or in the layout wgmma

Few tokens read their experts without being grouped (few_experts.py). Many rows an expert go to grouped_linear.py if the
weight is plain or unpacked first, or to grouped_packed_linear.py, which unpacks the layout wgmma in registers. Fewer
rows by that layout go to packed_linear.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph import PackedWeight
from atom.graph.formats import block_of, parse_format, with_block
from atom.kernels.hopper import few_experts, grouped_linear, grouped_packed_linear, packed_linear
from atom.kernels.hopper.shuffle import LAYOUT
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts import moe
from atom.kernels.triton.experts.grouped_tiles import Find
from atom.kernels.triton.experts.grouping import combine_rows, group_pairs
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.lora import add_grouped
from atom.kernels.triton.linear.packed import unpack
from atom.kernels.triton.linear.quantized import as_multiplied
from atom.kernels.triton.linear.row_kernels import FP8, quantize_rows, span_of
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.weight_encoding import Weight

FEW_COLUMNS = 2048  # up to which the library is slower, since storing a tile takes long compared to its GEMM
# mean rows an expert from which the kernels of many rows are faster: by plain weights, by weights that are unpacked
# first, by the layout wgmma, and with activations in fp8 by weights in it, or rounded to it
MANY_ROWS, MANY_UNPACKED_ROWS, MANY_PACKED_ROWS, MANY_FP8_ROWS, MANY_ROUNDED_ROWS = 128, 384, 128, 64, 512


class Experts(moe.Experts):
    """The linears of experts of one model, which must run one after another: they share the counters of splits."""

    def experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Weight, down: Weight,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, first: Tensor | None = None, *, kind: str,
        limit: float | None = None, alpha: float | None = None, act: str | None = None,
    ) -> Tensor:  # fmt: skip
        """As in `moe.Experts`; act: as in the op, for many rows in the layout wgmma"""
        matrices, biases, gate = (gate_up, down), (gate_up_bias, down_bias), Gate(kind, limit, alpha)
        is_shuffled = _is_shuffled(gate_up)
        is_plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        if first is None and (is_shuffled or is_plain) and few_experts.suits_few(x, ids, gate_up, down):
            return few_experts.multiply_few(x, weights, ids, matrices, biases, gate, self.counters(x.device))
        if not is_shuffled:
            return super().experts(x, weights, ids, gate_up, down, *biases, first, kind=kind, limit=limit, alpha=alpha,
                                   act=act)  # fmt: skip
        assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight), "both are in the layout wgmma"
        average = ids.numel() / gate_up.shape[0]  # rows of an expert
        min_rows = MANY_FP8_ROWS if parse_format(str(gate_up.type.fmt)).bits == 8 else MANY_ROUNDED_ROWS
        if act is not None and average >= min_rows:
            return multiply_in_fp8(x, weights, ids, first, (gate_up, down), biases, gate, act)
        if average >= MANY_PACKED_ROWS:
            return multiply_many_packed(x, weights, ids, first, (gate_up, down), biases, gate)
        return self._multiply_by_groups(x, weights, ids, first, matrices, biases, gate)

    def multiply(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None, *,
                 parameters: Find | None = None) -> Tensor:  # fmt: skip
        """As in `moe.Experts`"""
        rows, (num_experts, out, _) = len(x), weight.shape
        if not rows:
            return x.new_empty(0, out if gate is None else out // 2)
        if not _is_shuffled(weight):
            if suits_many(x, weight, gate):
                return multiply_many(x, weight, ends, bias, gate)
            return super().multiply(x, weight, ends, bias, gate, parameters=parameters)
        assert isinstance(weight, PackedWeight), "plain weights are not shuffled"
        if rows >= MANY_PACKED_ROWS * num_experts and x.stride(0) % 8 == x.data_ptr() % 16 == 0:
            return grouped_packed_linear.multiply(x, weight, grouped_packed_linear.plan_tiles(ends, rows), bias, gate)
        tiles = (parameters or self._parameters)(moe.describe(x, weight, gate), find_gpu(x.device))
        assert isinstance(tiles, Wgmma), f"{tiles} are for weights that are not shuffled"
        return packed_linear.multiply_grouped(x, weight, ends, bias, gate, self.counters(x.device), tiles)


def grouped_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """y [P, O], x [P, I], a [E, L + 1, r, I], b [E, L + 1, O, r], ends i64[E (L + 1)] -> [P, O]"""
    return add_grouped(Experts(), y, x, a, b, ends)


def _is_shuffled(weight: Weight) -> bool:
    return isinstance(weight, PackedWeight) and weight.layout == LAYOUT


def suits_many(x: Tensor, weight: Weight, gate: Gate | None = None) -> bool:
    """Whether `multiply_many` takes these, and is faster: many rows an expert, in bf16."""
    num_experts, out, inner = weight.shape
    min_rows = MANY_ROWS if isinstance(weight, Tensor) else MANY_UNPACKED_ROWS
    columns = out if gate is None else out // 2
    return (
        len(x) >= min_rows * num_experts
        and x.dtype == torch.bfloat16
        and columns % 8 == inner % 8 == x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and (isinstance(weight, Tensor) or unpacks_experts(weight))
    )


def unpacks_experts(weight: PackedWeight) -> bool:
    """Whether all experts together are a weight of more rows."""
    has_factor = not weight.parts.keys().isdisjoint(("factor", "divisor"))
    return not has_factor and weight.shape[1] % block_of(weight.type)[-2] == 0


def unpack_experts(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """A packed weight [E, O, I] as a plain one."""
    num_experts, out, inner = weight.shape
    fmt = str(weight.type.fmt)
    rows, columns = parse_format(fmt).block
    if rows is None:  # one scale an expert
        fmt = with_block(fmt, out, columns)
    type = replace(weight.type, shape=(num_experts * out, inner), fmt=fmt)
    parts = {name: part.flatten(0, 1) for name, part in weight.parts.items()}
    return unpack(PackedWeight(type, parts, weight.layout), dtype).view(weight.shape)


def multiply_many(
    x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None
) -> Tensor:
    """`Experts.multiply` of many rows an expert; a packed weight is unpacked into a temporary

    By the library if nothing is added to a GEMM of more than FEW_COLUMNS.
    """
    plain = unpack_experts(weight, x.dtype) if isinstance(weight, PackedWeight) else weight
    if bias is None and gate is None and x.shape[1] > FEW_COLUMNS:
        y: Tensor = F.grouped_mm(x, plain.transpose(1, 2), offs=ends.to(torch.int32))
        return y
    return grouped_linear.multiply(x, plain, ends, bias, gate)


def multiply_many_packed(
    x: Tensor, weights: Tensor, ids: Tensor, first: Tensor | None, matrices: tuple[PackedWeight, PackedWeight],
    biases: tuple[Tensor | None, Tensor | None], gate: Gate,
) -> Tensor:  # fmt: skip
    """experts of many tokens by shuffled weights, which are unpacked in registers."""
    (gate_up, down), (gate_up_bias, down_bias) = matrices, biases
    rows, _, ends, places = group_pairs(x, ids, first, gate_up.shape[0])
    plan = grouped_packed_linear.plan_tiles(ends, len(rows))
    m = grouped_packed_linear.multiply(rows, gate_up, plan, gate_up_bias, gate)
    return combine_rows(grouped_packed_linear.multiply(m, down, plan, down_bias), weights, places)


def multiply_in_fp8(
    x: Tensor, weights: Tensor, ids: Tensor, first: Tensor | None, matrices: tuple[PackedWeight, PackedWeight],
    biases: tuple[Tensor | None, Tensor | None], gate: Gate, act: str,
) -> Tensor:  # fmt: skip
    """experts of many tokens by shuffled weights in fp8, or rounded to it, with activations quantized to this format"""
    (gate_up_bias, down_bias), gate_up = biases, as_multiplied(matrices[0], act)
    is_shuffled = _is_shuffled(gate_up)
    tokens = quantize_rows(x, span_of(act, x.shape[1]), FP8, is_shuffled=is_shuffled)
    pairs = tokens.values[: len(x)].view(torch.bfloat16)  # of fp8, which not all copy
    rows, order, ends, places = group_pairs(pairs, ids, first, gate_up.shape[0])
    plan = grouped_linear.plan_fp8(ends, len(rows))
    taken, of_pairs = (rows.view(FP8), tokens.scales, gate_up, plan), (gate, order, ids.shape[1])
    if block_of(gate_up.type)[-2] == 1:
        m = grouped_linear.multiply_fp8(*taken, gate_up_bias, *of_pairs)
        values, scales, *_ = quantize_rows(m, m.shape[1], FP8, is_shuffled=is_shuffled)
    else:
        values, scales = grouped_linear.multiply_and_quantize(*taken, *of_pairs)
    del gate_up, taken  # a temporary of all experts, if it was rounded
    down = as_multiplied(matrices[1], act)
    y = grouped_linear.multiply_fp8(values[: len(rows)], scales, down, plan, down_bias)
    return combine_rows(y, weights, places)

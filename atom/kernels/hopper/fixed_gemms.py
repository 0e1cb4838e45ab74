"""Batch-invariant linears and experts by packed weights in the layout wgmma; see fixed.py.

tiles = choose(rows, encoding)      # those of packed_linear.py, of which only the rows follow from the batch
"""

from __future__ import annotations

import math

from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.hopper import packed_linear
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts import fixed
from atom.kernels.triton.experts.grouped_tiles import Find
from atom.kernels.triton.gpu import next_power_of_2
from atom.kernels.triton.linear.matrix import make_counters
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.weight_encoding import Weight, WeightEncoding, encoding_of_weight

COLUMNS = 128  # of a stage
STAGES = {16: 5, 32: 4, 64: 4, 128: 2}  # by rows of a tile: so that two or three programs share a multiprocessor
ROOM = 1.5  # rows of a tile, for each that an average expert has


def choose(rows: int, encoding: WeightEncoding) -> Wgmma:
    """The tiles for this many rows."""
    max_rows = 64 if encoding.values == "e2m1" else 128  # e2m1 has more sums, which take registers
    block_rows = min(max(16, next_power_of_2(rows)), max_rows)
    return Wgmma(block_rows, COLUMNS * encoding.bits // 512, STAGES[block_rows])


class FixedLinears:
    """The linears of one model."""

    def __init__(self) -> None:
        self._arrived: Tensor | None = None  # which unsplit columns do not count

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """x [T, I], a shuffled weight [O, I], bias [O] -> [T, O]"""
        if self._arrived is None:
            self._arrived = make_counters(x.device)
        tiles = choose(len(x), encoding_of_weight(weight))
        return packed_linear.multiply(x, weight, bias, None, self._arrived, tiles)


class FixedExperts(fixed.FixedExperts):
    """The experts of one model."""

    def multiply(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None, gate: Gate | None = None, *,
                 parameters: Find | None = None) -> Tensor:  # fmt: skip
        """As in `moe.Experts`, by shuffled weights [E, O, I]"""
        num_experts, out, _ = weight.shape
        if not len(x):
            return x.new_empty(0, out if gate is None else out // 2)
        assert isinstance(weight, PackedWeight), "plain weights are not shuffled"
        tiles = choose(math.ceil(ROOM * len(x) / num_experts), encoding_of_weight(weight))
        return packed_linear.multiply_grouped(x, weight, ends, bias, gate, self.counters(x.device), tiles)

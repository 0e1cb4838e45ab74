"""Linears on NVIDIA's Hopper: Gluon kernels where they are faster, else Triton's.

linears = Linears()                             # of one model
y = linears.linear(x, shuffle(weight))          # few rows by a weight in the layout wgmma: packed_linear.py, one_row.py
m = linears.gated_linear(x, gate_up, kind="silu")    # many rows by a plain weight: gated_linear.py
"""

from __future__ import annotations

from torch import Tensor

from atom.graph.packed import PackedWeight
from atom.kernels.hopper import gated_linear, one_row, packed_linear
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear import linear
from atom.kernels.triton.linear.shuffled import Row, Wgmma
from atom.kernels.triton.linear.tiles import Matrix
from atom.kernels.triton.linear.weight_encoding import Weight


class Linears(linear.Linears):
    """The linears of one model, which must run one after another: they share the counters of splits."""

    def _multiply_row(self, a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Weight, bias: Tensor | None,
                      eps: float, row: Row) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert isinstance(weight, PackedWeight), "plain weights are not shuffled"
        return one_row.multiply_row(a, b, norm, weight, bias, eps, row)

    def _multiply_tiles(self, x: Tensor, weight: Weight, bias: Tensor | None, kind: str | None,
                        tiles: Matrix | Wgmma) -> Tensor:  # fmt: skip
        if isinstance(tiles, Matrix):
            return super()._multiply_tiles(x, weight, bias, kind, tiles)
        assert isinstance(weight, PackedWeight), f"{tiles} are for packed weights"
        gate = None if kind is None else Gate(kind)
        return packed_linear.multiply(x, weight, bias, gate, self._counters(x.device), tiles)

    def _multiply_by_library(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str | None) -> Tensor:
        if bias is None and gated_linear.suits(x, weight, kind):
            return gated_linear.gated_linear(x, weight)
        return super()._multiply_by_library(x, weight, bias, kind)

"""Linears on NVIDIA's Hopper: Gluon kernels where they are faster, else Triton's.

linears = Linears()                             # of one model
y = linears.linear(x, shuffle(weight))          # few rows by a weight in the layout wgmma: packed_linear.py
m = linears.gated_linear(x, gate_up, kind="silu")    # many rows by a plain weight: gated_linear.py
"""

from __future__ import annotations

from torch import Tensor

from atom.graph.packed import PackedWeight
from atom.kernels.hopper import gated_linear, packed_linear
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear import linear
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.tiles import Matrix
from atom.kernels.triton.linear.weight_encoding import Weight


class Linears(linear.Linears):
    """The linears of one model, which must run one after another: they share the counters of splits."""

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

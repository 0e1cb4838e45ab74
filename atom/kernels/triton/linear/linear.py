"""Linears of few rows, fused with the norm before and the gated activation after.

They cost the reading of the weight and little else.

    linears = Linears()                                         # of one model
    y = linears.linear(x, weight, bias)                         # [T, I] by [O, I] -> [T, O]
    y, total = linears.add_norm_linear(a, b, norm, weight, eps=1e-6)    # linear(rms_norm(a + b)), a + b
    m, _ = linears.add_norm_linear(a, b, norm, weight, eps=1e-6, kind="silu")    # and gated_activate of it

tiles.py chooses the kernel: vector.py for one row, norm included, or kquant_gemv.py for one row by K-quants; matrix.py
for several rows, which are normed first; the vendor's library for more than MAX_ROWS, and for more than 32 without
measured tiles.

Packed weights are unpacked in registers (packed.py) and multiplied in the dtype of x; each block of columns that share
a scale is summed in float32 by itself. For several rows matrix.py scales the numbers of K-quants first, and rounds them
to the dtype of x, as if they had been unpacked. For many rows the library multiplies in fp8 or int8 (quantized.py), or
all of the weight is unpacked first.

On NVIDIA from sm_90, each kernel starts while the preceding one still runs, and prefetches the weight until that has
ended: a weight must have been written before the preceding kernel began. All linears of a model share one array of
counters for split K: they run on one stream, and the first before any capture.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph import ops
from atom.graph.packed import PackedWeight
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.matrix import make_counters, multiply_matrix
from atom.kernels.triton.linear.packed import unpack
from atom.kernels.triton.linear.quantized import as_multiplied, multiply_quantized
from atom.kernels.triton.linear.row_kernels import (
    QuantizedRows,
    activate_gates,
    normalize,
    quantize_gated,
    quantize_normalized,
    span_of,
)
from atom.kernels.triton.linear.shuffled import Row, Wgmma
from atom.kernels.triton.linear.tiles import MAX_ROWS, Find, Matrix, Parameters, Shape, Vector, find
from atom.kernels.triton.linear.vector import multiply_vector
from atom.kernels.triton.linear.weight_encoding import Weight, encoding_of_weight

OPS = (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear)
Rows = Tensor | QuantizedRows


class Linears:
    """The linears of one model, which must run one after another: they share the counters of splits."""

    def __init__(self, parameters: Find = find) -> None:
        self._parameters = parameters
        self._arrived: Tensor | None = None  # for good: graphs hold it

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None, *, act: str | None = None,
               parameters: Find | None = None) -> Tensor:  # fmt: skip
        """x [T, I], weight [O, I], bias [O] -> [T, O]; act: as in the op, of what the library multiplies"""
        y, _ = self.multiply(x, None, None, weight, bias, act=act, parameters=parameters)
        assert isinstance(y, Tensor), "rows are given quantized after a gated activation only"
        return y

    def gated_linear(self, x: Tensor, weight: Weight, *, kind: str, act: str | None = None, gives: str | None = None,
                     parameters: Find | None = None) -> Rows:  # fmt: skip
        """x [T, I], weight [2 W, I], gate before up -> gated_activate(linear(x)), [T, W]; gives: as in the op"""
        return self.multiply(x, None, None, weight, None, 0.0, kind, act, gives, parameters)[0]

    def norm_linear(self, x: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None = None, *, eps: float,
                    kind: str | None = None, act: str | None = None, gives: str | None = None,
                    parameters: Find | None = None) -> Rows:  # fmt: skip
        """x [T, I], norm [I], weight [O, I], bias [O] -> linear(rms_norm(x)), [T, O]; with a kind, gated_activate"""
        return self.multiply(x, None, norm, weight, bias, eps, kind, act, gives, parameters)[0]

    def add_norm_linear(self, a: Tensor, b: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None = None, *,
                        eps: float, kind: str | None = None, act: str | None = None, gives: str | None = None,
                        parameters: Find | None = None) -> tuple[Rows, Tensor]:  # fmt: skip
        """a and b [T, I], the others as in norm_linear -> norm_linear(a + b), a + b"""
        return self.multiply(a, b, norm, weight, bias, eps, kind, act, gives, parameters)

    def linear_by_head(self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, heads: int) -> Tensor:
        """x [T, N I], weight [N O, I], bias [N O] -> [T, N O], of N heads; as in the op, a plain weight [N O, I, S]"""
        if isinstance(weight, Tensor):  # of 1 to 32 rows by V4's weight the library takes 18 to 22 us, as our kernel
            return multiply_heads(x, weight, bias, heads)
        tiles = self._choose_by_head(x, weight, heads)
        if tiles is None:
            return multiply_heads(x, unpack(weight, x.dtype), bias, heads)
        return multiply_matrix(x, weight, bias, None, self._counters(x.device), tiles, heads)

    def _choose_by_head(self, x: Tensor, weight: PackedWeight, heads: int) -> Matrix | None:
        """The tiles of a linear by head of a packed weight; None: the vendor's library multiplies."""
        if len(x) > MAX_ROWS:
            return None
        (out, inner), rows = weight.shape, max(2, len(x))  # a GEMV takes one x for all of the weight
        shape = Shape(rows, out, inner, 1, x.element_size(), encoding_of_weight(weight))
        tiles = self._parameters(shape, find_gpu(weight.device))
        return tiles if isinstance(tiles, Matrix) and out // heads % tiles.block_out == 0 else None

    def multiply(
        self, a: Rows, b: Tensor | None, norm: Tensor | None, weight: Weight, bias: Tensor | None, eps: float = 0.0,
        kind: str | None = None, act: str | None = None, gives: str | None = None, parameters: Find | None = None,
    ) -> tuple[Rows, Tensor]:  # fmt: skip
        """Compute any of the above: its result, and a + b, which is a without b.

        b only with a norm. All are contiguous, but the rows of a and b may lie apart. More than MAX_ROWS rows are given
        quantized if the op says so, and taken so.
        """
        assert b is None or norm is not None, "a sum without a norm"
        if isinstance(a, QuantizedRows):
            assert isinstance(weight, PackedWeight) and act is not None, "quantized rows by a plain weight"
            y = multiply_quantized(a, weight, bias, act)
            return y, y
        tiles = self._choose(a, weight, kind, act, parameters)
        if isinstance(tiles, Vector):
            assert len(a) == 1, f"{tiles} is for one row, not for {len(a)}"
            return multiply_vector(a, b, norm, weight, bias, eps, kind, tiles)
        if isinstance(tiles, Row):
            assert len(a) == 1 and kind is None, f"{tiles} is for one row and no gate"
            return self._multiply_row(a, b, norm, weight, bias, eps, tiles)
        if tiles is None and act is not None:
            assert isinstance(weight, PackedWeight), "quantized rows by a plain weight"
            return quantize_and_multiply(a, b, norm, weight, bias, eps, kind, act, gives if len(a) > MAX_ROWS else None)
        x, total = (a, a) if norm is None else normalize(a, b, norm, eps)
        if tiles is None:
            plain = unpack(weight, x.dtype) if isinstance(weight, PackedWeight) else weight
            return self._multiply_by_library(x, plain, bias, kind), total
        return self._multiply_tiles(x, weight, bias, kind, tiles), total

    def _choose(self, x: Tensor, weight: Weight, kind: str | None, act: str | None, parameters: Find | None
                ) -> Parameters:  # fmt: skip
        """The tiles of a linear; None: the vendor's library multiplies."""
        (out, inner), gates = weight.shape, 1 if kind is None else 2
        if len(x) > MAX_ROWS:
            return None
        shape = Shape(len(x), out, inner, gates, x.element_size(), encoding_of_weight(weight, act))
        return (parameters or self._parameters)(shape, find_gpu(weight.device))

    def _multiply_row(self, a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Weight, bias: Tensor | None,
                      eps: float, row: Row) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`multiply` of one row, by a shuffled weight."""
        raise AssertionError(f"{row} is for shuffled weights")

    def _multiply_tiles(self, x: Tensor, weight: Weight, bias: Tensor | None, kind: str | None,
                        tiles: Matrix | Wgmma) -> Tensor:  # fmt: skip
        """Rows x [T, I], normed already, by our kernels."""
        assert isinstance(tiles, Matrix), f"{tiles} are for shuffled weights"
        return multiply_matrix(x, weight, bias, kind, self._counters(x.device), tiles)

    def _multiply_by_library(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str | None) -> Tensor:
        """Rows x [T, I], normed already, by a plain or an unpacked weight."""
        y = F.linear(x, weight, bias)
        return y if kind is None else activate_gates(y, kind)

    def _counters(self, device: torch.device) -> Tensor:
        if self._arrived is None:
            self._arrived = make_counters(device)
        return self._arrived


def multiply_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`linear_by_head` in one batched GEMM of the vendor's library."""
    (out, inner, *parts), tokens = weight.shape, len(x)
    y, x = x.new_empty(tokens, heads, out // heads), x.view(tokens, *parts, heads, inner)
    if parts:  # in the order of the weight's columns, which are more than these
        x = x.permute(0, 2, 3, 1).reshape(tokens, heads, inner * parts[0])
    factors = x.transpose(0, 1), weight.reshape(heads, out // heads, -1).mT
    if bias is None:
        torch.bmm(*factors, out=y.transpose(0, 1))
    else:
        torch.baddbmm(bias.view(heads, 1, -1), *factors, out=y.transpose(0, 1))
    return y.flatten(1)


def quantize_and_multiply(
    a: Tensor, b: Tensor | None, norm: Tensor | None, weight: PackedWeight, bias: Tensor | None, eps: float,
    kind: str | None, act: str, gives: str | None,
) -> tuple[Rows, Tensor]:  # fmt: skip
    """`multiply` of rows that the library multiplies quantized to `act`; gives: the format of the result's rows"""
    weight = as_multiplied(weight, act)
    is_shuffled, total = weight.layout is not None, a
    x: Rows = a
    if norm is not None and act.startswith("fp8"):
        x, total = quantize_normalized(a, b, norm, eps, span_of(act, a.shape[1]), is_shuffled)
    elif norm is not None:
        x, total = normalize(a, b, norm, eps)
    y = multiply_quantized(x, weight, bias, act)
    if kind is None:
        return y, total
    if gives is None:
        return activate_gates(y, kind), total
    return quantize_gated(y, kind, span_of(gives, y.shape[1] // 2), is_shuffled), total

"""Linears of any number of rows by one order of sums, for batch-invariant runs.

    y = FixedLinears().linear(x, weight, bias)     # [T, I] by [O, I] -> [T, O]; a row has the same bits for any T

Tensor cores add 16 columns at a time to a number, in the order of the columns: so its bits depend neither on how many
rows a program takes, which follows from T, nor on how many columns of a plain weight it reads in a step. Of a packed
weight, whose steps are scaled, those are fixed; and if the sums of several groups of columns are added at last, or
there are no tensor cores, the rows are, too. Nothing is split.
"""

from __future__ import annotations

from torch import Tensor

from atom.kernels.triton.gpu import next_power_of_2
from atom.kernels.triton.linear.matrix import make_counters, multiply_matrix
from atom.kernels.triton.linear.tiles import Matrix
from atom.kernels.triton.linear.weight_encoding import Weight, WeightEncoding, encoding_of_weight

STEP = 128  # columns of a packed weight that are read in a step
MIN_ROWS = 16  # of x in a tile


class FixedLinears:
    """The linears of one model."""

    def __init__(self) -> None:
        self._arrived: Tensor | None = None  # for good: graphs hold it

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, I], weight [O, I], bias [O] -> [T, O]"""
        if self._arrived is None:
            self._arrived = make_counters(x.device)
        tiles = choose(len(x), x.element_size(), encoding_of_weight(weight))
        return multiply_matrix(x, weight, bias, None, self._arrived, tiles, rows_are_fixed=True)


def choose(rows: int, element_size: int, encoding: WeightEncoding) -> Matrix:
    """The tiles for this many rows of x by such a weight; measured on an H200 with the layers of Qwen3-8B."""
    if element_size == 4:
        return Matrix(32, 32, 4, 2, block_rows=MIN_ROWS)
    block_rows = min(max(MIN_ROWS, next_power_of_2(rows)), 128)
    if encoding.values is None:
        if rows <= 64:
            return Matrix(64, 128, 4, 6, prefetch=4, block_rows=block_rows)
        if rows <= 128:
            return Matrix(64, 128, 4, 4, prefetch=4, block_rows=block_rows)
        return Matrix(128, 64, 8, 4, block_rows=128 if rows <= 512 else 256)
    if encoding.columns is not None and encoding.columns % STEP:  # several groups of columns in a step
        return Matrix(64, STEP, 4, 3, block_rows=32)
    if rows <= 64:
        return Matrix(64, STEP, 4, 6, prefetch=4, block_rows=block_rows)
    return Matrix(64, STEP, 4, 4, prefetch=4, block_rows=block_rows) if rows <= 128 else Matrix(128, STEP, 8, 4)

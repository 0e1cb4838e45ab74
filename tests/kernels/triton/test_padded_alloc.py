"""Activations padded to a tile: how much memory there is, and how much of it is read."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from atom.kernels.triton.linear import tiles
from atom.kernels.triton.padded_alloc import MAX_ROWS, new_rows, readable_rows


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 33, 64, 65, 127, 128, 129, 200, 256])
@pytest.mark.parametrize("block_rows", [8, 16, 32, 64, 128])
def test_new_rows_fill_the_tiles_of_their_gemms(rows: int, block_rows: int):
    y = new_rows(torch.empty(1, dtype=torch.bfloat16), rows, 3, 8)
    assert y.shape == (rows, 3, 8) and y.is_contiguous() and y.dtype == torch.bfloat16
    if block_rows < 2 * rows or block_rows == 8:  # a tile of fewer rows is not that large
        assert readable_rows(y.flatten(1), block_rows) == -(-rows // block_rows) * block_rows


def test_many_rows_have_no_memory_after_them():
    assert MAX_ROWS == tiles.MAX_ROWS, "of GEMMs that read tiles"
    y = new_rows(torch.empty(1), 257, 8)
    assert y.untyped_storage().nbytes() == 257 * 8 * 4 and readable_rows(y, 64) == 257


@pytest.mark.parametrize(
    ("begin", "end", "columns", "readable"),
    [(0, 10, 8, 16), (0, 3, 5, 8), (8, 11, 8, 8), (17, 26, 8, 11), (25, 27, 5, 3), (27, 28, 5, 1), (0, 28, 8, 28)],
)
def test_no_row_is_read_beyond_a_storage(begin: int, end: int, columns: int, readable: int):
    """Of a storage of 28 rows of 8 numbers."""
    x = torch.zeros(28, 8)[begin:end, :columns]
    assert readable_rows(x, 8) == readable
    torch.as_strided(x, (readable, columns), x.stride()).sum()  # raises beyond the storage


def test_rows_that_are_one_are_read_once():
    assert readable_rows(torch.zeros(1, 8).expand(5, 8), 8) == 5

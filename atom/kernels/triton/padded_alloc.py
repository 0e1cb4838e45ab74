"""Allocate activations padded to full TMA tiles, so edges need no zero fill.

    y = new_rows(x, 40, 4096)                                       # [40, 4096], with memory for 64 rows
    descriptors.find(y, (readable_rows(y, 64), 4096), y.stride())   # 64 rows: a tile is read, whatever lies after 40

Norms, gated activations and attention allocate so. If a tile ends beyond its tensor, the TMA fills it with zeros, which
takes longer than reading as many rows: on an H200 a GEMM of 72 rows by int4, 24576 x 4096, takes 87 µs so, and 53 µs if
it reads 128 rows. Rows of a GEMM do not depend on each other, and those after the last are not stored.
"""

from __future__ import annotations

from torch import Tensor

from atom.kernels.triton.gpu import next_power_of_2

MIN_ROWS, MAX_ROWS, TILE = (
    8,
    256,
    128,
)  # rows of the smallest tile, of GEMMs by such tiles at most, and of the largest tile


def new_rows(x: Tensor, rows: int, *sizes: int) -> Tensor:
    """Allocate [rows, *sizes] of x's dtype with memory for the last tile of its rows, whatever a tile's size."""
    if rows > MAX_ROWS:
        return x.new_empty(rows, *sizes)
    room = -(-rows // TILE) * TILE if rows > TILE else max(next_power_of_2(rows), MIN_ROWS)
    return x.new_empty(room, *sizes)[:rows]


def readable_rows(x: Tensor, block_rows: int) -> int:
    """How many rows from x's first one may be read in tiles: those of whole tiles, as far as its memory goes.

    x [T, I]
    """
    whole = -(-len(x) // block_rows) * block_rows
    if whole == len(x) or x.stride(0) <= 0:
        return len(x)
    elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return min(whole, 1 + (elements - x.shape[1]) // x.stride(0))

"""Choose the tiles of linears by weights in the layout wgmma.

tiles = choose(32, 6144, 4096, encoding, gpu)                  # of a weight in the layout wgmma
row = choose_row(5120, 2048, encoding, gpu)                    # the same of one row; None: it takes tiles
tiles = choose_grouped(256, 128, 1536, 2048, encoding, gpu)    # the same of experts
"""

from __future__ import annotations

import math
from typing import NamedTuple

from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear.weight_encoding import SPANS, WeightEncoding

BLOCK_OUT = 64  # rows of a weight that a program takes; if gated, half of them gate projections
BOX = 64  # bytes of a row of a weight that one copy brings
PARTS, EACH = 8, 8  # of the columns, and rows of a weight that a program takes, where x is one row
ROW_PROGRAMS, ROW_BOXES = 6, 8  # of one row: max on a multiprocessor, and boxes of a part, which take registers
MAX_STAGES = 8
MIN_BYTES = 512  # of a row of a weight that a program takes
OTHER_MEMORY = 2048  # bytes of a program's shared memory besides its stages
UNUSED_MEMORY = 8192  # bytes of shared memory that stages never take, which the compiler needs


class Wgmma(NamedTuple):
    """Tiles of a linear by a weight in the layout wgmma."""

    block_rows: int  # of x that a program takes at most, a power of 2 from 8
    boxes: int  # of a row of the weight in a stage
    stages: int  # in memory at a time
    splits: int = 1  # programs that share out the columns


class Row(NamedTuple):
    """One row by such a weight, whose columns the warps of a program share out."""

    boxes: int  # of each of PARTS of the columns


def choose(rows: int, out: int, inner: int, encoding: WeightEncoding, gpu: Gpu) -> Wgmma:
    """The fastest tiles of an H200 with layers of Qwen3, GLM-4.5 and DeepSeek-V3, or close to them.

    All programs are on the GPU at once where they can be, as many on each multiprocessor, whose memory their stages
    fill: with less, those of a kernel that starts while attention runs would crowd where that has ended.
    """
    block_rows = _block_rows(rows, encoding)
    num_tiles = -(-out // BLOCK_OUT)
    has_two_sums = encoding.bits == 8 and encoding.columns is not None  # of 128 rows they would take all registers
    if block_rows > 64 and (has_two_sums or num_tiles * -(-rows // block_rows) < 2 * gpu.units):
        block_rows = 64
    tiles = num_tiles * -(-rows // block_rows)
    max_programs = 4 if encoding.bits == 4 and block_rows == 8 else 3  # on a multiprocessor
    splits = _split_linear(tiles, inner, block_rows, encoding, gpu)
    if block_rows == 8:  # long sums are cut further while the parts are long enough to pay
        splits = max(
            n
            for n in (splits, 6, 8)
            if n == splits or splits < n <= min(max_programs * gpu.units // tiles, inner // 1024)
        )
    together = min(-(-tiles * splits // gpu.units), max_programs)
    min_boxes = -(-(encoding.columns or 1) * encoding.bits // (8 * BOX))  # boxes of the columns that share a scale
    memory = min(gpu.shared_memory // together - OTHER_MEMORY, gpu.shared_memory - UNUSED_MEMORY)
    fitting = memory // box_bytes(block_rows, encoding)  # boxes
    max_boxes = 2 if encoding.values == "e2m1" and block_rows > 8 else 4  # scales of more take registers
    boxes = max(next((boxes for boxes in (max_boxes, 2) if fitting >= 2 * boxes), 1), min_boxes)
    return Wgmma(block_rows, boxes, min(max(fitting // boxes, 2), MAX_STAGES), splits)


def choose_row(out: int, inner: int, encoding: WeightEncoding, gpu: Gpu) -> Row | None:
    """How one row is multiplied; None if columns have no PARTS of whole boxes, or it is too large or of K-quants.

    All programs are on the GPU at once, so that each has its weight before it has x.
    """
    if encoding.factor == SPANS:
        return None
    columns = BOX * encoding.per_byte
    boxes, programs = inner // (PARTS * columns), -(-out // (EACH * gpu.units))
    if inner % (PARTS * max(columns, encoding.columns or 0)) or out % EACH or not 0 < boxes <= ROW_BOXES:
        return None
    memory = boxes * box_bytes(PARTS, encoding) + OTHER_MEMORY
    return Row(boxes) if programs <= min(ROW_PROGRAMS, gpu.shared_memory // memory) else None


def choose_grouped(rows: int, experts: int, out: int, inner: int, encoding: WeightEncoding, gpu: Gpu) -> Wgmma:
    """Tiles that hold the rows of most experts, since another tile reads the weight again. rows: of all experts

    Where each row has its own expert, few programs share out the columns, too.
    """
    room = 4 / 3 if encoding.bits == 4 else 1.5
    block_rows = _block_rows(max(math.ceil(room * rows / experts), 8), encoding)
    if block_rows > 32:
        return Wgmma(block_rows, 1 if encoding.bits == 4 else 2, 2 if encoding.values == "e2m1" else 3)
    boxes, num_stages = 2, 2
    if encoding.bits == 8 and block_rows <= 16:  # a stage has 4 boxes where several of them follow one another
        has_many = inner >= (8 if block_rows == 8 else 32) * BOX
        boxes = 4 if has_many else 2
        num_stages = 4 if block_rows == 16 and not has_many and inner >= 8 * BOX else 2
    if rows > experts:
        return Wgmma(block_rows, boxes, num_stages)
    columns = boxes * BOX * 8 // encoding.bits
    return Wgmma(block_rows, boxes, 2, _split(rows * -(-out // BLOCK_OUT), inner, columns, 1.9 * gpu.units))


def _split_linear(tiles: int, inner: int, block_rows: int, encoding: WeightEncoding, gpu: Gpu) -> int:
    """How many programs share out the columns of a linear's tile.

    Of up to 8 rows nearly two for each multiprocessor, since their sums cost little to add up. Of more rows one, and
    twice as many while each has long parts of the columns and there are fewer than one and a half.
    """
    max_programs, long = (1.9, 0) if block_rows == 8 else (1.5, 1536 if block_rows <= 32 else 2048)  # programs, columns
    splits = 1
    while splits < 8 and inner * encoding.bits // 8 >= 2 * splits * MIN_BYTES:
        programs = tiles * splits / gpu.units  # of a multiprocessor
        if programs >= max_programs or (programs >= 0.95 and inner <= long * splits):
            break
        splits *= 2
    return splits


def _split(tiles: int, inner: int, columns: int, wanted: float) -> int:
    """How many programs share out the columns of a tile, so that there are as many as wanted. columns: of a stage"""
    splits = 1
    while splits < 8 and tiles * splits < wanted and inner >= 4 * splits * columns:
        splits *= 2
    return splits


def box_bytes(block_rows: int, encoding: WeightEncoding) -> int:
    """The shared memory of a box of the weight, and of x next to it."""
    return BOX * (BLOCK_OUT + block_rows * 16 // encoding.bits)


def _block_rows(rows: int, encoding: WeightEncoding) -> int:
    max_rows = 64 if encoding.values == "e2m1" else 128  # a box of e2m1 has four sums, which take registers
    return min(max(8, 1 << (rows - 1).bit_length()), max_rows)

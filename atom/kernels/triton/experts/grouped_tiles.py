"""Choose the tiles of grouped GEMMs of experts, measured or by a rule.

shape = Shape(256, 128, 1536, 2048, 2, 2, PLAIN)    # 256 pairs of token and expert by 128 experts [1536, 2048]
tiles = find(shape, gpu)                            # as packaged for this GPU
find = finder({"256 128x1536 2048 2": ["tiles", 16, 64, 128, 4, 4]})    # a lookup with other measured ones
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import ceil
from typing import Any, NamedTuple

from atom.kernels import tuned
from atom.kernels.triton.gpu import Gpu, next_power_of_2
from atom.kernels.triton.linear.shuffled import Wgmma, choose_grouped
from atom.kernels.triton.linear.weight_encoding import WeightEncoding

FOLDED = 32  # columns that share a scale, up to which it multiplies the numbers, not their sums
NUM_BUCKETS = 3  # sizes, each twice the one before, that measured tiles of a larger GEMM are looked for in


class Tiles(NamedTuple):
    """The tile of a program: rows of x, rows of a weight, columns of both."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int


class Shape(NamedTuple):
    """The shape of a grouped GEMM, by which its tiles are chosen."""

    rows: int  # pairs of token and expert
    experts: int
    out: int
    inner: int
    gates: int  # 2 if half of the outputs are gate projections
    element_size: int  # of x, bytes
    encoding: WeightEncoding  # how the weight holds numbers


Parameters = Tiles | Wgmma
Find = Callable[[Shape, Gpu], Parameters]


def max_tiles(rows: int, experts: int, block_rows: int) -> int:
    """Max number of tiles, each of one expert's rows, that this many rows of this many experts can have."""
    used = min(experts, rows)
    return used + (rows - used) // block_rows  # each used expert has one tile that need not be full


@cache
def find(shape: Shape, gpu: Gpu) -> Parameters:
    """Look up the packaged tiles of such a GEMM on such a GPU, else `choose` them."""
    return _find(partial(tuned.parameters, gpu.name, "experts"), shape, gpu)


def finder(measured: Mapping[str, Sequence[Any]]) -> Find:
    """Make a lookup like `find` with these measured tiles of a GPU, by key."""
    return cache(partial(_find, measured.get))


def _find(measured: Callable[[str], Sequence[Any] | None], shape: Shape, gpu: Gpu) -> Parameters:
    if shape.element_size == 2:  # of 32 bits nobody measures
        for bucket in range(NUM_BUCKETS):
            if entry := measured(key_of(shape._replace(rows=next_power_of_2(shape.rows) << bucket))):
                return from_entry(entry)
    return choose(shape, gpu)


def key_of(shape: Shape) -> str:
    """The key of such a GEMM's tiles, which hold for rows up to the next power of 2."""
    rows, experts, out, inner, gates, _, encoding = shape
    return f"{next_power_of_2(rows)} {experts}x{out} {inner} {gates} {encoding.name}".rstrip()


def from_entry(entry: Sequence[Any]) -> Parameters:
    """["tiles", 16, 64, 128, 4, 4] -> Tiles(16, 64, 128, 4, 4)"""
    kind, *numbers = entry
    return Tiles(*numbers) if kind == "tiles" else Wgmma(*numbers)


def to_entry(parameters: Parameters) -> list[Any]:
    """The inverse of `from_entry`."""
    return [type(parameters).__name__.lower(), *parameters]


def choose(shape: Shape, gpu: Gpu) -> Parameters:
    if shape.encoding.is_shuffled:
        return choose_grouped(shape.rows, shape.experts, shape.out, shape.inner, shape.encoding, gpu)
    return choose_tiles(shape, gpu) if shape.encoding.values is None else choose_packed_tiles(shape, gpu)


def choose_tiles(shape: Shape, gpu: Gpu) -> Tiles:
    """Choose tiles that an average expert fills, with as many stages up to 4 as fit in shared memory, and with few
    outputs if otherwise some of the GPU's units would have no tile"""
    rows_an_expert = shape.rows / shape.experts
    if shape.element_size == 4:  # multiplied without tensor cores
        tile, num_warps = ((16, 32, 32), 4) if rows_an_expert <= 16 else ((64, 64, 32), 8)
    elif rows_an_expert <= 8:
        has_plenty = min(shape.rows, shape.experts) * shape.out >= 4 * gpu.units * 64
        tile, num_warps = (16, 64, 128) if has_plenty else (16, 32, 256), 4
    elif rows_an_expert <= 16:
        tile, num_warps = (32, 64, 128), 4
    elif rows_an_expert <= 48:
        tile, num_warps = (64, 128, 64), 4
    else:
        tile, num_warps = (128, 128, 64), 8
    stage = (tile[0] + tile[1]) * tile[2] * shape.element_size
    return Tiles(*tile, num_warps, max(1, min(4, gpu.shared_memory // stage)))


def choose_packed_tiles(shape: Shape, gpu: Gpu) -> Tiles:
    """Choose tiles of a packed weight, see `choose_tiles`."""
    rows_an_expert = ceil(shape.rows / shape.experts)
    has_few = rows_an_expert <= 16
    if shape.element_size == 4:
        tiles = Tiles(16, 32, 64, 4, 2) if has_few else Tiles(64, 32, 64, 8, 2)
    elif rows_an_expert <= 64:
        tiles = Tiles(16 if has_few else next_power_of_2(rows_an_expert), 64, 128, 4, 4)
    else:
        tiles = Tiles(128, 128, 64, 8, 3)
    if gpu.capability == (0, 0):  # Triton 3.6 does not compile more stages for AMD
        tiles = tiles._replace(num_stages=2)
    return with_whole_groups(tiles, shape)


def with_whole_groups(tiles: Tiles, shape: Shape) -> Tiles:
    """The tiles with steps of a whole part of the columns that share a scale, or of a whole number of such groups."""
    group = min(shape.encoding.columns or shape.inner, shape.inner)
    share = group & -group  # the largest power of 2 in it
    is_free = group >= shape.inner or share == group <= FOLDED
    return tiles if is_free else tiles._replace(inner=min(tiles.inner, share))

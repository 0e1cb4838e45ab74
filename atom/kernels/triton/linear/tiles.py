"""Choose the tiles of linears of few rows, measured or by a rule.

tiles = find(Shape(32, 6144, 4096), gpu)        # 32 rows by a weight [6144, 4096], as packaged for this GPU
find = finder({"32 6144 4096 1": ["matrix", 64, 128, 4, 4]})    # a lookup with other measured ones
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from atom.kernels import tuned
from atom.kernels.triton.gpu import Gpu, next_power_of_2
from atom.kernels.triton.linear import shuffled
from atom.kernels.triton.linear.shuffled import Row, Wgmma
from atom.kernels.triton.linear.weight_encoding import FACTOR_SPAN, PLAIN, SPANS, WeightEncoding
from atom.kernels.tuned import BUCKETS

MAX_ROWS = BUCKETS[-1]
MAX_STAGES = 9  # of a GEMV
WARP = 32  # threads, of NVIDIA's
MAX_TILES = 4096  # of a GEMM whose columns are split
MIN_BYTES = 32  # of a packed weight's row per group: fewer do not fill the registers of tensor cores
MEMORY = 98304, 16384  # bytes of shared memory that a GEMV takes of a multiprocessor, and of them per step
# with more: so much that two programs never share a multiprocessor, while attention still fits next to one
LARGE_MEMORY = 131072, 32768
# per step with four programs on a multiprocessor, if a weight has few rows for each
FEW_MEMORY = 16384


class Shape(NamedTuple):
    """What the tiles of a GEMM depend on."""

    rows: int
    out: int
    inner: int
    gates: int = 1  # 2 if half of the outputs are gate projections
    element_size: int = 2  # of x, bytes
    encoding: WeightEncoding = PLAIN  # how the weight holds numbers


class Vector(NamedTuple):
    """Tiles of a GEMV."""

    block_out: int  # rows of the weight in a step of a program; if gated, half of them gate projections
    warps: int
    stages: int  # steps in memory at a time, all but one on their way
    programs: int  # per multiprocessor


class Matrix(NamedTuple):
    """Tiles of a GEMM of several rows."""

    block_out: int  # rows of the weight that a program takes; if gated, half of them gate projections
    block_inner: int  # columns of the weight that a group reads in a step
    warps: int
    stages: int  # steps in memory at a time, all but one on their way
    groups: int = 1  # of warps, which share out the columns of a step
    splits: int = 1  # programs that share out the columns
    prefetch: int = 0  # lines of 128 bytes of each row to send for while the kernel ahead still runs
    block_rows: int = 128  # rows that a program takes at most

    def as_run(self, rows: int, gpu: Gpu, encoding: WeightEncoding = PLAIN) -> Matrix:
        """The parameters to run a GEMM of this many rows with on this GPU.

        Where columns share a scale, a group reads those of one, but at least MIN_BYTES. Numbers whose scales have
        factors are scaled first, and one group reads columns of one factor.
        """
        columns = encoding.columns or self.block_inner
        share = min(max(columns & -columns, MIN_BYTES * encoding.per_byte), self.block_inner)
        groups = self.groups * self.block_inner // share
        if encoding.factor == SPANS:
            share, groups = min(self.block_inner, FACTOR_SPAN), 1
        tile = self._replace(
            block_rows=min(max(8, next_power_of_2(rows)), self.block_rows),
            prefetch=self.prefetch if gpu.has_dependent_launch else 0,
            block_inner=share,
            groups=groups,
        )
        if torch.version.hip is not None:  # AMD's tensor cores take 16 rows, and its programs 64 KB of memory
            tile = tile._replace(block_rows=max(16, tile.block_rows), stages=2)
        return tile

    def num_sums(self, encoding: WeightEncoding = PLAIN) -> int:
        """float32 sums that a thread holds, of a tile as it is run: those of each scale of a group apart.

        Triton gives each warp whole groups; where they are fewer than warps, several warps compute the same one.
        """
        columns = encoding.columns or self.block_inner
        parts = 1 if encoding.factor == SPANS else self.block_inner // min(columns & -columns, self.block_inner)
        of_group = self.block_out * self.block_rows * parts // WARP
        return of_group // self.warps if self.groups == 1 else of_group * max(1, self.groups // self.warps)


class TileError(Exception):
    """A GEMM cannot be tiled with these parameters."""


Parameters = Vector | Matrix | Wgmma | Row | None  # None: the vendor's library multiplies
Find = Callable[[Shape, Gpu], Parameters]


@cache
def find(shape: Shape, gpu: Gpu) -> Parameters:
    """Look up the packaged parameters of such a GEMM on such a GPU, else `choose` them."""
    return _find(functools.partial(tuned.parameters, gpu.name, "linear"), shape, gpu)


def finder(measured: Mapping[str, Sequence[Any]]) -> Find:
    """Make a lookup like `find` with these measured parameters of a GPU, by key."""
    return cache(functools.partial(_find, measured.get))


def _find(measured: Callable[[str], Sequence[Any] | None], shape: Shape, gpu: Gpu) -> Parameters:
    entry = measured(key_of(shape)) if shape.element_size == 2 else None  # of 32 bits nobody measures
    return choose(shape, gpu) if entry is None else from_entry(entry)


def key_of(shape: Shape) -> str:
    """The key of such a GEMM's parameters."""
    bucket = next(size for size in BUCKETS if size >= shape.rows)
    return f"{bucket} {shape.out} {shape.inner} {shape.gates} {shape.encoding.name}".rstrip()


def from_entry(entry: Sequence[Any]) -> Parameters:
    """["matrix", 64, 128, 4, 4] -> Matrix(64, 128, 4, 4)"""
    kind, *numbers = entry
    kinds = {"vector": Vector, "matrix": Matrix, "wgmma": Wgmma, "row": Row}
    return None if kind == "library" else kinds[kind](*numbers)


def to_entry(parameters: Parameters) -> list[Any]:
    """The inverse of `from_entry`."""
    return ["library"] if parameters is None else [type(parameters).__name__.lower(), *parameters]


def choose(shape: Shape, gpu: Gpu) -> Parameters:
    """Choose the tiles of a GEMM of MAX_ROWS rows or fewer by a weight [out, inner]; None: the vendor's library."""
    rows, out, inner, gates, _, encoding = shape
    if encoding.is_shuffled:
        if rows == gates == 1 and (row := shuffled.choose_row(out, inner, encoding, gpu)):
            return row
        by_library = encoding.act is not None and fills_library(rows, out, gpu)
        return None if by_library else shuffled.choose(rows, out, inner, encoding, gpu)
    if encoding.values is not None:
        return choose_packed(shape, gpu)
    tiles = choose_vector(shape, gpu) if rows == 1 else None
    return tiles or choose_matrix(shape, gpu)


def fills_library(rows: int, out: int, gpu: Gpu) -> bool:
    """Whether the library multiplies more than 64 rows in 8 bits faster than our kernel does in 16.

    It does twice as much in a time, but its tiles of 128 x 128 have all columns each, whose time passes however few of
    them there are; the other's are 64 wide, split by columns, and need no launch that quantizes.
    """
    return rows > 64 and -(-rows // 128) * -(-out // 128) > gpu.units // 4


def choose_vector(shape: Shape, gpu: Gpu) -> Vector | None:
    """`choose` for one row by a plain weight; None if a row is too large, or where padding it wastes too much."""
    _, out, inner, gates, element_size, _ = shape
    columns = next_power_of_2(inner)
    row_size = columns * element_size
    is_large = gpu.has_dependent_launch and gpu.shared_memory > LARGE_MEMORY[0]
    memory, step = LARGE_MEMORY if is_large else MEMORY
    if element_size == 2 and out >= 64 * gpu.units and 4 * inner < 3 * columns:
        return None  # measured on an H200 with 2,880 and 5,120 columns: tensor cores read such weights faster
    if is_large and out < 64 * gpu.units and row_size * gates <= FEW_MEMORY:
        # measured on an H200 with 2,048 to 6,144 rows of 2,880 and 4,096 columns
        return Vector(_step_rows(FEW_MEMORY // row_size, gates, out, 4 * gpu.units), warps=4, stages=3, programs=4)
    if row_size * gates > memory:
        return None
    block_out = _step_rows(step // row_size, gates, out, 2 * gpu.units)
    stages = min(1 + memory // (block_out * row_size), MAX_STAGES)
    return Vector(block_out, warps=min(max(columns // 256, 1), 8), stages=stages, programs=1)


def _step_rows(max_rows: int, min_rows: int, out: int, num_steps: int) -> int:
    """Rows of a weight in a step: at most max_rows, halved down to min_rows until there are enough steps."""
    rows = max(min_rows, max_rows)
    while rows > min_rows and out < rows * num_steps:
        rows //= 2
    return rows


def choose_matrix(shape: Shape, gpu: Gpu) -> Matrix | None:
    """`choose` for some rows by a plain weight."""
    rows, out, inner, _, element_size, _ = shape
    if element_size > 2 or rows > 32:  # at 64 rows of layers of Qwen3 the library beat what follows
        return None
    # measured on an H200 with the layers of Qwen3-0.6B and 8B at 4, 16 and 32 rows, and of 32B's ranks at 32
    block_out, block_inner, warps, min_programs = (32, 256, 2, 0.9) if rows <= 8 else (64, 128, 4, 1.2)
    tiles, splits = -(-out // block_out), 1
    while splits < 8 and tiles * splits < min_programs * gpu.units and inner >= 4 * splits * block_inner:
        splits *= 2
    return Matrix(block_out, block_inner, warps, stages=4, splits=splits, prefetch=4)


def choose_kquants(shape: Shape, gpu: Gpu) -> Vector | None:
    """`choose` for one row by words (kquant_gemv.py); None for several rows, or if one is too large.

    By what compilers make of it: up to 128 registers a thread, and 16 warps on a multiprocessor.
    """
    rows, out, inner, gates, _, encoding = shape
    groups = next_power_of_2(inner) // (encoding.columns or inner)
    warps = min(max(groups // (WARP if encoding.bits == 4 else 2 * WARP), 1), 16)
    chunks = max(groups // (WARP * warps), 1)  # of the columns, of which a thread has one group each
    if rows > 1 or chunks > 2:
        return None
    programs = 16 // warps
    max_rows = 8 if chunks == 1 and warps <= 4 else 4 if chunks == 1 or encoding.bits == 8 else 2
    return Vector(_step_rows(max_rows, gates, out, programs * gpu.units * 9 // 10), warps, stages=1, programs=programs)


def choose_scaled(shape: Shape, gpu: Gpu) -> Matrix | None:
    """`choose` for rows by a packed weight whose numbers are scaled first: tiles whose sums fit into registers."""
    rows, out, inner, _, element_size, encoding = shape
    if rows > 128:
        return None
    tile, programs = (Matrix(64, 128, 4, 4, 1, 1, 4), 4) if rows <= 64 else (Matrix(128, 128, 8, 3, 1, 1, 4), 2)
    stage = tile.block_inner * (tile.block_out * encoding.bits // 8 + next_power_of_2(rows) * element_size)
    if tile.stages * stage > gpu.shared_memory:
        tile = tile._replace(stages=2)
    tiles, splits = -(-out // tile.block_out), 1
    while splits < 8 and 2 * splits * tiles <= programs * gpu.units and inner >= 4 * splits * tile.block_inner:
        splits *= 2
    return tile._replace(splits=splits)


def choose_packed(shape: Shape, gpu: Gpu) -> Parameters:
    """`choose` of a packed weight: a row too goes through tensor cores, which leave others free to unpack."""
    rows, out, inner, _, element_size, encoding = shape
    parts = -(-MIN_BYTES * encoding.per_byte // (encoding.columns & -encoding.columns)) if encoding.columns else 1
    if encoding.factor == SPANS and element_size == 2:
        return choose_kquants(shape, gpu) or choose_scaled(shape, gpu)
    if element_size > 2 or rows * parts > 64:
        return None
    # what an H200 does fastest with the layers of Qwen3-8B; each warp of a group unpacks columns of its own
    tiles, units = -(-out // 16), gpu.units
    if rows <= 16:
        if encoding.bits == 8 and out >= 2.5 * 64 * units:
            tile = Matrix(64, 256, 4, 4, 1, 1, 4) if encoding.columns is None else Matrix(32, 128, 2, 4, 2, 1, 4)
        elif encoding.bits == 4 and out >= 2.5 * 64 * units:
            tile = Matrix(32, 128, 4, 4, 4, 1, 4)
        elif encoding.bits == 4 and inner >= 8192:
            tile = Matrix(32, 128, 4, 4, 4, 2, 4)
        else:
            tile = Matrix(16, 128, 4, 4, 4, 2 if tiles < 2.5 * units and inner >= 2048 else 1, 4)
    elif encoding.act is not None and out >= 40 * units:  # the library multiplies 8-bit numbers faster
        return None
    elif out >= 2.5 * 64 * units:
        tile = Matrix(64, 128, 4 if encoding.bits == 8 else 2, 6, 1, 1, 4)
    else:
        tile = Matrix(
            32, 128, 4, 4 if encoding.bits == 8 else 3, 4, 2 if inner >= 8192 and encoding.bits == 4 else 1, 4
        )
    # stages of a group's columns of the weight and of x, which blocks of few columns widen
    width = tile.block_out * encoding.bits // 8 + max(16, next_power_of_2(rows)) * 2 * parts
    if tile.stages * tile.block_inner * tile.groups * width > gpu.shared_memory:
        tile = Matrix(64, 128, 4, 3, 1, 1, 4)
    return tile if tile.splits == 1 or -(-out // tile.block_out) <= MAX_TILES else tile._replace(splits=1)

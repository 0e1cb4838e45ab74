"""Tune linears: the parameters to try, and a step's calls.

options = candidates(Shape(1, 6144, 4096), find_gpu(device))
tuner = LinearTuner(device)                    # what tune=true asks of these kernels
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from atom.graph import BODY, HEAD, Graph, Shuffle
from atom.graph.gguf_blocks import SPLIT
from atom.graph.graph import type_of
from atom.graph.ops import Op
from atom.graph.types import BITS
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import shuffled
from atom.kernels.triton.linear.linear import OPS, Linears
from atom.kernels.triton.linear.shuffled import Row, Wgmma
from atom.kernels.triton.linear.tiles import (
    MAX_STAGES,
    MAX_TILES,
    Matrix,
    Parameters,
    Shape,
    Vector,
    choose_kquants,
    finder,
    key_of,
    to_entry,
)
from atom.kernels.triton.linear.weight_encoding import PLAIN, SPANS, WeightEncoding, encoding_of, encoding_of_weight
from atom.kernels.triton.search import Call, MatmulTuner, methods_of, specialized

Kinds = Mapping[str, type[Linears]]  # by backend
KINDS: Kinds = {"triton": Linears}
# Of a thread: of as many, some candidates spill registers already, and compile in 2 to 4 s; of more, some take minutes.
MAX_SUMS = 128

RINGS = ((1, 98304), (1, 131072), (1, 196608), (2, 32768), (2, 49152), (2, 98304))  # programs, bytes of each in flight
ONE = (  # row, if the GEMM is small
    Matrix(32, 256, 2, 4, 1, 1, 4), Matrix(32, 128, 2, 4, 1, 1, 4), Matrix(16, 64, 4, 6, 4, 1, 4),
)  # fmt: skip
FEW = (  # rows, up to 32
    *ONE, Matrix(64, 128, 4, 4, 1, 1, 4), Matrix(64, 128, 4, 4, 1, 1, 0), Matrix(64, 256, 4, 3, 1, 1, 4),
    Matrix(64, 64, 4, 5, 1, 1, 4), Matrix(16, 128, 4, 4, 4, 1, 0), Matrix(16, 128, 4, 3, 4, 1, 8),
    Matrix(32, 64, 8, 4, 8, 1, 4), Matrix(128, 128, 8, 3, 1, 1, 2),
)  # fmt: skip
MANY = (
    Matrix(64, 128, 4, 3, 1, 1, 4), Matrix(64, 128, 4, 4, 1, 1, 4), Matrix(64, 128, 4, 5, 1, 1, 4),
    Matrix(64, 128, 4, 6, 1, 1, 4), Matrix(64, 256, 4, 3, 1, 1, 4), Matrix(64, 64, 4, 5, 1, 1, 16),
    Matrix(128, 64, 4, 4, 1, 1, 0), Matrix(128, 128, 8, 3, 1, 1, 8), Matrix(128, 128, 8, 4, 1, 1, 4),
)  # fmt: skip


PACKED = (  # rows up to 64, of packed weights: tiles whose numbers are unpacked once, in registers
    Matrix(16, 128, 4, 4, 4, 1, 4), Matrix(32, 128, 4, 4, 4, 1, 4), Matrix(64, 128, 4, 3, 4, 1, 4),
    Matrix(32, 128, 2, 6, 1, 1, 4), Matrix(32, 256, 2, 4, 1, 1, 4), Matrix(64, 128, 2, 6, 1, 1, 4),
    Matrix(64, 256, 2, 4, 1, 1, 4), Matrix(64, 128, 4, 6, 1, 1, 4), Matrix(64, 256, 4, 4, 1, 1, 4),
    Matrix(128, 128, 8, 4, 1, 1, 4),
)  # fmt: skip


class Matmul(NamedTuple):
    """A GEMM of a text that these kernels take."""

    out: int
    inner: int
    gates: int  # 2 if half of the outputs are gate projections
    num_calls: int  # in a step
    encoding: WeightEncoding = PLAIN  # how its weight holds numbers

    @property
    def num_elements(self) -> int:
        """Elements of the weights that a step reads."""
        return self.out * self.inner * self.num_calls

    def shape(self, rows: int) -> Shape:
        return Shape(rows, self.out, self.inner, self.gates, encoding=self.encoding)


def matmuls_of(graph: Graph, backends: Collection[str] = tuple(KINDS)) -> list[Matmul]:
    """The linears of decodes with these backends' kernels and weights of 16 bits once unpacked, the largest first."""
    counts: dict[tuple[int, int, int, WeightEncoding], int] = {}
    for program in (program for name, program in graph.programs.items() if name in (BODY, HEAD)):
        for node in program.nodes:
            if node.target in OPS and node.meta.get("kernel") in backends:
                type = type_of(node.args[node.target.weight])
                if BITS[type.dtype] == 16:
                    out, inner = map(int, type.shape)
                    weight = node.args[node.target.weight]
                    is_shuffled = isinstance(weight, Shuffle) and weight.layout != SPLIT
                    encoding = encoding_of(type.fmt, out, node.kwargs.get("act"), is_shuffled)
                    shape = out, inner, 1 if node.kwargs.get("kind") is None else 2, encoding
                    counts[shape] = counts.get(shape, 0) + 1
    matmuls = [
        Matmul(out, inner, gates, num_calls, encoding) for (out, inner, gates, encoding), num_calls in counts.items()
    ]
    return sorted(matmuls, key=lambda matmul: -matmul.num_elements * matmul.encoding.bits)


def candidates(shape: Shape, gpu: Gpu) -> list[Parameters]:
    """Parameters that may be the fastest for such a GEMM: tiles that won on an H200, with splits for this GPU."""
    found: list[Parameters] = [None]
    rows, encoding = shape.rows, shape.encoding
    if encoding.is_shuffled:
        return found + list(_shuffled(shape, gpu))
    weight_size = shape.element_size * encoding.bits / 16
    if rows == 1 and encoding.factor == SPANS:
        found += _words(shape, gpu)
    elif rows == 1 and not (encoding.columns or 1) & (encoding.columns or 1) - 1:
        found += _vectors(shape.inner, weight_size, shape.gates, gpu)
    heights = (128,) if rows <= 32 else (32, 64, 128)
    tiles: tuple[Matrix, ...] = ONE if rows == 1 else FEW if rows <= 32 else MANY
    if encoding.values is not None:
        tiles = PACKED if rows <= 64 else (*PACKED, *MANY)
    for tile, block_rows in itertools.product(tiles, heights):
        tile = tile._replace(block_rows=block_rows).as_run(rows, gpu, encoding)
        if tile.num_sums(encoding) <= MAX_SUMS:
            found += _splits(tile, shape, weight_size, gpu)
    return list(dict.fromkeys(found))


def _vectors(inner: int, element_size: float, gates: int, gpu: Gpu) -> Iterator[Vector]:
    columns = triton.next_power_of_2(inner)
    usual = [warps for warps in (4, 8, 16) if warps * 128 <= columns <= warps * 512]
    for block_out, (programs, ring) in itertools.product((2, 4, 8, 16), RINGS):
        stages = 1 + int(ring // (block_out * columns * element_size))
        if block_out % gates == 0 and 2 <= stages <= MAX_STAGES and ring * programs <= gpu.shared_memory:
            for warps in usual or [min(max(columns // 256, 1), 16)]:
                yield Vector(block_out, warps, stages, programs)


def _words(shape: Shape, gpu: Gpu) -> Iterator[Vector]:
    """Of kquant_gemv.py: more or fewer warps than usual, which have fewer or more columns each."""
    usual = choose_kquants(shape, gpu)
    for warps, block_out in itertools.product((1, 2, 4, 8, 16), (2, 4, 8)):
        if usual is not None and usual.warps <= 2 * warps <= 4 * usual.warps:
            for programs in {max(8 // warps, 1), 16 // warps}:
                yield Vector(block_out, warps, stages=1, programs=programs)


def _shuffled(shape: Shape, gpu: Gpu) -> Iterator[Wgmma | Row]:
    rows, out, inner, encoding = shape.rows, shape.out, shape.inner, shape.encoding
    usual = shuffled.choose(rows, out, inner, encoding, gpu)
    if rows == shape.gates == 1 and (row := shuffled.choose_row(out, inner, encoding, gpu)):
        yield row
    heights = (usual.block_rows // 2, usual.block_rows)  # taller ones are slower than the library
    for block_rows, boxes, stages, splits in itertools.product(heights, (1, 2, 4), range(2, 9), (1, 2, 4, 6, 8)):
        width = boxes * shuffled.BOX * 8 // encoding.bits
        tiles = triton.cdiv(rows, block_rows) * triton.cdiv(out, shuffled.BLOCK_OUT)
        is_split = splits == 1 or (inner >= 2 * splits * width and tiles * splits <= 4 * gpu.units)
        fits = stages * boxes * shuffled.box_bytes(block_rows, encoding) <= gpu.shared_memory - shuffled.UNUSED_MEMORY
        if block_rows >= 8 and is_split and fits and width % (encoding.columns or 1) == 0:
            yield Wgmma(block_rows, boxes, stages, splits)


def _splits(tile: Matrix, shape: Shape, weight_size: float, gpu: Gpu) -> Iterator[Matrix]:
    """A tile, as it is run, with the splits that keep about every multiprocessor busy, where its ring fits."""
    rows, out, inner, *_ = shape
    step = tile.block_inner * tile.groups
    if (tile.stages - 1) * step * (tile.block_out * weight_size + tile.block_rows * 2) > gpu.shared_memory:
        return
    tiles = triton.cdiv(rows, tile.block_rows) * triton.cdiv(out, tile.block_out)
    possible = [1] + [splits for splits in (2, 4, 8) if triton.cdiv(inner, step) >= 2 * splits and tiles <= MAX_TILES]
    min_programs, max_programs = (0.45, 4) if rows <= 32 else (0.6, 2)  # programs for each multiprocessor
    busy = [splits for splits in possible if min_programs <= tiles * splits / gpu.units <= max_programs]
    for splits in busy or [1 if tiles > gpu.units else possible[-1]]:
        yield tile._replace(splits=splits)


class Recording:
    """Records the calls of a step's linears that differ for Triton, on the step's own inputs."""

    def __init__(self, kinds: Kinds = KINDS) -> None:
        self._calls: dict[tuple[int, int, int, WeightEncoding], dict[Any, Call]] = {}
        methods = methods_of(OPS, {backend: kind() for backend, kind in kinds.items()})
        self.kernels = {(op, backend): self._note(op, run) for (op, backend), run in methods.items()}

    def calls_of(self, matmul: Matmul) -> list[Call]:
        return [*self._calls[*matmul[:3], matmul.encoding].values()]

    def _note(self, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            weight = args[op.weight]
            encoding = encoding_of_weight(weight, kwargs.get("act"))
            calls = self._calls.setdefault((*weight.shape, 1 if kwargs.get("kind") is None else 2, encoding), {})
            calls.setdefault((op, *kwargs.items(), *map(specialized, args)), partial(run, *args, **kwargs))
            return run(*args, **kwargs)

        return call


class LinearTuner(MatmulTuner):
    """The `Tuner` of linears, by weights of 16 bits and packed ones."""

    table, what = "linear", "linears"
    known, to_entry = staticmethod(finder), staticmethod(to_entry)
    ops, key_of, candidates = OPS, staticmethod(key_of), staticmethod(candidates)
    matmuls_of, recorder = staticmethod(matmuls_of), staticmethod(Recording)

    def __init__(self, device: torch.device, kinds: Kinds = KINDS) -> None:
        super().__init__(device, kinds)

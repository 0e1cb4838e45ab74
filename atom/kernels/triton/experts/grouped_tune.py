"""Tune grouped GEMMs of experts: the tiles to try, and a step's calls.

    options = candidates(Shape(256, 128, 1536, 2048, 2, 2, PLAIN), find_gpu(device))
    tuner = ExpertsTuner(device)                   # what tune=true asks of these kernels

How many rows an expert has depends on the tokens: those of the step are random, so about uniform.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from atom.graph import BODY, HEAD, Graph, Shuffle, ops
from atom.graph.graph import type_of
from atom.graph.types import BITS, Type
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts import grouped_tiles
from atom.kernels.triton.experts.grouped_tiles import Parameters, Shape, Tiles, key_of, with_whole_groups
from atom.kernels.triton.experts.moe import Experts, describe
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear.shuffled import BLOCK_OUT, BOX, OTHER_MEMORY, Wgmma, box_bytes
from atom.kernels.triton.linear.weight_encoding import Weight, WeightEncoding, encoding_of
from atom.kernels.triton.search import MatmulTuner, methods_of, specialized

Kinds = Mapping[str, type[Experts]]  # by backend
KINDS: Kinds = {"triton": Experts}
OPS = (ops.grouped_linear, ops.experts)
HEIGHTS = (16, 32, 64, 128)  # rows of a tile
FORMS = (  # outputs, columns and warps of a tile
    (32, 256, 4), (64, 128, 4), (64, 256, 4), (64, 64, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8),
)  # fmt: skip
STAGES = (2, 3, 4, 5)


class Matmul(NamedTuple):
    """A grouped GEMM of a text that these kernels take."""

    experts: int
    out: int
    inner: int
    gates: int  # 2 if half of the outputs are gate projections
    pairs: int  # of token and expert, a token of the step
    num_calls: int  # in a step
    encoding: WeightEncoding  # how its weight holds numbers

    def shape(self, tokens: int) -> Shape:
        return Shape(tokens * self.pairs, self.experts, self.out, self.inner, self.gates, 2, self.encoding)


def matmuls_of(graph: Graph, backends: Collection[str] = tuple(KINDS)) -> list[Matmul]:
    """The linears of decodes with these backends' kernels and weights of 16 bits once unpacked, the largest first."""
    programs = [program for name, program in graph.programs.items() if name in (BODY, HEAD)]
    nodes = [node for program in programs for node in program.nodes if node.target in OPS]
    taken = [node for node in nodes if node.meta.get("kernel") in backends]
    counts = Counter(matmul for node in taken for matmul in _matmuls(node))
    matmuls = [matmul._replace(num_calls=count) for matmul, count in counts.items()]
    return sorted(matmuls, key=lambda each: -each.experts * each.out * each.inner * each.num_calls * each.encoding.bits)


def _matmuls(node: Node) -> Iterator[Matmul]:
    if node.target is ops.experts:
        pairs = type_of(node.args[2]).bytes_per_token * 8 // BITS["i64"]
        weights = {node.args[3]: 2, node.args[4]: 1}
    else:
        rows = type_of(node.args[0])
        pairs, weights = rows.bytes_per_token // rows.row.num_bytes, {node.args[1]: 1}
    for weight, gates in weights.items():
        type: Type = type_of(weight)
        experts, out, inner = map(int, type.shape)
        if BITS[type.dtype] == 16:
            encoding = encoding_of(type.fmt, out, None, isinstance(weight, Shuffle))
            yield Matmul(experts, out, inner, gates, int(pairs), 0, encoding)


def candidates(shape: Shape, gpu: Gpu) -> list[Parameters]:
    """Tiles that may be the fastest for such a GEMM."""
    found = _shuffled(shape, gpu) if shape.encoding.is_shuffled else _tiles(shape, gpu)
    return list(dict.fromkeys(found))


def _tiles(shape: Shape, gpu: Gpu) -> Iterator[Tiles]:
    """Tiles of up to about four times an average expert's rows, with as many stages as fit, and with one less."""
    heights = [rows for rows in HEIGHTS if rows <= max(16, 4 * shape.rows / shape.experts)]
    for rows, (out, inner, warps) in itertools.product(heights, FORMS):
        if rows * out > 128 * 128 or out < 2 * shape.gates:
            continue
        tiles = Tiles(rows, out, inner, warps, 2)
        if shape.encoding.values is not None:
            tiles = with_whole_groups(tiles, shape)
        stage = tiles.inner * (rows * 2 + out * shape.encoding.bits // 8)
        max_stages = 2 if gpu.capability == (0, 0) else STAGES[-1]  # Triton 3.6 compiles no more for AMD
        fitting = [num for num in STAGES if num <= max_stages and num * stage <= gpu.shared_memory] or [1]
        for stages in fitting[-2:]:
            yield tiles._replace(num_stages=stages)


def _shuffled(shape: Shape, gpu: Gpu) -> Iterator[Wgmma]:
    usual, encoding = grouped_tiles.choose(shape, gpu), shape.encoding
    assert isinstance(usual, Wgmma), "of a shuffled weight"
    is_by_row = shape.rows <= shape.experts  # each row has a tile of its own, of which programs may share the columns
    heights = (8,) if is_by_row else (usual.block_rows // 2, usual.block_rows, usual.block_rows * 2)
    splits = (1, 2, 4, 8) if is_by_row else (1,)
    for height, boxes, stages, num in itertools.product(heights, (1, 2, 4), (2, 3, 4, 6, 8), splits):
        width = boxes * BOX * 8 // encoding.bits
        fits = stages * boxes * box_bytes(height, encoding) <= gpu.shared_memory - OTHER_MEMORY
        programs = shape.rows * ceil(shape.out / BLOCK_OUT) * num
        is_split = num == 1 or (shape.inner >= 2 * num * width and programs <= 4 * gpu.units)
        is_whole = width % (encoding.columns or 1) == 0 and is_split
        if 8 <= height <= (64 if encoding.values == "e2m1" else 128) and fits and is_whole:
            yield Wgmma(height, boxes, stages, num)


class Recording:
    """Records the calls of a step's grouped GEMMs that differ for Triton, on the step's own inputs."""

    def __init__(self, kinds: Kinds = KINDS) -> None:
        self._calls: dict[tuple[Any, ...], dict[Any, Callable[..., Tensor]]] = {}
        self.kernels = methods_of(OPS, {backend: self._recording(kind)() for backend, kind in kinds.items()})

    def calls_of(self, matmul: Matmul) -> list[Callable[..., Tensor]]:
        """The recorded calls of a GEMM; empty if other kernels take so few rows."""
        return [*self._calls.get((*matmul[:4], matmul.encoding), {}).values()]

    def _recording(self, kind: type[Experts]) -> type[Experts]:
        calls = self._calls

        class RecordingExperts(kind):  # type: ignore[misc, valid-type]
            def multiply(self, x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None = None,
                         gate: Gate | None = None) -> Tensor:  # fmt: skip
                y: Tensor = super().multiply(x, weight, ends, bias, gate)
                repeated = partial(_multiply, super().multiply, x, weight, ends, bias, gate)
                shape = describe(x, weight, gate)
                key = *shape[1:5], shape.encoding
                calls.setdefault(key, {}).setdefault((gate, *map(specialized, (x, weight, bias))), repeated)
                return y

        return RecordingExperts


def _multiply(run: Callable[..., Tensor], x: Tensor, weight: Weight, ends: Tensor, *args: Any,
              parameters: Callable[..., Parameters | None]) -> Tensor:  # fmt: skip
    """Repeat a call, by the kernel's rule if `parameters` gives none; the rows of the experts that are here."""
    tiles = parameters()
    y = run(x, weight, ends, *args, parameters=None if tiles is None else parameters)
    return y[: int(ends[-1])]


class ExpertsTuner(MatmulTuner):
    """The `Tuner` of experts, by weights of 16 bits and packed ones."""

    table, what = "experts", "matmuls of experts"
    known, to_entry = staticmethod(grouped_tiles.finder), staticmethod(grouped_tiles.to_entry)
    ops, key_of, candidates = OPS, staticmethod(key_of), staticmethod(candidates)
    matmuls_of, recorder = staticmethod(matmuls_of), staticmethod(Recording)

    def __init__(self, device: torch.device, kinds: Kinds = KINDS) -> None:
        super().__init__(device, kinds)

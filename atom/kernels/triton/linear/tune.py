"""Tune linears: the parameters to try, and the fastest in a step.

    options = candidates(1, 6144, 4096, 2, 1, find_gpu(device))
    fastest = search(current, options, prepare)    # prepare(option)() times a step that has the option, in seconds
    tuner = LinearTuner(device)                    # what tune=true asks of these kernels

A product is timed in the step that it is part of. Timed alone it says little, since two programs of a kernel share a
multiprocessor only where attention keeps another one busy. Clocks drift, so two steps are timed in turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from atom.errors import is_out_of_memory
from atom.graph import BODY, HEAD, Graph, Shuffle
from atom.graph.graph import type_of
from atom.graph.ops import Op
from atom.graph.packed import PackedWeight
from atom.graph.types import BITS
from atom.kernels.triton.gpu import Gpu, find_gpu
from atom.kernels.triton.linear import shuffled
from atom.kernels.triton.linear.linear import BACKENDS, PRODUCTS, Products
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.style import PLAIN, Style, operand_of, style_of, style_of_weight
from atom.kernels.triton.linear.tiles import (
    MAX_STAGES,
    MAX_TILES,
    Find,
    Matrix,
    Parameters,
    TileError,
    Vector,
    finder,
    key_of,
    to_entry,
)

# Of the step's time: a step is timed to about 0.2% in turns, and the best of some 50 is the luckiest of them too.
MARGIN = 0.005
ROUNDS = 3  # rounds in which two steps take turns; the best of each counts
HOPELESS = 0.02  # of the step's time: an option slower by this in the first round is not timed again

# Of a thread: of as many, some candidates spill registers already, and compile in 2 to 4 s; of more, some take minutes.
MAX_SUMS = 128

RINGS = ((1, 98304), (1, 131072), (1, 196608), (2, 32768), (2, 49152), (2, 98304))  # programs, bytes of each in flight
ONE = (  # row, where the product is small
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


class Product(NamedTuple):
    """A matrix product of a text that these kernels take."""

    out: int
    inner: int
    gates: int  # 2 where half of the outputs are gates
    num_calls: int  # in a step
    style: Style = PLAIN  # how its weight holds numbers

    @property
    def num_elements(self) -> int:
        """Elements of the weights that a step reads."""
        return self.out * self.inner * self.num_calls


def products_of(graph: Graph) -> list[Product]:
    """The products of decodes with these kernels and weights unpacked to 16 bits, those that read most first."""
    counts: dict[tuple[int, int, int, Style], int] = {}
    for program in (program for name, program in graph.programs.items() if name in (BODY, HEAD)):
        for node in program.nodes:
            if node.target in PRODUCTS and node.meta.get("kernel") in BACKENDS:
                type = type_of(node.args[node.target.weight])
                if BITS[type.dtype] == 16:
                    out, inner = map(int, type.shape)
                    is_shuffled = isinstance(node.args[node.target.weight], Shuffle)
                    style = style_of(type.fmt, out, node.kwargs.get("act"), is_shuffled)
                    shape = out, inner, 1 if node.kwargs.get("kind") is None else 2, style
                    counts[shape] = counts.get(shape, 0) + 1
    products = [
        Product(out, inner, gates, num_calls, style) for (out, inner, gates, style), num_calls in counts.items()
    ]
    return sorted(products, key=lambda product: -product.num_elements * product.style.bits)


def candidates(rows: int, out: int, inner: int, element_size: int, gates: int, gpu: Gpu, style: Style = PLAIN
               ) -> list[Parameters]:  # fmt: skip
    """Parameters that may be the fastest for such a product: tiles that won on an H200, with splits for this GPU."""
    found: list[Parameters] = [None]
    if style.is_shuffled:
        return found + list(_shuffled(rows, out, inner, gpu, style))
    weight_size = element_size * style.bits / 16
    if rows == 1 and not (style.columns or 1) & (style.columns or 1) - 1:
        found += _vectors(inner, weight_size, gates, gpu)
    heights = (128,) if rows <= 32 else (32, 64, 128)
    tiles: tuple[Matrix, ...] = ONE if rows == 1 else FEW if rows <= 32 else MANY
    if style.values is not None:
        tiles = PACKED if rows <= 64 else (*PACKED, *MANY)
    for tile, block_rows in itertools.product(tiles, heights):
        tile = tile._replace(block_rows=block_rows).as_run(rows, gpu, style)
        if tile.num_sums(style) <= MAX_SUMS:
            found += _splits(tile, rows, out, inner, weight_size, gpu)
    return list(dict.fromkeys(found))


def _vectors(inner: int, element_size: float, gates: int, gpu: Gpu) -> Iterator[Vector]:
    columns = triton.next_power_of_2(inner)
    usual = [warps for warps in (4, 8, 16) if warps * 128 <= columns <= warps * 512]
    for block_out, (programs, ring) in itertools.product((2, 4, 8, 16), RINGS):
        stages = 1 + int(ring // (block_out * columns * element_size))
        if block_out % gates == 0 and 2 <= stages <= MAX_STAGES and ring * programs <= gpu.shared_memory:
            for warps in usual or [min(max(columns // 256, 1), 16)]:
                yield Vector(block_out, warps, stages, programs)


def _shuffled(rows: int, out: int, inner: int, gpu: Gpu, style: Style) -> Iterator[Wgmma]:
    usual = shuffled.choose(rows, out, inner, style, gpu)
    heights = (usual.block_rows // 2, usual.block_rows)
    for block_rows, boxes, stages, splits in itertools.product(heights, (1, 2, 4), range(2, 9), (1, 2, 4, 6, 8)):
        width = boxes * shuffled.BOX * 8 // style.bits
        tiles = triton.cdiv(rows, block_rows) * triton.cdiv(out, shuffled.BLOCK_OUT)
        is_split = splits == 1 or (inner >= 2 * splits * width and tiles * splits <= 4 * gpu.units)
        fits = stages * boxes * shuffled.box_bytes(block_rows, style) <= gpu.shared_memory - 8192
        if block_rows >= 8 and is_split and fits and width % (style.columns or 1) == 0:
            yield Wgmma(block_rows, boxes, stages, splits)


def _splits(tile: Matrix, rows: int, out: int, inner: int, weight_size: float, gpu: Gpu) -> Iterator[Matrix]:
    """A tile, as it is run, with the splits that keep about every multiprocessor busy, where its ring fits."""
    step = tile.block_inner * tile.groups
    if (tile.stages - 1) * step * (tile.block_out * weight_size + tile.block_rows * 2) > gpu.shared_memory:
        return
    tiles = triton.cdiv(rows, tile.block_rows) * triton.cdiv(out, tile.block_out)
    possible = [1] + [splits for splits in (2, 4, 8) if triton.cdiv(inner, step) >= 2 * splits and tiles <= MAX_TILES]
    least, most = (0.45, 4) if rows <= 32 else (0.6, 2)  # programs for each multiprocessor
    busy = [splits for splits in possible if least <= tiles * splits / gpu.units <= most]
    for splits in busy or [1 if tiles > gpu.units else possible[-1]]:
        yield tile._replace(splits=splits)


class Trial:
    """The lookup while products are tried: the chosen parameters of a product go before the known ones."""

    def __init__(self, known: Find) -> None:
        self._known = known
        self.chosen: dict[str, Parameters] = {}

    def __call__(self, rows: int, out: int, inner: int, element_size: int, gates: int, gpu: Gpu, style: Style = PLAIN
                 ) -> Parameters:  # fmt: skip
        key = key_of(rows, out, inner, gates, style)
        if element_size == 2 and key in self.chosen:
            return self.chosen[key]
        return self._known(rows, out, inner, element_size, gates, gpu, style)


Call = Callable[..., Tensor | tuple[Tensor, ...]]  # of a kernel with its arguments, but for `parameters`


def agrees(call: Call, parameters: Parameters) -> bool:
    """Whether a call with these parameters equals the library's result, but for rounding; of x too by the library,
    where the weight is packed."""
    ours, theirs = (_results(call(parameters=lambda *_, chosen=chosen: chosen)) for chosen in (parameters, None))
    is_packed = any(isinstance(arg, PackedWeight) for arg in getattr(call, "args", ()))
    return all(_are_near(a, b, 16 if is_packed else 8) for a, b in zip(ours, theirs, strict=True))


def _results(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _are_near(a: Tensor, b: Tensor, roundings: int) -> bool:
    """a and b [T, O]: no element further apart than so many roundings of the largest of its row.

    All is near an inf or a NaN of b, the library's own, and a NaN of a is near no number.
    """
    is_number = b.isfinite()
    allowed = roundings * torch.finfo(b.dtype).eps * b.abs().where(is_number, 0).amax(1, keepdim=True)
    return bool((((a - b).abs() <= allowed) | ~is_number).all())


def is_unfit(error: Exception) -> bool:
    """Whether this error says that an option does not fit in memory, or that a pass of Triton fails on it."""
    if isinstance(error, TileError | TritonError):
        return True
    return isinstance(error, RuntimeError) and (is_out_of_memory(error) or "PassManager" in str(error))


def search(current: Parameters, options: Sequence[Parameters], prepare: Callable[[Parameters], Callable[[], float]],
           on_timed: Callable[[], object] = lambda: None) -> Parameters:  # fmt: skip
    """Find the fastest parameters; the current ones stay where no other is faster by MARGIN.

    prepare gives a function that times a step in seconds; an option is left out where it raises an `is_unfit` error.
    """
    start = prepare(current)
    best, timer = current, start
    for option in options:
        try:
            other = prepare(option)
        except Exception as error:
            if not is_unfit(error):
                raise
            on_timed()
            continue
        ours, theirs = take_turns(timer, other)
        if theirs < ours:
            best, timer = option, other
        on_timed()
    if best == current:
        return current
    before, after = take_turns(start, timer, 2 * ROUNDS)
    return best if after < before * (1 - MARGIN) else current


def take_turns(one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS) -> tuple[float, float]:
    """Time two steps in turns; the least seconds of each."""
    ours, theirs = one(), other()
    for _ in range(rounds - 1):
        if theirs > ours * (1 + HOPELESS):
            break
        ours, theirs = min(ours, one()), min(theirs, other())
    return ours, theirs


class Recording:
    """Records the calls of a step's products that differ for Triton, on the step's own inputs."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int, int, Style], dict[Any, Call]] = {}
        self.kernels = {(op, name): self._note(op, run) for (op, name), run in Products().kernels().items()}

    def calls_of(self, product: Product) -> list[Call]:
        return [*self._calls[*product[:3], product.style].values()]

    def _note(self, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            weight = args[op.weight]
            style = style_of_weight(weight, kwargs.get("act"))
            calls = self._calls.setdefault((*weight.shape, 1 if kwargs.get("kind") is None else 2, style), {})
            calls.setdefault((op, *kwargs.items(), *map(specialized, args)), partial(run, *args, **kwargs))
            return run(*args, **kwargs)

        return call


def specialized(arg: Tensor | PackedWeight | None) -> Any:
    """The properties of an argument that Triton specializes a kernel on."""
    if isinstance(arg, PackedWeight):
        return tuple(map(specialized, operand_of(arg)[:4]))
    return None if arg is None else (arg.dtype, arg.shape, arg.stride(), arg.data_ptr() % 16)


class LinearTuner:
    """The backend's `Tuner`, for products of weights of 16 bits, and packed ones."""

    table, what = "linear", "linears"
    products, trial, recording = staticmethod(products_of), Trial, Recording
    known, to_entry = staticmethod(finder), staticmethod(to_entry)
    agrees, is_unfit = staticmethod(agrees), staticmethod(is_unfit)
    search, take_turns = staticmethod(search), staticmethod(take_turns)

    def __init__(self, device: torch.device) -> None:
        self._gpu = find_gpu(device)
        self.gpu = self._gpu.name

    def key(self, rows: int, product: Product) -> str:
        return key_of(rows, *product[:3], product.style)

    def kernels(self, find: Find) -> Mapping[tuple[Op, str], Callable[..., Any]]:
        return Products(find).kernels()

    def options(self, rows: int, product: Product, find: Find) -> tuple[Parameters, list[Parameters]]:
        out, inner, gates, _, style = product
        current = find(rows, out, inner, 2, gates, self._gpu, style)
        as_run = current.as_run(rows, self._gpu, style) if isinstance(current, Matrix) else current
        tried = candidates(rows, out, inner, 2, gates, self._gpu, style)
        return current, [each for each in tried if each != as_run]

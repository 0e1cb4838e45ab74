"""Search for the fastest parameters of a GEMM in a model's own steps.

    fastest = search(current, options, prepare)    # prepare(option)() times a step that has the option, in seconds

A GEMM is timed in the step that it is part of. Timed in isolation it says little, since two programs of a kernel share
a multiprocessor only while attention keeps another one busy. Clocks drift, so two steps are timed alternately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from atom.errors import is_out_of_memory
from atom.graph import Graph
from atom.graph.ops import Op
from atom.graph.packed import PackedWeight
from atom.kernels.triton.gpu import Gpu, find_gpu
from atom.kernels.triton.linear.tiles import Matrix, TileError
from atom.kernels.triton.linear.weight_encoding import operand_of

# Of the step's time: a step is timed to about 0.2% alternately, and the best of some 50 is the luckiest of them too.
MARGIN = 0.005
ROUNDS = 3  # rounds in which two steps take turns; the best of each counts
HOPELESS = 0.02  # of the step's time: an option slower by this in the first round is not timed again

Find = Callable[[Any, Gpu], Any]  # a lookup of parameters by the shape of a GEMM
Call = Callable[..., Tensor | tuple[Tensor, ...]]  # of a kernel with its arguments, but for `parameters`


class Trial:
    """The lookup while GEMMs are tuned: the chosen parameters of a GEMM go before the known ones."""

    def __init__(self, known: Find, key_of: Callable[[Any], str]) -> None:
        self._known, self._key_of = known, key_of
        self.chosen: dict[str, Any] = {}

    def __call__(self, shape: Any, gpu: Gpu) -> Any:
        key = self._key_of(shape)
        if shape.element_size == 2 and key in self.chosen:  # of 32 bits nobody measures
            return self.chosen[key]
        return self._known(shape, gpu)


def agrees(call: Call, parameters: Any) -> bool:
    """Whether a call with these parameters gives the untuned result, but for rounding.

    Untuned, the library multiplies in a linear, and rounds x too if the weight is packed; experts follow their
    kernel's own rule.
    """
    ours, theirs = (_results(call(parameters=lambda *_, chosen=chosen: chosen)) for chosen in (parameters, None))
    is_packed = any(isinstance(arg, PackedWeight) for arg in getattr(call, "args", ()))
    return all(_are_near(a, b, 16 if is_packed else 8) for a, b in zip(ours, theirs, strict=True))


def _results(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _are_near(a: Tensor, b: Tensor, roundings: int) -> bool:
    """a and b [T, O]: no element further apart than this many roundings of the largest of its row.

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


def search(current: Any, options: Sequence[Any], prepare: Callable[[Any], Callable[[], float]],
           on_timed: Callable[[], object] = lambda: None) -> Any:  # fmt: skip
    """Find the fastest parameters; the current ones stay if no other is faster by MARGIN.

    prepare gives a function that times a step in seconds; an option is left out if it raises an `is_unfit` error.
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
    """Time two steps alternately; the min seconds of each."""
    ours, theirs = one(), other()
    for _ in range(rounds - 1):
        if theirs > ours * (1 + HOPELESS):
            break
        ours, theirs = min(ours, one()), min(theirs, other())
    return ours, theirs


def specialized(arg: Tensor | PackedWeight | None) -> Any:
    """The properties of an argument that Triton specializes a kernel on."""
    if isinstance(arg, PackedWeight):
        return tuple(map(specialized, operand_of(arg)[:4]))
    return None if arg is None else (arg.dtype, arg.shape, arg.stride(), arg.data_ptr() % 16)


def methods_of(ops: Iterable[Op], objects: Mapping[str, object]) -> dict[tuple[Op, str], Callable[..., Any]]:
    """The methods of backends' objects by op and backend, as a text names them."""
    return {(op, backend): getattr(each, op.name) for op in ops for backend, each in objects.items()}


class MatmulTuner:
    """What the backend's tuners have in common: a GPU, classes of kernels, and the search."""

    ops: tuple[Op, ...]  # that the classes have methods for
    key_of: Callable[[Any], str]  # the key of a shape's parameters
    matmuls_of: Callable[..., Sequence[Any]]  # (graph, backends) -> the matmuls of a text
    candidates: Callable[[Any, Gpu], Sequence[Any]]  # parameters that may be the fastest for a shape
    recorder: Callable[[Any], Any]  # (kinds) -> kernels that record their calls
    agrees, is_unfit = staticmethod(agrees), staticmethod(is_unfit)
    search, take_turns = staticmethod(search), staticmethod(take_turns)

    def __init__(self, device: torch.device, kinds: Mapping[str, Callable[[Find], object]]) -> None:
        """kinds: the class of each backend whose matmuls it tunes"""
        self._gpu, self._kinds = find_gpu(device), kinds
        self.gpu = self._gpu.name

    def matmuls(self, graph: Graph) -> Sequence[Any]:
        return self.matmuls_of(graph, self._kinds)

    def recording(self) -> Any:
        return self.recorder(self._kinds)

    def key(self, rows: int, matmul: Any) -> str:
        return self.key_of(matmul.shape(rows))

    def trial(self, known: Find) -> Trial:
        return Trial(known, self.key_of)

    def kernels(self, find: Find) -> Mapping[tuple[Op, str], Callable[..., Any]]:
        return methods_of(self.ops, {backend: kind(find) for backend, kind in self._kinds.items()})

    def options(self, rows: int, matmul: Any, find: Find) -> tuple[Any, list[Any]]:
        shape = matmul.shape(rows)
        current = find(shape, self._gpu)
        as_run = current.as_run(rows, self._gpu, shape.encoding) if isinstance(current, Matrix) else current
        return current, [each for each in self.candidates(shape, self._gpu) if each != as_run]

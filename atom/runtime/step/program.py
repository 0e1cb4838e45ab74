"""Execute a lowered program: kernels and compiled pieces, with weights and caches bound.

bindings = Bindings(weights, code, caches)
body, head = (Executable(graph.programs[name], bindings) for name in ("body", "head"))
hidden = body({"tokens": …, "positions": …, "batch": …})
logits = score(head, rows_of(hidden, slice(3)))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from atom.graph import LaidOut, PackedWeight, PagedCache, Program, Recipe, State
from atom.graph.graph import results_of
from atom.graph.ops import Op
from atom.kernels import Communicator, LoadContext, find_kernel
from atom.kernels.host_memory import HostTensor
from atom.pieces import PieceCode, find_pieces

ALIGNMENT = 16  # bytes, by which Triton's kernels differ
Kernels = Mapping[tuple[Op, str], Callable[..., Any]]  # by op and backend
Hidden = tuple[Tensor, ...]  # [T, …] each: the results of a body by token, and, of some tokens, the inputs of its head


def rows_of(hidden: Hidden, rows: slice | Tensor) -> Hidden:
    """The hidden states of some tokens: a slice of them, which is a view, or those at the indices i64[R]."""
    return tuple(each[rows] if isinstance(rows, slice) else each.index_select(0, rows) for each in hidden)


def score(head: Executable, hidden: Hidden) -> Tensor:
    """The logits [R, V] of rows of hidden states."""
    (logits,) = head(dict(zip(head.inputs, hidden, strict=True)))
    return logits  # type: ignore[no-any-return]


class Bindings(NamedTuple):
    """The values of the names in a program's text."""

    weights: Mapping[Recipe, Any]
    code: Mapping[str, PieceCode] = MappingProxyType({})  # by the text of a piece; one without it runs call by call
    caches: Mapping[State, Tensor] = MappingProxyType({})  # [blocks, *`State.block`]
    slots: Mapping[State, Tensor] = MappingProxyType({})  # of recurrent states [slots + 1, num_states, …]
    kernels: Kernels = MappingProxyType({})  # in place of those that the text names
    communicator: Communicator | None = None  # of several ranks


class _Step(NamedTuple):
    call: Callable[..., Any]
    args: tuple[int, ...]  # indices of the arguments
    results: tuple[int, ...]  # indices of the results
    is_single: bool
    dead: tuple[int, ...] = ()  # indices that no later step reads


class Executable:
    """Runs a program's calls in order over a list of values: one for each input, constant and result."""

    _loaded: dict[Any, Callable[..., Any]]  # kernels, by op and backend

    def __init__(self, program: Program, bindings: Bindings, *, thins: Executable | None = None) -> None:
        """thins: of the program, to make only the first of its calls that are alike, as those of equal layers are.

        So it launches what a step launches, and its kernels get what they keep from then on; its results are not those
        of the model.
        """
        linker = _Linker(program, bindings, is_thinned=thins is not None)
        context = LoadContext(bindings.communicator)  # one for all calls
        self._loaded = loaded = dict(bindings.kernels) if thins is None else thins._loaded
        pieces = {piece.calls[0]: piece for piece in find_pieces(program) if piece.text in bindings.code}
        inside = {call for piece in pieces.values() for call in piece.calls}
        for node in program.nodes:
            if node in pieces:
                piece = pieces[node]
                args = tuple(linker.piece_index_of(arg) for arg in (*piece.inputs, *piece.weights))
                linker.add(bindings.code[piece.text], args, piece.results, is_single=False)
            elif node not in inside:
                assert isinstance(node.target, Op)
                key = node.target, node.meta.get("kernel", "reference")
                if key not in loaded:
                    loaded[key] = find_kernel(*key).load(context)
                call = functools.partial(loaded[key], **node.kwargs) if node.kwargs else loaded[key]
                args = tuple(map(linker.index_of, node.args))
                linker.add(call, args, results_of(node), is_single=not isinstance(node.meta["type"], tuple))
        self.inputs, self._start = linker.inputs, linker.start
        self._names = {at: node.name for node, at in linker.indices.items()}
        self._results = tuple(linker.indices[node] for node in program.results)
        self._steps = _with_deaths(linker.steps, {*self.inputs.values(), *self._results})

    def __call__(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run the program; its results."""
        values = self._start.copy()
        for name, at in self.inputs.items():
            values[at] = inputs[name]
        for call, args, results, is_single, dead in self._steps:
            result = call(*[values[arg] for arg in args])
            if is_single:
                values[results[0]] = result
            else:
                for at, part in zip(results, result, strict=True):
                    values[at] = part
            for at in dead:
                values[at] = None
        return tuple(values[at] for at in self._results)

    def trace(self, inputs: Mapping[str, Any], watch: Callable[[Mapping[str, Any]], None]) -> tuple[Any, ...]:
        """Run the program as a call does, and show its inputs and each call's results to `watch`, by their names.

        It may write to what it is shown. Values inside compiled pieces are not shown.
        """
        values = self._start.copy()
        for name, at in self.inputs.items():
            values[at] = inputs[name]
        watch({name: inputs[name] for name in self.inputs})
        for call, args, results, is_single, dead in self._steps:
            made = call(*[values[arg] for arg in args])
            parts = (made,) if is_single else tuple(made)
            watch({self._names[at]: part for at, part in zip(results, parts, strict=True)})
            for at, part in zip(results, parts, strict=True):
                values[at] = part
            for at in dead:
                values[at] = None
        return tuple(values[at] for at in self._results)


class Watched(Executable):
    """An executable whose values are shown as it runs."""

    def __init__(self, executable: Executable, watch: Callable[[Mapping[str, Any]], None]) -> None:
        vars(self).update(vars(executable))
        self._watch = watch

    def __call__(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        return self.trace(inputs, self._watch)


class _Linker:
    """Gives each value of a program an index, and lists its steps."""

    def __init__(self, program: Program, bindings: Bindings, *, is_thinned: bool) -> None:
        """is_thinned: make only the first of calls that are alike"""
        self.inputs = {node.name: at for at, node in enumerate(program.inputs)}
        self.indices: dict[Node, int] = {node: self.inputs[node.name] for node in program.inputs}
        self.start: list[Any] = [None] * len(self.inputs)  # values before the first step
        self.steps: list[_Step] = []
        self._bindings, self._is_thinned = bindings, is_thinned
        self._firsts: dict[Any, tuple[int, ...]] = {}  # indices of the results of the first of calls that are alike
        self._origins: dict[int, Any] = {at: name for name, at in self.inputs.items()}  # of values, by their indices

    def index_of(self, arg: Any) -> int:
        """The index of an argument: of a result or an input its own, of a constant a new one."""
        if isinstance(arg, Node):
            return self.indices[arg]
        if isinstance(arg, State):
            bindings = self._bindings
            arg = bindings.slots[arg] if arg.rule.in_slot else PagedCache(bindings.caches[arg], arg.kind)
        value = self._bindings.weights[arg] if isinstance(arg, Recipe) else arg
        self.start.append(value.view if isinstance(value, HostTensor) else value)
        return len(self.start) - 1

    def piece_index_of(self, arg: Any) -> int:
        """The same for compiled code, which knows the layout of its weights and takes their tensors."""
        at = self.index_of(arg)
        if isinstance(weight := self.start[at], LaidOut):
            self.start[at] = weight.tensor
        return at

    def add(self, call: Callable[..., Any], args: tuple[int, ...], results: Sequence[Node], *, is_single: bool) -> None:
        """Add a step, unless only the first of calls that are alike is made and this is another one."""
        if not self._is_thinned:
            self.steps.append(_Step(call, args, self._result_indices(results), is_single))
            return
        which = (call.func, repr(call.keywords)) if isinstance(call, functools.partial) else call
        origins = tuple(self._origins[at] if at in self._origins else describe(self.start[at]) for at in args)
        if (first := self._firsts.get((which, origins))) is not None:
            self.indices.update(zip(results, first, strict=True))
            return
        made = self._firsts[which, origins] = self._result_indices(results)
        self.steps.append(_Step(call, args, made, is_single))
        for place, (at, result) in enumerate(zip(made, results, strict=True)):
            self._origins[at] = which, place, str(result.meta["type"])

    def _result_indices(self, results: Sequence[Node]) -> tuple[int, ...]:
        for result in results:
            self.indices[result] = len(self.start)
            self.start.append(None)
        return tuple(self.indices[result] for result in results)


def describe(value: Any) -> Any:
    """All that a launch depends on of an argument that is no result: of a tensor, all but its content and place."""
    match value:
        case Tensor():
            return value.dtype, value.shape, value.stride(), value.data_ptr() % ALIGNMENT
        case PackedWeight():
            return value.type, value.layout, describe(value.parts)
        case LaidOut():
            return value.type, describe(value.tensor)
        case Mapping():
            return tuple((name, describe(each)) for name, each in value.items())
        case list() | tuple():
            return tuple(map(describe, value))
    return type(value), repr(value)


def _with_deaths(steps: Sequence[_Step], kept: Collection[int]) -> list[_Step]:
    """The steps, each with the values that it is the last to read."""
    last = {at: index for index, step in enumerate(steps) for at in step.results}
    last |= {at: index for index, step in enumerate(steps) for at in step.args if at in last}
    dead: dict[int, list[int]] = {}
    for at, index in last.items():
        if at not in kept:
            dead.setdefault(index, []).append(at)
    return [step._replace(dead=tuple(dead.get(index, ()))) for index, step in enumerate(steps)]

"""A lowered program made callable: each node's kernel, with the weights, caches and constants already in their places.

body = Executable(graph.programs["body"], weights, caches)
hidden = body({"tokens": …, "positions": …, …})
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from atom.graph import KV, Program, Recipe
from atom.graph.graph import results_of
from atom.graph.ops import Op
from atom.kernels import find_kernel


class _Step(NamedTuple):
    call: Callable[..., Any]
    args: tuple[int, ...]  # places of the arguments
    results: tuple[int, ...]  # places of the results
    is_single: bool
    dead: tuple[int, ...]  # places that nobody reads after this step


class Executable:
    """Runs a program's calls in order over a list of places: one for each input, constant and result."""

    def __init__(self, program: Program, weights: Mapping[Recipe, Any], caches: Mapping[KV, Tensor]) -> None:
        self.inputs = {node.name: place for place, node in enumerate(program.inputs)}
        self._start: list[Any] = [None] * len(self.inputs)
        place_of: dict[Node, int] = {node: self.inputs[node.name] for node in program.inputs}
        kernels: dict[tuple[Op, str], Callable[..., Any]] = {}  # one for all calls: they share its workspace

        def place(arg: Any) -> int:
            if isinstance(arg, Node):
                return place_of[arg]
            self._start.append(caches[arg] if isinstance(arg, KV) else weights[arg] if isinstance(arg, Recipe) else arg)
            return len(self._start) - 1

        last_use = _last_uses(program)
        self._steps: list[_Step] = []
        for node in program.nodes:
            assert isinstance(node.target, Op)
            key = node.target, node.meta.get("kernel", "reference")
            if key not in kernels:
                kernels[key] = find_kernel(*key).load()
            call = functools.partial(kernels[key], **node.kwargs) if node.kwargs else kernels[key]
            args = tuple(place(arg) for arg in node.args)
            results = results_of(node)
            for result in results:
                place_of[result] = len(self._start)
                self._start.append(None)
            dead = tuple(place_of[used] for used in last_use.get(node, ()))
            is_single = not isinstance(node.meta["type"], tuple)
            self._steps.append(_Step(call, args, tuple(place_of[result] for result in results), is_single, dead))
        self._results = tuple(place_of[node] for node in program.results)

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run it: the result, or a tuple where there are several."""
        places = self._start.copy()
        for name, place in self.inputs.items():
            places[place] = inputs[name]
        for call, args, results, is_single, dead in self._steps:
            result = call(*[places[arg] for arg in args])
            if is_single:
                places[results[0]] = result
            else:
                for place, part in zip(results, result, strict=True):
                    places[place] = part
            for place in dead:
                places[place] = None
        return places[self._results[0]] if len(self._results) == 1 else tuple(places[place] for place in self._results)


def _last_uses(program: Program) -> dict[Node, list[Node]]:
    """By call, the results that it is the last to read."""
    last: dict[Node, Node] = {}
    for node in program.nodes:
        for used in (*node.all_input_nodes, *results_of(node)):
            last[used] = node
    kept = {*program.results, *program.inputs}
    by_call: dict[Node, list[Node]] = {}
    for used, node in last.items():
        if used not in kept:
            by_call.setdefault(node, []).append(used)
    return by_call

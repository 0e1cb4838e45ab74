"""Cut a program into pieces, and write the text of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import Node

from atom.graph import Graph, Program, Recipe, Type, show
from atom.graph.graph import results_of

NAME = "piece"


class Piece(NamedTuple):
    """One use of a piece in a program."""

    calls: list[Node]
    text: str  # equal texts are compiled once
    inputs: list[Node]
    weights: list[Recipe]  # after the inputs
    results: list[Node]


def find_pieces(program: Program) -> list[Piece]:
    """Find the pieces that `split_pieces` marked, in order."""
    runs: dict[int, list[Node]] = {}
    for node in program.nodes:
        if "piece" in node.meta:
            runs.setdefault(node.meta["piece"], []).append(node)
    texts: dict[tuple[Any, ...], str] = {}  # by what they depend on, since most layers are equal
    return [_piece(program, calls, texts) for calls in runs.values()]


def _piece(program: Program, calls: list[Node], texts: dict[tuple[Any, ...], str]) -> Piece:
    made = {result for call in calls for result in results_of(call)}
    inputs = list(dict.fromkeys(node for call in calls for node in call.all_input_nodes if node not in made))
    weights = list(dict.fromkeys(arg for call in calls for arg in call.args if isinstance(arg, Recipe)))
    inside = set(calls) | made
    returned = set(program.results)
    results = [
        node
        for call in calls
        for node in results_of(call)
        if node in returned or any(user not in inside for user in node.users)
    ]
    described = _describe(calls, inputs, weights, results)
    if described not in texts:
        texts[described] = _text(calls, inputs, weights, results)
    return Piece(calls, texts[described], inputs, weights, results)


def _describe(calls: list[Node], inputs: list[Node], weights: list[Recipe], results: list[Node]) -> tuple[Any, ...]:
    """All that the text of these calls depends on, without the names of values and weights."""
    names: dict[Any, str] = {node: f"x{index}" for index, node in enumerate(inputs)}
    names |= {weight: f"w{index}" for index, weight in enumerate(weights)}
    types = tuple(repr(type) for type in (*(node.meta["type"] for node in inputs), *(each.type for each in weights)))
    described: list[Any] = [types]
    for number, call in enumerate(calls):
        args = tuple(names[arg] if isinstance(arg, Node | Recipe) else repr(arg) for arg in call.args)
        target: Any = call.target
        described.append((target.name, args, repr(call.kwargs), kernel_of(call)))
        names |= {node: f"r{number}_{place}" for place, node in enumerate(results_of(call))}
    return (*described, tuple(names[node] for node in results))


def _text(calls: list[Node], inputs: list[Node], weights: list[Recipe], results: list[Node]) -> str:
    """Show the calls as a graph of their own: inputs x0, x1 …, weights w0, w1 …, open dims A, B …"""
    graph = Graph()
    program = graph.program(NAME)
    symbols: dict[str, str] = {}

    def closed(type: Type) -> Type:
        shape = (symbols.setdefault(d, chr(ord("A") + len(symbols))) if isinstance(d, str) else d for d in type.shape)
        return replace(type, shape=tuple(shape))

    mapping: dict[Any, Node] = {}
    for index, node in enumerate(inputs):
        mapping[node] = program.input(f"x{index}", closed(node.meta["type"]))
    for index, weight in enumerate(weights):
        mapping[weight] = program.input(f"w{index}", closed(weight.type))
    for call in calls:
        args = [mapping.get(arg, arg) if isinstance(arg, Node | Recipe) else arg for arg in call.args]
        made = program.call(call.target, *args, **call.kwargs)
        for old, new in zip(results_of(call), made if isinstance(made, tuple) else (made,), strict=True):
            mapping[old] = new
        program.nodes[-1].meta["kernel"] = kernel_of(call)
    program.output(*(mapping[node] for node in results))
    return show(graph)


def kernel_of(call: Node) -> str:
    kernel: str = call.meta.get("kernel", "reference")
    return kernel

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
    weights: list[Recipe]  # behind the inputs
    results: list[Node]


def find_pieces(program: Program) -> list[Piece]:
    """Find the pieces that `split_pieces` marked, in order."""
    runs: dict[int, list[Node]] = {}
    for node in program.nodes:
        if "piece" in node.meta:
            runs.setdefault(node.meta["piece"], []).append(node)
    return [_piece(program, calls) for calls in runs.values()]


def _piece(program: Program, calls: list[Node]) -> Piece:
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
    return Piece(calls, _text(calls, inputs, weights, results), inputs, weights, results)


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
        program.nodes[-1].meta["kernel"] = call.meta.get("kernel", "reference")
    program.output(*(mapping[node] for node in results))
    return show(graph)

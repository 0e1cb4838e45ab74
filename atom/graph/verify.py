"""Verify a graph at its level; run after every pass, without torch.

verify(graph, ops.SEMANTIC)     # PassError names the program, the node and what is wrong
"""

from __future__ import annotations

from torch.fx import Node

from atom.errors import PassError
from atom.graph.graph import Graph, Program, call_of, infer_call, results_of
from atom.graph.ops import Op


def verify(graph: Graph, level: str) -> None:
    """Raise PassError unless every call is legal at the level, comes before its uses, and has its inferred type."""
    for program in graph.programs.values():
        seen: set[Node] = set(program.inputs)
        names: set[str] = {node.name for node in program.inputs}
        for node in program.fx.nodes:
            for needed in node.all_input_nodes:
                if needed not in seen:
                    raise _wrong(program, node, f"uses {needed.name} before it is set")
            seen.add(node)
            if isinstance(node.target, Op):
                _verify_call(program, node, node.target, level)
            elif node.op == "call_function" and node.target is not call_of(node).target and node.meta["type"] is None:
                raise _wrong(program, node, "has no type")
            if node.op == "call_function" and node.name in names:
                raise _wrong(program, node, "is set twice")
            names.add(node.name)


def _verify_call(program: Program, node: Node, op: Op, level: str) -> None:
    if op.level not in (None, level):
        raise _wrong(program, node, f"{op.name} is not legal in a {level} graph")
    if (given := node.kwargs.get("gives")) is not None:
        for reader in results_of(node)[0].users:
            if reader.target.name != "linear" or reader.kwargs.get("act") != given:
                raise _wrong(program, node, f"gives rows in {given}, and {reader.name} reads them")
    inferred = infer_call(op, node.args, node.kwargs)
    if inferred != node.meta["type"]:
        raise _wrong(program, node, f"is {inferred}, but was made as {node.meta['type']}")


def _wrong(program: Program, node: Node, reason: str) -> PassError:
    return PassError(f"{program.name}: {node.name} {reason}")

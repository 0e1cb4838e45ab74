"""Fuse a linear with the gated activation after it.

    gate_up = linear(h, W("gate_up"))   ->      m = gated_linear(h, W("gate_up"), kind="silu")
    m = gated_activate(gate_up, kind="silu")

Declines if no kernel computes both, if another op reads gate_up, if it has a bias, or the activation has a limit.
"""

from atom.graph import Graph, ops
from atom.graph.graph import type_of
from atom.passes.context import PassContext


def fuse_linear_gate(graph: Graph, context: PassContext) -> Graph:
    for gated in graph.find(ops.gated_activate):
        (linear,) = gated.args
        if linear.target is not ops.linear or len(linear.users) > 1 or len(linear.args) > 2:
            continue
        if set(gated.kwargs) != {"kind"}:
            continue
        attributes = {**linear.kwargs, **gated.kwargs}
        if context.takes(ops.gated_linear, *map(type_of, linear.args), **attributes):
            graph.replace({gated: graph.insert(gated, ops.gated_linear, *linear.args, **attributes)})
    return graph

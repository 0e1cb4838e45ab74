"""Fuse the gate and up projections of an mlp into one linear.

    gate = linear(h, W("gate"))         ->      gate_up = linear(h, cat([W("gate"), W("up")]))
    up = linear(h, W("up"))                     m = gated_activate(gate_up, kind="silu")
    active = activate(gate, kind="silu")
    m = mul(active, up)

Declines if gate and up do not read the same tensor, only one has a bias, or their stored formats differ.
"""

from atom.graph import Graph, ops
from atom.passes.match import cat_linears, have_same_form


def fuse_gate_up(graph: Graph) -> Graph:
    for mul in graph.find(ops.mul):
        active, up = mul.all_input_nodes if len(mul.all_input_nodes) == 2 else (mul, mul)
        if active.target is not ops.activate:
            continue
        linears = [active.all_input_nodes[0], up]
        if not have_same_form(linears):
            continue
        gate_up = graph.insert(mul, ops.linear, *cat_linears(linears), name="gate_up", **up.kwargs)
        graph.replace({mul: graph.insert(mul, ops.gated_activate, gate_up, **active.kwargs)})
    return graph

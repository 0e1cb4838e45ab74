"""Fuse the gate and up projections of an mlp into one linear.

    gate = linear(h, W("gate"))         ->      gate_up = linear(h, cat([W("gate"), W("up")]))
    up = linear(h, W("up"))                     m = gated_activate(gate_up, kind="silu")
    active = activate(gate, kind="silu")
    m = mul(active, up)

    gate_up = join(gate, up)
    m = gated_activate(gate_up, kind="silu", limit=7.0)    ->      m = gated_activate(gate_up, kind="silu", limit=7.0)

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
    for gated in graph.find(ops.gated_activate):
        (both,) = gated.args
        if both.target is not ops.join or len(both.args) != 2 or not have_same_form(both.args):
            continue
        gate_up = graph.insert(gated, ops.linear, *cat_linears(both.args), name="gate_up", **both.args[0].kwargs)
        graph.replace({both: gate_up})
    return graph

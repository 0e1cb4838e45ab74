"""Lower a mixture of experts to grouped linears.

    y = experts(h, weights, ids, gate_up, down, kind="silu")
        ->
    grouped, order, ends = group(h, ids, experts=8)
    gate_up = grouped_linear(grouped, gate_up, ends)
    m = gated_activate(gate_up, kind="silu")
    down = grouped_linear(m, down, ends)
    y = combine(down, weights, order)

`plain_experts` have up and activate in place of gate_up and gated_activate.

Between group and combine there are rows by expert and no tokens: that part can run where the experts are.
Declines if a kernel computes all of it. Activations stay in h's dtype if none takes them in the format `act`.
"""

from torch.fx import Node

from atom.graph import Graph, ops
from atom.graph.graph import type_of
from atom.passes.context import PassContext


def lower_moe(graph: Graph, context: PassContext) -> Graph:
    for experts in graph.find(ops.experts):
        if _is_taken(experts, context):
            continue
        h, weights, ids, gate_up, down, *biases = experts.args
        gate_up_bias, down_bias, *first = biases or (None, None)
        grouped, order, ends = graph.insert(
            experts, ops.group, h, ids, *first, experts=gate_up.type.shape[0], name=("grouped", "order", "ends")
        )
        both = graph.insert(experts, ops.grouped_linear, grouped, gate_up, ends, gate_up_bias, name="gate_up")
        m = graph.insert(experts, ops.gated_activate, both, name="m", **experts.kwargs)
        rows = graph.insert(experts, ops.grouped_linear, m, down, ends, down_bias, name="down")
        graph.replace({experts: graph.insert(experts, ops.combine, rows, weights, order, name="y")})
    for experts in graph.find(ops.plain_experts):
        h, weights, ids, up, down = experts.args
        grouped, order, ends = graph.insert(
            experts, ops.group, h, ids, experts=up.type.shape[0], name=("grouped", "order", "ends")
        )
        rows = graph.insert(experts, ops.grouped_linear, grouped, up, ends, name="up")
        m = graph.insert(experts, ops.activate, rows, name="m", **experts.kwargs)
        rows = graph.insert(experts, ops.grouped_linear, m, down, ends, name="down")
        graph.replace({experts: graph.insert(experts, ops.combine, rows, weights, order, name="y")})
    return graph


def _is_taken(experts: Node, context: PassContext) -> bool:
    """Whether a kernel takes the call, with its activations in the format `act` or, if not so, without."""
    types = [type_of(arg) for arg in experts.args]
    if "act" in experts.kwargs and not context.takes(ops.experts, *types, **experts.kwargs):
        refusals = context.refusals(ops.experts, *types, **experts.kwargs)
        experts.meta["refused"] = [f"act={experts.kwargs['act']}: {reason}" for reason in refusals]
        experts.kwargs = {key: value for key, value in experts.kwargs.items() if key != "act"}
    return context.takes(ops.experts, *types, **experts.kwargs)

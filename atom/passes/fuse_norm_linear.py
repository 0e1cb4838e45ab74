"""Fuse an RMS norm with the linear after it.

    h, s = add_rms_norm(x, r, w, eps=eps)       ->      y, s = add_norm_linear(x, r, w, W("y"), eps=eps)
    y = linear(h, W("y"))

    h = rms_norm(x, w, eps=eps)                 ->      m = norm_linear(x, w, W("gate_up"), eps=eps, kind="silu")
    m = gated_linear(h, W("gate_up"), kind="silu")

Declines if no kernel computes both, or if another op reads the norm.
"""

from atom.graph import Graph, ops
from atom.graph.graph import call_of, results_of, type_of
from atom.passes.context import PassContext


def fuse_norm_linear(graph: Graph, context: PassContext) -> Graph:
    for linear in graph.find(ops.linear) + graph.find(ops.gated_linear):
        normed, *weights = linear.args
        norm = call_of(normed)
        if norm.target not in (ops.rms_norm, ops.add_rms_norm) or len(normed.users) > 1:
            continue
        if normed is not results_of(norm)[0]:  # the linear reads the sum
            continue
        args, attributes = (*norm.args, *weights), {**norm.kwargs, **linear.kwargs}
        fused = ops.norm_linear if norm.target is ops.rms_norm else ops.add_norm_linear
        if not context.takes(fused, *map(type_of, args), **attributes):
            continue
        if fused is ops.norm_linear:
            graph.replace({linear: graph.insert(linear, fused, *args, **attributes)})
        else:
            _, total = results_of(norm)
            y, fused_total = graph.insert(norm, fused, *args, **attributes)
            graph.replace({linear: y, total: fused_total})
    return graph

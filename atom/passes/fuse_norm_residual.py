"""Fuse a residual sum with the RMS norm after it.

    s = add(x, residual)                ->      n, s = add_rms_norm(x, residual, w, eps=eps)
    n = rms_norm(s, w, eps=eps)

Declines when the norm's input is not a sum of two rows.
"""

from torch.fx import Node

from atom.graph import Graph, ops


def fuse_norm_residual(graph: Graph) -> Graph:
    for norm in graph.find(ops.rms_norm):
        total, weight = norm.args
        if total.target is not ops.add or not isinstance(total.args[1], Node):
            continue
        fused = graph.insert(total, ops.add_rms_norm, *total.args, weight, **norm.kwargs)
        graph.replace({norm: fused[0], total: fused[1]})
    return graph

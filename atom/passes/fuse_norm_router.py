"""Fuse an RMS norm of a sum with the router after it.

    h, s = add_rms_norm(x, r, w, eps=eps)           ->      weights, ids, h, s = add_norm_router(
    weights, ids = router(h, W("gate"), top_k=8)                x, r, w, W("gate"), eps=eps, top_k=8)

The experts read the norm, too. Declines if no kernel computes both, or if the sum is not normed.
"""

from atom.graph import Graph, ops
from atom.graph.graph import call_of, results_of, type_of
from atom.passes.context import PassContext


def fuse_norm_router(graph: Graph, context: PassContext) -> Graph:
    for router in graph.find(ops.router):
        normed, *rest = router.args
        norm = call_of(normed)
        if norm.target is not ops.add_rms_norm or normed is not results_of(norm)[0]:
            continue
        args, attributes = (*norm.args, *rest), {**norm.kwargs, **router.kwargs}
        if not context.takes(ops.add_norm_router, *map(type_of, args), **attributes):
            continue
        results = *results_of(router), *results_of(norm)
        fused = graph.insert(norm, ops.add_norm_router, *args, **attributes)
        graph.replace(dict(zip(results, fused, strict=True)))
    return graph

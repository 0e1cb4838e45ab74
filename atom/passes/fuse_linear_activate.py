"""Fuse a tower's linear with the activation after it.

    up = linear(h, W("up"), W("up.b"))      ->      a = linear_activate(h, W("up"), W("up.b"), kind="gelu_tanh")
    a = activate(up, kind="gelu_tanh")

Only in the program `vision`, whose steps have many rows: of few, kernels of linears are faster than the library's.
Declines if no kernel computes both, if another op reads up, or if the linear has no bias or quantized activations.
"""

from atom.graph import VISION, Graph, ops
from atom.graph.graph import type_of
from atom.passes.context import PassContext

NUM_ARGS = 3  # of a linear with a bias


def fuse_linear_activate(graph: Graph, context: PassContext) -> Graph:
    for active in graph.find(ops.activate):
        (linear,) = active.args
        if linear.target is not ops.linear or len(linear.users) > 1 or graph.program_of(active).name != VISION:
            continue
        if len(linear.args) != NUM_ARGS or linear.kwargs:
            continue
        if context.takes(ops.linear_activate, *map(type_of, linear.args), **active.kwargs):
            graph.replace({active: graph.insert(active, ops.linear_activate, *linear.args, **active.kwargs)})
    return graph

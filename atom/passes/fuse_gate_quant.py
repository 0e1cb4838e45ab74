"""Quantize the output of a gated activation for the linear that reads it.

    m = gated_linear(h, W("gate_up"), kind="silu", act="fp8")  ->  m = gated_linear(…, act="fp8", gives="fp8")
    y = linear(m, W("down"), act="fp8")                            y = linear(m, W("down"), act="fp8")

With many rows, 8 bits per element are written and read, instead of 16 that a separate kernel quantizes. (A norm ahead
of a linear needs no such pass, since both are one call.)

It runs after the choice of kernels: only kernels of one backend, with weights in one layout, pass such rows to each
other. Declines if another op reads the output.
"""

from torch.fx import Node

from atom.graph import Graph, ops
from atom.graph.formats import rounded_act_of
from atom.graph.graph import results_of, type_of
from atom.kernels import find_kernel
from atom.passes.context import PassContext


def fuse_gate_quant(graph: Graph, context: PassContext) -> Graph:
    for gated in graph.find(ops.gated_linear) + graph.find(ops.norm_linear) + graph.find(ops.add_norm_linear):
        readers = list(results_of(gated)[0].users)
        if gated.kwargs.get("kind") is None or "gives" in gated.kwargs or len(readers) != 1:
            continue
        (linear,) = readers
        act, backend = linear.kwargs.get("act"), gated.meta["kernel"]
        if linear.target is not ops.linear or act is None or linear.meta["kernel"] != backend:
            continue
        if _is_rounded(gated) != _is_rounded(linear):  # to fp8 first: such weights have no layout of their own
            continue
        attributes = {**gated.kwargs, "gives": act}
        if find_kernel(gated.target, backend).accepts(context.target, *map(type_of, gated.args), **attributes) is None:
            gated.kwargs = attributes
            graph.num_rewrites += 1
    return graph


def _is_rounded(node: Node) -> bool:
    fmt = type_of(node.args[node.target.weights[0]]).fmt
    return fmt is not None and rounded_act_of(fmt) == node.kwargs.get("act")

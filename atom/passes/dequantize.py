"""
    y = linear(h, W("y", …, fmt="mxfp4"))       ->      y = linear(h, dequantize(W("y", …, fmt="mxfp4")))

Declines where a kernel takes the packed weight, and where nothing can unpack it: then the text is refused when it is to
run. It comes behind the lowering, since kernels are of lowered ops.
"""

from atom.graph import Dequantize, Graph, Recipe
from atom.graph.graph import type_of
from atom.graph.parts import has_parts
from atom.passes.context import PassContext


def dequantize(graph: Graph, context: PassContext) -> Graph:
    for node in [node for program in graph.programs.values() for node in program.nodes]:
        for place in node.target.weights:
            weight = node.args[place]
            if not isinstance(weight, Recipe) or not has_parts(weight):
                continue
            if context.takes(node.target, *map(type_of, node.args), **node.kwargs):
                continue
            node.update_arg(place, Dequantize(weight))
            graph.num_rewrites += 1
    return graph

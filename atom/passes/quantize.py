"""Keep the packed weights that kernels take; others are unpacked while they load.

    q = linear(h, W("q", …, fmt="fp8[128, 128]"))   ->  q = linear(h, W("q", …, fmt="fp8[128, 128]"))
    y = router(h, W("gate", …, fmt="fp8"))              y = router(h, dequantize(W("gate", …, fmt="fp8")))

Where joined parts end within a block, as 192 rows do in blocks of 128, `regroup` repeats their scales for blocks of the
greatest common divisor; so q, k and v with a scale each get one for each row.

What has no parts is left alone: such a text is refused when it is to run. It comes behind the lowering, since kernels
are of lowered ops.
"""

from __future__ import annotations

from torch.fx import Node

from atom.graph import Dequantize, Graph, Recipe
from atom.graph.formats import FormatError
from atom.graph.graph import type_of
from atom.graph.parts import aligned, has_parts, parts_of
from atom.graph.recipes import packed_while_loading
from atom.passes.context import PassContext


def quantize(graph: Graph, context: PassContext) -> Graph:
    for node in [node for program in graph.programs.values() for node in program.nodes]:
        for place in node.target.weights:
            weight = node.args[place]
            if isinstance(weight, Recipe) and has_parts(weight):
                made = _as_kernels_take_it(node, place, weight, context)
                if made != weight:
                    node.update_arg(place, made)
                    graph.num_rewrites += 1
    return graph


def _as_kernels_take_it(node: Node, place: int, weight: Recipe, context: PassContext) -> Recipe:
    packed = aligned(weight)
    types = [packed.type if at == place else type_of(arg) for at, arg in enumerate(node.args)]
    if not context.takes(node.target, *types, **node.kwargs):
        node.meta["unpacked"] = context.refusals(node.target, *types, **node.kwargs)
        return Dequantize(weight)
    try:
        if not any(packed_while_loading(packed)):  # whose parts are made as they are wanted
            parts_of(packed)
    except FormatError:  # a slice cuts blocks, or each of the joined tensors has an order of its own
        return Dequantize(weight)
    return packed

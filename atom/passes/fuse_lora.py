"""Fuse adapters with their linear and the gated activation after it.

    y = linear(x, W("y"))               ->      y = linear(x, cat([W("y"), lora_stack("y.lora_A", …)]))
    y = lora(y, x, lora_stack("y.lora_A", …), b, adapters, …)
                                                y = expand_lora(y, b, adapters, …)
    m = gated_activate(y, kind="silu")  ->      m = expand_lora(y, b, adapters, …, kind="silu")

Declines if no kernel takes it, the weight is packed, or the activation has a limit.
"""

from dataclasses import replace

from atom.graph import Full, Graph, Recipe, ops
from atom.graph.graph import type_of
from atom.graph.recipe_ranges import cat
from atom.passes.context import PassContext


def fuse_lora(graph: Graph, context: PassContext) -> Graph:
    for node in graph.find(ops.lora):
        linear, x, a, b, adapters = node.args
        if linear.target is not ops.linear or len(linear.users) > 1:
            continue
        _, weight, *bias = linear.args
        if linear.kwargs or not isinstance(weight, Recipe) or weight.type.fmt is not None:
            continue
        attributes, last = dict(node.kwargs), node
        if [user.target for user in node.users] == [ops.gated_activate]:
            (gated,) = node.users
            if set(gated.kwargs) == {"kind"}:
                attributes, last = {**attributes, **gated.kwargs}, gated
        whole = cat((weight, a))
        types = type_of(linear).with_last(whole.type.shape[0]), type_of(b), type_of(adapters)
        if not context.takes(ops.expand_lora, *types, **attributes):
            continue
        num_more = int(a.type.shape[0])
        joins = [cat((each, Full(0, replace(each.type, shape=(num_more,))))) for each in bias]
        joined = graph.insert(linear, ops.linear, x, whole, *joins, name=linear.name)
        graph.replace({last: graph.insert(last, ops.expand_lora, joined, b, adapters, **attributes)})
    return graph

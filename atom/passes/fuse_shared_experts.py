"""Make the expert that all tokens share some more of the experts.

    weights, ids = router(h, W("g"), top_k=6)   ->      weights, ids = router(h, W("g"), top_k=6, shared=2)
    y = experts(h, …, stack(…, 0, 64), …)               z = experts(h, …, cat([stack(…, 0, 64), …]), …)
    m = gated_activate(linear(h, W("gate_up")))
    s = linear(m, W("down"))
    z = add(y, s)

A shared expert of twice an expert's width is two: each has half of the gates, of the ups and of the columns behind
them. So it is computed beside the others, in their launches, and nothing is added behind them.

Declines where no kernel computes experts in one call, among several ranks, where its width is no whole number of
theirs, where it has a gate of its own, and where one of the two has a bias or stored formats.
"""

from __future__ import annotations

from torch.fx import Node

from atom.graph import Graph, Recipe, Stack, ops
from atom.graph.graph import call_of, type_of
from atom.graph.mesh import ALONE
from atom.graph.recipe_ranges import cat, narrow
from atom.passes.context import PassContext


def fuse_shared_experts(graph: Graph, context: PassContext) -> Graph:
    for experts in graph.find(ops.experts) if context.mesh == ALONE else ():
        if len(experts.users) != 1 or not context.takes(ops.experts, *map(type_of, experts.args), **experts.kwargs):
            continue
        (total,) = experts.users
        recipes = _shared_weights(experts, total) if total.target is ops.add else None
        h, weights, _, gate_up, down = experts.args[:5]
        router = call_of(weights)
        if recipes is None or router.target is not ops.router or "shared" in router.kwargs:
            continue
        width, num = int(down.type.shape[2]), int(recipes[1].type.shape[1]) // int(down.type.shape[2])
        parts = [_part(*recipes, at * width, (at + 1) * width) for at in range(num)]
        gate_ups, downs = ([Stack(part[at], 0, 1) for part in parts] for at in range(2))
        routed = graph.insert(router, ops.router, *router.args, **router.kwargs, shared=num, name=("weights", "ids"))
        stacks = cat((gate_up, *gate_ups)), cat((down, *downs))
        fused = graph.insert(total, ops.experts, h, *routed, *stacks, **experts.kwargs, name="y")
        graph.replace({total: fused})
    return graph


def _shared_weights(experts: Node, total: Node) -> tuple[Recipe, Recipe] | None:
    """Gates and ups [2 S, H], and downs [H, S], of what is added to the sum of experts."""
    h, _, _, gate_up, down, *biases = experts.args
    if any(bias is not None for bias in biases) or gate_up.type.fmt is not None or down.type.fmt is not None:
        return None
    shared = next((each for each in total.args if each is not experts), None)
    if shared is None or not _is_plain(shared):
        return None
    gated = shared.args[0]
    if gated.target is not ops.gated_activate or gated.kwargs != experts.kwargs or len(gated.users) > 1:
        return None
    both = gated.args[0]
    if not _is_plain(both) or both.args[0] is not h:
        return None
    recipes = both.args[1], shared.args[1]
    is_whole = int(recipes[1].type.shape[1]) % int(down.type.shape[2]) == 0
    return recipes if is_whole and all(each.type.dtype == down.type.dtype for each in recipes) else None


def _is_plain(node: Node) -> bool:
    """Whether it is a linear without a bias, by a plain weight, that one other call reads."""
    is_linear = node.target is ops.linear and len(node.args) == 2 and len(node.users) == 1 and not node.kwargs
    return is_linear and isinstance(node.args[1], Recipe) and node.args[1].type.fmt is None


def _part(gate_up: Recipe, down: Recipe, start: int, stop: int) -> tuple[Recipe, Recipe]:
    """The weights of a range of a gated mlp's width."""
    width = int(down.type.shape[1])
    gates, ups = narrow(gate_up, start, stop), narrow(gate_up, width + start, width + stop)
    return cat((gates, ups)), narrow(down, start, stop, 1)

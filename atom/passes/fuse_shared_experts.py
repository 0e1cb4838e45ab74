"""Fuse the shared expert with the routed experts.

    weights, ids = router(h, W("g"), top_k=6)   ->      weights, ids = router(h, W("g"), top_k=6, shared=2)
    y = experts(h, …, stack(…, 0, 64), …)               z = experts(h, …, cat([stack(…, 0, 64), …]), …)
    m = gated_activate(linear(h, W("gate_up")))
    s = linear(m, W("down"))
    z = add(y, s)

A shared expert of twice an expert's width is two: each has half of the gate and up rows and of the down columns.
So it is computed with the others, in their launches, and nothing is added after them.

    share = activate(linear(h, W("share")), kind="sigmoid")
    z = add(y, mul(s, share))           ->      weights, ids = router(h, cat([W("g"), W("share")]), …, gated=True)

A gate of its own becomes a row of the router's weight, and its sigmoid the weight of these experts.

Packed weights are joined as they are stored, or before they are packed.

Of ranks that divide each expert, each has its part of the shared one too.

Declines if no kernel computes experts in one call, if ranks have whole experts, if its width is no whole number of
theirs, if one of the two has a bias, if they are stored in different formats or cannot be joined without
unpacking them, if a format of activations was asked for that the routed ones lack, and if only its own linears
have kernels for theirs: prompts would take longer by more than decodes gain. A gate must read what the router
reads, both must be plain and of one dtype, and a kernel must take them as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from atom.graph import Graph, Quantize, Recipe, Stack, ops
from atom.graph.formats import FormatError
from atom.graph.graph import call_of, type_of
from atom.graph.parts import aligned, has_parts, parts_of
from atom.graph.recipe_contents import packed_while_loading
from atom.graph.recipe_ranges import cat, narrow
from atom.passes.context import PassContext


def fuse_shared_experts(graph: Graph, context: PassContext) -> Graph:
    mesh = context.mesh
    for experts in graph.find(ops.experts) if mesh.experts == mesh.data == 1 else ():
        if len(experts.users) != 1 or not _is_taken(experts, context):
            continue
        (total,) = experts.users
        added = next((each for each in total.args if each is not experts), None) if total.target is ops.add else None
        if not isinstance(added, Node):  # or a vector that is added to each token's sum
            continue
        shared, gate = _without_gate(added)
        recipes = _shared_weights(experts, shared, context)
        h, weights, _, gate_up, down = experts.args[:5]
        router = call_of(weights)
        if recipes is None or router.target is not ops.router or "shared" in router.kwargs:
            continue
        stacks = _join(gate_up, down, *recipes)
        if stacks is None:
            continue
        args, rule = router.args, {**router.kwargs, "shared": int(stacks[0].type.shape[0] - gate_up.type.shape[0])}
        if gate is not None:
            if not _can_be_joined(router, gate):
                continue
            args, rule["gated"] = (args[0], cat((args[1], gate.args[1])), *args[2:]), True
            if not context.takes(ops.router, *map(type_of, args), **rule):
                continue
        routed = graph.insert(router, ops.router, *args, **rule, name=("weights", "ids"))
        fused = graph.insert(total, ops.experts, h, *routed, *stacks, **experts.kwargs, name="y")
        graph.replace({total: fused})
    return graph


def _is_taken(experts: Node, context: PassContext) -> bool:
    """Whether a kernel computes all experts, with activations in the format that was asked for."""
    kwargs = experts.kwargs if context.keeps_act else _without_act(experts)
    return context.takes(ops.experts, *map(type_of, experts.args), **kwargs)


def _has_acts(call: Node, context: PassContext) -> bool:
    """Whether a kernel takes the activations of a call in the format that it states."""
    return "act" in call.kwargs and context.takes(call.target, *map(type_of, call.args), **call.kwargs)


def _without_gate(added: Node) -> tuple[Node, Node | None]:
    """What a shared expert gives, and the linear whose sigmoid weights it, if there is one."""
    if added.target is not ops.mul or len(added.users) > 1:
        return added, None
    shared, share = added.args
    if not isinstance(share, Node) or share.kwargs != {"kind": "sigmoid"} or len(share.users) > 1:
        return added, None
    (gate,) = share.args
    return (shared, gate) if share.target is ops.activate and _is_plain_linear(gate) else (added, None)


def _can_be_joined(router: Node, gate: Node) -> bool:
    """Whether a gate's row can be one of the router's weight."""
    rows, row = router.args[1], gate.args[1]
    is_plain = isinstance(rows, Recipe) and rows.type.fmt is row.type.fmt is None
    return is_plain and rows.type.dtype == row.type.dtype and row.type.shape[0] == 1 and gate.args[0] is router.args[0]


def _shared_weights(experts: Node, shared: Node, context: PassContext) -> tuple[Recipe, Recipe] | None:
    """The gate and up projections [2 S, H], and the down projection [H, S], of what is added to the sum of experts."""
    h, _, _, gate_up, down, *biases = experts.args
    if any(bias is not None for bias in biases) or not _is_plain_linear(shared):
        return None
    gated = shared.args[0]
    if gated.target is not ops.gated_activate or gated.kwargs != _without_act(experts) or len(gated.users) > 1:
        return None
    both = gated.args[0]
    if not _is_plain_linear(both) or both.args[0] is not h:
        return None
    acts = {call.kwargs.get("act") for call in (experts, both, shared)}
    if (context.keeps_act and len(acts) > 1) or (_has_acts(both, context) and not _has_acts(experts, context)):
        return None
    recipes = both.args[1], shared.args[1]
    are_alike = all(map(_are_stored_alike, recipes, (gate_up, down)))
    is_whole = int(recipes[1].type.shape[1]) % int(down.type.shape[2]) == 0
    return recipes if are_alike and is_whole else None


def _is_plain_linear(node: Node) -> bool:
    """Whether it is a linear without a bias that one other call reads."""
    is_linear = node.target is ops.linear and len(node.args) == 2 and len(node.users) == 1
    return is_linear and isinstance(node.args[1], Recipe) and not node.kwargs.keys() - {"act"}


def _without_act(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.kwargs.items() if key != "act"}


def _are_stored_alike(one: Recipe, other: Recipe) -> bool:
    types_alike = (one.type.dtype, one.type.fmt) == (other.type.dtype, other.type.fmt)
    return types_alike and isinstance(one, Quantize) == isinstance(other, Quantize)


def _join(gate_up: Recipe, down: Recipe, shared_both: Recipe, shared_down: Recipe) -> tuple[Recipe, Recipe] | None:
    """The weights of the routed experts followed by those of the shared one; None if a kernel would have to
    take them unpacked."""
    width, shared_width = int(down.type.shape[2]), int(shared_down.type.shape[1])
    starts = range(0, shared_width, width)

    def gate_up_chunks(whole: Recipe, start: int) -> Recipe:
        gate, up = (narrow(whole, at, at + width) for at in (start, shared_width + start))
        return cat((gate, up))

    def down_of(whole: Recipe, start: int) -> Recipe:
        return narrow(whole, start, start + width, 1)

    try:
        joined = (
            cat((gate_up, *(_stack_one(shared_both, gate_up_chunks, start) for start in starts))),
            cat((down, *(_stack_one(shared_down, down_of, start) for start in starts))),
        )
        for recipe in joined:
            if has_parts(recipe) and not any(packed_while_loading(recipe)):
                parts_of(aligned(recipe))
    except FormatError:  # a part of the shared expert cuts blocks, or each tensor has a number or an order of its own
        return None
    return joined


def _stack_one(whole: Recipe, part: Callable[[Recipe, int], Recipe], start: int) -> Recipe:
    """A part of a weight as one expert's, which is packed after it was cut if it is packed while it loads."""
    if isinstance(whole, Quantize):
        return Quantize(Stack(part(whole.part, start), 0, 1), whole.fmt)
    return Stack(part(whole, start), 0, 1)

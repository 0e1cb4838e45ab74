"""Keep the packed weights and the formats of activations that kernels take.

    q = linear(h, W("q", …, fmt="fp8[128, 128]"))   ->  q = linear(h, W("q", …, fmt="fp8[128, 128]"))
    y = router(h, W("gate", …, fmt="fp8"))              y = router(h, dequantize(W("gate", …, fmt="fp8")))
    o = linear(a, W("o", …, fmt="fp8"), act="fp8")      o = linear(a, W("o", …, fmt="fp8"))

Other weights are unpacked while they load. Activations that no kernel multiplies in their format stay in x's dtype,
which is more exact, unless that format was asked for: then the call is left to the reference body. Experts whose
weights have no such kernel keep them so even then, and the text says why.

If joined parts end within a block, as 192 rows do in blocks of 128, `regroup` repeats their scales for blocks of the
greatest common divisor; so q, k and v with a scale each get one for each row.

A weight that several calls read, as a tied embedding, stays packed if kernels of all of them take it: no weight is
kept twice. What has no parts is skipped: such a text is refused when it is to run. It comes after the lowering,
since kernels are of lowered ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from atom.graph import Dequantize, Graph, Recipe, ops
from atom.graph.formats import FormatError, rounded_act_of
from atom.graph.graph import type_of
from atom.graph.parts import aligned, has_parts, parts_of
from atom.graph.recipe_contents import packed_to, packed_while_loading
from atom.graph.recipes import leaves
from atom.passes.context import PassContext


def quantize(graph: Graph, context: PassContext) -> Graph:
    readers: dict[Recipe, list[tuple[Node, int]]] = {}  # by weight: calls, and its place among their arguments
    for node in [node for program in graph.programs.values() for node in program.nodes]:
        for place in node.target.weights:
            weight = node.args[place]
            if "act" in node.kwargs and not context.keeps_act:
                graph.num_rewrites += _drop_act(node, _refusals(node, place, context))
            if context.keeps_act and (why := leaves_act(node)):
                node.meta.setdefault("refused", []).append(why)
            if isinstance(weight, Recipe) and has_parts(weight):
                readers.setdefault(weight, []).append((node, place))
    for weight, calls in readers.items():
        made = _as_kernels_take_it(weight, calls, context)
        for node, place in calls if made != weight else ():
            node.update_arg(place, made)
            graph.num_rewrites += 1
    return graph


def leaves_act(node: Node) -> str | None:
    """What the activations of packed experts stay in, in words; None if they have a format, and of other calls."""
    if node.target not in (ops.experts, ops.grouped_linear) or "act" in node.kwargs:
        return None
    weights = [node.args[place] for place in node.target.weights if isinstance(node.args[place], Recipe)]
    formats = {fmt for weight in weights for fmt in (*packed_to(weight), *(leaf.type.fmt for leaf in leaves(weight)))}
    packed = ", ".join(sorted(fmt for fmt in formats if fmt is not None))
    return f"activations of experts in {packed} stay in {type_of(node.args[0]).dtype}" if packed else None


def _drop_act(node: Node, refusals: Sequence[str] | None) -> bool:
    """Leave activations in x's dtype if all kernels refuse the call."""
    if refusals is None:
        return False
    node.meta["refused"] = [f"act={node.kwargs['act']}: {reason}" for reason in refusals]
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "act"}
    return True


def _as_kernels_take_it(weight: Recipe, calls: Sequence[tuple[Node, int]], context: PassContext) -> Recipe:
    packed = aligned(weight)
    answers = {node.target: _refusals(node, place, context) for node, place in calls}
    refusing = {op: reasons for op, reasons in answers.items() if reasons is not None}
    for node, _ in calls if refusing else ():
        others = [f"{op.name} reads it too, and takes it plain" for op in refusing if op is not node.target]
        node.meta.setdefault("refused", []).extend(refusing.get(node.target, others))
    try:
        if not any(packed_while_loading(packed)):  # whose parts are made as they are wanted
            parts_of(packed)
    except FormatError:  # a slice cuts blocks, or each of the joined tensors has an order of its own
        return Dequantize(weight)
    acts = {node.kwargs.get("act") for node, _ in calls} if context.keeps_act else set[str | None]()
    is_rounded = packed.type.fmt is not None and rounded_act_of(packed.type.fmt) in acts - {None}
    return Dequantize(weight) if refusing and not is_rounded else packed  # the reference, too, rounds what has 4 bits


def _refusals(node: Node, place: int, context: PassContext) -> list[str] | None:
    """Why no kernel but the reference takes a call with its weight as it is stored; None if one does."""
    weight = node.args[place]
    stored = aligned(weight).type if isinstance(weight, Recipe) and has_parts(weight) else type_of(weight)
    types = [stored if at == place else type_of(arg) for at, arg in enumerate(node.args)]
    return (
        None
        if context.takes(node.target, *types, **node.kwargs)
        else context.refusals(node.target, *types, **node.kwargs)
    )

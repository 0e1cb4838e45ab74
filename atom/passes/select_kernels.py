"""Select the first kernel that accepts each call.

    h = rms_norm(x, w, eps=eps)         ->      h = torch.rms_norm(x, w, eps=eps)
    y = linear(h, W("y"))                       y = torch.linear(h, shuffle(W("y"), "onednn"))

The backends are asked in their order; the reasons of those that refused are comments of the text. No weight is kept
twice: if ops of two kinds read one, as a tied embedding's, it is in a layout that kernels of both take, or as
stored. An embedding's that nothing else reads is as stored.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from atom.errors import UnsupportedError
from atom.graph import Graph, Recipe, Shuffle, Type, ops
from atom.graph.graph import node_leaves, type_of
from atom.kernels import Kernel
from atom.passes.context import PassContext


def select_kernels(graph: Graph, context: PassContext) -> Graph:
    readers = _readers(graph)
    refused: dict[str, list[str]] = {}  # of ops that no kernel takes
    for program in graph.programs.values():
        for node in program.nodes:
            node.meta["notes"] = [*node.meta.get("refused", [])]  # why its weight or its activations are plain
            for kernel in context.candidates(node.target):
                if kernel.is_for_packed and all(type.fmt is None for type in _weight_types(node)):
                    continue
                reason = _refusal(kernel, context, node, readers)
                if reason is None:
                    _choose(kernel, node)
                    graph.num_rewrites += kernel.backend != "reference"
                    break
                node.meta["notes"].append(f"{kernel.backend}: {reason}")
            else:
                refused.setdefault(node.target.name, node.meta["notes"])
    if context.batch_invariant and refused:
        raise UnsupportedError(_explain_variant(refused, context))
    return graph


def _explain_variant(refused: Mapping[str, Sequence[str]], context: PassContext) -> str:
    """Which ops have no kernel whose bits are the same in any batch, and why those that there are refuse."""
    listed = (f"{op} ({'; '.join(dict.fromkeys(why))})" if why else op for op, why in sorted(refused.items()))
    return (
        f"batch_invariant=true: on {context.target.device} no kernel gives the same bits in any batch for: "
        f"{', '.join(listed)}; leave batch_invariant out"
    )


def _refusal(kernel: Kernel, context: PassContext, node: Node, readers: Mapping[Any, Sequence[Node]]) -> str | None:
    layout = _layout(kernel, node)
    for weight in (node.args[place] for place in node.target.weights):
        if not isinstance(weight, Recipe):
            if layout is not None:
                return "its weight is computed"
            continue
        others = {each.target.name for each in readers[weight]} - {node.target.name}
        if others and layout not in _shared_layouts(readers[weight], context):
            return f"its weight is read by {', '.join(sorted(others))} too"
        if layout is not None and not others and weight.type.fmt is None and node.target is ops.embedding:
            return "no matmul reads its weight"
    return _answer(kernel, context, node)


def _shared_layouts(nodes: Sequence[Node], context: PassContext) -> set[str | None]:
    """The layouts of a weight in which kernels of all these calls take it; None, as stored, if there is no other."""
    return set.intersection(*(set(_layouts(node, context)) for node in nodes)) or {None}


def _layouts(node: Node, context: PassContext) -> Iterator[str | None]:
    for kernel in context.candidates(node.target):
        if (layout := _layout(kernel, node)) is not None and _answer(kernel, context, node) is None:
            yield layout


def _answer(kernel: Kernel, context: PassContext, node: Node) -> str | None:
    return kernel.accepts(context.target, *(type_of(arg) for arg in node.args), **node.kwargs)


def _choose(kernel: Kernel, node: Node) -> None:
    node.meta["kernel"] = kernel.backend
    if (layout := _layout(kernel, node)) is not None:
        for place in kernel.op.weights:
            node.update_arg(place, Shuffle(node.args[place], layout))


def _layout(kernel: Kernel, node: Node) -> str | None:
    """The layout that a kernel wants of a call's weights."""
    return kernel.layout_of(*_weight_types(node)) if kernel.has_layouts else None


def _weight_types(node: Node) -> Iterator[Type]:
    return (type_of(node.args[place]) for place in node.target.weights)


def _readers(graph: Graph) -> dict[Any, list[Node]]:
    """The calls that read each recipe."""
    readers: dict[Any, list[Node]] = defaultdict(list)
    for program in graph.programs.values():
        for node in program.nodes:
            for leaf in node_leaves(node):
                readers[leaf].append(node)
    return readers

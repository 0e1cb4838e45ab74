"""Select the first kernel that accepts each call.

    h = rms_norm(x, w, eps=eps)         ->      h = torch.rms_norm(x, w, eps=eps)
    y = linear(h, W("y"))                       y = torch.linear(h, shuffle(W("y"), "onednn"))

The backends are asked in their order; the reasons of those that refused are comments of the text. A kernel that wants
its weight in a layout of its own is skipped where another op reads the weight too: no weight is kept twice.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from atom.graph import Graph, Recipe, Shuffle
from atom.graph.graph import node_leaves, type_of
from atom.graph.ops import Op
from atom.kernels import Kernel, Target, candidates
from atom.passes.context import PassContext


def select_kernels(graph: Graph, context: PassContext) -> Graph:
    readers = _readers(graph)
    for program in graph.programs.values():
        for node in program.nodes:
            node.meta["notes"] = node.meta.pop("unpacked", [])  # why its weight is not packed any more
            for kernel in candidates(node.target, context.backends):
                reason = _refusal(kernel, context.target, node, readers)
                if reason is None:
                    _choose(kernel, node)
                    graph.num_rewrites += kernel.backend != "reference"
                    break
                node.meta["notes"].append(f"{kernel.backend}: {reason}")
    return graph


def _refusal(kernel: Kernel, target: Target, node: Node, readers: Mapping[Any, set[Op]]) -> str | None:
    if _layout(kernel, node) is not None:
        weight = node.args[kernel.op.weight]
        if not isinstance(weight, Recipe):
            return "its weight is computed"
        others = readers[weight] - {kernel.op}
        if others:
            return f"its weight is read by {', '.join(sorted(other.name for other in others))} too"
    return kernel.accepts(target, *(type_of(arg) for arg in node.args), **node.kwargs)


def _choose(kernel: Kernel, node: Node) -> None:
    node.meta["kernel"] = kernel.backend
    if (layout := _layout(kernel, node)) is not None:
        node.update_arg(kernel.op.weight, Shuffle(node.args[kernel.op.weight], layout))


def _layout(kernel: Kernel, node: Node) -> str | None:
    """The layout that a kernel wants of a call's weight."""
    return kernel.layout and kernel.layout_of(type_of(node.args[kernel.op.weight]))


def _readers(graph: Graph) -> dict[Any, set[Op]]:
    """The ops that read each recipe."""
    readers: dict[Any, set[Op]] = defaultdict(set)
    for program in graph.programs.values():
        for node in program.nodes:
            for leaf in node_leaves(node):
                readers[leaf].add(node.target)
    return readers

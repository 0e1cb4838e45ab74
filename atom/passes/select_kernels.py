"""
    h = rms_norm(x, w, eps=eps)         ->      h = torch.rms_norm(x, w, eps=eps)    # bf16[T, 576]; triton: no GPU

The first backend in the order whose kernel accepts the call; the reasons of those before it are noted in the text.
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from atom.graph import KV, Graph
from atom.kernels import Target, candidates


def select_kernels(graph: Graph, target: Target, backends: Sequence[str]) -> Graph:
    for program in graph.programs.values():
        for node in program.nodes:
            types = [_type_of(arg) for arg in node.args]
            node.meta["notes"] = []
            for kernel in candidates(node.target, backends):
                reason = kernel.accepts(target, *types, **node.kwargs)
                if reason is None:
                    node.meta["kernel"] = kernel.backend
                    graph.num_rewrites += kernel.backend != "reference"
                    break
                node.meta["notes"].append(f"{kernel.backend}: {reason}")
    return graph


def _type_of(arg: Any) -> Any:
    if isinstance(arg, Node):
        return arg.meta["type"]
    return arg if arg is None or isinstance(arg, KV) else arg.type

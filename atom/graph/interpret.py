"""Interpret a graph of any level on the reference bodies.

hidden = interpret(graph, "body", {"tokens": …, "positions": …}, weights=loaded.__getitem__)
logits = interpret(graph, "head", {"hidden": hidden}, weights=loaded.__getitem__)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from atom.dtypes import DTYPES, GRAPH_DTYPES
from atom.graph.batch import PagedCache
from atom.graph.graph import Graph
from atom.graph.recipes import KV, Recipe

TORCH_DTYPES: dict[str, torch.dtype] = {dtype: getattr(torch, DTYPES[dtype].name) for dtype in GRAPH_DTYPES}


def interpret(
    graph: Graph,
    program: str,
    inputs: Mapping[str, Any],
    weights: Callable[[Recipe], torch.Tensor],
    caches: Callable[[KV], torch.Tensor | None] = lambda _: None,
) -> Any:
    """Run one program: its result, or a tuple where it has several."""
    values: dict[Node, Any] = {}

    def value(arg: Any) -> Any:
        if isinstance(arg, Node):
            return values[arg]
        if isinstance(arg, KV):
            blocks = caches(arg)
            return None if blocks is None else PagedCache(blocks, arg.kind)
        return weights(arg) if isinstance(arg, Recipe) else arg

    for node in graph.programs[program].fx.nodes:
        args = map_aggregate(node.args, value)
        if node.op == "placeholder":
            values[node] = inputs[node.name]
        elif node.target is operator.getitem:
            values[node] = args[0][node.args[1]]
        elif node.op == "output":
            results = args[0]
            return results[0] if len(results) == 1 else results
        else:
            values[node] = node.target(*args, **node.kwargs)
    raise AssertionError(f"{program} has no output")

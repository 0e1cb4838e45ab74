"""Interpret a graph of any level on the reference bodies.

hidden = interpret(graph, "body", {"tokens": …, "positions": …}, weights=loaded.__getitem__)
logits = interpret(graph, "head", {"hidden": hidden}, weights=loaded.__getitem__)
hidden = interpret_ranks(graph, "body", [inputs] * 2, [first.__getitem__, second.__getitem__], Mesh(2))
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from atom.dtypes import DTYPES, GRAPH_DTYPES
from atom.graph.batch import PagedCache
from atom.graph.graph import Graph
from atom.graph.mesh import ALONE, Mesh
from atom.graph.recipes import KV, Recipe

TORCH_DTYPES: dict[str, torch.dtype] = {dtype: getattr(torch, DTYPES[dtype].name) for dtype in GRAPH_DTYPES}


Weights = Callable[[Recipe], torch.Tensor]
Caches = Callable[[KV], torch.Tensor | None]


def interpret(
    graph: Graph, program: str, inputs: Mapping[str, Any], weights: Weights, caches: Caches = lambda _: None
) -> Any:
    """Run one program: its result, or a tuple where it has several."""
    return interpret_ranks(graph, program, [inputs], [weights], caches=[caches])[0]


def interpret_ranks(
    graph: Graph,
    program: str,
    inputs: Sequence[Mapping[str, Any]],
    weights: Sequence[Weights],
    mesh: Mesh = ALONE,
    caches: Sequence[Caches] | None = None,
) -> list[Any]:
    """Run one program on the ranks of a mesh, call by call; the result of each."""
    values: list[dict[Node, Any]] = [{} for _ in inputs]
    blocks_of = caches or [lambda _: None for _ in inputs]

    def value(arg: Any, rank: int) -> Any:
        if isinstance(arg, Node):
            return values[rank][arg]
        if isinstance(arg, KV):
            blocks = blocks_of[rank](arg)
            return None if blocks is None else PagedCache(blocks, arg.kind)
        return weights[rank](arg) if isinstance(arg, Recipe) else arg

    for node in graph.programs[program].fx.nodes:
        args = [map_aggregate(node.args, functools.partial(value, rank=rank)) for rank in range(len(inputs))]
        if node.op == "output":
            return [results[0] if len(results) == 1 else results for (results,) in args]
        for rank, own in enumerate(args):
            if node.op == "placeholder":
                result = inputs[rank][node.name]
            elif node.target is operator.getitem:
                result = own[0][node.args[1]]
            elif node.target.is_collective:
                peers = mesh.peers(rank, node.kwargs["axis"])
                met = zip(*(args[peer] for peer in peers), strict=True)
                result = node.target(*met, **node.kwargs)[peers.index(rank)]
            else:
                result = node.target(*own, **node.kwargs)
            values[rank][node] = result
    raise AssertionError(f"{program} has no output")

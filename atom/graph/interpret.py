"""Interpret a graph of any level on the reference bodies.

hidden = interpret(graph, "body", {"tokens": …, "positions": …}, weights=loaded.__getitem__)
logits = interpret(graph, "head", {"hidden": hidden}, weights=loaded.__getitem__)
hidden = interpret_ranks([graph], "body", [inputs] * 2, [first.__getitem__, second.__getitem__], Mesh(2))
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from atom.dtypes import DTYPES, GRAPH_DTYPES
from atom.graph import ops
from atom.graph.batch import PagedCache
from atom.graph.graph import Graph, Program
from atom.graph.mesh import SINGLE, Mesh
from atom.graph.recipes import Recipe, State
from atom.graph.types import Type

TORCH_DTYPES: dict[str, torch.dtype] = {dtype: getattr(torch, DTYPES[dtype].name) for dtype in GRAPH_DTYPES}


Weights = Callable[[Recipe], torch.Tensor]
Caches = Callable[[State], torch.Tensor | None]
Watch = Callable[[Node, Sequence[Any]], Any]  # gets each call but collectives before it is run, with its arguments
Mail = dict[tuple[int, int], deque[torch.Tensor]]  # what was sent and not received yet, by sender and receiver


def zeros_of(type: Type) -> torch.Tensor:
    return torch.zeros(*map(int, type.shape), dtype=TORCH_DTYPES[type.dtype])


def interpret(
    graph: Graph,
    program: str,
    inputs: Mapping[str, Any],
    weights: Weights,
    caches: Caches = lambda _: None,
    watch: Watch = lambda *_: None,
) -> Any:
    """Run one program: its result, or a tuple if it has several."""
    return interpret_ranks([graph], program, [inputs], [weights], caches=[caches], watch=watch)[0]


def interpret_ranks(
    graphs: Sequence[Graph],
    program: str,
    inputs: Sequence[Mapping[str, Any]],
    weights: Sequence[Weights],
    mesh: Mesh = SINGLE,
    caches: Sequence[Caches] | None = None,
    watch: Watch = lambda *_: None,
) -> list[Any]:
    """Run one program on the ranks of a mesh, call by call; the result of each.

    graphs: of each stage. A stage that receives what was not sent yet waits while others run. Values are dropped after
    their last reader.
    """
    mail: Mail = defaultdict(deque)
    blocks_of = caches or [lambda _: None for _ in inputs]
    results: dict[int, list[Any]] = {}
    waiting = {
        stage: _run(
            graph.programs[program], stage * mesh.ranks_per_stage, inputs, weights, mesh, blocks_of, mail, watch
        )
        for stage, graph in enumerate(graphs)
    }
    while waiting:
        before = {pair: len(sent) for pair, sent in mail.items()}
        ended = len(results)
        for stage, run in list(waiting.items()):
            try:
                next(run)
            except StopIteration as end:
                results[stage] = end.value
                del waiting[stage]
        is_stuck = ended == len(results) and before == {pair: len(sent) for pair, sent in mail.items()}
        assert not is_stuck, f"stages {[*waiting]} of {program} wait for what nobody sends"
    return [result for stage in range(len(graphs)) for result in results[stage]]


def _run(
    program: Program,
    first: int,
    inputs: Sequence[Mapping[str, Any]],
    weights: Sequence[Weights],
    mesh: Mesh,
    blocks_of: Sequence[Caches],
    mail: Mail,
    watch: Watch,
) -> Generator[None, None, list[Any]]:
    """Run the program of a stage on its ranks, of which this is the first; yields if there is nothing to receive."""
    ranks = range(first, first + mesh.ranks_per_stage)
    values: dict[int, dict[Node, Any]] = {rank: {} for rank in ranks}
    last_reader = {read: node for node in program.fx.nodes for read in node.all_input_nodes}

    for node in program.fx.nodes:
        args = {rank: _evaluate(node.args, values[rank], weights[rank], blocks_of[rank]) for rank in ranks}
        if node.op == "output":
            return [results[0] if len(results) == 1 else results for (results,) in args.values()]
        for rank, own in args.items():
            if node.op == "placeholder":
                result = inputs[rank][node.name]
            elif node.target is operator.getitem:
                result = own[0][node.args[1]]
            elif node.target is ops.send:
                mail[rank, mesh.peers(rank, ops.STAGES)[node.kwargs["to"]]].append(own[0])
                result = ops.send(*own, **node.kwargs)
            elif node.target is ops.receive:
                pair = mesh.peers(rank, ops.STAGES)[node.kwargs["source"]], rank
                while not mail[pair]:
                    yield
                result = ops.receive(mail[pair].popleft(), **node.kwargs)
            elif node.target.is_collective:
                peers = mesh.peers(rank, node.kwargs["axis"])
                met = zip(*(args[peer] for peer in peers), strict=True)
                result = node.target(*met, **node.kwargs)[peers.index(rank)]
            else:
                watch(node, own)
                result = node.target(*own, **node.kwargs)
            values[rank][node] = result
        for read in node.all_input_nodes:
            if last_reader[read] is node:
                for rank in ranks:
                    del values[rank][read]
    raise AssertionError(f"{program.name} has no output")


def run_calls(calls: Iterable[Node], values: dict[Node, Any], weights: Weights, device: str = "cpu") -> None:
    """Run calls of a program on one rank and with empty caches, from the values of the calls before them.

    Their results are added to the values, which are dropped after their last reader in the program.
    """

    def empty(state: State) -> torch.Tensor | None:
        return zeros_of(state.type).to(device) if state.rule.in_slot else None

    for node in calls:
        args = _evaluate(node.args, values, weights, empty)
        is_item = node.target is operator.getitem
        values[node] = args[0][args[1]] if is_item else node.target(*args, **node.kwargs)
        for read in node.all_input_nodes:
            if not any(node < user for user in read.users):
                del values[read]


def _evaluate(args: Any, values: Mapping[Node, Any], weights: Weights, blocks: Caches) -> Any:
    """The arguments of a call, with values and tensors for nodes, states and recipes."""

    def value(arg: Any) -> Any:
        if isinstance(arg, Node):
            return values[arg]
        if isinstance(arg, State):
            kept = blocks(arg)
            if arg.rule.in_slot:
                return zeros_of(arg.type) if kept is None else kept
            return None if kept is None else PagedCache(kept, arg.kind)
        return weights(arg) if isinstance(arg, Recipe) else arg

    return map_aggregate(args, value)

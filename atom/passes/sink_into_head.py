"""Move what follows the last attention from the body to the head.

    def body(tokens, positions):                        def body(tokens, positions):
        a = attention(q, k, v, KV("1"), …)                  a = attention(q, k, v, KV("1"), …)
        o = linear(a, W("o"))                               return x, a
        x = add(x, o)                           ->
        return x                                        def head(x: bf16[R, …], a: bf16[R, …]):
                                                            o = linear(a, W("o"))
    def head(hidden: bf16[R, …]):                           x = add(x, o)
        logits = linear(hidden, W("lm_head"))               logits = linear(x, W("lm_head"))

Nothing behind the last attention depends on other tokens, so only the rows of a prompt that get logits go through it.
Declines where there is no attention, where a draft reads the hidden state of each token, where the head does not take
what the body returns, or where a value that it would then take does not have a row for each token.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from atom.graph import BODY, DRAFT_IN, HEAD, KV, Graph, Program
from atom.graph.graph import call_of, node_leaves, results_of


def sink_into_head(graph: Graph) -> Graph:
    if DRAFT_IN in graph.programs or not graph.programs.keys() >= {BODY, HEAD}:
        return graph
    body, head = graph.programs[BODY], graph.programs[HEAD]
    kept = _ahead_of_attention(body)
    sunk = [call for call in body.nodes if call not in kept]
    returned, taken = ([node.meta["type"].row for node in nodes] for nodes in (body.results, head.inputs))
    if not kept or not sunk or returned != taken:
        return graph
    read = {node for call in sunk for node in call.all_input_nodes} | set(body.results)
    crossing = [node for node in body.fx.nodes if node in read and call_of(node) not in sunk]
    tokens, rows = (program.inputs[0].meta["type"].shape[:1] for program in (body, head))
    if any(node.meta["type"].shape[:1] != tokens for node in crossing):
        return graph

    made = Program(head.name)
    copies: dict[Node, Node] = {}
    for node in crossing:
        type = node.meta["type"]
        copies[node] = made.input(node.name, replace(type, shape=(*rows, *type.shape[1:])))
    _copy(sunk, made, copies)
    copies |= zip(head.inputs, (copies[result] for result in body.results), strict=True)
    _copy(head.nodes, made, copies)
    made.output(*(copies[result] for result in head.results))
    graph.programs[head.name] = made

    body.fx.output_node().args = (tuple(crossing),)
    for call in reversed(sunk):
        for node in dict.fromkeys((*results_of(call), call)):
            body.fx.erase_node(node)
    graph.num_rewrites += 1
    return graph


def _copy(calls: list[Node], program: Program, copies: dict[Node, Node]) -> None:
    """Copy calls into a program. `copies` maps old nodes to new ones; the new results are added to it."""
    for call in calls:
        names = tuple(result.name for result in results_of(call))
        args = [copies[arg] if isinstance(arg, Node) else arg for arg in call.args]
        results = program.call(call.target, *args, name=names, **call.kwargs)
        copies |= zip(results_of(call), results if isinstance(results, tuple) else (results,), strict=True)


def _ahead_of_attention(program: Program) -> set[Node]:
    """The calls with a cache, and all calls and inputs that they depend on."""
    found = {call for call in program.nodes if any(isinstance(leaf, KV) for leaf in node_leaves(call))}
    waiting = list(found)
    while waiting:
        new = {call_of(node) for node in waiting.pop().all_input_nodes} - found
        found |= new
        waiting += new
    return found

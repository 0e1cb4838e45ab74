"""
    def body(tokens, positions):                        def body(tokens, positions):
        a = attention(q, k, v, KV("1"), …)                  a = attention(q, k, v, KV("1"), …)
        o = linear(a, W("o"))                               return x, a
        x = add(x, o)                           ->
        return x                                        def head(x: bf16[R, …], a: bf16[R, …]):
                                                            o = linear(a, W("o"))
    def head(hidden: bf16[R, …]):                           x = add(x, o)
        logits = linear(hidden, W("lm_head"))               logits = linear(x, W("lm_head"))

No other token reads what is behind the last attention, so of a prompt only the rows that get logits go through it.
Declines where there is no attention, or where something that the head would then take is not of each token.
"""

from __future__ import annotations

from torch.fx import Node

from atom.graph import KV, Graph, Program, Type
from atom.graph.graph import call_of, node_leaves, results_of


def sink_into_head(graph: Graph) -> Graph:
    if not graph.programs.keys() >= {"body", "head"}:
        return graph
    body, head = graph.programs["body"], graph.programs["head"]
    kept = _ahead_of_attention(body)
    sunk = [call for call in body.nodes if call not in kept]
    if not kept or not sunk or len(head.inputs) != len(body.results):
        return graph
    read = {node for call in sunk for node in call.all_input_nodes} | set(body.results)
    crossing = [node for node in body.fx.nodes if node in read and call_of(node) not in sunk]
    tokens, rows = (program.inputs[0].meta["type"].shape[:1] for program in (body, head))
    if any(node.meta["type"].shape[:1] != tokens for node in crossing):
        return graph

    given = dict(zip(head.inputs, body.results, strict=True))
    first = next(node for node in head.fx.nodes if node.op != "placeholder")
    moved: dict[Node, Node] = {}
    for node in crossing:
        type = node.meta["type"]
        moved[node] = head.input(node.name, Type(type.dtype, (*rows, *type.shape[1:])))
    for call in sunk:
        names = tuple(result.name for result in results_of(call))
        args = [moved[arg] if isinstance(arg, Node) else arg for arg in call.args]
        made = graph.insert(first, call.target, *args, name=names, **call.kwargs)
        moved |= zip(results_of(call), made if isinstance(made, tuple) else (made,), strict=True)
    for hidden, result in given.items():
        hidden.replace_all_uses_with(moved[result])
        head.fx.erase_node(hidden)
    body.fx.output_node().args = (tuple(crossing),)
    for call in reversed(sunk):
        for node in dict.fromkeys((*results_of(call), call)):
            body.fx.erase_node(node)
    graph.num_rewrites += 1
    return graph


def _ahead_of_attention(program: Program) -> set[Node]:
    """The inputs and the calls that a call with a cache needs, and these calls."""
    found = {call for call in program.nodes if any(isinstance(leaf, KV) for leaf in node_leaves(call))}
    waiting = list(found)
    while waiting:
        new = {call_of(node) for node in waiting.pop().all_input_nodes} - found
        found |= new
        waiting += new
    return found

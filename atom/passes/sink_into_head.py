"""Move what follows the last attention from the body to the head.

    def body(tokens, positions):                        def body(tokens, positions):
        a = attention(q, k, v, KV("1"), …)                  a = attention(q, k, v, KV("1"), …)
        o = linear(a, W("o"))                               return x, a
        x = add(x, o)                           ->
        return x                                        def head(x: bf16[R, …], a: bf16[R, …]):
                                                            o = linear(a, W("o"))
    def head(hidden: bf16[R, …]):                           x = add(x, o)
        logits = linear(hidden, W("lm_head"))               logits = linear(x, W("lm_head"))

Nothing after the last attention depends on other tokens, so only the rows of a prompt that get logits go through it.
What makes embeddings takes rows of the same results, and gets a copy of these calls. What a tap or a draft reads of
each token stays a result of the body. What drafts is a body and a head, too; a hidden state that a further draft begins
with is then a result of its head, after the tokens.
Declines if there is no attention, if a draft reads what the head takes or another stage receives it, if the
head does not take what the body returns, or if a value that it would then take does not have a row for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from atom.graph import BODY, DRAFT, DRAFT_HEAD, DRAFT_IN, HEAD, POOL, Graph, Program, State, ops
from atom.graph.graph import NOISE, call_of, copy_calls, node_leaves, results_of


def sink_into_head(graph: Graph) -> Graph:
    num_states = len(graph.programs[DRAFT_IN].inputs) if DRAFT_IN in graph.programs else 0
    for body, head, num_read in ((BODY, HEAD, num_states), (DRAFT, DRAFT_HEAD, 0)):
        if graph.programs.keys() >= {body, head}:
            heads = (HEAD, POOL) if head == HEAD else (head,)
            _sink(graph, graph.programs[body], [graph.programs[n] for n in heads if n in graph.programs], num_read)
    return graph


def _sink(graph: Graph, body: Program, heads: list[Program], num_read: int) -> None:
    """Move the end of a body into its heads.

    heads: all of the same results of the body.
    num_read: the last results of the body, which a draft reads, and may be the first ones.
    """
    is_carried = body.name == DRAFT and graph.carries_hidden and len(heads[0].results) == 1
    head = heads[0]
    rows_taken = [node for node in head.inputs if node.name not in NOISE]
    num_taken = len(rows_taken)
    num_read = max(num_read, len(body.results) - num_taken)
    results, states = body.results[:num_taken], body.results[len(body.results) - num_read :]
    kept = _ahead_of_attention(body, states)
    sunk = [call for call in body.nodes if call not in kept]
    returned, taken = ([node.meta["type"].row for node in nodes] for nodes in (results, rows_taken))
    if not kept or not sunk or returned != taken or any(call.target is ops.send for call in sunk):
        return
    read = {node for call in sunk for node in call.all_input_nodes} | set(results)
    crossing = [node for node in body.fx.nodes if node in read and call_of(node) not in sunk]
    tokens, rows = (program.inputs[0].meta["type"].shape[:1] for program in (body, head))
    if any(node.meta["type"].shape[:1] != tokens for node in crossing):
        return

    for head in heads:
        made = Program(head.name)
        copies: dict[Node, Node] = {}
        for node in crossing:
            type = node.meta["type"]
            copies[node] = made.input(node.name, replace(type, shape=(*rows, *type.shape[1:])))
        copy_calls(sunk, made, copies)
        copies |= zip(head.inputs[:num_taken], (copies[result] for result in results), strict=True)
        copies |= {node: made.input(node.name, node.meta["type"]) for node in head.inputs[num_taken:]}
        copy_calls(head.nodes, made, copies)
        carried = [copies[result] for result in results] if is_carried else []
        made.output(*(copies[result] for result in head.results), *carried)
        graph.programs[head.name] = made

    body.fx.output_node().args = ((*crossing, *states),)
    for call in reversed(sunk):
        for node in dict.fromkeys((*results_of(call), call)):
            body.fx.erase_node(node)
    graph.num_rewrites += 1


def _ahead_of_attention(program: Program, states: Sequence[Node]) -> set[Node]:
    """The calls with a state and those of these states, and all calls and inputs that they depend on."""
    found = {call for call in program.nodes if any(isinstance(leaf, State) for leaf in node_leaves(call))}
    waiting = [*found, *(call_of(state) for state in states)]
    found |= set(waiting)
    while waiting:
        new = {call_of(node) for node in waiting.pop().all_input_nodes} - found
        found |= new
        waiting += new
    return found

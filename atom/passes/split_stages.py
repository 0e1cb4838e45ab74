"""Keep the layers of one stage of a pipeline.

    x = embedding(tokens, W("embed"))            x = embedding(tokens, W("embed"))
    …  # layer 0                                 …  # layer 0
    x = add(x, m)                                x = add(x, m)
    …  # layer 1                           ->    x = send(x, axis="pipeline", to=1)
                                                 return x
    return hidden
                                                 def head(hidden: bf16[R, …]):
    def head(hidden: bf16[R, …]):                    logits = receive(hidden, axis="pipeline", source=1, …)
        logits = linear(hidden, W("lm_head"))

The body of the next stage begins with what it receives in place of `x`, and rotates positions by itself. The last stage
computes logits, and sends them to all others, so that each draws the same tokens as the last one does; and also the
vectors that embeddings are pooled of, if the text makes some. It also has what drafts, which reads only its hidden
states, and sends the drafted tokens:

    def draft(tokens, positions, hidden):                def draft(tokens):
        …                                        ->          return tokens
    def draft_head(drafted: bf16[R, …], keys, …):        def draft_head(drafted: i64[R], keys, …):
        …                                                    tokens = receive(drafted, axis="pipeline", source=1, …)

Hidden states that are tapped are returned by the stage that computes them; in their place another one returns its
tokens.

Layers are the calls that read a cache. Stages have as many of them; what remains goes to those before the last one,
which has the head, as in vLLM. Layers that read the KV of another one are on its stage, or refused; a stage begins at
the nearest layer that reads nothing that an earlier one chose. Two stages meet where the fewest values pass from one
to the other; several rows are sent as one, side by side:

    rows = send(join(x, x_1), …)      ->      x, x_1 = split(receive(…), …)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from atom.errors import UnsupportedError
from atom.graph import BODY, DRAFT, DRAFT_HEAD, DRAFT_IN, HEAD, POOL, Graph, Program, State, Type, ops
from atom.graph.graph import call_of, copy_calls, node_leaves
from atom.passes.context import PassContext


def split_stages(graph: Graph, context: PassContext) -> Graph:
    num_stages, stage = context.mesh.pipeline, context.stage
    if num_stages == 1:
        return graph
    body = graph.programs[BODY]
    layers = _first_calls(body)
    starts = _starts(body, layers, num_stages)
    taps = _taps(graph)
    results = [node for number, node in enumerate(body.results) if number not in taps]
    needed = _needed(results, ())
    borders = [_border(body, results, needed, layers[:start], layers[start]) for start in starts]  # each may be refused
    given = borders[stage - 1] if stage else []
    is_last = stage == num_stages - 1
    returned = results if is_last else borders[stage]
    tapped = [body.results[number] for number in taps]
    graph.programs[BODY] = _body_of_stage(body, given, returned, tapped, context, num_read=taps.start)
    if not is_last:
        graph.programs.pop(DRAFT_IN, None)
    if not is_last and DRAFT in graph.programs:
        graph.programs[DRAFT] = _given_tokens(graph.programs[DRAFT])
    for name, source in ((HEAD, BODY), (POOL, BODY), (DRAFT_HEAD, DRAFT)):
        if name not in graph.programs:
            continue
        if is_last:
            _send_result(graph, graph.programs[name], num_stages)
        else:
            result = graph.programs[source].results[0]
            graph.programs[name] = _received_result(graph.programs[name], result, num_stages - 1)
    graph.num_rewrites += 1
    return graph


def _taps(graph: Graph) -> range:
    """The places of the body's results that are tapped: between those that the head takes and those of `draft_in`."""
    num_read = len(graph.programs[HEAD].inputs)
    num_drafted = len(graph.programs[DRAFT_IN].inputs) if DRAFT_IN in graph.programs else 0
    return range(num_read, len(graph.programs[BODY].results) - num_drafted)


def _starts(body: Program, layers: Sequence[Node], num_stages: int) -> list[int]:
    """The first layers of all stages but the first one, as near to those of stages of one size as can be."""
    numbers = {state.name: number for number, layer in enumerate(layers) for state in _states(layer)}
    possible = {*range(1, len(layers))}
    for chosen in (call for call in body.nodes if call.target is ops.index_topk):
        readers = (state for user in chosen.users for state in _states(user))
        last = max((numbers[state.name] for state in readers), default=0)
        possible -= {*range(numbers[_states(chosen)[0].name] + 1, last + 1)}
    counts = layers_of_stages(len(layers), num_stages)
    starts = list[int]()
    for number in range(1, num_stages):
        left = sorted(layer for layer in possible if layer > max(starts, default=0))
        left = left[: max(len(left) - (num_stages - 1 - number), 0)]  # one for each stage that follows
        if not left:
            shared = "layers read what earlier ones chose, which does not go to another stage"
            raise UnsupportedError(f"{shared}; set fewer stages with parallel.pipeline, or one")
        wanted = sum(counts[:number])
        starts.append(min(left, key=lambda layer: abs(layer - wanted)))
    return starts


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage has."""
    fewest, more = divmod(num_layers, num_stages)
    return [fewest + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages)]


def _first_calls(body: Program) -> list[Node]:
    """The first call with a state of each layer."""
    found: dict[str, Node] = {}
    for call in body.nodes:
        for state in _states(call):
            found.setdefault(state.name, call)
    return list(found.values())


def _states(call: Node) -> list[State]:
    return [leaf for leaf in node_leaves(call) if isinstance(leaf, State)]


def _border(body: Program, ends: Sequence[Node], needed: set[Node], before: Sequence[Node], layer: Node) -> list[Node]:
    """The rows of the last place ahead of a layer where the fewest pass, which depend on the layers before it.

    ends: the body's results that the last stage returns, wherever they are computed
    needed: the calls that these depend on
    """
    nodes = list(body.fx.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    first, stop = numbers[before[-1]], numbers[layer]  # of the places where stages may meet
    kept = {state.name for call in before for state in _states(call)}
    for call in nodes[stop:]:
        for state in _states(call):
            if state.name in kept:
                at = f"{call.name} reads the KV of {state.name}, a layer of another stage"
                raise UnsupportedError(f"{at}; set fewer stages with parallel.pipeline")
    dependent = _dependent(nodes[:stop], before)
    last = {node: max((numbers[user] for user in node.users if user in needed), default=-1) for node in dependent}
    last |= {node: len(nodes) for node in ends if node in dependent}
    passing = [node for node in nodes[:stop] if last.get(node, -1) > first]
    found = (
        [node for node in passing if numbers[node] <= place < last[node]] for place in reversed(range(first, stop))
    )
    alike = [values for values in found if _are_alike(values)]
    if not alike:
        raise UnsupportedError(f"{layer.name} takes values of the layers before it that are no rows of one type; "
                               "set parallel.pipeline=1")  # fmt: skip
    return min(alike, key=len)


def _are_alike(values: Sequence[Node]) -> bool:
    """Whether values are rows of one type, but for their columns."""
    types = [node.meta["type"] for node in values]
    return all(not isinstance(type, tuple) and len(type.shape) == 2 for type in types) and (
        len({(type.dtype, type.shape[0]) for type in types}) == 1
    )


def _dependent(nodes: Sequence[Node], before: Sequence[Node]) -> set[Node]:
    """The values that depend on these calls, and the calls."""
    found = {*before}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _needed(results: Sequence[Node], given: Sequence[Node]) -> set[Node]:
    """The calls that results depend on, if these values are given."""
    found: set[Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in given and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _body_of_stage(
    body: Program,
    given: Sequence[Node],
    results: Sequence[Node],
    tapped: Sequence[Node],
    context: PassContext,
    *,
    num_read: int,
) -> Program:
    """The body from some values to others; without the first from the tokens.

    tapped: returned after the first num_read results, those that the stage computes

    Results of the last stage that drafts read besides the first one are its own: config.load refuses others.
    """
    made = Program(body.name)
    copies = {node: made.input(node.name, node.meta["type"]) for node in body.inputs}
    if given:
        like, types = next(iter(copies.values())), [node.meta["type"] for node in given]
        sizes = [int(type.shape[-1]) for type in types]
        received = _receive(made, like, types[0].with_last(sum(sizes)), _name_of(given), context.stage - 1)
        names = tuple(node.name for node in given)
        parts = [received] if len(given) == 1 else made.call(ops.split, received, sizes=sizes, name=names)
        copies |= zip(given, parts, strict=True)
    computed = _needed(results, given)
    needed = {call_of(node) for node in computed}
    copy_calls([node for node in body.nodes if node in needed], made, copies)
    own = [copies[node] if node in computed else made.inputs[0] for node in tapped]
    if context.stage < context.mesh.pipeline - 1:
        name = _name_of(results)
        sent = copies[results[0]] if len(results) == 1 else made.call(ops.join, *map(copies.get, results), name=name)
        made.output(made.call(ops.send, sent, axis=ops.STAGES, to=context.stage + 1, name=name), *own)
    else:
        returned = [copies[node] for node in results]
        made.output(*returned[:num_read], *own, *returned[num_read:])
    return made


def _name_of(values: Sequence[Node]) -> str:
    return values[0].name if len(values) == 1 else "rows"


def _given_tokens(draft: Program) -> Program:
    """The draft program of a stage before the last one, which only returns its tokens."""
    made = Program(draft.name)
    tokens = draft.inputs[0]
    made.output(made.input(tokens.name, tokens.meta["type"]))
    return made


def _received_result(program: Program, result: Node, last: int) -> Program:
    """A head of a stage before the last one: of rows of its body's result as many of what the last stage's gives."""
    made, (first, *others) = Program(program.name), program.inputs
    rows, type = first.meta["type"].shape[:1], result.meta["type"]
    like = made.input(first.name, replace(type, shape=(*rows, *type.shape[1:])))
    for node in others:
        made.input(node.name, node.meta["type"])
    (logits,) = program.results
    made.output(_receive(made, like, logits.meta["type"], logits.name, last))
    return made


def _receive(program: Program, like: Node, type: Type, name: str, source: int) -> Node:
    (columns,) = type.shape[1:] or (None,)
    received: Node = program.call(
        ops.receive, like, axis=ops.STAGES, source=source, columns=columns, dtype=type.dtype, name=name
    )
    return received


def _send_result(graph: Graph, program: Program, num_stages: int) -> None:
    output = program.fx.output_node()
    (result,) = program.results
    for stage in range(num_stages - 1):
        result = graph.insert(output, ops.send, result, axis=ops.STAGES, to=stage, name=result.name)
    output.args = ((result,),)

"""Write a decoder: an embedding, layers, a head.

    write_body(writer)      # of the program `body`
    write_head(writer)

A layer is one block or several, each of which adds to the hidden states what it makes of them: blocks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import islice

from torch.fx import Node

from atom.config import Group, SectionConfig, VisionConfig
from atom.config.taps import NO_TAPS, LayerTaps
from atom.frontend.attention import rotaries
from atom.frontend.blocks import write_block
from atom.frontend.mlp import mlp_of
from atom.frontend.ngrams import add_ngrams
from atom.frontend.per_layer_input import per_layer_inputs
from atom.frontend.placed import write_placed
from atom.frontend.rope import Rotary
from atom.frontend.streams import STREAMS, Place
from atom.frontend.writer import Writer
from atom.graph import Dequantize, Recipe, Type, W, ops
from atom.graph.graph import STEERING
from atom.graph.recipe_ranges import cat, narrow, padded

RunLayers = Callable[[Node, int], Node]  # what the next layers, so many, give of their input
NORMS = ("attention", "mlp")  # the roles of the norms of a layer's first and second block begin with these


def write_body(
    writer: Writer,
    kept: Sequence[int] = (),
    vocab: int | None = None,
    vision: VisionConfig | None = None,
    taps: LayerTaps = NO_TAPS,
) -> None:
    """Write the body: tokens and positions i64[T] -> hidden states [T, H] after the final norm.

    kept: layers whose inputs are returned after the hidden states; num_layers stands for the last one's output.
    vocab: see `table`.
    taps: layers whose outputs are returned between the two, and vectors that are added to those of some.
    vision: what makes rows that some tokens take, see `placed.py`; None: all tokens are of a text.
    """
    tokens, positions = write_tokens(writer)
    model = writer.model
    writer.carried["tokens"] = tokens
    placed = None if vision is None else write_placed(writer, vision)
    rotaries_by_layer = rotaries(writer, positions, range(model.layers), placed and placed.rope_positions)
    embedded = embed(writer, tokens, vocab)
    if placed is not None:
        embedded = placed.put(writer, embedded)
    embedded = add_positions(writer, embedded, positions)
    inputs = per_layer_inputs(writer, tokens, embedded) or [None] * model.layers
    layers = enumerate(zip(rotaries_by_layer, inputs, strict=True))
    streams = STREAMS[model.streams.kind]
    x = streams.spread(writer, embedded)
    states, later = [x], None
    tapped: dict[int, Node] = {}

    def run_layers(x: Node, num_layers: int) -> Node:
        nonlocal later
        states[-1] = x
        for number, (rotary, own) in islice(layers, num_layers):
            x = add_ngrams(writer, x, number)
            read, end = streams.connect_layer(writer, x, number, own)
            y, later = write_layer(writer, read, rotary, number, embedded=embedded, earlier=later)
            tapped[number] = x = steer(writer, end(y), number, taps)
            if placed is not None and number + 1 < placed.num_parts:
                x = placed.put(writer, x, number + 1)
            states.append(x)
        return x

    sections = model.sections or [SectionConfig(layers=model.stored_layers)]
    own_states: dict[int, Node | Recipe] = {
        index: W(writer.name("section_state"), Type(writer.dtype, (model.hidden,)))
        for index, section in enumerate(sections)
        if section.own_state
    }
    for loop in range(model.loops):
        x = writer.norm(x, "final_norm", name="x") if loop else x
        for index, section in enumerate(sections):
            if section.own_state:
                own_states[index] = state = write_loops(writer, section, own_states[index], x, run_layers)
                x = writer.call(ops.add, x, state, name="x")
            else:
                x = write_loops(writer, section, x, None, run_layers)
    hidden = streams.merge(writer, x)
    if model.norm.final:
        hidden = writer.norm(hidden, "final_norm", name="hidden")
    writer.program.output(hidden, *map(tapped.__getitem__, taps.layers), *(states[number] for number in kept))


def steer(writer: Writer, x: Node, layer: int, taps: LayerTaps) -> Node:
    """x, what a layer gives -> the same with its steering vectors, each by the scale of its token

    x: [T, H], or several streams side by side [T, S H], of which each takes a vector [H]
    """
    streams, hidden = writer.model.streams.num, writer.model.hidden
    for vector in taps.vectors:
        if vector.layer == layer:
            scales = writer.program.input(STEERING, Type("fp32", ("T", taps.num_scales)))
            columns = streams * hidden if vector.is_of_streams else hidden
            stored = W(vector.tensor, Type(writer.dtype, (columns,)))
            weight = stored if columns == streams * hidden else cat((stored,) * streams)
            x = writer.program.call(ops.steer, x, scales, weight, index=vector.number, name="x")
    return x


def write_loops(
    writer: Writer, section: SectionConfig, state: Node | Recipe, added: Node | None, run_layers: RunLayers
) -> Node:
    """state [T, H] -> [T, H], what the last loop over a section's layers gives

    state: what the first loop reads; a vector [H] for all tokens, if something is added to it
    added: to what each loop reads [T, H]; None: what the first one reads, if the section adds that
    """

    def normed(state: Node) -> Node:
        return writer.norm(state, "final_norm", name="x")

    for _ in range(section.loops):
        if section.norm == "before":
            assert isinstance(state, Node), "check_loops refuses a norm of a vector"
            state = normed(state)
        if section.adds_input and added is None:
            assert isinstance(state, Node), "only a section with a state of its own has a vector"
            added = state
        if added is not None:
            state = writer.call(ops.add, added, state, name="x")
        state = run_layers(state, section.layers)
        if section.norm == "after":
            state = normed(state)
    return state


def write_tokens(writer: Writer) -> tuple[Node, Node]:
    """The inputs of a program that runs for each token: tokens and positions i64[T]."""
    tokens, positions = (writer.program.input(name, Type("i64", ("T",))) for name in ("tokens", "positions"))
    return tokens, positions


def write_head(writer: Writer) -> None:
    """Write what makes logits [R, V] of rows of hidden states [R, H]."""
    writer.program.output(write_logits(writer, write_rows(writer)))


def write_pool(writer: Writer) -> None:
    """Write what makes the vectors [R, H] that embeddings are pooled of, of rows of hidden states [R, H]."""
    writer.program.output(write_rows(writer))


def write_rows(writer: Writer) -> Node:
    """The input of a program that runs for rows of hidden states."""
    return writer.program.input("hidden", Type(writer.dtype, ("R", writer.model.hidden)))


def write_logits(writer: Writer, hidden: Node, vocab: int | None = None) -> Node:
    """hidden [R, H] -> [R, V]

    vocab: see `table`.
    """
    model = writer.model
    role = "embedding" if model.tied else "head"
    weight = writer.packed(table(writer, role, vocab), role, None, writer.quant.head, by_pattern=False)
    bias = [table_bias(writer, int(weight.type.shape[0]))] if model.head_bias else []
    logits = writer.multiply(hidden, weight, *bias, role=role, layer=None, name="logits")
    logits = writer.scale_channels(logits, "head")
    logits = writer.scale(logits, 1 / model.logits_divisor if model.logits_divisor else model.logits_scale)
    if model.logits_softcap is not None:
        logits = writer.call(ops.softcap, logits, cap=model.logits_softcap, name="logits")
    return logits


def embed(writer: Writer, tokens: Node, vocab: int | None = None) -> Node:
    """tokens i64[T] -> [T, H]

    vocab: see `table`.
    """
    x = writer.call(ops.embedding, tokens, table(writer, "embedding", vocab), name="x")
    x = writer.scale(x, writer.model.embedding_scale)
    if writer.model.embedding_affine:
        x = writer.affine(x, "embedding")
    if not writer.model.embedding_norm:
        return x
    weight = "shared" if writer.model.embedding_norm_weight else "none"
    return writer.norm(x, "embedding_norm", name="x", weight_of_heads=weight)


def add_positions(writer: Writer, x: Node, positions: Node) -> Node:
    """x [T, H] and a learned row for each position [T, H], if the model has a table of these"""
    model = writer.model
    if not model.learned_positions:
        return x
    first, num = model.position_offset, model.max_position
    rows = narrow(writer.weight("positions", (first + num, model.hidden)), first, first + num)
    total: Node = writer.call(ops.add, x, writer.call(ops.embedding, positions, rows, name="p"), name="x")
    return total


def table(writer: Writer, role: str, vocab: int | None = None) -> Recipe:
    """A matrix with a row for each token.

    vocab: that another model has, whose embedding may be padded otherwise: rows are left out, or zero
    """
    model, num_rows = writer.model, writer.model.vocab
    if role == "head" and model.eagle3 is not None:
        num_rows = model.eagle3.vocab or num_rows
    if role == "embedding" and model.embedding_rows is not None:
        matrix = narrow(writer.matrix(role, (model.embedding_rows, model.hidden)), 0, num_rows)
    else:
        matrix = writer.matrix(role, (num_rows, model.hidden))
    if vocab is None:
        return matrix
    return padded(matrix if matrix.type.fmt is None or vocab <= num_rows else Dequantize(matrix), 0, vocab)


def table_bias(writer: Writer, rows: int) -> Recipe:
    """The head's bias [rows], for which it may be padded; a tied head has a name for it, too."""
    return padded(writer.weight("head", (writer.model.vocab,), None, "bias"), 0, rows)


def write_layer(
    writer: Writer, x: Node, rotary: Rotary | None, layer: int, h: Node | None = None, embedded: Node | None = None,
    earlier: Node | None = None,
) -> tuple[Node, Node | None]:  # fmt: skip
    """x [T, H] -> [T, H], and what is to be added after the next layer (shortcut-connected experts, Cai et al. 2024)

    x: what `connect_layer` gives, whose counterpart comes after it: streams.py.
    h: what the first block reads; None: x, normed.
    embedded: the hidden states ahead of the first layer.
    earlier: what a block of the layer before gave that is added after this one.
    """
    model, norm, later = writer.model, writer.model.norm, None
    is_after_only = model.layer_type(layer) in norm.after_only
    has_before, has_after = norm.before and not is_after_only, norm.after or is_after_only
    blocks = [Place(layer, number, role, group) for number, (group, role) in
              enumerate(zip(model.groups_of(layer), NORMS, strict=False))]  # fmt: skip
    if not blocks:
        return x, earlier
    connect = STREAMS[model.streams.kind].connect_block

    def normed(x: Node, role: str) -> Node:
        if not has_before:
            return x
        is_moe = role == "mlp" and mlp_of(model, layer).kind == "moe"
        is_gated = ("moe" if is_moe else role) in norm.gated
        return write_gated_norm(writer, x, role, layer) if is_gated else writer.norm(x, f"{role}_norm", layer)

    def input_of(x: Node, group: Group, role: str) -> Node:
        if group.ahead:
            assert embedded is not None, "only layers of the body have shared blocks"
            x = add(x, write_ahead(writer, x, embedded, group.ahead, rotary, layer), name="read")
        return normed(x, role)

    def given(x: Node, h: Node, group: Group, role: str) -> Node:
        y = functools.reduce(add, [write_block(writer, h, name, rotary, layer, x) for name in group.names])
        return writer.norm(y, f"{role}_after_norm", layer, name=role[0]) if has_after else y

    def add(a: Node, b: Node, name: str = "x") -> Node:
        total: Node = writer.call(ops.add, a, b, name=name)
        return total

    if not model.residual.startswith("parallel"):
        for place in blocks:
            read, write = connect(writer, x, place)
            h = input_of(read, place.group, place.role) if place.number or h is None else h
            if place.group.later is not None:
                later = write_block(writer, h, place.group.later, rotary, layer, read)
            x = write(writer.scale(given(read, h, place.group, place.role), model.residual_scale), h)
        return x if earlier is None else add(x, earlier), later
    h = input_of(x, blocks[0].group, blocks[0].role) if h is None else h
    inputs = [h, *(h if model.residual == "parallel" else normed(x, place.role) for place in blocks[1:])]
    all_given = [given(x, each, place.group, place.role) for each, place in zip(inputs, blocks, strict=True)]
    total = functools.reduce(functools.partial(add, name="o"), all_given)
    return add(x, writer.scale(total, model.residual_scale)), None


def write_gated_norm(writer: Writer, x: Node, role: str, layer: int) -> Node:
    """x [T, H] -> [T, H], normed and times a gate that two linears, of a low rank between them, make of that"""
    h, rank = writer.norm(x, f"{role}_gated_norm", layer), writer.model.norm.gate_rank
    low = writer.linear(h, f"{role}_norm_gate_in", rank, False, layer)
    low = writer.call(ops.activate, low, kind="silu", name="gate")
    gate = writer.linear(low, f"{role}_norm_gate_out", writer.model.hidden, False, layer)
    gate = writer.call(ops.activate, gate, kind="sigmoid", name="gate")
    gated: Node = writer.call(ops.mul, h, gate, name="h")
    return gated


def write_ahead(
    writer: Writer, x: Node, embedded: Node, names: Sequence[str], rotary: Rotary | None, layer: int
) -> Node:
    """x [T, H] -> [T, H]: blocks that layers share, one after the other, and a linear of the layer's own (Zamba2).

    The first reads the hidden states and the embedding, joined and normed; each other one what the one before it gives.
    """
    y = writer.call(ops.join, x, embedded, name="joined")
    for name in names:
        y = write_block(writer, writer.norm(y, f"ahead_{name}_norm", layer), name, rotary, layer, y)
    return writer.linear(y, "ahead_out", writer.model.hidden, False, layer)

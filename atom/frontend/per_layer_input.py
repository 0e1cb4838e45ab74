"""Per-layer embeddings: what each layer reads of a token besides hidden states.

    inputs = per_layer_inputs(writer, tokens, x)        # [T, P] for each layer
    x = add_per_layer_input(writer, x, inputs[layer], layer)

As in Gemma 3n and 4. They are made once, of a table with a row for each token and of the embedding, and are added after
a layer's blocks.
"""

from __future__ import annotations

from torch.fx import Node

from atom.frontend.writer import Writer
from atom.graph import Full, Type, ops


def per_layer_inputs(writer: Writer, tokens: Node, x: Node) -> list[Node]:
    """tokens i64[T], their embedding x [T, H] -> [T, P] for each layer; none if the model has no such inputs"""
    model, own = writer.model, writer.model.per_layer_input
    if not own.dims:
        return []
    columns = model.layers * own.dims
    rows = own.vocab or model.vocab
    if rows < model.vocab:  # tokens that it does not have take its first row
        tokens, _ = writer.call(
            ops.local_tokens, tokens, Full(0, Type("i64", (1,))), size=rows, name=("known", "is_known")
        )
    table = writer.matrix("per_layer_embedding", (rows, columns))
    e = writer.scale(writer.call(ops.embedding, tokens, table, name="e"), own.dims**0.5)
    p = writer.scale(writer.linear(x, "per_layer_projection", columns, False), model.hidden**-0.5)
    p, e = (writer.call(ops.split_heads, each, heads=model.layers, name=each.name) for each in (p, e))
    p = writer.call(ops.add, writer.norm(p, "per_layer_norm", name="p"), e, name="p")
    p = writer.call(ops.merge_heads, writer.scale(p, 0.5**0.5), name="p")
    names = tuple(f"p_{layer}" for layer in range(model.layers))
    if model.layers == 1:
        return [p]
    return list(writer.call(ops.split, p, sizes=[own.dims] * model.layers, name=names))


def add_per_layer_input(writer: Writer, x: Node, p: Node, layer: int) -> Node:
    """x [T, H], p [T, P] -> [T, H]"""
    added: Node = writer.call(ops.add, x, per_layer_output(writer, x, p, layer), name="x")
    return added


def per_layer_output(writer: Writer, x: Node, p: Node, layer: int) -> Node:
    """x [T, H], p [T, P] -> what is added to the hidden states [T, H]"""
    own = writer.model.per_layer_input
    gate = writer.linear(x, "per_layer_gate", own.dims, False, layer)
    active = writer.call(ops.activate, gate, kind=own.activation, name="active")
    m = writer.call(ops.mul, active, p, name="m")
    return writer.norm(
        writer.linear(m, "per_layer_out", writer.model.hidden, False, layer), "per_layer_out_norm", layer
    )

"""Write a decoder: an embedding, layers of attention and mlp, a head.

    write_body(writer)      # of the program `body`
    write_head(writer)

The blocks of a layer are chosen by the `kind` that the model file says: attention.py and mlp.py have them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from atom.frontend.attention import ATTENTIONS, Rotary, rotaries
from atom.frontend.mlp import MLPS, mlp_of
from atom.frontend.writer import Writer
from atom.graph import Dequantize, Recipe, Type, ops
from atom.graph.recipe_ranges import padded


def write_body(writer: Writer, kept: Sequence[int] = (), vocab: int | None = None) -> None:
    """Write the body: tokens and positions i64[T] -> hidden states [T, H] after the final norm.

    kept: layers whose inputs are returned after the hidden states; num_layers stands for the last one's output.
    vocab: see `table`.
    """
    tokens, positions = write_tokens(writer)
    rotaries_by_layer = rotaries(writer, positions, range(writer.model.layers))
    states = [embed(writer, tokens, vocab)]
    for number, rotary in enumerate(rotaries_by_layer):
        states.append(write_layer(writer, states[-1], rotary, number))
    hidden = writer.norm(states[-1], "final_norm", name="hidden")
    writer.program.output(hidden, *(states[number] for number in kept))


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
    weight = writer.packed(table(writer, role, vocab), role, None, writer.quant.head)
    bias = [table_bias(writer, int(weight.type.shape[0]))] if model.head_bias else []
    logits = writer.multiply(hidden, weight, *bias, role=role, layer=None, name="logits")
    logits = writer.scale(logits, 1 / model.logits_divisor if model.logits_divisor else model.logits_scale)
    if model.logits_softcap is not None:
        logits = writer.call(ops.softcap, logits, cap=model.logits_softcap, name="logits")
    return logits


def embed(writer: Writer, tokens: Node, vocab: int | None = None) -> Node:
    """tokens i64[T] -> [T, H]

    vocab: see `table`.
    """
    x = writer.call(ops.embedding, tokens, table(writer, "embedding", vocab), name="x")
    return writer.scale(x, writer.model.embedding_scale)


def table(writer: Writer, role: str, vocab: int | None = None) -> Recipe:
    """A matrix with a row for each token.

    vocab: that another model has, whose embedding may be padded otherwise: rows are left out, or zero
    """
    model, num_rows = writer.model, writer.model.vocab
    if role == "head" and model.eagle3 is not None:
        num_rows = model.eagle3.vocab or num_rows
    matrix = writer.matrix(role, (num_rows, model.hidden))
    if vocab is None:
        return matrix
    return padded(matrix if matrix.type.fmt is None or vocab <= num_rows else Dequantize(matrix), 0, vocab)


def table_bias(writer: Writer, rows: int) -> Recipe:
    """The head's bias [rows], for which it may be padded; a tied head has a name for it, too."""
    return padded(writer.weight("head", (writer.model.vocab,), None, "bias"), 0, rows)


def write_layer(writer: Writer, x: Node, rotary: Rotary | None, layer: int, h: Node | None = None) -> Node:
    """x [T, H] -> [T, H]

    h: what attention reads; None: x, normed.
    """
    model, norm, mlp = writer.model, writer.model.norm, mlp_of(writer.model, layer)

    def attention_of(h: Node) -> Node:
        a = ATTENTIONS[model.attention.kind](writer, h, rotary, layer)
        return writer.norm(a, "attention_after_norm", layer, name="a") if norm.after else a

    def mlp_block(h: Node) -> Node:
        m = MLPS[mlp.kind](writer, h, mlp, layer)
        return writer.norm(m, "mlp_after_norm", layer, name="m") if norm.after else m

    def add(a: Node, b: Node, name: str = "x") -> Node:
        total: Node = writer.call(ops.add, a, b, name=name)
        return total

    if h is None:
        h = writer.norm(x, "attention_norm", layer) if norm.before else x
    if model.residual != "sequential":
        own = h if model.residual == "parallel" else writer.norm(x, "mlp_norm", layer)
        both = add(attention_of(h), mlp_block(own), name="o")
        return add(x, writer.scale(both, model.residual_scale))
    x = add(x, writer.scale(attention_of(h), model.residual_scale))
    h = writer.norm(x, "mlp_norm", layer) if norm.before else x
    return add(x, writer.scale(mlp_block(h), model.residual_scale))

"""Write a decoder: an embedding, layers of attention and mlp, a head.

    graph = build(config.model, dtype="bf16", cache_dtype="bf16")
    print(show(graph))
    graph = build(config.model, "bf16", "bf16", has_draft=True)     # with the layer that drafts tokens

The blocks of a layer are chosen by the `kind` that the model file says: attention.py and mlp.py have them.
"""

from __future__ import annotations

from torch.fx import Node

from atom.config import ModelConfig, QuantConfig
from atom.errors import ConfigError
from atom.frontend.attention import ATTENTIONS, Rotary, rotaries
from atom.frontend.mlp import MLPS, mlp_of
from atom.frontend.writer import Writer
from atom.graph import BODY, DRAFT, DRAFT_HEAD, DRAFT_IN, HEAD, Graph, Type, ops

AS_STORED = QuantConfig()


def build(
    model: ModelConfig, dtype: str, cache_dtype: str, quant: QuantConfig = AS_STORED, *, has_draft: bool = False
) -> Graph:
    """`body`: tokens and positions i64[T] to hidden states [T, H]; `head`: rows of them [R, H] to logits [R, V].

    has_draft: also the programs of the first layer that predicts further tokens. `draft_in`: what head takes, of each
    token, to hidden states [T, H] behind the final norm; `draft`: those of positions p, and the tokens at p + 1, to
    hidden states [T, H], which a further draft takes in their place; `draft_head`: rows of them [R, H] to logits [R, V]
    of the tokens at p + 2. ConfigError where the model has no such layer.
    """
    graph = Graph()

    def writer(program: str) -> Writer:
        return Writer(model, graph.program(program), dtype, cache_dtype, quant)

    _write_body(writer(BODY))
    _write_head(writer(HEAD))
    if has_draft:
        if not model.mtp_layers:
            raise ConfigError("serve.method=mtp: the model has no layer that predicts further tokens; take another one")
        _write_draft_in(writer(DRAFT_IN))
        _write_draft(writer(DRAFT), model.layers)
        _write_head(writer(DRAFT_HEAD))
    if quant.asks_act and not any("act" in linear.kwargs for linear in graph.find(ops.linear)):
        raise ConfigError(f"quant.act={quant.act}: no linear's weights are packed; quant={quant.act} packs them")
    return graph


def _write_body(writer: Writer) -> None:
    model = writer.model
    tokens = writer.program.input("tokens", Type("i64", ("T",)))
    positions = writer.program.input("positions", Type("i64", ("T",)))
    turns = rotaries(writer, positions, range(model.layers))
    x = _embed(writer, tokens)
    for layer, rotary in enumerate(turns):
        x = _layer(writer, x, rotary, layer)
    writer.program.output(writer.norm(x, "final_norm", name="hidden"))


def _write_draft_in(writer: Writer) -> None:
    """What body returns is behind the final norm already."""
    writer.program.output(writer.program.input("hidden", Type(writer.dtype, ("T", writer.model.hidden))))


def _write_draft(writer: Writer, layer: int) -> None:
    """Multi-token prediction (DeepSeek-AI 2024), with the model's own embedding, and its head behind it.

    The product of embedding and hidden state side by side is written as the sum of their own products: the sum is
    merged into the norm behind it, and no pass or kernel has to know of joined values.
    """
    model = writer.model
    tokens = writer.program.input("tokens", Type("i64", ("T",)))
    positions = writer.program.input("positions", Type("i64", ("T",)))
    hidden = writer.program.input("hidden", Type(writer.dtype, ("T", model.hidden)))
    normed = {
        "mtp_embedding_proj": writer.norm(_embed(writer, tokens), "mtp_embedding_norm", layer, name="e"),
        "mtp_hidden_proj": writer.norm(hidden, "mtp_hidden_norm", layer, name="h"),
    }
    columns = dict.fromkeys(normed, model.hidden)
    halves = writer.parts(columns, lambda role, n: writer.matrix(role, (model.hidden, n), layer), layer, dim=1)
    e, h = (
        writer.multiply(x, writer.packed(half, role, layer), role=role, layer=layer, name=x.name)
        for (role, x), half in zip(normed.items(), halves, strict=True)
    )
    (rotary,) = rotaries(writer, positions, [layer])
    x = _layer(writer, writer.call(ops.add, e, h, name="x"), rotary, layer)
    writer.program.output(writer.norm(x, "mtp_norm", layer, name="drafted"))


def _embed(writer: Writer, tokens: Node) -> Node:
    """tokens i64[T] -> [T, H]"""
    table = writer.matrix("embedding", (writer.model.vocab, writer.model.hidden))
    return writer.scale(writer.call(ops.embedding, tokens, table, name="x"), writer.model.embedding_scale)


def _write_head(writer: Writer) -> None:
    model = writer.model
    hidden = writer.program.input("hidden", Type(writer.dtype, ("R", model.hidden)))
    role = "embedding" if model.tied else "head"
    weight = writer.packed(writer.matrix(role, (model.vocab, model.hidden)), role, None, writer.quant.head)
    logits = writer.multiply(hidden, weight, role=role, layer=None, name="logits")
    logits = writer.scale(logits, 1 / model.logits_divisor if model.logits_divisor else None)
    if model.logits_softcap is not None:
        logits = writer.call(ops.softcap, logits, cap=model.logits_softcap, name="logits")
    writer.program.output(logits)


def _layer(writer: Writer, x: Node, rotary: Rotary | None, layer: int) -> Node:
    model, norm, mlp = writer.model, writer.model.norm, mlp_of(writer.model, layer)

    def attention_of(h: Node) -> Node:
        a = ATTENTIONS[model.attention.kind](writer, h, rotary, layer)
        return writer.norm(a, "attention_after_norm", layer, name="a") if norm.after else a

    def mlp_behind(h: Node) -> Node:
        m = MLPS[mlp.kind](writer, h, mlp, layer)
        return writer.norm(m, "mlp_after_norm", layer, name="m") if norm.after else m

    def add(a: Node, b: Node, name: str = "x") -> Node:
        total: Node = writer.call(ops.add, a, b, name=name)
        return total

    h = writer.norm(x, "attention_norm", layer) if norm.before else x
    if model.residual == "parallel":
        both = add(attention_of(h), mlp_behind(h), name="o")
        return add(x, writer.scale(both, model.residual_scale))
    x = add(x, writer.scale(attention_of(h), model.residual_scale))
    h = writer.norm(x, "mlp_norm", layer) if norm.before else x
    return add(x, writer.scale(mlp_behind(h), model.residual_scale))

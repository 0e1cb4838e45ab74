"""Write a decoder: an embedding, layers of attention and mlp, a head.

    graph = build(config.model, dtype="bf16", cache_dtype="bf16")
    print(show(graph))

The blocks of a layer are chosen by the `kind` that the model file says: attention.py and mlp.py have them.
"""

from __future__ import annotations

from torch.fx import Node

from atom.config import ModelConfig, QuantConfig
from atom.errors import ConfigError
from atom.frontend.attention import ATTENTIONS, Rotary, rotaries
from atom.frontend.mlp import MLPS, mlp_of
from atom.frontend.writer import Writer
from atom.graph import BODY, HEAD, Graph, Type, ops

AS_STORED = QuantConfig()


def build(model: ModelConfig, dtype: str, cache_dtype: str, quant: QuantConfig = AS_STORED) -> Graph:
    """`body`: tokens and positions i64[T] to hidden states [T, H]; `head`: rows of them [R, H] to logits [R, V]."""
    graph = Graph()
    _write_body(Writer(model, graph.program(BODY), dtype, cache_dtype, quant))
    _write_head(Writer(model, graph.program(HEAD), dtype, cache_dtype, quant))
    if quant.asks_act and not any("act" in linear.kwargs for linear in graph.find(ops.linear)):
        raise ConfigError(f"quant.act={quant.act}: no linear's weights are packed; quant={quant.act} packs them")
    return graph


def _write_body(writer: Writer) -> None:
    model = writer.model
    tokens = writer.program.input("tokens", Type("i64", ("T",)))
    positions = writer.program.input("positions", Type("i64", ("T",)))
    turns = rotaries(writer, positions)
    x = writer.call(ops.embedding, tokens, writer.matrix("embedding", (model.vocab, model.hidden)), name="x")
    x = writer.scale(x, model.embedding_scale)
    for layer, rotary in enumerate(turns):
        x = _layer(writer, x, rotary, layer)
    writer.program.output(writer.norm(x, "final_norm", name="hidden"))


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

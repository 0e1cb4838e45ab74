"""Write the programs that draft tokens.

A model's own layer drafts (mtp), or one of another checkpoint (eagle3), or another model.

`draft` makes hidden states [T, …] of tokens and positions i64[T], and `draft_head`, of rows of them [R, …] and what
`ops.gumbel_argmax` takes of each, the tokens i64[R] that come next.

With mtp and eagle3, `draft` also takes a hidden state of each position p, and the tokens at p + 1; what it gives, a
further draft takes in its place. `draft_in` makes the first ones, of the last results of body: with mtp of what the
head takes, or of several residual streams, with eagle3 of the inputs of some layers, which body then gives after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch.fx import Node

from atom.config import ModelConfig, StreamsConfig
from atom.config.draft import find_aux_layers
from atom.errors import ConfigError
from atom.frontend.attention import rotaries
from atom.frontend.decoder import embed, table, write_body, write_layer, write_logits, write_rows, write_tokens
from atom.frontend.streams import end_layer, merge_hyper
from atom.frontend.writer import Writer, required
from atom.graph import DRAFT, DRAFT_HEAD, DRAFT_IN, Type, W, ops
from atom.graph.graph import NOISE


class Writers(Protocol):
    """Gives a writer of a program, of the model or of the one that drafts for it."""

    def __call__(self, program: str, of: ModelConfig = ...) -> Writer: ...


def write_mtp(writers: Writers, model: ModelConfig, states: Sequence[Node] = ()) -> None:
    """Multi-token prediction (DeepSeek-AI 2024), with the model's own embedding and head.

    The linear of embedding and hidden state joined is written as the sum of a linear of each: the sum is fused into the
    norm after it, and no pass or kernel has to know of joined values.

    states: the last layer's streams [T, S H], of a layer with several. Each is a hidden state, to which the same is
        added; a further draft begins with the layer's, and the head of drafts merges them (DeepSeek-AI 2026).
    """
    model = mtp_model(model)
    writer = writers(DRAFT_IN, model)
    if not model.mtp_layers:
        raise ConfigError(
            "serve.method=mtp: the model has no layer that predicts further tokens; take serve.method=ngram"
        )
    num, layer = model.streams.num, model.layers
    writer.program.output(_write_hidden(writer, num))  # what body gives of one stream went through the final norm
    writer = writers(DRAFT, model)
    (tokens, positions), hidden = write_tokens(writer), _write_hidden(writer, num)
    columns = dict.fromkeys(("mtp_embedding_proj", "mtp_hidden_proj"), model.hidden)
    parts = writer.parts(columns, lambda role, n: writer.matrix(role, (model.hidden, n), layer), layer, dim=1)
    weights = {role: writer.packed(part, role, layer) for role, part in zip(columns, parts, strict=True)}

    def project(x: Node, role: str) -> Node:
        return writer.multiply(x, weights[role], role=role, layer=layer, name=x.name)

    e = writer.norm(embed(writer, tokens), "mtp_embedding_norm", layer, name="e")
    streams = [hidden]
    if num > 1:
        streams = writer.call(ops.split, hidden, sizes=[model.hidden] * num, name=("h",) * num)
    normed = [writer.norm(x, "mtp_hidden_norm", layer, name="h") for x in streams]
    e, *projected = project(e, "mtp_embedding_proj"), *(project(x, "mtp_hidden_proj") for x in normed)
    (rotary,) = rotaries(writer, positions, [layer])
    read = [writer.call(ops.add, e, x, name="x") for x in projected]
    x, _ = write_layer(writer, writer.call(ops.join, *read, name="x") if num > 1 else read[0], rotary, layer)
    if num > 1:
        writer.program.output(x)
    else:
        writer.program.output(writer.norm(end_layer(writer, x, None, layer), "mtp_norm", layer, name="drafted"))
    writer = writers(DRAFT_HEAD, model)
    if num > 1:
        rows = writer.program.input("hidden", Type(writer.dtype, ("R", num * model.hidden)))
        x = writer.norm(merge_hyper(writer, rows, "mtp", layer), "mtp_norm", layer, name="drafted")
    else:
        x = write_rows(writer)
    _write_tokens_of(writer, write_logits(writer, x))


def write_eagle3(writers: Writers, draft: ModelConfig, states: Sequence[Node]) -> None:
    """The layer of EAGLE-3 (Li et al. 2025; eagle/model/cnets.py of SafeAILab/EAGLE).

    A further draft begins with what it gives ahead of its final norm. Without an embedding of its own it has the
    model's, unscaled.

    states: the results of body that it reads.
    """
    writer = writers(DRAFT_IN, draft)
    inputs = [writer.program.input(f"aux_{number}", state.meta["type"]) for number, state in enumerate(states)]
    joined = writer.call(ops.join, *inputs, name="aux")
    writer.program.output(writer.linear(joined, "fc", draft.hidden, has_bias=False))
    writer = writers(DRAFT, draft)
    (tokens, positions), x = write_tokens(writer), _write_hidden(writer)
    vocab = writers(DRAFT).model.vocab
    embedder = writer if "embedding" in draft.weights else writers(DRAFT)
    e = embedder.call(ops.embedding, tokens, table(embedder, "embedding", vocab), name="e")
    e, h = writer.norm(e, "attention_norm", name="e"), writer.norm(x, "hidden_norm")
    (rotary,) = rotaries(writer, positions, [0])
    residual = h if required(draft.eagle3).norm_before_residual else x
    joined = writer.call(ops.join, e, h, name="h")
    x, _ = write_layer(writer, residual, rotary, 0, joined)
    writer.program.output(x)
    writer, has_map = writers(DRAFT_HEAD, draft), "d2t" in draft.weights
    hidden = writer.norm(write_rows(writer), "final_norm", name="hidden")
    _write_tokens_of(writer, write_logits(writer, hidden, None if has_map else vocab))


def write_draft_model(writers: Writers, draft: ModelConfig, states: Sequence[Node] = ()) -> None:
    """A whole model, with the vocabulary of the model it drafts for, whose embedding may be padded otherwise."""
    vocab = writers(DRAFT).model.vocab
    write_body(writers(DRAFT, draft), vocab=vocab)
    writer = writers(DRAFT_HEAD, draft)
    _write_tokens_of(writer, write_logits(writer, write_rows(writer), vocab))


def _write_hidden(writer: Writer, num_streams: int = 1) -> Node:
    return writer.program.input("hidden", Type(writer.dtype, ("T", num_streams * writer.model.hidden)))


def _write_tokens_of(writer: Writer, logits: Node) -> None:
    """Tokens i64[R] of the model's vocabulary, drawn from logits as its own are, with the noise of the draw that they
    guess."""
    types = Type("i64", ("R",)), *[Type("fp32", ("R",))] * 2
    noise = [writer.program.input(name, type) for name, type in zip(NOISE, types, strict=True)]
    offsets = []
    if "d2t" in writer.model.weights:
        offsets = [W(writer.name("d2t"), Type("i64", logits.meta["type"].shape[1:]))]
    writer.program.output(writer.call(ops.gumbel_argmax, logits, *noise, *offsets, name="tokens"))


def kept_states(method: str | None, model: ModelConfig, draft: ModelConfig | None) -> Sequence[int]:
    """The layers whose input drafts read, besides what the head takes; that after the last one for its output."""
    if draft is not None and draft.eagle3 is not None:
        return find_aux_layers(draft.eagle3, model.layers)
    return (model.layers,) if method == "mtp" and mtp_model(model).streams.num > 1 else ()


def mtp_model(model: ModelConfig) -> ModelConfig:
    """The model as layers for multi-token prediction have it: of one stream, if only the body has several."""
    return model if model.streams.in_mtp else replace(model, streams=StreamsConfig())


# by method, of those with programs: from a writer of each program, the model that drafts, and the hidden states that
# the body gives for it
WRITERS: dict[str, Callable[[Writers, ModelConfig, Sequence[Node]], None]] = {
    "mtp": write_mtp,
    "eagle3": write_eagle3,
    "draft": write_draft_model,
}

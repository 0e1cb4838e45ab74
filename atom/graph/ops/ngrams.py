"""Ops of n-gram embeddings: hashed rows, and gates of streams (Qwen Team 2026).

    rows = ngrams(tokens, STATE("model.layers.1", i64[2], part="ngrams"), multipliers, sizes, starts, end=0)
    e = merge_heads(embedding(rows, W("table", bf16[320001536, 160])))
    gate = stream_gate(key, query, streams=4)

Lengths of n-grams are 2 to n; each is hashed by some heads to as many rows of the table as the head has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph.ops.base import divide, op
from atom.graph.ops.recurrent import recurrent
from atom.graph.recipes import State
from atom.graph.types import Type, need


def _ngrams(tokens: Type, state: State, multipliers: Type, sizes: Type, starts: Type, *, end: int) -> Type:
    need(tokens.dtype == "i64" and len(tokens.shape) == 1, f"tokens are {tokens}, not i64[T]")
    need(multipliers.dtype == "i64" and len(multipliers.shape) == 1, f"the multipliers are {multipliers}")
    before = int(multipliers.shape[0]) - 1
    need(before > 0, "an n-gram has 2 tokens or more")
    need(state.type == Type("i64", (before,)), f"the state is {state.type} of the {before} tokens before one")
    need(sizes == starts and sizes.dtype == "i64", f"sizes are {sizes}, starts {starts}")
    divide(sizes.shape[0], before)
    need(end >= 0, f"{end} is no token")
    return Type("i64", (tokens.shape[0], sizes.shape[0]))


@recurrent(_ngrams)
def ngrams(tokens: Tensor, state: Tensor, multipliers: Tensor, sizes: Tensor, starts: Tensor, *,
           end: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rows that the n-grams which end with each token are hashed to, by M heads for the n - 1 lengths.

    tokens i64[T], state i64[n - 1]: 1 + each of the tokens before, 0 for none, multipliers i64[n], sizes i64[M] and
    starts i64[M]: the rows that a head has, and the first of them -> i64[T, M]

    The hash of k tokens is the exclusive or of each times a multiplier, the newest's the first; its remainder by the
    size is the row. Tokens before `end`, and before the first one, count as `end`.
    """
    history, num = torch.cat((state, tokens + 1)), len(state)
    hashed, newer, rows = tokens * multipliers[0], None, []
    for back, (size, start) in enumerate(zip(sizes.chunk(num), starts.chunk(num), strict=True), 1):
        older = history[num - back : len(history) - back] - 1
        is_past = (older < 0) if newer is None else (older < 0) | (newer == end)
        newer = older.masked_fill(is_past, end)
        hashed = hashed ^ (newer * multipliers[back])
        rows.append(hashed.unsqueeze(1) % size + start)
    return torch.cat(rows, 1), history[len(tokens) :]


def _stream_gate(key: Type, query: Type, *, streams: int) -> Type:
    need(key == query, f"key is {key}, query {query}")
    divide(key.shape[-1], streams)
    return key.with_last(streams)


@op(_stream_gate)
def stream_gate(key: Tensor, query: Tensor, *, streams: int) -> Tensor:
    """key and query [T, S H] of S streams side by side -> [T, S], shares of what each takes, in float32, rounded once

    Of a stream's product of key and query over the root of H, the sigmoid of its root, which keeps the sign.
    """
    parts = (each.float().view(*each.shape[:-1], streams, -1) for each in (key, query))
    product = torch.linalg.vecdot(*parts) / (key.shape[-1] // streams) ** 0.5
    return torch.sigmoid(product.sign() * product.abs().clamp(min=LEAST).sqrt()).to(key.dtype)


LEAST = 1e-6  # that the size of a product counts as

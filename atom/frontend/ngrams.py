"""N-gram embeddings: what some streams take of a large table (Qwen Team 2026).

x = add_ngrams(writer, x, layer)            # ahead of the layer's blocks
sizes = head_rows(model.ngrams, layer)      # of the rows of each head
"""

from __future__ import annotations

import math
from itertools import islice

from torch.fx import Node

from atom.config import NgramsConfig
from atom.frontend.streams import mix
from atom.frontend.writer import Writer, required
from atom.graph import Full, LatestState, Recipe, Slice, Type, W, ops
from atom.graph.recipe_ranges import cat


def add_ngrams(writer: Writer, x: Node, layer: int) -> Node:
    """x [T, S H] of S streams -> itself and what they take, if the layer has n-grams

    A linear of the rows is shared among streams by gates, and has a convolution over the tokens before besides.
    """
    model, own = writer.model, writer.model.ngrams
    if layer + 1 not in own.layers:
        return x
    streams, width, hidden = model.streams.num, int(x.meta["type"].shape[-1]), model.hidden
    e = look_up(writer, own, layer)
    key = writer.linear(e, "ngram_key", width, False, layer)
    value = writer.linear(e, "ngram_value", hidden, False, layer)
    key = writer.norm(key, "ngram_key_norm", layer, name="key", groups=streams)
    query = writer.norm(x, "ngram_query_norm", layer, name="query", groups=streams)
    gate = writer.call(ops.stream_gate, key, query, streams=streams, name="gate")
    taken = mix(writer, value, gate, 1, "taken")
    normed = writer.norm(taken, "ngram_conv_norm", layer, name="normed", groups=streams)
    near = dilated_conv(writer, normed, own, layer)
    x = writer.call(ops.add, x, taken, name="x")
    total: Node = writer.call(ops.add, x, near, name="x")
    return total


def look_up(writer: Writer, own: NgramsConfig, layer: int) -> Node:
    """The rows of the table [T, dim] that the tokens up to each are hashed to."""
    sizes = head_rows(own, layer)
    stored = (("multipliers", own.size), ("sizes", len(sizes)), ("starts", len(sizes)))
    by = [W(writer.name(f"ngram_{name}", layer), Type("i64", (num,))) for name, num in stored]
    state = LatestState(writer.name("layer", layer), Type("i64", (own.size - 1,)), part="ngrams")
    rows = writer.call(ops.ngrams, writer.carried["tokens"], state, *by, end=required(own.end), name="rows")
    num, dim = math.ceil(sum(sizes) / own.multiple) * own.multiple, own.dim // len(sizes)
    name, step = writer.weight_name("ngram_table", layer), math.ceil(num / own.parts)
    parts = [W(name.replace("{part}", str(part)), Type(writer.dtype, (min(step, num - part * step), dim)))
             for part in range(math.ceil(num / step))]  # fmt: skip
    e = writer.call(ops.embedding, rows, cat(tuple(parts)), name="e")
    merged: Node = writer.call(ops.merge_heads, e, name="e")
    return merged


def dilated_conv(writer: Writer, x: Node, own: NgramsConfig, layer: int) -> Node:
    """A convolution [T, C] -> [T, C], and silu, of the last tokens that are a multiple of `size` before each."""
    channels, dilation = int(x.meta["type"].shape[-1]), own.size
    stored = writer.weight("ngram_conv", (channels, own.taps), layer)
    gap = Full(0.0, Type(writer.dtype, (channels, dilation - 1)))
    taps: list[Recipe] = [Slice(stored, 0, 1, 1)]
    for tap in range(1, own.taps):
        taps += [gap, Slice(stored, tap, tap + 1, 1)]
    state = LatestState(
        writer.name("layer", layer), Type(writer.dtype, ((own.taps - 1) * dilation, channels)), part="ngrams"
    )
    made: Node = writer.call(ops.causal_conv, x, state, cat(tuple(taps), 1), kind="silu", name="near")
    return made


def head_rows(own: NgramsConfig, layer: int) -> list[int]:
    """The rows of each head of a layer: primes from own.rows on, those of earlier layers left out."""
    heads = (own.size - 1) * own.heads
    first = heads * own.layers.index(layer + 1)
    return [*islice((number for number in range(own.rows, 1 << 62) if is_prime(number)), first, first + heads)]


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))

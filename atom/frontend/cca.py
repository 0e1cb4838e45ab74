"""Queries, keys and values of compressed convolutional attention (CCA).

    made = project_cca(writer, h, attention, layer)     # q [T, N, D], k and v [T, K, D] by name, ahead of rope

Figliolia et al. 2025. Queries and keys pass two convolutions, by channel and then by head, and the mean of both is
added to them; they have unit length, but for a number of each key head. The second half of the values is of the token
before.
"""

from __future__ import annotations

from torch.fx import Node

from atom.config import AttentionConfig
from atom.frontend.writer import Writer, required
from atom.graph import Full, LatestState, Recipe, Type, W, ops
from atom.graph.recipe_ranges import cat

LEAST_SQUARE = 1e-12  # that is added to the mean square of what gets unit length
HEAD_TAPS = 2  # tokens that the convolution by head reads


def project_cca(writer: Writer, h: Node, attention: AttentionConfig, layer: int) -> dict[str, Node]:
    heads, kv_heads, dim = attention.heads, required(attention.kv_heads), required(attention.head_dim)
    sizes = {"q": heads * dim, "k": kv_heads * dim}
    half = sizes["k"] // 2
    q, k, v, before = writer.linears(h, {**sizes, "v": half, "v_before": half}, attention.bias, layer)
    mixed, before = convolve(writer, q, k, before, attention, layer)
    mixed = writer.call(ops.add, mixed, means_of(writer, q, k, attention), name="mixed")
    q, k = writer.call(ops.split, mixed, sizes=[*sizes.values()], name=("q", "k"))
    v = writer.call(ops.join, v, before, name="v")
    q, k, v = (
        writer.call(ops.split_heads, x, heads=n, name=name)
        for x, n, name in ((q, heads, "q"), (k, kv_heads, "k"), (v, kv_heads, "v"))
    )
    ones = Full(1.0, Type(writer.dtype, (dim,)))
    q, k = (writer.call(ops.rms_norm, x, ones, eps=LEAST_SQUARE, name=x.name) for x in (q, k))
    temperatures = W(writer.name("cca_temperature", layer), Type(writer.dtype, (kv_heads, 1)))
    return {"q": q, "k": writer.call(ops.mul, k, temperatures, name="k"), "v": v}


def convolve(
    writer: Writer, q: Node, k: Node, before: Node, attention: AttentionConfig, layer: int
) -> tuple[Node, Node]:
    """q [T, N D] and k [T, K D] after both convolutions, joined, and `before` [T, U] of one token before.

    The second one finds the bias of the first ahead of the first token, not zeros: so that bias is added by the
    convolution that moves tokens, whose state is without it.
    """
    taps, heads = required(attention.cca_taps), attention.heads + required(attention.kv_heads)
    dim, half = required(attention.head_dim), int(before.meta["type"].shape[1])
    size = heads * dim
    joined = writer.call(ops.join, q, k, before, name="qkv")
    weight = writer.weight("cca_conv", (size, taps), layer)
    by_channel = causal_conv(writer, joined, layer, cat((weight, tap_of(writer, half, taps, 1))))
    mixed, before = writer.call(ops.split, by_channel, sizes=[size, half], name=("mixed", "before"))
    pair = writer.call(ops.join, *[mixed] * HEAD_TAPS, name="pair")
    moved = cat(tuple(tap_of(writer, size, HEAD_TAPS, ago) for ago in reversed(range(HEAD_TAPS))))
    bias = writer.weight("cca_conv", (size,), layer, "bias")
    pair = causal_conv(writer, pair, layer, moved, cat((bias,) * HEAD_TAPS))
    by_head = writer.weight("cca_head_conv", (size, dim, HEAD_TAPS), layer)
    bias = writer.weight("cca_head_conv", (size,), layer, "bias")
    return writer.call(ops.linear_by_head, pair, by_head, bias, heads=heads, name="mixed"), before


def causal_conv(writer: Writer, x: Node, layer: int, weight: Recipe, *bias: Recipe) -> Node:
    channels, taps = map(int, weight.type.shape)
    state = LatestState(writer.name("layer", layer), Type(writer.dtype, (taps - 1, channels)))
    made: Node = writer.call(ops.causal_conv, x, state, weight, *bias, kind=None, name="conv")
    return made


def tap_of(writer: Writer, channels: int, taps: int, ago: int) -> Recipe:
    """The taps [channels, taps] of a convolution that gives what was so many tokens ago."""
    of_tokens = (Full(float(tap == taps - 1 - ago), Type(writer.dtype, (channels, 1))) for tap in range(taps))
    return cat(tuple(of_tokens), 1)


def means_of(writer: Writer, q: Node, k: Node, attention: AttentionConfig) -> Node:
    """Of each query and its key the mean, and of the queries of a key the mean of these, joined: [T, (N + K) D]"""
    kv_heads = required(attention.kv_heads)
    group = attention.heads // kv_heads
    q, k = (writer.call(ops.split_heads, x, heads=kv_heads, name=x.name) for x in (q, k))
    repeated = writer.call(ops.mix_streams, k, Full(0.5, Type(writer.dtype, (group,))), streams=1, name="k")
    q = writer.call(ops.add, writer.scale(q, 0.5), repeated, name="q")
    k = writer.call(ops.mix_streams, q, Full(1 / group, Type(writer.dtype, (group,))), streams=group, name="k")
    joined: Node = writer.call(ops.join, *(writer.call(ops.merge_heads, x, name=x.name) for x in (q, k)), name="means")
    return joined

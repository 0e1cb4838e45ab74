"""Residual streams: how layers and blocks read hidden states and write to them.

    streams = STREAMS[model.streams.kind]
    states = streams.spread(writer, x)                                # of x [T, H]
    read, end = streams.connect_layer(writer, states, layer, own)     # once for each layer
    x, write = streams.connect_block(writer, read, place)             # x [T, H], once for each of its blocks
    read = write(y, h)                                                # y [T, H], what the block gives of h, x normed
    states = end(read)
    hidden = streams.merge(writer, states)                            # [T, H]

Only these functions know what states are. Of one stream, they are the hidden states, to which blocks add. Several lie
side by side in one value [T, S H], so that stages of a pipeline meet at it, as at any hidden states.
`ops.mix_streams` is what reads, mixes and writes them: sums of weighted streams, of which each token has its own
weights. Attention residuals are values of their own, since there are more of them in later layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import Node

from atom.config import Group, ModelConfig
from atom.frontend.per_layer_input import add_per_layer_input, per_layer_output
from atom.frontend.writer import Writer, required
from atom.graph import Apply, Full, Recipe, Repeat, Type, W, ops
from atom.graph.recipe_ranges import cat, narrow

LEAST_SQUARE = 1e-5  # that the mean square of a stream counts as, as transformers has it
SHARES = {  # kind of a residual gate -> functions of its vector: shares of what a block is added to, of what it gives
    "abs": ("rest_of_abs", "abs"),
    "sigmoid": ("rest_of_sigmoid", "sigmoid"),
    "given": (None, "scale"),
}

States = Any  # a Node, or `Sums`
End = Callable[[States], States]
Write = Callable[[Node, Node], States]  # y and h [T, H] -> states


class Place(NamedTuple):
    """Where a block is, or several that are added up."""

    layer: int
    number: int  # in the layer
    role: str  # which the names of its norms begin with
    group: Group


class Streams(NamedTuple):
    spread: Callable[[Writer, Node], States]  # of x [T, H]
    connect_layer: Callable[[Writer, States, int, Node | None], tuple[States, End]]  # states, a layer, its own input
    connect_block: Callable[[Writer, States, Place], tuple[Node, Write]]
    merge: Callable[[Writer, States], Node]  # to [T, H]


def keep(_writer: Writer, x: Node) -> Node:
    return x


def connect_one(writer: Writer, x: Node, layer: int, own: Node | None) -> tuple[Node, End]:
    """x [T, H] -> itself, and what ends the layer"""
    return x, lambda y: end_layer(writer, y, own, layer)


def end_layer(writer: Writer, x: Node, own: Node | None, layer: int) -> Node:
    """x [T, H] with what the layer's own input adds, and times the number that is stored for it, if there are any"""
    if own is not None:
        x = add_per_layer_input(writer, x, own, layer)
    if not writer.model.layer_scalar:
        return x
    scalar = W(writer.name("layer_scalar", layer), Type(writer.dtype, (1,)))
    scaled: Node = writer.call(ops.mul, x, scalar, name="x")
    return scaled


def connect_sum(writer: Writer, x: Node, place: Place) -> tuple[Node, Write]:
    """x [T, H] -> itself, and its sum with what a block gives, each with a share that the model may have"""
    model = writer.model

    def write(y: Node, h: Node) -> Node:
        base = kept(writer, h if model.residual == "normed" else x, place)
        if model.residual == "depth_scaled":
            num_terms = num_blocks_before(model, place.layer) + place.number + 2  # the embedding's, and this one
            base = writer.scale(base, ((num_terms - 1) / num_terms) ** 0.5)
            y = writer.scale(y, num_terms**-0.5)
        total: Node = writer.call(ops.add, *weigh_residual(writer, base, y, place), name="x")
        return total

    return x, write


def kept(writer: Writer, x: Node, place: Place) -> Node:
    """x [T, H], times what model.block_scales has for what a block is added to"""
    names, all_scales = place.group.names, writer.model.block_scales
    scales = {name: all_scales[name] for name in names if name in all_scales}
    by = math.prod(each.kept for each in scales.values())
    x = writer.scale(x, None if by == 1 else by)
    for name in (name for name, each in scales.items() if each.stored):
        x = writer.affine(x, f"{name}_kept", place.layer)
    return x


def num_blocks_before(model: ModelConfig, layer: int) -> int:
    """The number of blocks, or groups of these, that layers before a layer add to the hidden states."""
    return sum(len(model.groups_of(each)) for each in range(layer))


def weigh_residual(writer: Writer, x: Node, y: Node, place: Place) -> tuple[Node, Node]:
    """x and y [T, H], what a block is added to and what it gives, times the shares of channels that a model may have"""
    gate = writer.model.residual_gate
    if gate.kind == "none":
        return x, y
    vector = W(writer.name(f"{place.role}_residual", place.layer), Type("fp32", (writer.model.hidden,)))

    def weighed(x: Node, function: str | None) -> Node:
        return x if function is None else writer.call(ops.mul, x, Apply(vector, function, gate.factor), name=x.name)

    of_kept, of_given = SHARES[gate.kind]
    return weighed(x, of_kept), weighed(y, of_given)


def spread_altup(writer: Writer, x: Node) -> Node:
    """x [T, H] -> itself and a linear of it for each further stream, as long as x"""
    joined: Node = writer.call(ops.join, x, *map_others(writer, "altup_in", [x] * others_of(writer), x), name="x")
    return joined


def merge_altup(writer: Writer, x: Node) -> Node:
    """The mean of the first stream and a linear of each other one, as long as the first; -> [T, H]"""
    first, *others = writer.call(ops.split, x, sizes=[writer.model.hidden] * writer.model.streams.num,
                                 name=names_of(writer, "x"))  # fmt: skip
    made = [first, *map_others(writer, "altup_out", others, first)]
    return writer.scale(functools.reduce(lambda a, b: writer.call(ops.add, a, b, name="x"), made), 1 / len(made))


def connect_altup(writer: Writer, x: Node, layer: int, own: Node | None) -> tuple[Node, End]:
    """Alternating updates (Baykal et al. 2023): a layer reads the first stream as all together predict it.

    What it makes of that corrects the predictions of all streams. The layer's own input is read by the first one, and
    added to the others.
    """
    num, hidden = writer.model.streams.num, writer.model.hidden
    active, _ = writer.call(ops.split, x, sizes=[hidden, hidden * (num - 1)], name=("active", "others"))
    change = mix(writer, x, coefficients(writer, active, "altup_predict", num * num, layer), num, "change")
    predicted = writer.call(ops.add, x, change, name="predicted")
    read, _ = writer.call(ops.split, predicted, sizes=[hidden, hidden * (num - 1)], name=("read", "others"))

    def end(y: Node) -> Node:
        weights = coefficients(writer, y, "altup_correct", num, layer, Full(1.0, Type(writer.dtype, (num,))))
        news = writer.call(ops.add, y, writer.scale(read, -1.0), name="news")
        corrected: Node = writer.call(ops.add, predicted, mix(writer, news, weights, 1, "change"), name="x")
        if own is None:
            return corrected
        first, _ = writer.call(ops.split, corrected, sizes=[hidden, hidden * (num - 1)], name=("first", "others"))
        factors = W(writer.name("altup_scale", layer), Type(writer.dtype, (hidden,)))
        y = per_layer_output(writer, writer.call(ops.mul, first, factors, name="first"), own, layer)
        shares = cat((Full(0.0, Type(writer.dtype, (1,))), Full(1.0, Type(writer.dtype, (num - 1,)))))
        added: Node = writer.call(ops.add, corrected, mix(writer, y, shares, 1, "change"), name="x")
        return added

    return read, end


def coefficients(writer: Writer, x: Node, role: str, num: int, layer: int, *bias: Recipe) -> Node:
    """x [T, H] -> [T, num], a linear of what a router gives of x for each stream, from -1 to 1"""
    streams, hidden = writer.model.streams.num, writer.model.hidden
    h = writer.scale(writer.norm(x, "altup_router_norm", layer), 1 / hidden)
    table = writer.matrix("altup_router", (streams, hidden), layer)
    routed = writer.multiply(h, table, role="altup_router", layer=layer, name="routed")
    routed = writer.call(ops.softcap, routed, cap=1.0, name="routed")
    return writer.multiply(routed, writer.matrix(role, (num, streams), layer), *bias, role=role, layer=layer)


def spread_hyper(writer: Writer, x: Node) -> Node:
    """x [T, H] -> itself in each stream"""
    num = writer.model.streams.num
    return mix(writer, x, Full(1.0, Type(writer.dtype, (num,))), 1, "x")


def connect_all(_writer: Writer, x: Node, _layer: int, _own: Node | None) -> tuple[Node, End]:
    """The streams as they are, of layers whose blocks connect each by itself."""
    return x, lambda y: y


def connect_hyper(writer: Writer, x: Node, place: Place) -> tuple[Node, Write]:
    """Hyper-connections (Zhu et al. 2024): a block reads a sum of the streams, and all take a share of what it gives.

    With rounds, the streams are mixed by a matrix that is about doubly stochastic (Xie et al. 2026). All weights are
    of the streams themselves.
    """
    streams = writer.model.streams
    num, names = streams.num, ["read_by", "write_by", "mix_by"]
    sizes = [num, num, num * num] if streams.rounds else [num, num]
    logits = stream_logits(writer, x, place.role, sizes, place.layer)
    read_by, write_by, *mix_by = writer.call(ops.split, logits, sizes=sizes, name=tuple(names[: len(sizes)]))
    write_by = writer.scale(sigmoid(writer, write_by), streams.write_scale)
    write_by = shift(writer, write_by, streams.write_eps)
    kept = x
    for each in mix_by:
        shares = writer.call(ops.sinkhorn, each, streams=num, rounds=streams.rounds, eps=streams.eps, name="mix_by")
        kept = mix(writer, x, shares, num, "kept")

    def write(y: Node, _h: Node) -> Node:
        total: Node = writer.call(ops.add, kept, mix(writer, y, write_by, 1, "news"), name="x")
        return total

    return mix(writer, x, shift(writer, sigmoid(writer, read_by), streams.eps), num, "read"), write


def merge_hyper(writer: Writer, x: Node, role: str = "head", layer: int | None = None) -> Node:
    """The mean of the streams, or a sum of them as blocks read them; -> [T, H]"""
    streams = writer.model.streams
    if streams.merge == "mean":
        return mix(writer, x, Full(1 / streams.num, Type("fp32", (streams.num,))), streams.num, "x")
    weights = sigmoid(writer, stream_logits(writer, x, role, [streams.num], layer))
    return mix(writer, x, shift(writer, weights, streams.eps), streams.num, "x")


def connect_gated(writer: Writer, x: Node, place: Place) -> tuple[Node, Write]:
    """Gated residual streams (Qwen Team 2026): a block reads the mean of the streams, normed and gated by channel, and
    all take a share of what it gives, by what the norm gives, too."""
    streams, role = writer.model.streams, f"gated_{place.role}"
    normed, read = read_gated(writer, x, role, place.layer)
    weight = writer.matrix(f"{role}_write", (streams.num, streams.num * writer.model.hidden), place.layer)
    write_by = writer.multiply(normed, weight, role=f"{role}_write", layer=place.layer, name="write_by")
    write_by = sigmoid(writer, writer.scale(write_by, 1 / streams.num))
    write_by = writer.scale(write_by, streams.write_scale)

    def write(y: Node, _h: Node) -> Node:
        total: Node = writer.call(ops.add, x, mix(writer, y, write_by, 1, "news"), name="x")
        return total

    return read, write


def merge_gated_streams(writer: Writer, x: Node) -> Node:
    """The streams as a block reads them; -> [T, H]"""
    return read_gated(writer, x, "gated_head", None)[1]


def read_gated(writer: Writer, x: Node, role: str, layer: int | None) -> tuple[Node, Node]:
    """x [T, S H] -> itself, each stream normed, and the mean [T, H] of that times gates, which are two linears of it"""
    streams, width = writer.model.streams, int(x.meta["type"].shape[-1])
    normed = writer.norm(x, f"{role}_norm", layer, name="normed", groups=streams.num)
    low = writer.linear(normed, f"{role}_down", required(streams.rank), False, layer)
    low = writer.call(ops.activate, writer.scale(low, 1 / streams.num), kind="silu", name="low")
    gate = sigmoid(writer, writer.linear(low, f"{role}_up", width, False, layer))
    gated = writer.call(ops.mul, gate, normed, name="gated")
    return normed, mix(writer, gated, Full(1 / streams.num, Type("fp32", (streams.num,))), streams.num, "read")


def stream_logits(writer: Writer, x: Node, role: str, sizes: list[int], layer: int | None) -> Node:
    """fp32[T, the sum of sizes] of the streams x [T, S H]; outputs of one size share a scale"""
    num, shape = sum(sizes), x.meta["type"].shape
    weight, scale, bias = (
        W(writer.name(f"hyper_{role}_{part}", layer), Type("fp32", dims))
        for part, dims in (("weight", (num, shape[-1])), ("scale", (len(sizes),)), ("bias", (num,)))
    )
    scales = cat(tuple(Repeat(narrow(scale, n, n + 1), size, 0, size) for n, size in enumerate(sizes)))
    logits: Node = writer.call(ops.stream_logits, x, weight, scales, bias, eps=writer.model.norm.eps, name="logits")
    return logits


def sigmoid(writer: Writer, x: Node) -> Node:
    weights: Node = writer.call(ops.activate, x, kind="sigmoid", name=x.name)
    return weights


def shift(writer: Writer, x: Node, by: float) -> Node:
    """x [T, S] and a number"""
    if not by:
        return x
    shifted: Node = writer.call(ops.add, x, Full(by, Type("fp32", x.meta["type"].shape[-1:])), name=x.name)
    return shifted


def mix(writer: Writer, x: Node, weights: Node | Recipe, streams: int, name: str) -> Node:
    mixed: Node = writer.call(ops.mix_streams, x, weights, streams=streams, name=name)
    return mixed


def map_others(writer: Writer, role: str, others: list[Node], like: Node) -> list[Node]:
    """A linear of each stream but the first, which has the root mean square of like [T, H]"""
    made = []
    for stream, x in enumerate(others):
        y = replace(writer, stream=stream).linear(x, role, writer.model.hidden, False)
        made.append(writer.call(ops.match_rms, y, like, eps=LEAST_SQUARE, name="x"))
    return made


def others_of(writer: Writer) -> int:
    return writer.model.streams.num - 1


def names_of(writer: Writer, name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{stream}" for stream in range(writer.model.streams.num))


class Sums(NamedTuple):
    """What blocks gave, added up."""

    kept: tuple[Node, ...]  # the embedding [T, H], then the sum of each run of layers
    last: Node | None  # of the layers since then; None: no block has given anything


def spread_sums(_writer: Writer, x: Node) -> Sums:
    return Sums((), x)


def keep_layer(_writer: Writer, sums: Sums, _layer: int, _own: Node | None) -> tuple[Sums, End]:
    return sums, lambda sums: sums


def connect_residuals(writer: Writer, sums: Sums, place: Place) -> tuple[Node, Write]:
    """Attention residuals (Kimi Team 2026): a block reads a softmax over sums, and adds to the last one.

    The first block of each run of layers begins a sum.
    """
    if place.number == 0 and place.layer % required(writer.model.streams.layers) == 0:
        sums = Sums((*sums.kept, required(sums.last)), None)

    def write(y: Node, _h: Node) -> Sums:
        last = y if sums.last is None else writer.call(ops.add, sums.last, y, name="x")
        return sums._replace(last=last)

    return attend(writer, sums, place.role, place.layer), write


def merge_sums(writer: Writer, sums: Sums) -> Node:
    return attend(writer, sums, "final")


def attend(writer: Writer, sums: Sums, role: str, layer: int | None = None) -> Node:
    """The sums, weighted -> [T, H]"""
    read, hidden = [*sums.kept, *([] if sums.last is None else [sums.last])], writer.model.hidden
    if len(read) == 1:
        return read[0]
    norm = W(writer.name(f"{role}_mix_norm", layer), Type(writer.dtype, (hidden,)))
    query = writer.matrix(f"{role}_mix", (1, hidden), layer)
    eps = writer.model.norm.eps
    attended: Node = writer.call(ops.attend_residuals, norm, query, *read, eps=eps, name="read")
    return attended


STREAMS = {
    "one": Streams(keep, connect_one, connect_sum, keep),
    "altup": Streams(spread_altup, connect_altup, connect_sum, merge_altup),
    "hyper": Streams(spread_hyper, connect_all, connect_hyper, merge_hyper),
    "gated": Streams(spread_hyper, connect_all, connect_gated, merge_gated_streams),
    "attention_residuals": Streams(spread_sums, keep_layer, connect_residuals, merge_sums),
}

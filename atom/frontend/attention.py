"""The attention blocks of a layer, by `kind`: h [T, H] -> [T, H]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from atom.config import AttentionConfig, CompressConfig, IndexConfig, ModelConfig, RopeConfig
from atom.frontend.cca import project_cca
from atom.frontend.compressed import pool_by_gate, write_runs
from atom.frontend.mlp import mlp_of
from atom.frontend.rope import Rotary, rope_freqs, rotary_scale, rotate, rotate_halves, rotate_last
from atom.frontend.writer import Writer, required
from atom.graph import KV, Full, LearnedFreqs, Recipe, Repeat, Type, W, ops
from atom.graph.ops.latent import latent_entry
from atom.graph.ops.sparse import index_entry
from atom.graph.recipe_ranges import cat
from atom.graph.recipes import Measured


def gqa(writer: Writer, h: Node, attention: AttentionConfig, rotary: Rotary | None, layer: int) -> Node:
    """Grouped-query attention (Ainslie et al. 2023)."""
    model, dim = writer.model, required(attention.head_dim)
    if writer.segments is not None:
        return segmented(writer, h, attention, rotary, layer)
    value_dim, window, kv_layer = attention.value_dim or dim, window_of(model, attention, layer), model.kv_layer(layer)
    cache = KV(writer.name("layer", kv_layer), Type(writer.cache_dtype, (2, required(attention.kv_heads), dim)), window)
    if attention.cca_taps is None:
        made, gate = project(writer, h, attention, layer, reads_kv=kv_layer != layer)
    else:
        made, gate = project_cca(writer, h, attention, layer), None
    made = rotate_heads(writer, made, attention, rotary, layer)
    selected = choose(writer, h, attention, rotary, layer)
    if value_dim < dim and "v" in made:  # a cache keeps keys and values of one size
        made["v"] = writer.call(ops.pad, made["v"], size=dim, name="v")
    if kv_layer != layer:
        made["k"], made["v"] = kept_in(writer, cache)
    chunked = {"chunked": True} if attention.chunked and window is not None else {}
    block = None if selected is None else required(attention.index).block
    blocks = {} if block is None else {"block": block}
    more = more_of_scores(writer, attention, cache, layer, kv_layer, selected)
    a = writer.call(
        ops.attention, *map(made.__getitem__, "qkv"), cache, *more, scale=required(attention.scale), window=window,
        softcap=attention.softcap, **chunked, **blocks, name="a",
    )  # fmt: skip
    if value_dim < dim:
        a, _ = writer.call(ops.split, a, sizes=[value_dim, dim - value_dim], name=("a", "padding"))
    if attention.o_norm == "per_head":
        a = writer.norm(a, "o_norm", layer, name="a")
    a = merge_gated(writer, a, h, attention, layer, gate)
    if attention.o_norm == "whole":
        a = writer.norm(a, "o_norm", layer, name="a")
    return writer.linear(a, "o", model.hidden, attention.o_bias, layer)


def segmented(writer: Writer, h: Node, attention: AttentionConfig, rotary: Rotary | None, layer: int) -> Node:
    """Attention of patches to all of their image, or window."""
    made, _ = project(writer, h, attention, layer, reads_kv=False)
    made = rotate_heads(writer, made, attention, rotary, layer)
    starts, window_starts = required(writer.segments)
    if writer.model.layer_type(layer) == "sliding_attention":
        starts = required(window_starts)
    scale, qkv = required(attention.scale), map(made.__getitem__, "qkv")
    a = writer.call(ops.segment_attention, *qkv, starts, scale=scale, name="a")
    a = writer.call(ops.merge_heads, a, name="a")
    return writer.linear(a, "o", writer.model.hidden, attention.o_bias, layer)


def project(
    writer: Writer, h: Node, attention: AttentionConfig, layer: int, *, reads_kv: bool
) -> tuple[dict[str, Node], Node | None]:
    """q [T, N, D], k [T, K, D] and v [T, K, U] by name, and the gate [T, N D] that is stored with q, if there is one.

    reads_kv: there is q only, since the layer reads the KV of another one
    """
    heads, kv_heads, dim = attention.heads, required(attention.kv_heads), required(attention.head_dim)
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * (attention.value_dim or dim)}
    rows = {role: rows[role] for role in attention.qkv_order if role == "q" or not reads_kv}
    if attention.k_is_v:
        rows.pop("v", None)
    made: dict[str, Node] = {}
    gate: Node | None = None
    if attention.gate == "query":  # one stored tensor has queries and gates of the first head, then of the next
        made["q"], gate = writer.linears(h, {"q": rows.pop("q"), "q_gate": heads * dim}, attention.bias, layer, heads)
        made |= zip(rows, writer.linears(h, rows, attention.bias, layer), strict=True)
    else:
        made |= zip(rows, writer.linears(h, rows, attention.bias, layer, attention.qkv_chunks), strict=True)
    made = {role: made[role] for role in "qkv" if role in made}
    if attention.adapter_rank is not None:
        made = dict(zip(made, writer.adapt(h, attention.adapter_rank, layer, **made), strict=True))
    if attention.qk_norm == "whole":
        made |= norm_qk(writer, made, layer)
    if attention.clip is not None:
        made = {name: writer.call(ops.clamp, x, limit=attention.clip, name=name) for name, x in made.items()}
    for name, x in made.items():
        made[name] = writer.call(ops.split_heads, x, heads=heads if name == "q" else kv_heads, name=name)
    if "k" in made:
        made.setdefault("v", made["k"])
    return made, gate


def rotate_heads(
    writer: Writer, made: dict[str, Node], attention: AttentionConfig, rotary: Rotary | None, layer: int
) -> dict[str, Node]:
    """q, k and v with the norms of heads and the rope."""
    if attention.qk_norm == "per_head":
        made |= norm_qk(writer, made, layer, attention.qk_norm_weight)
    if rotary is not None:
        made["q"] = rotate_halves(writer, made["q"], rotary.queries, rotary, "q")
        if "k" in made:
            made["k"] = rotate_halves(writer, made["k"], rotary.keys, rotary, "k")
    if attention.qk_norm == "behind_rope":
        made |= norm_qk(writer, made, layer, attention.qk_norm_weight)
    if "q" in writer.model.channel_scales:
        q = writer.scale_channels(writer.call(ops.merge_heads, made["q"], name="q"), "q", layer)
        made["q"] = writer.call(ops.split_heads, q, heads=attention.heads, name="q")
    if attention.v_norm and "v" in made:
        made["v"] = writer.norm(made["v"], "v_norm", layer, "v", "none")
    return made


def norm_qk(writer: Writer, made: dict[str, Node], layer: int, weight_of_heads: str = "shared") -> dict[str, Node]:
    """q and k, normed; weight_of_heads: see `Writer.norm`"""
    names = [name for name in "qk" if name in made]
    return {name: writer.norm(made[name], f"{name}_norm", layer, name, weight_of_heads) for name in names}


def more_of_scores(
    writer: Writer, attention: AttentionConfig, cache: KV, layer: int, kv_layer: int, selected: Node | None
) -> list[Any]:
    """Further arguments of `ops.attention`, to the last one: sinks, scales of keys and values in fp8, slopes, ends, and
    what is selected."""
    sinks = sinks_of(writer, attention, layer)
    roles = ("k_scale", "v_scale")
    is_scaled = cache.type.dtype == "fp8_e4m3"
    scales = [scale_of(writer, role, kv_layer) if is_scaled else None for role in roles]
    slopes = None
    if attention.alibi != "none":
        slopes = alibi_slopes(attention.heads, required(attention.scale) if attention.alibi == "scaled" else 1.0)
    more = [sinks, *scales, slopes, writer.ends.get(writer.model.layer_type(layer) or ""), selected]
    return without_last_nones(more)


def without_last_nones(args: list[Any]) -> list[Any]:
    """Arguments of an op to the last one that is given."""
    return args[: max((place for place, arg in enumerate(args, 1) if arg is not None), default=0)]


def sinks_of(writer: Writer, attention: AttentionConfig, layer: int) -> Recipe | None:
    """The sinks [N] of a layer, if it has some."""
    return W(writer.name("sinks", layer), Type(writer.dtype, (attention.heads,))) if attention.sinks else None


def choose(writer: Writer, h: Node, attention: AttentionConfig, rotary: Rotary | None, layer: int) -> Node | None:
    """What a layer's queries attend to, by heads that are normed and rotated as the attention's are: blocks
    i32[T, G, top_k], or tokens i32[T, 1, k]; None: all."""
    index = attention.index
    if index is None or (index.layers is not None and index.layers[writer.model.layer_like(layer)] == "none"):
        return None
    rows = {"index_q": index.heads * index.dim, "index_k": index.dim}
    q, k = writer.linears(h, rows, False, layer)
    if index.every > 1:
        k = mean_of_runs(writer, k, index.every, layer)
    rotations = {"index_q": rotary and rotary.keys, "index_k": rotary and (rotary.runs or rotary.keys)}
    made: dict[str, Node] = {}
    for role, x in {"index_q": q, "index_k": k}.items():
        x = writer.call(ops.split_heads, x, heads=rows[role] // index.dim, name=role)
        x = writer.norm(x, f"{role}_norm", layer, role) if attention.qk_norm == "per_head" else x
        made[role] = x if rotary is None else rotate(writer, x, rotations[role], rotary.interleaved, role)
    k = writer.call(ops.merge_heads, made["index_k"], name="index_k")
    entry, every = index_entry(writer.cache_dtype, index.dim), None if index.every == 1 else index.every
    cache = KV(writer.name("layer", layer), entry, every=every, part="index")
    if every is not None:
        by = {"top_k": index.top_k, "every": every}
        runs = writer.call(ops.index_topk, made["index_q"], k, None, cache, **by, name="runs")
        return tokens_of_runs(writer, runs, every)
    local = {} if index.local == 1 else {"local": index.local}
    chosen: Node = writer.call(
        ops.index_blocks, made["index_q"], k, cache, block=index.block, top_k=index.top_k, **local, name="selected"
    )
    return chosen


def mean_of_runs(writer: Writer, k: Node, every: int, layer: int) -> Node:
    """k [T, D] -> [T, D], of the last token of each run the mean of its keys (Qwen Team 2026)"""
    kept = KV(writer.name("layer", layer), Type(writer.dtype, (1, *k.meta["type"].shape[1:])), every, part="index_runs")
    pooled: Node = writer.call(ops.compress, k, None, None, kept, every=every, name="index_k")
    return pooled


def alibi_slopes(heads: int, scale: float) -> Recipe:
    """Slopes fp32[heads] (Press et al. 2022): a geometric series, of heads that are no power of two two of them."""
    power = 1 << (heads.bit_length() - 1)
    steps = [n / power for n in range(1, power + 1)] + [(2 * n + 1) / (2 * power) for n in range(heads - power)]
    return cat(tuple(Full(2 ** (-8 * step) * scale, Type("fp32", (1,))) for step in steps))


def merge_gated(
    writer: Writer, a: Node, h: Node, attention: AttentionConfig, layer: int, gate: Node | None = None
) -> Node:
    """a [T, N, V] -> [T, N V], times the gate that the block has

    h: what the block reads [T, H]
    gate: that was stored with q [T, N V], if there is one
    """
    heads, value_dim = attention.heads, int(a.meta["type"].shape[-1])
    if attention.gate == "head":
        by_head = writer.linear(h, "o_gate", heads, False, layer)
        a = weigh(writer, a, writer.call(ops.split_heads, by_head, heads=heads, name="gate"), attention)
    a = writer.call(ops.merge_heads, a, name="a")
    if attention.gate == "element":
        gate = gate_by_element(writer, h, attention, value_dim, layer)
    return a if gate is None else weigh(writer, a, gate, attention)


def gate_by_element(writer: Writer, h: Node, attention: AttentionConfig, dims: int, layer: int) -> Node:
    """The gate [T, N dims] that a linear of its own gives; its bias, if any, is a number for each head."""
    rows, bias = attention.heads * dims, None
    if attention.gate_bias:
        by_head = W(writer.name("o_gate_bias", layer), Type(writer.dtype, (attention.heads,)))
        bias = Repeat(by_head, dims, 0, rows)
    return writer.scale_channels(writer.linear(h, "o_gate", rows, False, layer, bias), "o_gate", layer)


def weigh(writer: Writer, a: Node, gate: Node, attention: AttentionConfig) -> Node:
    """a [...] times its activated gate, of one shape or with one number in the last dim"""
    weights = writer.call(ops.activate, gate, kind=attention.gate_act, name="gate")
    weighed: Node = writer.call(ops.mul, a, weights, name="a")
    return weighed


def kept_in(writer: Writer, cache: KV) -> tuple[Node, Node]:
    """The keys and values that an earlier layer gives to its KV, or its latents and rotated keys."""
    before = {ops.attention: 1, ops.mla_attention: 2}  # arguments ahead of both, which the cache follows
    calls = ((before[node.target], node.args) for node in writer.program.nodes if node.target in before)
    name = writer.prefix + cache.name
    k, v = next(
        args[at : at + 2] for at, args in calls if any(isinstance(each, KV) and each.name == name for each in args)
    )
    return k, v


def scale_of(writer: Writer, role: str, layer: int) -> Recipe:
    """The scale of a layer's keys or values in fp8: the checkpoint's, or one that a start measures."""
    if role in writer.model.weights:
        return W(writer.name(role, layer), Type("fp32", (1,)))
    return Measured(f"{writer.name('layer', layer)}.{role}")


def mla(writer: Writer, h: Node, attention: AttentionConfig, rotary: Rotary | None, layer: int) -> Node:
    """Multi-head latent attention (DeepSeek-AI 2024)."""
    model, kv_layer = writer.model, writer.model.kv_layer(layer)
    heads, rank, rotated = attention.heads, required(attention.kv_rank), required(attention.rope_dim)
    plain, value = required(attention.nope_dim), required(attention.value_dim)
    if rotary is None and not attention.no_rope_key:
        plain, rotated = plain + rotated, 0
    q_a, sizes = None, {"q": plain, "q_rope": rotated}
    if attention.gate == "query":
        sizes["gate"] = value
    rows = heads * sum(sizes.values())
    if attention.q_rank is None:
        q = writer.linear(h, "q", rows, False, layer)
    else:
        low = writer.linear(h, "q_a", attention.q_rank, attention.bias, layer)
        read = q_a = writer.norm(low, "q_a_norm", layer, name="q_a")
        if attention.q_joined:
            read = writer.call(ops.join, q_a, low, name="q_a")
        q = writer.linear(read, "q_b", rows, False, layer)
    q = writer.call(ops.split_heads, q, heads=heads, name="q")
    if attention.ssmax:
        q = scale_by_position(writer, q, "", layer)
    q, q_rope, *gates = writer.call(ops.split, q, sizes=[*sizes.values()], name=tuple(sizes))
    window, entry = window_of(model, attention, layer), latent_entry(writer.cache_dtype, writer.dtype, rank, rotated)
    cache = KV(writer.name("layer", kv_layer), entry, window)
    is_own = kv_layer == layer
    latent, k_rope = make_latent(writer, h, attention, rotated, layer) if is_own else kept_in(writer, cache)
    if rotary is not None:
        q = rotate(writer, q, rotary.grown, rotary.interleaved, "q")
        q_rope = rotate(writer, q_rope, rotary.queries, rotary.interleaved, "q_rope")
        k_rope = rotate(writer, k_rope, rotary.keys, rotary.interleaved, "k_rope") if is_own else k_rope
    more: list[Any] = [scale_of(writer, "k_scale", kv_layer) if cache.type.dtype == "fp8_e4m3" else None, None]
    if attention.index is not None:
        more[1] = choose_entries(writer, h, q_a, attention, rotary, layer)
    more.append(sinks_of(writer, attention, layer))
    kv_b = writer.stored(writer.weight_name("kv_b", layer), (heads * (plain + value), rank))
    attributes = {"scale": required(attention.scale)} | ({} if window is None else {"window": window})
    args = q, q_rope, latent, k_rope, kv_b, cache, *without_last_nones(more)
    a = writer.call(ops.mla_attention, *args, **attributes, name="a")
    gate = writer.call(ops.merge_heads, gates[0], name="gate") if gates else None
    return writer.linear(merge_gated(writer, a, h, attention, layer, gate), "o", model.hidden, attention.o_bias, layer)


def make_latent(writer: Writer, h: Node, attention: AttentionConfig, rotated: int, layer: int) -> tuple[Node, Node]:
    """The latent [T, L] of keys and values, and the key [T, 1, rotated] that all heads share, ahead of its rope."""
    rank = required(attention.kv_rank)
    kv_a = writer.linear(h, "kv_a", rank + rotated, attention.bias, layer)
    latent, k_rope = writer.call(ops.split, kv_a, sizes=[rank, rotated], name=("latent", "k_rope"))
    latent = writer.norm(latent, "kv_a_norm", layer, name="latent")
    latent = writer.scale(latent, attention.latent_scale)
    k_rope = writer.call(ops.split_heads, k_rope, heads=1, name="k_rope")
    if attention.qk_norm == "rotated_key":
        k_rope = writer.norm(k_rope, "k_rope_norm", layer, name="k_rope")
    return latent, k_rope


def scale_by_position(writer: Writer, q: Node, prefix: str, layer: int) -> Node:
    """q [T, N, D] times what its head's stored numbers, roles after a prefix, make of the position (Nakanishi 2025)"""
    positions = writer.program.input("positions", Type("i64", ("T",)))
    by_head = Type("fp32", (int(q.meta["type"].shape[1]),))
    scale, bias = (W(writer.name(f"{prefix}ssmax_{part}", layer), by_head) for part in ("scale", "bias"))
    scaled: Node = writer.call(ops.scale_by_position, q, positions, scale, bias, name=q.name)
    return scaled


def choose_entries(
    writer: Writer, h: Node, q_a: Node | None, attention: AttentionConfig, rotary: Rotary | None, layer: int
) -> Node:
    """The tokens i32[T, 1, k] that a layer's queries attend to, or those that an earlier layer chose.

    q_a: the normed latent of queries, which an indexer reads that reads no hidden states
    """
    index: IndexConfig = required(attention.index)
    model, made_by = writer.model, ops.index_topk if index.every == 1 else ops.run_tokens
    is_listed = index.layers is not None and layer < model.layers  # a layer that drafts has an indexer of its own
    if is_listed and required(index.layers)[model.layer_like(layer)] == "shared":
        return next(node for node in reversed(writer.program.nodes) if node.target is made_by)
    read = required(q_a) if index.reads == "latent" else norm_of_index(writer, h, "index_q_norm", index.eps, layer)
    q = writer.call(ops.split_heads, writer.linear(read, "index_q", index.heads * index.dim, False, layer),
                    heads=index.heads, name="index_q")  # fmt: skip
    if attention.ssmax:
        q = scale_by_position(writer, q, "index_", layer)
    k = norm_of_index(writer, writer.linear(h, "index_k", index.dim, False, layer), "index_k_norm", index.eps, layer)
    k = writer.call(ops.split_heads, k, heads=1, name="index_k")
    if rotary is not None and rotary.keys is not None:
        turn = rotate_last if index.last else rotate
        q, k = (turn(writer, x, rotary.keys, index.interleaved, f"index_{n}") for n, x in (("q", q), ("k", k)))
    k = writer.call(ops.merge_heads, k, name="index_k")
    weights = writer.linear(h, "index_weights", index.heads, False, layer)
    entry = index_entry(writer.cache_dtype, index.dim)
    if index.every == 1:
        cache = KV(writer.name("layer", layer), entry, part="index")
        chosen: Node = writer.call(ops.index_topk, q, k, weights, cache, top_k=index.top_k, name="selected")
        return chosen
    gate = writer.linear(h, "index_run_gate", index.dim, False, layer)
    k = pool_by_gate(writer, k, gate, "index_run", CompressConfig(every=index.every), layer)
    cache = KV(writer.name("layer", layer), entry, every=index.every, part="index")
    runs = writer.call(ops.index_topk, q, k, weights, cache, top_k=index.top_k, every=index.every, name="runs")
    return tokens_of_runs(writer, runs, index.every)


def norm_of_index(writer: Writer, x: Node, role: str, eps: float, layer: int) -> Node:
    """x [T, C] by a layer norm with a bias"""
    norm = (writer.weight(role, (int(x.meta["type"].shape[-1]),), layer, part) for part in ("weight", "bias"))
    normed: Node = writer.call(ops.layer_norm, x, *norm, eps=eps, name=role.removesuffix("_norm"))
    return normed


def tokens_of_runs(writer: Writer, runs: Node, every: int) -> Node:
    """The tokens i32[T, 1, k] of the runs that are chosen, and those after the last whole run."""
    positions = writer.program.input("positions", Type("i64", ("T",)))
    tokens: Node = writer.call(ops.run_tokens, runs, positions, every=every, name="selected")
    return tokens


def mqa(writer: Writer, h: Node, attention: AttentionConfig, rotary: Rotary | None, layer: int) -> Node:
    """Shared key-value attention (DeepSeek-AI 2026): one head of keys, which are values, too.

    Values are rotated with them, so the output is turned back. Groups of its heads have a first linear each.
    """
    heads, dim, groups = attention.heads, required(attention.head_dim), attention.o_groups
    q_rank, o_rank = required(attention.q_rank), required(attention.o_rank)
    q_a, kv = writer.linears(h, {"q_a": q_rank, "kv": dim}, attention.bias, layer)
    q_a = writer.norm(q_a, "q_a_norm", layer, name="q_a")
    q = writer.call(ops.split_heads, writer.linear(q_a, "q_b", heads * dim, False, layer), heads=heads, name="q")
    q = writer.norm(q, "q_b_norm", layer, name="q", weight_of_heads="none")
    kv = writer.call(ops.split_heads, writer.norm(kv, "kv_norm", layer, name="kv"), heads=1, name="kv")
    if rotary is not None:
        q, kv = (rotate_last(writer, x, rotary.queries, rotary.interleaved, x.name) for x in (q, kv))
    kv = writer.call(ops.merge_heads, kv, name="kv")
    window = window_of(writer.model, attention, layer)
    cache = KV(writer.name("layer", layer), Type(writer.cache_dtype, (dim,)), window)
    k_scale = scale_of(writer, "k_scale", layer) if cache.type.dtype == "fp8_e4m3" else None
    more: list[Any] = [sinks_of(writer, attention, layer), k_scale]
    attributes: dict[str, Any] = {"scale": required(attention.scale), "window": window}
    if attention.compress is not None:
        more += write_runs(writer, h, q_a, attention, rotary, layer)
        attributes["every"] = attention.compress.every
    a = writer.call(ops.mqa_attention, q, kv, cache, *without_last_nones(more), **attributes, name="a")
    if rotary is not None:
        a = rotate_last(writer, a, required(rotary.back), rotary.interleaved, "a")
    a = writer.call(ops.merge_heads, a, name="a")
    weight = writer.stored(writer.weight_name("o_a", layer), (groups * o_rank, heads * dim // groups))
    o_a = writer.call(ops.linear_by_head, a, weight, heads=groups, name="o_a")
    return writer.linear(o_a, "o", writer.model.hidden, attention.o_bias, layer)


ATTENTIONS: dict[str, Callable[[Writer, Node, AttentionConfig, Rotary | None, int], Node]] = {
    "gqa": gqa,
    "mla": mla,
    "mqa": mqa,
}


def rotaries(
    writer: Writer, positions: Node, layers: Iterable[int], rope_positions: Node | None = None
) -> list[Rotary | None]:
    """The `Rotary` of each of these layers, None for a layer without; layers of one rope share it.

    rope_positions: i64[T, 3] of ropes with sections; None: tokens are of no image, positions i64[T] are all three
    """
    made: dict[int, Rotary] = {}
    found: list[Rotary | None] = []
    for layer in layers:
        rope = rope_of(writer.model, layer)
        if rope is not None and id(rope) not in made:
            attention = required(attention_of(writer.model, layer))
            made[id(rope)] = make_rotary(writer, positions, rope, attention, rope_positions)
        found.append(None if rope is None else made[id(rope)])
    return found


def make_rotary(
    writer: Writer,
    positions: Node,
    rope: RopeConfig,
    attention: AttentionConfig,
    rope_positions: Node | None = None,
) -> Rotary:
    """rope_positions: see `rotaries`"""

    def pair(freqs: Recipe, name: str, **scales: Any) -> tuple[Node, Node]:
        cos, sin = writer.call(ops.rotary, positions, freqs, **scales, name=(f"{name}cos", f"{name}sin"))
        return cos, sin

    growth: dict[str, Any] = {"growth": rope.query_growth, "period": rope.original_max_position}
    if rope.growth_kind == "power":
        growth["power"] = True
    if rope.growth_offset:
        growth["offset"] = rope.growth_offset

    def still(dims: int, name: str) -> tuple[Node, Node]:  # an angle of 0, at which cos only grows
        return pair(Full(0.0, Type("fp32", (dims // 2,))), name, **growth)

    if rope.kind == "none":
        return Rotary(None, still(required(attention.head_dim), "q_"), rope.interleaved)
    scale, freqs = rotary_scale(rope), freqs_of(writer, rope)
    if rope.sections is not None and rope_positions is not None:
        attributes = {"sections": rope.sections, "interleaved": rope.sections_interleaved, "scale": scale}
        pair_of_sections = writer.call(ops.rotary_sections, rope_positions, freqs, **attributes, name=("cos", "sin"))
        return Rotary(pair_of_sections, pair_of_sections, rope.interleaved)
    keys = pair(freqs, "", scale=scale)
    if not rope.query_growth:
        back = (keys[0], writer.scale(keys[1], -1.0)) if attention.kind == "mqa" else None
        every = every_of(attention)
        runs = None if every is None else pair(freqs, "run_", scale=scale, every=every)
        return Rotary(keys, keys, rope.interleaved, back=back, runs=runs)
    queries = pair(freqs, "q_", scale=scale, **growth)
    grown = still(required(attention.nope_dim), "grown_") if attention.kind == "mla" else None
    return Rotary(keys, queries, rope.interleaved, grown=grown)


def freqs_of(writer: Writer, rope: RopeConfig) -> Recipe:
    freqs = rope_freqs(rope)
    return LearnedFreqs(W(writer.name("rope_exponents"), freqs.type), freqs) if rope.learned else freqs


def every_of(attention: AttentionConfig) -> int | None:
    """The tokens of a run, if runs of them have entries that are rotated."""
    if attention.compress is not None:
        return attention.compress.every
    return None if attention.index is None or attention.index.every == 1 else attention.index.every


def rope_of(model: ModelConfig, layer: int) -> RopeConfig | None:
    """The rope of the layer's attention, or None."""
    attention, like = attention_of(model, layer), model.layer_like(layer)
    if attention is None:
        return None
    is_full = window_of(model, attention, layer) is None
    has_full = attention.full_rope or (attention.dense_rope and mlp_of(model, layer).kind != "moe")
    if not attention.has_rope(like) or (is_full and not has_full):
        return None
    rope = attention.rope if is_full else attention.window_rope or attention.rope
    return None if rope.kind == "none" and not rope.query_growth else rope


def attention_of(model: ModelConfig, layer: int) -> AttentionConfig | None:
    """The layer's attention, or None."""
    found = (model.attention if name == "attention" else model.blocks[name].attention
             for name in model.branches_of(layer) if name != "mlp")  # fmt: skip
    return next((attention for attention in found if attention is not None), None)


def window_of(model: ModelConfig, attention: AttentionConfig, layer: int) -> int | None:
    """The window in tokens of a layer's attention, or None."""
    kind = model.layer_type(layer)
    is_full = model.layer_like(layer) < attention.window_from if kind is None else kind == "full_attention"
    return None if is_full else attention.window

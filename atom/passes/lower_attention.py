"""Lower attention to a cache write and paged attention.

    q = rope(q, cos, sin)               ->      q = norm_rope_write(q, k, v, cos, sin, None, None, KV("0"), batch)
    k = rope(k, cos, sin)                       a = paged_attention(q, KV("0"), batch, …)
    a = attention(q, k, v, KV("0"), …)

    latent = rms_norm(latent, w, …)     ->      q_rope = norm_rope_write_latent(q_rope, latent, k_rope, cos, sin, w, …)
    q_rope = rope(q_rope, cos, sin)             a = paged_mla_attention(q, q_rope, W("kv_b"), KV("0"), batch, …)
    k_rope = rope(k_rope, cos, sin)
    a = mla_attention(q, q_rope, latent, k_rope, W("kv_b"), KV("0"), …)

    a = mqa_attention(q, kv, KV("0"), …)     ->     q = write_mqa(q, kv, KV("0"), batch)
                                                    a = paged_mqa_attention(q, KV("0"), batch, …)

Layers may share KV: an attention of the keys and values of an earlier one, or its latents, and its cache, writes
nothing.

    a = attention(q, k, v, KV("0"), …)  ->      q = norm_rope_write(q, k, v, cos, sin, None, None, KV("0"), batch)
    …                                           a = paged_attention(q, KV("0"), batch, …)
    b = attention(r, k, v, KV("0"), …)          b = paged_attention(r, KV("0"), batch, …)

What an indexer chooses for the queries of a layer is chosen among the keys that it writes:

    s = index_topk(q, k, weights, KV("0", part="index"), …)    ->    q = write_index(q, k, KV("0", part="index"), batch)
                                                                     s = paged_index_topk(q, weights, KV(…), batch, …)

What runs of tokens have together is pooled of what the step has of them and of what the cache keeps of earlier ones:

    p = compress(kv, gate, W("bias"), KV("0", window=4, part="runs"))    ->    p = paged_compress(kv, …, KV(…), batch)

Norms of q and k before the rope are part of it. A rope or norm that q and k do not share stays as it is. The batch
becomes an input of the program. `lower_recurrent` lowers the ops with recurrent state.
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from atom.errors import PassError
from atom.graph import BATCH, Graph, ops
from atom.passes.lower_recurrent import lower_recurrent


def lower_attention(graph: Graph) -> Graph:
    lower_recurrent(graph)
    writers, readers = _by_cache(graph.find(ops.attention), (1, 2, 3))
    for call in writers:
        _lower(graph, call)
    for call in readers:
        _lower_reader(graph, call)
    writers, readers = _by_cache(graph.find(ops.mla_attention), (2, 3, 5))
    for call in writers:
        _lower_latent(graph, call)
    for call in readers:
        _lower_latent_reader(graph, call)
    for attention in graph.find(ops.mqa_attention):
        _lower_mqa(graph, attention)
    for op in INDEXERS:
        for chosen in graph.find(op):
            _lower_index(graph, chosen)
    for pooled in graph.find(ops.compress):
        batch = graph.program_of(pooled).input("batch", BATCH)
        graph.replace({pooled: graph.insert(pooled, ops.paged_compress, *pooled.args, batch, **pooled.kwargs)})
    return graph


def _by_cache(calls: Sequence[Node], entries: tuple[int, ...]) -> tuple[list[Node], list[Node]]:
    """The calls that write what they attend to, and those that read what an earlier one writes to their cache.

    entries: the places of keys, values and cache among the arguments
    """
    writers: dict[tuple[object, str], Node] = {}
    readers = []
    for call in calls:
        *_, cache = own = [call.args[place] for place in entries]
        writer = writers.setdefault((call.graph, cache.name), call)
        if writer is call:
            continue
        if own != [writer.args[place] for place in entries]:
            at = f"its cache {cache.name} is written by {writer.name}"
            raise PassError(f"{call.name}: {at}, of other keys and values")
        readers.append(call)
    return [*writers.values()], readers


def _lower(graph: Graph, attention: Node) -> None:
    rotated, k, v, cache, *more = attention.args  # sinks, scales of entries in fp8, slopes, ends, what is selected
    batch = graph.program_of(attention).input("batch", BATCH)
    (q, k, *turned), attributes = ahead_of_norm_rope(rotated, k)
    written = graph.insert(
        attention, ops.norm_rope_write, q, k, v, *turned, cache, batch, *more[1:3], name="q", **attributes
    )
    paged = graph.insert(attention, ops.paged_attention, written, cache, batch, *more, **attention.kwargs)
    graph.replace({attention: paged} if q is rotated else {attention: paged, rotated: written})


def _lower_reader(graph: Graph, attention: Node) -> None:
    """Lower the attention of a layer whose keys and values an earlier one has written."""
    q, _, _, cache, *more = attention.args
    batch = graph.program_of(attention).input("batch", BATCH)
    paged = graph.insert(attention, ops.paged_attention, q, cache, batch, *more, **attention.kwargs)
    graph.replace({attention: paged})


def ahead_of_norm_rope(q: Node, k: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which norm_rope gives q and k: both ahead of norms and rope, the norms, and the rope."""
    q, k, cos, sin, attributes = _before_rope(q, k)
    q_norm = k_norm = None
    if q.target is ops.rms_norm and k.target is ops.rms_norm and q.kwargs == k.kwargs:
        attributes |= q.kwargs
        (q, q_norm), (k, k_norm) = q.args, k.args
    return (q, k, cos, sin, q_norm, k_norm), attributes


def _lower_latent(graph: Graph, attention: Node) -> None:
    q, rotated, latent, k_rope, kv_b, cache, *more = attention.args  # scale of latents in fp8, what is selected, sinks
    scales = [scale for scale in more[:1] if scale is not None]
    batch = graph.program_of(attention).input("batch", BATCH)
    q_rope, k_rope, cos, sin, attributes = _before_rope(rotated, k_rope)
    norm = None
    if latent.target is ops.rms_norm:
        attributes |= latent.kwargs
        latent, norm = latent.args
    written = graph.insert(
        attention, ops.norm_rope_write_latent, q_rope, latent, k_rope, cos, sin, norm, cache, batch, *scales,
        name="q_rope", **attributes,
    )  # fmt: skip
    args = q, written, kv_b, cache, batch, *more
    paged = graph.insert(attention, ops.paged_mla_attention, *args, **attention.kwargs)
    graph.replace({attention: paged} if q_rope is rotated else {attention: paged, rotated: written})


def _lower_latent_reader(graph: Graph, attention: Node) -> None:
    """Lower the attention of a layer whose latents an earlier one has written."""
    q, q_rope, _, _, kv_b, cache, *more = attention.args
    batch = graph.program_of(attention).input("batch", BATCH)
    args = q, q_rope, kv_b, cache, batch, *more
    graph.replace({attention: graph.insert(attention, ops.paged_mla_attention, *args, **attention.kwargs)})


def _lower_mqa(graph: Graph, attention: Node) -> None:
    q, kv, cache, *more = attention.args
    batch = graph.program_of(attention).input("batch", BATCH)
    scales = [each for each in more[1:2] if each is not None]
    q = graph.insert(attention, ops.write_mqa, q, kv, cache, batch, *scales, name="q")
    if len(more) > 2:
        pooled, runs, *selected = more[2:]
        q = graph.insert(attention, ops.write_mqa, q, pooled, runs, batch, name="q", every=attention.kwargs["every"])
        more = [*more[:2], runs, *selected]
    paged = graph.insert(attention, ops.paged_mqa_attention, q, cache, batch, *more, **attention.kwargs)
    graph.replace({attention: paged})


INDEXERS = {ops.index_topk: ops.paged_index_topk, ops.index_blocks: ops.paged_index_blocks}


def _lower_index(graph: Graph, chosen: Node) -> None:
    q, k, *more = chosen.args  # weights of heads, if there are any, and the cache
    batch = graph.program_of(chosen).input("batch", BATCH)
    every = {name: value for name, value in chosen.kwargs.items() if name == "every"}
    written = graph.insert(chosen, ops.write_index, q, k, more[-1], batch, name="index_q", **every)
    paged = graph.insert(chosen, INDEXERS[chosen.target], written, *more, batch, **chosen.kwargs)
    graph.replace({chosen: paged})


def _before_rope(q: Node, k: Node) -> tuple[Node, Node, Node | None, Node | None, dict[str, Any]]:
    """q and k without the rope that they share, its cos and sin, and its attributes."""
    if q.target is ops.rope and k.target is ops.rope and q.args[1:] == k.args[1:] and q.kwargs == k.kwargs:
        (inner, cos, sin), k_inner = q.args, k.args[0]
        return inner, k_inner, cos, sin, dict(q.kwargs)
    return q, k, None, None, {}

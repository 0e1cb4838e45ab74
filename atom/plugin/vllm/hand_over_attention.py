"""Hand attention over to layers of another engine.

    q = rope(q, cos, sin)                           ->      q, k = norm_rope(q, k, cos, sin, None, None)
    k = rope(k, cos, sin)                                   a = attention_layer(q, k, v, layer="0", scale=0.1)
    a = attention(q, k, v, KV("0"), scale=0.1)

Norms and ropes of q and k stay as they are if no kernel computes both. Scales of a cache in fp8 are handed over
if the checkpoint has them; others are that engine's to choose.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from atom.errors import UnsupportedError
from atom.graph import Graph, ops
from atom.graph.graph import type_of
from atom.graph.recipes import Measured
from atom.passes.context import PassContext
from atom.passes.lower_attention import ahead_of_norm_rope
from atom.plugin.vllm.ops import attention_layer, mla_attention_layer

LATENT_ARGS = 7  # of mla_attention, to the scale of latents in fp8


def hand_over_attention(graph: Graph, context: PassContext) -> Graph:
    if graph.find(ops.index_topk) or graph.find(ops.index_blocks):
        raise UnsupportedError("layers attend to what an indexer chooses, to which vLLM's attention layers do not")
    if graph.find(ops.mqa_attention):
        raise UnsupportedError("layers have one key that is its value, too, which vLLM's attention layers do not keep")
    calls = graph.find(ops.attention)
    if len(names := {call.args[3].name for call in calls}) < len(calls):
        raise UnsupportedError(f"{len(calls)} layers read the KV of {len(names)}, which vLLM's layers do not share")
    for attention in calls:
        _, _, v, cache, *more = attention.args  # sinks, and scales of entries in fp8
        args = _without_measured(*_norm_and_rotate(graph, attention, context), v, *more)
        layer = graph.insert(attention, attention_layer, *args, layer=cache.name, name="a", **attention.kwargs)
        graph.replace({attention: layer})
    for attention in graph.find(ops.mla_attention):
        if len(attention.args) > LATENT_ARGS or "window" in attention.kwargs:
            raise UnsupportedError("latent attention has sinks or a window, which vLLM's layers for it do not")
        *args, cache = attention.args[:6]
        args = _without_measured(*args, *attention.args[6:])
        layer = graph.insert(attention, mla_attention_layer, *args, layer=cache.name, name="a", **attention.kwargs)
        graph.replace({attention: layer})
    return graph


def _norm_and_rotate(graph: Graph, attention: Node, context: PassContext) -> tuple[Node, Node]:
    """q and k of an attention, normed and rotated by one call if a kernel takes that."""
    q, k = attention.args[:2]
    args, attributes = ahead_of_norm_rope(q, k)
    if args[:2] == (q, k) or not context.takes(ops.norm_rope, *map(type_of, args), **attributes):
        return q, k
    made: tuple[Node, Node] = graph.insert(attention, ops.norm_rope, *args, name=("q", "k"), **attributes)
    return made


def _without_measured(*args: Any) -> list[Any]:
    kept = [None if isinstance(arg, Measured) else arg for arg in args]
    while kept[-1] is None:
        kept.pop()
    return kept

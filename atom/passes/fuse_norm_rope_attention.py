"""Fuse norm, rope and cache write with the attention that follows.

    q = norm_rope_write(q, k, …, KV("0"), batch)    ->      a = norm_rope_attention(q, k, …, KV("0"), batch, …)
    a = paged_attention(q, KV("0"), batch, …)

Declines if no kernel computes both, if another op reads that q, if a call lies between the two, which may read the
cache, or if queries attend to what an indexer chose.
"""

from atom.graph import Graph, ops
from atom.graph.graph import type_of
from atom.passes.context import PassContext


def fuse_norm_rope_attention(graph: Graph, context: PassContext) -> Graph:
    for attention in graph.find(ops.paged_attention):
        written, cache, batch, *more = attention.args  # sinks, scales of entries in fp8, slopes, ends, what is selected
        if attention.prev is not written or written.target is not ops.norm_rope_write or len(written.users) > 1:
            continue
        if written.args[7:] != (cache, batch, *more[1:3]) or len(more) > 5:
            continue
        args, attributes = (*written.args[:7], *attention.args[1:]), {**written.kwargs, **attention.kwargs}
        if context.takes(ops.norm_rope_attention, *map(type_of, args), **attributes):
            fused = graph.insert(attention, ops.norm_rope_attention, *args, **attributes)
            graph.replace({attention: fused}, written=(written,))
    return graph

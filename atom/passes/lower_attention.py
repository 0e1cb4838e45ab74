"""
    q = rope(q, cos, sin)               ->      q = norm_rope_write(q, k, v, cos, sin, None, None, KV("0"), slots)
    k = rope(k, cos, sin)                       a = paged_attention(q, KV("0"), table, starts, lengths, num_decodes, …)
    a = attention(q, k, v, KV("0"), …)

Norms of q and k before the rope go along. A rope or norm that the two do not share stays as it is. The batch's layout
becomes inputs (see `ops.paged_attention`): `slots` and `table` by kind of cache, the others for all.
"""

from torch.fx import Node

from atom.graph import KV, Graph, Type, ops


def lower_attention(graph: Graph) -> Graph:
    for attention in graph.find(ops.attention):
        q, k, v, cache = attention.args
        turned = q
        slots, layout = _inputs(graph, attention, cache)
        cos = sin = q_norm = k_norm = None
        attributes = {}
        if q.target is ops.rope and k.target is ops.rope and q.args[1:] == k.args[1:]:
            (q, cos, sin), k = q.args, k.args[0]
        if q.target is ops.rms_norm and k.target is ops.rms_norm and q.kwargs == k.kwargs:
            attributes = q.kwargs
            (q, q_norm), (k, k_norm) = q.args, k.args
        written = graph.insert(
            attention, ops.norm_rope_write, q, k, v, cos, sin, q_norm, k_norm, cache, slots, name="q", **attributes
        )
        paged = graph.insert(attention, ops.paged_attention, written, cache, *layout, **attention.kwargs)
        graph.replace({attention: paged} if q is turned else {attention: paged, turned: written})
    return graph


def _inputs(graph: Graph, attention: Node, cache: KV) -> tuple[Node, tuple[Node, ...]]:
    """The inputs that tell where the batch's tokens and blocks are, made if they are not there."""
    body = graph.program_of(attention)
    slots = body.input(f"slots_{cache.kind}", Type("i64", ("T",)))
    table = body.input(f"table_{cache.kind}", Type("i32", ("S", "M")))
    starts = body.input("starts", Type("i32", ("S1",)))
    lengths = body.input("lengths", Type("i32", ("S",)))
    return slots, (table, starts, lengths, body.input("num_decodes", Type("i64", ())))

"""Fuse the q, k and v projections into one linear.

    q = linear(h, W("q"))               ->      qkv = linear(h, cat([W("q"), W("k"), W("v")]))
    k = linear(h, W("k"))                       q, k, v = split(qkv, sizes=[…])
    v = linear(h, W("v"))

In latent attention these are the projections that read h: q (or q_a, if q has a latent too), kv_a, and the keys of an
indexer of the layer's own; in shared key-value attention q_a and kv.
Declines if they do not read the same tensor, only some have a bias, or their stored formats differ.
"""

from collections.abc import Sequence

from torch.fx import Node

from atom.graph import Graph, ops
from atom.graph.graph import call_of
from atom.passes.match import cat_linears, form_of, have_same_form

WRAPPERS = (
    ops.rope,
    ops.scale_by_position,
    ops.rms_norm,
    ops.split_heads,
    ops.split,
    ops.scale,
    ops.pad,
    ops.join,
    ops.merge_heads,
)  # ops between a projection and its attention
INDEX_WRAPPERS = (*WRAPPERS, ops.layer_norm, ops.merge_heads)  # and an indexer


def fuse_qkv(graph: Graph) -> Graph:
    for attention in graph.find(ops.attention):
        linears = dict.fromkeys(_projection(arg) for arg in attention.args[:3])  # one may give keys and values
        _fuse(graph, list(linears), "qkv")
    caches: set[str] = set()
    for attention in graph.find(ops.mla_attention):
        q, kv_a = (_projection(attention.args[place]) for place in (0, 2))
        if attention.args[5].name in caches:  # the latent is of an earlier layer
            kv_a = q
        caches.add(attention.args[5].name)
        if q.target is ops.linear and q.args[0] is not kv_a.args[0]:
            q = _projection(q.args[0], (*WRAPPERS, ops.join))
        index_k = [k for k in _index_keys(attention) if k.target is ops.linear and form_of(k) == form_of(kv_a)]
        _fuse(graph, list(dict.fromkeys([q, kv_a, *index_k])), "qkv_a")
    for attention in graph.find(ops.mqa_attention):
        q, kv = map(_projection, attention.args[:2])
        _fuse(graph, [_projection(q.args[0]), kv], "qkv_a")
    return graph


def _index_keys(attention: Node) -> list[Node]:
    """The projection of the keys of which what an attention reads is chosen."""
    chosen = [arg for arg in attention.args if isinstance(arg, Node) and arg.target is ops.index_topk]
    return [_projection(each.args[1], INDEX_WRAPPERS) for each in chosen]


def _fuse(graph: Graph, linears: Sequence[Node], name: str) -> None:
    if len(linears) < 2 or not have_same_form(linears):
        return
    sizes = [linear.meta["type"].shape[-1] for linear in linears]
    first = min(linears)
    fused = graph.insert(first, ops.linear, *cat_linears(linears), name=name, **first.kwargs)
    parts = graph.insert(first, ops.split, fused, sizes=sizes, name=tuple(linear.name for linear in linears))
    graph.replace(dict(zip(linears, parts, strict=True)))


def _projection(node: Node, wrappers: Sequence[ops.Op] = WRAPPERS) -> Node:
    node = call_of(node)
    while node.target in wrappers:
        node = call_of(node.all_input_nodes[0])
    return node

"""
    q = linear(h, W("q"))               ->      qkv = linear(h, cat([W("q"), W("k"), W("v")]))
    k = linear(h, W("k"))                       q, k, v = split(qkv, sizes=[…])
    v = linear(h, W("v"))

Declines where the three do not read the same tensor, only some have a bias, or their stored formats differ.
"""

from torch.fx import Node

from atom.graph import Graph, ops
from atom.passes.match import cat_linears, have_same_form

WRAPPERS = (ops.rope, ops.rms_norm, ops.split_heads)  # what may stand between a projection and its attention


def fuse_qkv(graph: Graph) -> Graph:
    for attention in graph.find(ops.attention):
        linears = [_projection(arg) for arg in attention.args[:3]]
        if not have_same_form(linears):
            continue
        sizes = [linear.meta["type"].shape[-1] for linear in linears]
        first = min(linears)
        qkv = graph.insert(first, ops.linear, *cat_linears(linears), name="qkv")
        parts = graph.insert(first, ops.split, qkv, sizes=sizes, name=("q", "k", "v"))
        graph.replace(dict(zip(linears, parts, strict=True)))
    return graph


def _projection(node: Node) -> Node:
    while node.target in WRAPPERS:
        node = node.all_input_nodes[0]
    return node

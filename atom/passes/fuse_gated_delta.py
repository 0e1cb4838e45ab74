"""Fuse the gated delta rule with its convolution, gates and norm.

    c = batched_causal_conv(qkv, STATE("0", …), batch, W("conv"), kind="silu")
    q, k, v = split(c, …)                           ->      o = gated_delta_net(qkv, z, a, b, STATE("0", …),
    o = batched_gated_delta(q, k, v, ssm_decay(a, …),           STATE("0", …), batch, W("conv"), …)
        activate(b, kind="sigmoid"), STATE("0", …), batch)
    o = mul(rms_norm(o, W("norm")), activate(z, kind="silu"))

Heads are split and merged between them. Declines if no kernel computes all of it, or if another call reads a part.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from atom.graph import Graph, ops
from atom.graph.graph import call_of, results_of, type_of
from atom.passes.context import PassContext

CONV, DELTA = ops.OPS["batched_causal_conv"], ops.OPS["batched_gated_delta"]


def fuse_gated_delta(graph: Graph, context: PassContext) -> Graph:
    for delta in graph.find(DELTA):
        found = _match(delta)
        if found is None:
            continue
        last, args, attributes, conv = found
        if context.takes(ops.gated_delta_net, *map(type_of, args), **attributes):
            fused = graph.insert(last, ops.gated_delta_net, *args, **attributes, name="o")
            graph.replace({last: fused}, written=(delta, conv))
    return graph


def _match(delta: Node) -> tuple[Node, list[Any], dict[str, Any], Node] | None:
    """What takes the block's place: the call whose result it has, its arguments and attributes; and the convolution."""
    q, k, v, decay, beta, state, batch = delta.args
    split = call_of(_under(q, ops.split_heads))
    parts = tuple(_under(each, ops.split_heads) for each in (q, k, v))
    if split.target is not ops.split or parts != tuple(results_of(split)) or not _is_read_once(*parts):
        return None
    conv = split.args[0]
    if conv.target is not CONV or conv.kwargs.get("kind") != "silu" or len(conv.args) != 4 or conv.args[2] is not batch:
        return None
    scaled = beta.target is ops.scale
    sigmoid = beta.args[0] if scaled else beta
    raw = _under(decay, ops.split_heads)
    if sigmoid.target is not ops.activate or sigmoid.kwargs != {"kind": "sigmoid"}:
        return None
    if raw.target is not ops.ssm_decay or not _is_read_once(beta, sigmoid, decay, raw, q, k, v, conv, delta):
        return None
    (norm,) = delta.users  # or the program's output, of a last layer whose head has the rest
    if norm.target is not ops.rms_norm or norm.args[0] is not delta or not _is_read_once(norm):
        return None
    (product,) = norm.users
    if product.target is not ops.mul:
        return None
    gates = [each for each in product.args if each is not norm]
    if len(gates) != 1 or not isinstance(gates[0], Node) or gates[0].target is not ops.activate:
        return None
    if type_of(gates[0]) != type_of(norm) or not _is_read_once(product, gates[0]):
        return None
    (merged,) = product.users
    z = _under(gates[0].args[0], ops.split_heads)
    if merged.target is not ops.merge_heads or not _is_read_once(gates[0].args[0]):
        return None
    a, a_log, bias = raw.args
    args = [conv.args[0], z, a, sigmoid.args[0], conv.args[1], state, batch, conv.args[3], a_log, bias, norm.args[1]]
    attributes = {
        "key_heads": int(type_of(q).shape[1]),
        **delta.kwargs,
        **raw.kwargs,
        "eps": norm.kwargs["eps"],
        "kind": gates[0].kwargs["kind"],
        **({"beta_scale": beta.kwargs["by"]} if scaled else {}),
    }
    return merged, args, attributes, conv


def _under(node: Node, op: ops.Op) -> Node:
    """What a call of this op reads; the node itself if it is another."""
    return node.args[0] if node.target is op else node


def _is_read_once(*nodes: Node) -> bool:
    return all(len(node.users) == 1 for node in nodes)

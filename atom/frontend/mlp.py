"""The mlp blocks of a layer, by `kind`: h [T, H] -> [T, H].

m = MLPS[mlp.kind](writer, h, mlp, layer, x)        # x: the hidden states that h is made of
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from atom.config import MLPConfig, ModelConfig, RouterConfig
from atom.errors import ConfigError
from atom.frontend.writer import Writer, required
from atom.graph import Full, Recipe, Stack, Transpose, Type, W, ops
from atom.graph.recipe_ranges import cat


def gated(writer: Writer, h: Node, mlp: MLPConfig, layer: int, _x: Node) -> Node:
    """down(act(gate) * up) (Shazeer 2020)."""
    return _gated(writer, h, mlp, width_of(writer.model, mlp, layer), layer)


def width_of(model: ModelConfig, mlp: MLPConfig, layer: int) -> int:
    return mlp.width if mlp.widths is None else mlp.widths[model.layer_like(layer)]


def _gated(writer: Writer, h: Node, mlp: MLPConfig, width: int, layer: int, prefix: str = "") -> Node:
    has_bias = required(mlp.shared_bias) if prefix else mlp.bias
    gate, up = writer.linears(h, {f"{prefix}gate": width, f"{prefix}up": width}, has_bias, layer)
    if mlp.adapter_rank is not None and not prefix:
        gate, up = writer.adapt(h, mlp.adapter_rank, layer, gate=gate, up=up)
    if not prefix:
        gate, up = (writer.scale_channels(each, name, layer) for name, each in (("gate", gate), ("up", up)))
    if mlp.sparsity is not None and (share := mlp.sparsity[writer.model.layer_like(layer)]):
        gate = writer.call(ops.gaussian_topk, gate, sparsity=share, name="gate")
    rule = gate_rule(mlp, writer.model.layer_like(layer), is_shared=bool(prefix))
    if rule.keys() == {"kind"}:
        active = writer.call(ops.activate, gate, **rule, name="active")
        m = writer.call(ops.mul, active, up, name="m")
    else:
        both = writer.call(ops.join, gate, up, name="gate_up")
        m = writer.call(ops.gated_activate, both, **rule, name="m")
    m = writer.norm(m, "down_norm", layer, name="m") if mlp.down_norm else m
    return writer.linear(m, f"{prefix}down", writer.model.hidden, has_bias, layer)


def gate_rule(mlp: MLPConfig, layer: int, is_shared: bool = False) -> dict[str, Any]:
    """The attributes of `gated_activate` in a layer.

    is_shared: of the expert that all tokens share
    """
    limits = mlp.shared_limits if is_shared and mlp.shared_limits is not None else mlp.limits
    limit = mlp.limit if limits is None or layer >= len(limits) else limits[layer] or None
    kind = "silu" if mlp.activation == "swiglustep" and limit is None else mlp.activation
    given = {"limit": limit, "alpha": mlp.alpha if kind in ("swigluoai", "situ") else None}
    return {"kind": kind, **{name: value for name, value in given.items() if value is not None}}


def plain(writer: Writer, h: Node, mlp: MLPConfig, layer: int, _x: Node) -> Node:
    """down(act(up))."""
    return _plain(writer, h, mlp, width_of(writer.model, mlp, layer), layer)


def laurel(writer: Writer, h: Node, mlp: MLPConfig, layer: int, _x: Node) -> Node:
    """h + norm(out(in(h))), a learned augmented residual of a low rank (Menghani et al. 2024)."""
    low = writer.linear(h, "laurel_in", mlp.width, False, layer)
    y = writer.norm(writer.linear(low, "laurel_out", writer.model.hidden, False, layer), "laurel_norm", layer, name="y")
    augmented: Node = writer.call(ops.add, h, y, name="laurel")
    return augmented


def _plain(writer: Writer, h: Node, mlp: MLPConfig, width: int, layer: int, prefix: str = "") -> Node:
    has_bias = required(mlp.shared_bias) if prefix else mlp.bias
    up = writer.linear(h, f"{prefix}up", width, has_bias, layer)
    if mlp.activation == "xielu":
        alphas = [W(writer.name(role, layer), Type(writer.dtype, (1,))) for role in ("alpha_p", "alpha_n")]
        m = writer.call(ops.xielu, up, *alphas, name="m")
    else:
        m = writer.call(ops.activate, up, kind=mlp.activation, name="m")
    m = writer.norm(m, "down_norm", layer, name="m") if mlp.down_norm else m
    return writer.linear(m, f"{prefix}down", writer.model.hidden, has_bias, layer)


def moe(writer: Writer, h: Node, mlp: MLPConfig, layer: int, x: Node) -> Node:
    """The sum of a token's experts (Shazeer et al. 2017), and of the one that all tokens share (Dai et al. 2024)."""
    weights, ids = _choose(writer, router_input(writer, x, layer) if mlp.router.own_norm else h, mlp, layer)
    read = h if mlp.latent is None else writer.linear(h, "latent_in", mlp.latent, False, layer)
    read = writer.norm(read, "latent_norm", layer, name="latent") if mlp.latent_norm == "before" else read
    if mlp.router.weighs == "inputs":
        read, weights = writer.call(ops.weigh_inputs, read, weights, name=("weighed", "ones"))
    y = _experts(writer, read, weights, ids, mlp, layer)
    if mlp.zero_experts and mlp.zero_gives == "input":
        share = writer.call(ops.identity_share, read, weights, ids, experts=mlp.experts, name="share")
        y = writer.call(ops.add, y, writer.call(ops.mul, read, share, name="kept"), name="y")
    if mlp.latent is not None:
        y = writer.norm(y, "latent_norm", layer, name="y") if mlp.latent_norm == "after" else y
        y = writer.linear(y, "latent_out", writer.model.hidden, False, layer)
    if mlp.shared_width is not None:
        y = writer.call(ops.add, y, _shared(writer, h, mlp, layer), name="y")
        y = writer.scale(y, 0.5 if mlp.shared_mean else None)
    return writer.norm(y, "moe_norm", layer, name="y") if mlp.after_norm else y


def _choose(writer: Writer, h: Node, mlp: MLPConfig, layer: int) -> tuple[Node, Node]:
    """weights fp32[T, k] and ids i64[T, k] of each token's experts; those after the last one are `zero_experts`."""
    h = writer.scale(h, mlp.router.logits_scale)
    router, experts = mlp.router, required(mlp.experts) + mlp.zero_experts
    h = h if router.hidden is None else _route(writer, h, router, layer)
    scores, names = _scores(writer, router, experts, layer), ("weights", "ids")
    if router.method == "sparsemixer":
        mixed: tuple[Node, Node] = writer.call(ops.sparse_mixer, h, scores, jitter=router.jitter, name=names)
        return mixed
    if router.method == "by_token":
        table = W(writer.name("expert_table", layer), Type("i64", (writer.model.vocab, required(mlp.top_k))))
        by_token: tuple[Node, Node] = writer.call(
            ops.token_router, h, scores, writer.carried["tokens"], table, score=router.score,
            renormalize=router.renormalize, scale=router.scale, name=names,
        )  # fmt: skip
        return by_token
    bias = writer.weight("router", (experts,), layer, "bias") if router.bias else None
    correction = None
    if router.method == "noaux_tc" and router.correction:
        rows = {role: experts for role in CORRECTIONS if role in writer.model.weights}
        correction, *_ = writer.parts(rows, lambda role, n: W(writer.name(role, layer), Type("fp32", (n,))), layer)
    ranks = {} if router.ranks == "scores" else {"ranks": router.ranks}
    chosen: tuple[Node, Node] = writer.call(
        ops.router, h, scores, bias, correction, top_k=mlp.top_k, method=router.method, score=router.score,
        groups=router.groups, top_groups=router.top_groups, renormalize=router.renormalize, scale=router.scale,
        **ranks, name=names,
    )  # fmt: skip
    if router.scale_by_expert:
        weights, ids = chosen
        scales = W(writer.name("expert_scale", layer), Type(writer.dtype, (experts,)))
        return writer.call(ops.scale_by_expert, weights, ids, scales, name="weights"), ids
    return chosen


CORRECTIONS = ("router_correction", "image_correction")  # the second of experts that images have of their own


def _scores(writer: Writer, router: RouterConfig, experts: int, layer: int) -> Recipe:
    """The matrix [E, R] of the router's last linear."""
    width = router.hidden or writer.model.hidden
    if router.transposed:
        return Transpose(writer.weight("router", (width, experts), layer))
    return writer.matrix("router", (experts, width), layer)


def _route(writer: Writer, h: Node, router: RouterConfig, layer: int) -> Node:
    """What a router that is an mlp makes of h [T, H], ahead of its last linear: [T, R]"""
    width = required(router.hidden)

    def linear(x: Node, role: str) -> Node:
        weight = writer.matrix(role, (width, int(x.meta["type"].shape[-1])), layer)
        return writer.multiply(x, weight, writer.weight(role, (width,), layer, "bias"), role=role, layer=layer)

    r = linear(h, "router_in")
    if router.carried:
        if (before := writer.carried.get("router")) is not None:
            factors = W(writer.name("router_share", layer), Type(writer.dtype, (width,)))
            r = writer.call(ops.add, r, writer.call(ops.mul, before, factors, name="share"), name="r")
        writer.carried["router"] = r
    x = writer.norm(r, "router_mlp_norm", layer, name="r")
    for role in ("router_mid_1", "router_mid_2"):
        x = writer.call(ops.activate, linear(x, role), kind="gelu", name="r")
    return x


def _shared(writer: Writer, h: Node, mlp: MLPConfig, layer: int) -> Node:
    """What the expert that all tokens share gives."""
    shared = SHARED[mlp.expert](writer, h, mlp, required(mlp.shared_width), layer, "shared_")
    if mlp.shared_gate:
        gate = writer.stored(writer.weight_name("shared_share", layer), (1, writer.model.hidden))  # not worth packing
        share = writer.multiply(h, gate, role="shared_share", layer=layer)
        share = writer.call(ops.activate, share, kind="sigmoid", name="share")
        shared = writer.call(ops.mul, shared, share, name="shared")
    return shared


def router_input(writer: Writer, x: Node, layer: int) -> Node:
    """x [T, H] by a norm of the router's own, over the root of H"""
    hidden = writer.model.hidden
    weight = W(writer.name("router_norm", layer), Type(writer.dtype, (hidden,)))
    normed = writer.call(ops.rms_norm, x, weight, eps=writer.model.norm.eps, name="r")
    return writer.scale(normed, hidden**-0.5)


SHARED = {"gated": _gated, "plain": _plain}


def _experts(writer: Writer, x: Node, weights: Node, ids: Node, mlp: MLPConfig, layer: int) -> Node:
    recipes: list[Any] = [*expert_weights(writer, mlp, layer)]
    if mlp.expert == "plain":
        y: Node = writer.call(ops.plain_experts, x, weights, ids, *recipes, kind=mlp.activation, name="y")
        return y
    if mlp.expert_norm:
        return _normed_experts(writer, x, weights, ids, recipes, mlp, layer)
    if mlp.zero_experts:  # of the experts that tokens choose some are none of these
        recipes = [*recipes, *([] if mlp.bias else [None, None]), Full(0, Type("i64", (1,)))]
    act = writer.act_of_experts(*recipes[:2])
    y = writer.call(
        ops.experts, x, weights, ids, *recipes, **gate_rule(mlp, writer.model.layer_like(layer)), act=act, name="y"
    )
    return y


def _normed_experts(
    writer: Writer, x: Node, weights: Node, ids: Node, recipes: list[Any], mlp: MLPConfig, layer: int
) -> Node:
    """Experts, with a norm of what each of them gives ahead of the sum."""
    gate_up, down, gate_up_bias, down_bias = (*recipes, None, None)[:4]
    grouped, order, ends = writer.call(ops.group, x, ids, experts=mlp.experts, name=("grouped", "order", "ends"))
    both = writer.call(ops.grouped_linear, grouped, gate_up, ends, gate_up_bias, name="gate_up")
    rule = gate_rule(mlp, writer.model.layer_like(layer))
    m = writer.call(ops.gated_activate, both, **rule, name="m")
    rows = writer.call(ops.grouped_linear, m, down, ends, down_bias, name="down")
    rows = writer.norm(rows, "expert_after_norm", layer, name="down")
    y: Node = writer.call(ops.combine, rows, weights, order, name="y")
    return y


def expert_weights(writer: Writer, mlp: MLPConfig, layer: int) -> list[Recipe]:
    """gate_up [E, 2 W, H] and down [E, H, W], followed by the biases [E, 2 W] and [E, H] if there are any.

    Plain experts have up [E, W, H] in place of gate_up.
    """
    experts, hidden = required(mlp.experts), mlp.latent or writer.model.hidden
    gate_up, down = {"experts_gate": mlp.width, "experts_up": mlp.width}, {"experts_down": hidden}
    if mlp.expert == "plain":
        del gate_up["experts_gate"]

    def joined(rows: dict[str, int], columns: int | None, suffix: str = "") -> Recipe:
        """Join the roles' rows of all experts, stored one by one if a name has {expert}, else as one tensor."""
        is_one_by_one = "{expert}" in writer.name(next(iter(rows)) + suffix, layer)
        dim, leading = (0, ()) if is_one_by_one else (1, (experts,))

        def stored(role: str, n: int) -> Recipe:
            name = writer.name(role + suffix, layer)
            if columns is None:
                return W(name, Type(writer.dtype, (*leading, n)))
            weight = writer.stored(name, (*leading, n, columns))
            is_transposed = mlp.down_transposed if role == "experts_down" else mlp.transposed
            if is_transposed and weight.type.fmt is None:
                return Transpose(W(name, Type(writer.dtype, (*leading, columns, n))))
            return weight

        whole = cat(tuple(writer.parts(rows, stored, layer, suffix, dim, mlp.interleaved)), dim)
        return Stack(whole, 0, experts) if is_one_by_one else whole

    fmt = writer.quant.experts
    recipes = [
        writer.packed(joined(rows, columns), role, layer, fmt)
        for role, rows, columns in ((next(iter(gate_up)), gate_up, hidden), ("experts_down", down, mlp.width))
    ]
    return [*recipes, joined(gate_up, None, "_bias"), joined(down, None, "_bias")] if mlp.bias else recipes


MLPS: dict[str, Callable[[Writer, Node, MLPConfig, int, Node], Node]] = {
    "gated": gated,
    "plain": plain,
    "moe": moe,
    "laurel": laurel,
}


def mlp_of(model: ModelConfig, layer: int) -> MLPConfig:
    """The first mlp entry of the layer's type, or that applies to the layer if no types are listed."""
    layer, types = model.layer_like(layer), model.mlp_layer_types or []
    if layer < len(types):
        is_sparse = types[layer] == "sparse"
        return next(mlp for mlp in model.mlp if (mlp.kind == "moe") == is_sparse)
    for mlp in model.mlp:
        is_in_range = mlp.first <= layer and (mlp.last is None or layer <= mlp.last)
        if is_in_range and (layer + 1) % mlp.every == 0 and layer not in mlp.skip:
            return mlp
    raise ConfigError(f"model.mlp: no entry takes layer {layer}")

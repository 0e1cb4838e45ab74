"""Blocks with recurrent state: h [T, H] -> [T, H]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from atom.config import GatedDeltaConfig, Mamba2Config, ShortConvConfig
from atom.frontend.writer import Writer
from atom.graph import LatestState, Recipe, Type, W, ops
from atom.graph.recipe_ranges import cat


def short_conv(writer: Writer, h: Node, block: ShortConvConfig, layer: int) -> Node:
    """out(c * conv(b * x)) of b, c, x = in(h) (Liquid AI 2025)."""
    hidden = writer.model.hidden
    bcx = writer.linear(h, "conv_in", 3 * hidden, block.bias, layer)
    b, c, x = writer.call(ops.split, bcx, sizes=[hidden] * 3, name=("b", "c", "x"))
    x = causal_conv(writer, writer.call(ops.mul, b, x, name="x"), "conv", block.taps, block.bias, layer)
    return writer.linear(writer.call(ops.mul, c, x, name="x"), "conv_out", hidden, block.bias, layer)


def gated_delta(writer: Writer, h: Node, block: GatedDeltaConfig, layer: int) -> Node:
    """out(norm(o) * silu(z)) of what a linear attention with the gated delta rule gives (Yang et al. 2024)."""
    heads, key, value = block.value_heads, block.key_heads * block.key_dim, block.value_heads * block.value_dim
    chunks = block.key_heads if block.by_head else 1
    rows = {"delta_q": key, "delta_k": key, "delta_v": value, "delta_z": value, "delta_beta": heads, "delta_a": heads}
    weights = dict(zip(rows, stored_parts(writer, h, rows, layer, chunks), strict=True))
    qkv_weight = writer.packed(
        cat(tuple(weights[role] for role in ("delta_q", "delta_k", "delta_v"))), "delta_q", layer
    )
    qkv = writer.multiply(h, qkv_weight, role="delta_q", layer=layer, name="qkv")
    z = writer.multiply(h, writer.packed(weights["delta_z"], "delta_z", layer), role="delta_z", layer=layer, name="z")
    beta, a = (
        writer.multiply(h, weights[role], role=role, layer=layer, name=name)
        for role, name in (("delta_beta", "beta"), ("delta_a", "a"))  # too few rows to be worth packing
    )
    qkv = causal_conv(writer, qkv, "delta_conv", block.taps, False, layer, "silu")
    q, k, v = writer.call(ops.split, qkv, sizes=[key, key, value], name=("q", "k", "v"))
    q, k, v, z = (
        writer.call(ops.split_heads, x, heads=n, name=name)
        for x, n, name in ((q, block.key_heads, "q"), (k, block.key_heads, "k"), (v, heads, "v"), (z, heads, "z"))
    )
    beta = writer.call(ops.activate, beta, kind="sigmoid", name="beta")
    beta = writer.scale(beta, None if block.beta_scale == 1 else block.beta_scale)
    decay = writer.call(
        ops.ssm_decay, a, *head_weights(writer, ("delta_decay", "delta_step"), heads, layer), name="decay"
    )
    state = LatestState(writer.name("layer", layer), Type("fp32", (heads, block.key_dim, block.value_dim)))
    o = writer.call(ops.gated_delta, q, k, v, decay, beta, state, scale=block.key_dim**-0.5, normalize=True, name="o")
    o = writer.call(
        ops.rms_norm, o, writer.weight("delta_norm", (block.value_dim,), layer), eps=writer.model.norm.eps, name="o"
    )
    o = writer.call(ops.mul, o, writer.call(ops.activate, z, kind="silu", name="z"), name="o")
    return writer.linear(writer.call(ops.merge_heads, o, name="o"), "delta_out", writer.model.hidden, False, layer)


def mamba2(writer: Writer, h: Node, block: Mamba2Config, layer: int) -> Node:
    """out(norm(y * silu(z))) of what a state space model gives (Dao & Gu 2024)."""
    heads, groups = block.heads, block.groups
    inner, shared = heads * block.head_dim, groups * block.state
    zxd = writer.linear(h, "mamba_in", 2 * inner + 2 * shared + heads, block.bias, layer)
    z, xbc, dt = writer.call(ops.split, zxd, sizes=[inner, inner + 2 * shared, heads], name=("z", "xbc", "dt"))
    xbc = causal_conv(writer, xbc, "mamba_conv", block.taps, block.conv_bias, layer, "silu")
    x, b, c = writer.call(ops.split, xbc, sizes=[inner, shared, shared], name=("x", "b", "c"))
    x, b, c = (
        writer.call(ops.split_heads, each, heads=n, name=name)
        for each, n, name in ((x, heads, "x"), (b, groups, "b"), (c, groups, "c"))
    )
    step, decay, skip = head_weights(writer, ("mamba_step", "mamba_decay", "mamba_skip"), heads, layer)
    dt = writer.call(ops.time_step, dt, step, low=block.step_min, name="dt")
    state = LatestState(writer.name("layer", layer), Type("fp32", (heads, block.head_dim, block.state)))
    y = writer.call(ops.merge_heads, writer.call(ops.ssd, x, dt, b, c, state, decay, skip, name="y"), name="y")
    y = writer.call(ops.mul, y, writer.call(ops.activate, z, kind="silu", name="z"), name="y")
    weight, eps = writer.weight("mamba_norm", (inner,), layer), writer.model.norm.eps
    y = writer.call(ops.group_rms_norm, y, weight, eps=eps, groups=groups, name="y")
    return writer.linear(y, "mamba_out", writer.model.hidden, block.bias, layer)


def stored_parts(writer: Writer, h: Node, rows: dict[str, int], layer: int, num_chunks: int = 1) -> list[Recipe]:
    """The weights of roles that read h, as they are stored; see `Writer.parts`."""
    inner = int(h.meta["type"].shape[-1])
    return writer.parts(
        rows, lambda role, n: writer.stored(writer.weight_name(role, layer), (n, inner)), layer, num_chunks=num_chunks
    )


def head_weights(writer: Writer, roles: tuple[str, ...], heads: int, layer: int) -> list[Recipe]:
    """Tensors with a number for each head, in float32 whatever they are stored in."""
    return [W(writer.name(role, layer), Type("fp32", (heads,))) for role in roles]


def causal_conv(
    writer: Writer, x: Node, role: str, taps: int, has_bias: bool, layer: int, kind: str | None = None
) -> Node:
    """The convolution [T, C] -> [T, C] of a role, which is stored as [C, 1, taps], and then an activation.

    kind: of the activation; None: none
    """
    channels = int(x.meta["type"].shape[1])
    state = LatestState(writer.name("layer", layer), Type(writer.dtype, (taps - 1, channels)))
    weights: list[Recipe] = [writer.weight(role, (channels, taps), layer)]
    if has_bias:
        weights.append(writer.weight(role, (channels,), layer, "bias"))
    made: Node = writer.call(ops.causal_conv, x, state, *weights, kind=kind, name=role)
    return made


RECURRENT: dict[type, Callable[[Writer, Node, Any, int], Node]] = {
    ShortConvConfig: short_conv,
    GatedDeltaConfig: gated_delta,
    Mamba2Config: mamba2,
}

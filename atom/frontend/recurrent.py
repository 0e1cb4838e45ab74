"""Blocks with recurrent state: h [T, H] -> [T, H]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from atom.config import GatedDeltaConfig, LightningConfig, Mamba2Config, MambaConfig, ShortConvConfig
from atom.frontend.writer import Writer
from atom.graph import Full, LatestState, Recipe, Type, W, ops
from atom.graph.recipe_ranges import cat, narrow


def short_conv(writer: Writer, h: Node, block: ShortConvConfig, layer: int) -> Node:
    """out(c * conv(b * x)) of b, c, x = in(h) (Liquid AI 2025)."""
    hidden = writer.model.hidden
    bcx = writer.linear(h, "conv_in", 3 * hidden, block.bias, layer)
    b, c, x = writer.call(ops.split, bcx, sizes=[hidden] * 3, name=("b", "c", "x"))
    x = causal_conv(writer, writer.call(ops.mul, b, x, name="x"), {"conv": hidden}, block.taps, block.bias, layer)
    return writer.linear(writer.call(ops.mul, c, x, name="x"), "conv_out", hidden, block.bias, layer)


def gated_delta(writer: Writer, h: Node, block: GatedDeltaConfig, layer: int) -> Node:
    """out(norm(o) * act(z)) of what a linear attention with the gated delta rule gives (Yang et al. 2024)."""
    heads, key, value = block.value_heads, block.key_heads * block.key_dim, block.value_heads * block.value_dim
    has_decay_by_dim = block.decay_by_dim or block.decay_rank is not None
    decays = heads * block.key_dim if has_decay_by_dim else heads
    chunks = block.key_heads if block.by_head else 1
    read_by = {"delta_z": h, "delta_a": h}  # what some linears read in place of h
    for role, rank in (("delta_z", block.gate_rank), ("delta_a", block.decay_rank)):
        if rank is not None:
            read_by[role] = writer.linear(h, f"{role}_in", rank, False, layer)
    rows = {"delta_q": key, "delta_k": key, "delta_v": value, "delta_z": value, "delta_beta": heads, "delta_a": decays}
    weights = stored_parts(writer, {role: (n, read_by.get(role, h)) for role, n in rows.items()}, layer, chunks)
    qkv_weight = cat(tuple(weights[role] for role in QKV))
    qkv = writer.multiply(h, writer.packed(qkv_weight, "delta_q", layer), role="delta_q", layer=layer, name="qkv")
    z_weight = writer.packed(weights["delta_z"], "delta_z", layer)
    z = writer.multiply(read_by["delta_z"], z_weight, role="delta_z", layer=layer, name="z")
    # of few rows, which are not worth packing
    beta = writer.multiply(h, weights["delta_beta"], role="delta_beta", layer=layer, name="beta")
    a_weight = writer.packed(weights["delta_a"], "delta_a", layer) if block.decay_by_dim else weights["delta_a"]
    a = writer.multiply(read_by["delta_a"], a_weight, role="delta_a", layer=layer, name="a")
    conv_rows = {role.replace("delta", "delta_conv"): rows[role] for role in QKV}
    qkv = causal_conv(writer, qkv, conv_rows, block.taps, False, layer, "silu")
    q, k, v = writer.call(ops.split, qkv, sizes=[key, key, value], name=("q", "k", "v"))
    q, k, v, z = (
        writer.call(ops.split_heads, x, heads=n, name=name)
        for x, n, name in ((q, block.key_heads, "q"), (k, block.key_heads, "k"), (v, heads, "v"), (z, heads, "z"))
    )
    beta = writer.call(ops.activate, beta, kind="sigmoid", name="beta")
    beta = writer.scale(beta, None if block.beta_scale == 1 else block.beta_scale)
    rate = narrow(number_by_head(writer, "delta_decay", block.decay_rows or heads, layer), 0, heads)
    rates = (rate, number_by_head(writer, "delta_step", decays, layer))
    floor = {} if block.decay_floor is None else {"floor": block.decay_floor}
    decay = writer.call(ops.ssm_decay, a, *rates, **floor, name="decay")
    if has_decay_by_dim:
        decay = writer.call(ops.split_heads, decay, heads=heads, name="decay")
    state = layer_state(writer, layer, heads, block.key_dim, block.value_dim)
    scale, eps = block.key_dim**-0.5, writer.model.norm.eps if block.eps is None else block.eps
    o = writer.call(ops.gated_delta, q, k, v, decay, beta, state, scale=scale, normalize=True, name="o")
    o = writer.call(ops.rms_norm, o, writer.weight("delta_norm", (block.value_dim,), layer), eps=eps, name="o")
    o = writer.call(ops.mul, o, writer.call(ops.activate, z, kind=block.gate_act, name="z"), name="o")
    return writer.linear(writer.call(ops.merge_heads, o, name="o"), "delta_out", writer.model.hidden, False, layer)


def mamba2(writer: Writer, h: Node, block: Mamba2Config, layer: int) -> Node:
    """out(norm(y * silu(z))) of what a state space model gives (Dao & Gu 2024)."""
    heads, groups = block.heads, block.groups
    inner, shared = heads * block.head_dim, groups * block.state
    zxd = writer.linear(h, "mamba_in", 2 * inner + 2 * shared + heads, block.bias, layer)
    z, xbc, dt = writer.call(ops.split, zxd, sizes=[inner, inner + 2 * shared, heads], name=("z", "xbc", "dt"))
    z, dt = writer.scale_as(z, "mamba_z"), writer.scale_as(dt, "mamba_dt")
    if any(writer.model.scales.get(f"mamba_{name}", 1) != 1 for name in "xbc"):
        parts = writer.call(ops.split, xbc, sizes=[inner, shared, shared], name=("x", "b", "c"))
        scaled = (writer.scale_as(each, f"mamba_{name}") for each, name in zip(parts, "xbc", strict=True))
        xbc = writer.call(ops.join, *scaled, name="xbc")
    xbc = causal_conv(writer, xbc, {"mamba_conv": inner + 2 * shared}, block.taps, block.conv_bias, layer, "silu")
    x, b, c = writer.call(ops.split, xbc, sizes=[inner, shared, shared], name=("x", "b", "c"))
    x, b, c = (
        writer.call(ops.split_heads, each, heads=n, name=name)
        for each, n, name in ((x, heads, "x"), (b, groups, "b"), (c, groups, "c"))
    )
    roles = ("mamba_step", "mamba_decay", "mamba_skip")
    step, decay, skip = (number_by_head(writer, role, heads, layer) for role in roles)
    limit = {} if block.step_max is None else {"high": block.step_max}
    dt = writer.call(ops.time_step, dt, step, low=block.step_min, **limit, name="dt")
    state = layer_state(writer, layer, heads, block.head_dim, block.state)
    y = writer.call(ops.merge_heads, writer.call(ops.ssd, x, dt, b, c, state, decay, skip, name="y"), name="y")
    z = writer.call(ops.activate, z, kind="silu", name="z")
    if block.norm != "before_gate":
        y = writer.call(ops.mul, y, z, name="y")
    if block.norm != "none":
        weight, eps = writer.weight("mamba_norm", (inner,), layer), writer.model.norm.eps
        if groups == 1:
            y = writer.call(ops.rms_norm, y, weight, eps=eps, name="y")
        else:
            y = writer.call(ops.group_rms_norm, y, weight, eps=eps, groups=groups, name="y")
    if block.norm == "before_gate":
        y = writer.call(ops.mul, y, z, name="y")
    return writer.linear(y, "mamba_out", writer.model.hidden, block.bias, layer)


def mamba(writer: Writer, h: Node, block: MambaConfig, layer: int) -> Node:
    """out(y * silu(z)) of what a selective scan gives (Gu & Dao 2023)."""
    inner, rank, size = block.inner, block.step_rank, block.state
    xz = writer.linear(h, "mamba_in", 2 * inner, block.bias, layer)
    x, z = writer.call(ops.split, xz, sizes=[inner, inner], name=("x", "z"))
    x = causal_conv(writer, x, {"mamba_conv": inner}, block.taps, block.conv_bias, layer, "silu")
    # small ones that steps and states depend on, which are not worth packing
    weight = writer.stored(writer.weight_name("mamba_x", layer), (rank + 2 * size, inner))
    all_three = writer.multiply(x, weight, role="mamba_x", layer=layer, name="dtbc")
    dt, b, c = writer.call(ops.split, all_three, sizes=[rank, size, size], name=("dt", "b", "c"))
    if block.norms != "none":
        dt, b, c = (inner_norm(writer, each, block, f"mamba_{name}_norm", layer, name)
                    for each, name in ((dt, "dt"), (b, "b"), (c, "c")))  # fmt: skip
    weight = writer.stored(writer.weight_name("mamba_dt", layer), (inner, rank))
    dt = writer.multiply(dt, weight, role="mamba_dt", layer=layer, name="dt")
    bias = W(f"{writer.name('mamba_dt', layer)}.bias", Type("fp32", (inner,)))
    dt = writer.call(ops.time_step, dt, bias, name="dt")
    decay = W(writer.name("mamba_decay", layer), Type("fp32", (inner, size)))
    skip = number_by_head(writer, "mamba_skip", inner, layer)
    state = layer_state(writer, layer, inner, size)
    y = writer.call(ops.selective_scan, x, dt, b, c, state, decay, skip, name="y")
    y = writer.call(ops.mul, y, writer.call(ops.activate, z, kind="silu", name="z"), name="y")
    return writer.linear(y, "mamba_out", writer.model.hidden, block.bias, layer)


def inner_norm(writer: Writer, x: Node, block: MambaConfig, role: str, layer: int, name: str) -> Node:
    shape = x.meta["type"].shape[-1:]
    is_stored = block.norms == "weighted"
    weight: Recipe = writer.weight(role, shape, layer) if is_stored else Full(1.0, Type(writer.dtype, shape))
    eps = writer.model.norm.eps if block.eps is None else block.eps
    normed: Node = writer.call(ops.rms_norm, x, weight, eps=eps, name=name)
    return normed


def lightning(writer: Writer, h: Node, block: LightningConfig, layer: int) -> Node:
    """out(norm(o) * sigmoid(z)) of what lightning attention gives (Qin et al. 2024)."""
    heads, inner = block.heads, block.heads * block.head_dim
    rows = {f"lightning_{name}": inner for name in "qkv"}
    q, k, v = (
        writer.call(ops.split_heads, writer.call(ops.activate, x, kind="silu", name=name), heads=heads, name=name)
        for x, name in zip(writer.linears(h, rows, False, layer, heads), "qkv", strict=True)
    )
    z = writer.linear(h, "lightning_z", inner, False, layer)
    state = layer_state(writer, layer, heads, block.head_dim, block.head_dim)
    share = 1 - layer / (block.layers - 1 + 1e-5) + 1e-5
    slopes = cat(tuple(Full(2 ** (-8 * n / heads) * share, Type("fp32", (1,))) for n in range(1, heads + 1)))
    o = writer.call(ops.merge_heads, writer.call(ops.lightning, q, k, v, state, slopes, name="o"), name="o")
    eps = writer.model.norm.eps if block.eps is None else block.eps
    o = writer.call(ops.rms_norm, o, writer.weight("lightning_norm", (inner,), layer), eps=eps, name="o")
    o = writer.call(ops.mul, o, writer.call(ops.activate, z, kind="sigmoid", name="z"), name="o")
    return writer.linear(o, "lightning_out", writer.model.hidden, False, layer)


def stored_parts(
    writer: Writer, rows: dict[str, tuple[int, Node]], layer: int, num_chunks: int = 1
) -> dict[str, Recipe]:
    """The weights of linears by role, as they are stored; see `Writer.parts`.

    rows: of each role, their number and what the linear reads
    """

    def stored(role: str, n: int) -> Recipe:
        return writer.stored(writer.weight_name(role, layer), (n, int(rows[role][1].meta["type"].shape[-1])))

    counts = {role: n for role, (n, _) in rows.items()}
    return dict(zip(rows, writer.parts(counts, stored, layer, num_chunks=num_chunks), strict=True))


def layer_state(writer: Writer, layer: int, *shape: int) -> LatestState:
    return LatestState(writer.name("layer", layer), Type(writer.model.state_dtype, shape))


def number_by_head(writer: Writer, role: str, count: int, layer: int) -> Recipe:
    """A tensor with a number for each head, in float32 whatever it is stored in."""
    return W(writer.name(role, layer), Type("fp32", (count,)))


def causal_conv(
    writer: Writer, x: Node, rows: dict[str, int], taps: int, has_bias: bool, layer: int, kind: str | None = None
) -> Node:
    """A convolution [T, C] -> [T, C], whose weights are stored as [C, 1, taps], and then an activation.

    rows: of each role, the channels; kind: of the activation; None: none
    """
    channels = sum(rows.values())
    state = LatestState(writer.name("layer", layer), Type(writer.dtype, (taps - 1, channels)))
    weight = writer.parts(rows, lambda role, n: writer.weight(role, (n, taps), layer), layer)
    weights = [cat(tuple(weight))]
    if has_bias:
        weights.append(cat(tuple(writer.parts(rows, lambda role, n: writer.weight(role, (n,), layer, "bias"), layer))))
    made: Node = writer.call(ops.causal_conv, x, state, *weights, kind=kind, name="conv")
    return made


QKV = ("delta_q", "delta_k", "delta_v")
RECURRENT: dict[type, Callable[[Writer, Node, Any, int], Node]] = {
    ShortConvConfig: short_conv,
    GatedDeltaConfig: gated_delta,
    Mamba2Config: mamba2,
    MambaConfig: mamba,
    LightningConfig: lightning,
}

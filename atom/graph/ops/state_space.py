"""State space models: Mamba's selective scan, Mamba-2's SSD, their time steps and norm.

dt = time_step(dt, W("….dt_bias", fp32[64]))
y = ssd(x, dt, b, c, STATE("model.layers.0", fp32[64, 64, 128]), W("….A_log", fp32[64]), W("….D", fp32[64]))
y = group_rms_norm(mul(merge_heads(y), activate(z, kind="silu")), W("….norm.weight", bf16[4096]), eps=1e-5, groups=8)

Shapes by letter besides those of all ops: I inner channels, P channels of a head, G groups of heads, S numbers that a
channel's state has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.ops.base import divide, op
from atom.graph.ops.dense import rms_norm
from atom.graph.ops.recurrent import recurrent
from atom.graph.recipes import State
from atom.graph.types import Type, need


def _time_step(dt: Type, bias: Type | None = None, *, low: float = 0.0, high: float | None = None) -> Type:
    need(bias is None or bias.shape == dt.shape[1:], f"the bias is {bias} for dt {dt}")
    need(high is None or low <= high, f"steps from {low} to {high}")
    return Type("fp32", dt.shape)


@op(_time_step, heads={"dt": 1, "bias": 0})
def time_step(dt: Tensor, bias: Tensor | None = None, *, low: float = 0.0, high: float | None = None) -> Tensor:
    """dt [T, C], bias [C] -> fp32[T, C]: softplus(dt + bias), from low to high (Gu & Dao 2023)"""
    raw = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(raw).clamp(low, high)


def _ssm_decay(a: Type, a_log: Type, bias: Type, *, floor: float | None = None) -> Type:
    need(len(a.shape) == 2 and bias.shape == a.shape[1:], f"the bias is {bias} for a {a}")
    need(len(a_log.shape) == 1, f"A_log is {a_log}, not of heads")
    divide(a.shape[1], int(a_log.shape[0]))
    need(floor is None or floor < 0, f"the floor of a logarithm of decays is {floor}")
    return Type("fp32", a.shape)


@op(_ssm_decay, heads={"a": 1, "a_log": 0, "bias": 0})
def ssm_decay(a: Tensor, a_log: Tensor, bias: Tensor, *, floor: float | None = None) -> Tensor:
    """a [T, N * K], a_log [N], bias [N * K] -> fp32[T, N * K], the logarithm of a decay: -exp(a_log) softplus(a + bias)

    floor: the lowest one, as in Kimi-K3; then it is floor * sigmoid(exp(a_log) (a + bias))
    """
    rate = a_log.float().exp().repeat_interleave(a.shape[1] // len(a_log))
    raw = a.float() + bias.float()
    return -rate * F.softplus(raw) if floor is None else floor * torch.sigmoid(rate * raw)


def _ssd(x: Type, dt: Type, b: Type, c: Type, state: State, a_log: Type, d: Type) -> Type:
    need(len(x.shape) == len(b.shape) == 3, f"x and B have heads and groups: x is {x}, B {b}")
    tokens, heads, dim = x.shape
    need(dt == Type("fp32", (tokens, heads)), f"the steps are {dt} for x {x}")
    need(b == c and (b.shape[0], b.dtype) == (tokens, x.dtype), f"B is {b}, C {c}, x {x}")
    divide(heads, int(b.shape[1]))
    need(a_log.shape == d.shape == (heads,), f"A_log is {a_log}, D {d} for x {x}")
    need(state.type.shape == (heads, dim, b.shape[2]), f"the state is {state.type} for x {x} and B {b}")
    return x


@recurrent(_ssd, heads={"x": 1, "dt": 1, "b": 1, "c": 1, "state": 0, "a_log": 0, "d": 0}, flops=4)
def ssd(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, a_log: Tensor,
        d: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba-2's state space model (Dao & Gu 2024), token by token in float32.

    x [T, N, P], dt fp32[T, N], see `time_step`, b and c [T, G, S], state [N, P, S], a_log and d [N] -> [T, N, P]

    h = exp(-exp(a_log) dt) h + dt x b^T; y = h c + d x. Each group serves N / G heads in a row.
    """
    b, c = (each.float().repeat_interleave(x.shape[1] // b.shape[1], 1) for each in (b, c))
    kept = torch.exp(-a_log.float().exp() * dt).view(*dt.shape, 1, 1)
    wide, d = x.float(), d.float().unsqueeze(-1)
    moved, state, out = wide * dt.unsqueeze(-1), state.float(), torch.empty_like(x)
    for t in range(len(x)):
        state = kept[t] * state + moved[t].unsqueeze(-1) * b[t].unsqueeze(-2)
        out[t] = (state @ c[t].unsqueeze(-1)).squeeze(-1) + d * wide[t]
    return out, state


def _selective_scan(x: Type, dt: Type, b: Type, c: Type, state: State, a_log: Type, d: Type) -> Type:
    need(len(x.shape) == len(b.shape) == 2, f"x and B are rows: x is {x}, B {b}")
    tokens, channels = x.shape
    need(dt == Type("fp32", x.shape), f"the steps are {dt} for x {x}")
    need(b == c and (b.shape[0], b.dtype) == (tokens, x.dtype), f"B is {b}, C {c}, x {x}")
    need(a_log.shape == (channels, b.shape[1]) and d.shape == (channels,), f"A_log is {a_log}, D {d} for x {x}, B {b}")
    need(state.type.shape == a_log.shape, f"the state is {state.type} for x {x} and B {b}")
    return x


@recurrent(_selective_scan, heads={"x": 1, "dt": 1, "state": 0, "a_log": 0, "d": 0}, flops=4)
def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, a_log: Tensor,
                   d: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba's selective scan (Gu & Dao 2023), token by token in float32.

    x [T, I], dt fp32[T, I], see `time_step`, b and c [T, S], state [I, S], a_log [I, S], d [I] -> [T, I]

    h = exp(-exp(a_log) dt) h + dt x b^T; y = h c + d x
    """
    b, c, wide, d, rate = b.float(), c.float(), x.float(), d.float(), -a_log.float().exp()
    moved, state, out = wide * dt, state.float(), torch.empty_like(x)
    for t in range(len(x)):
        state = torch.exp(dt[t].unsqueeze(-1) * rate) * state + moved[t].unsqueeze(-1) * b[t]
        out[t] = state @ c[t] + d * wide[t]
    return out, state


def _group_rms_norm(x: Type, weight: Type, *, eps: float, groups: int) -> Type:
    need(weight.shape == x.shape[-1:], f"the weight is {weight} for {x}")
    divide(x.shape[-1], groups)
    return x


@op(_group_rms_norm, heads={"x": 1, "weight": 0, "groups": None})
def group_rms_norm(x: Tensor, weight: Tensor, *, eps: float, groups: int) -> Tensor:
    """x [..., H], weight [H] -> [..., H]: `rms_norm` of each of the groups of columns, all of the same width"""
    parts = x.view(*x.shape[:-1], groups, -1)
    made: Tensor = rms_norm(parts, weight.view(groups, -1), eps=eps)
    return made.flatten(-2)

"""Linear attention: the gated delta rule, its block, and lightning attention.

A head's state is a matrix [K, V] that maps keys to values. Each token adds its own pair, and its query reads the state
in place of all earlier keys. A decay is given as its logarithm, 0 or less.

o = gated_delta(q, k, v, decay, beta, STATE("model.layers.0", fp32[32, 128, 128]), scale=0.088, normalize=True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atom.graph.batch import Batch
from atom.graph.ops.attention import merge_heads, split_heads
from atom.graph.ops.base import LOWERED, OPS, divide, op
from atom.graph.ops.dense import ACTIVATIONS, activate, mul, rms_norm
from atom.graph.ops.recurrent import recurrent
from atom.graph.ops.state_space import ssm_decay
from atom.graph.recipes import State
from atom.graph.types import Type, need

L2_EPS = 1e-6  # below the root of a key's squared length, as in flash-linear-attention


def _gated_delta(q: Type, k: Type, v: Type, decay: Type, beta: Type, state: State, *, scale: float,
                 normalize: bool = False) -> Type:  # fmt: skip
    need(len(q.shape) == len(v.shape) == 3, f"q and v have heads: q is {q}, v {v}")
    tokens, heads, value_dim = v.shape
    need(q == k and (q.shape[0], q.dtype) == (tokens, v.dtype), f"q is {q}, k {k}, v {v}")
    divide(heads, int(q.shape[1]))
    of_heads, of_dims = (Type("fp32", (tokens, heads, *dims)) for dims in ((), q.shape[2:]))
    need(decay in (of_heads, of_dims), f"the decay is {decay}, neither {of_heads} nor {of_dims}")
    need(beta.shape == (tokens, heads), f"beta is {beta} for v {v}")
    need(state.type.shape == (heads, q.shape[2], value_dim), f"the state is {state.type} for q {q} and v {v}")
    return v


@recurrent(_gated_delta, heads={"q": 1, "k": 1, "v": 1, "decay": 1, "beta": 1, "state": 0}, flops=6)
def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, scale: float,
                normalize: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule (Yang et al. 2024), token by token in float32.

    q and k [T, Nk, K], v [T, N, V], decay fp32[T, N], or fp32[T, N, K] for one of each dim of a key (Kimi Team 2025),
    beta [T, N], state [N, K, V] -> [T, N, V]

    The state decays, what it gives for the key moves towards the value by beta, and the query reads it:
    S = exp(decay) S; S += k beta (v - S^T k)^T; o = S^T q scale. Each head of q and k serves N / Nk heads in a row.

    normalize: q and k are divided by their lengths first
    """
    heads_per_key = v.shape[1] // q.shape[1]
    q, k = q.float(), k.float()
    if normalize:
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + L2_EPS) for each in (q, k))
    q, k = (each.repeat_interleave(heads_per_key, 1) for each in (q * scale, k))
    kept = decay.exp().view(*v.shape[:2], -1, 1)
    state, wide, beta, out = state.float(), v.float(), beta.float().unsqueeze(-1), torch.empty_like(v)
    for t in range(len(v)):
        state = state * kept[t]
        error = wide[t] - read(state, k[t])
        state = state + k[t].unsqueeze(-1) * (beta[t] * error).unsqueeze(-2)
        out[t] = read(state, q[t])
    return out, state


def read(state: Tensor, query: Tensor) -> Tensor:
    """What states [N, K, V] give for the queries [N, K] -> [N, V]"""
    return (query.unsqueeze(-2) @ state).squeeze(-2)


def _gated_delta_net(
    qkv: Type, z: Type, a: Type, b: Type, conv_state: State, state: State, batch: Any, conv: Type, a_log: Type,
    bias: Type, norm: Type, *, key_heads: int, scale: float, eps: float, kind: str = "silu", beta_scale: float = 1.0,
    normalize: bool = False, floor: float | None = None,
) -> Type:  # fmt: skip
    need(isinstance(state, State) and len(state.type.shape) == 3, f"{state} is no state of a delta rule")
    heads, dim, width = (int(size) for size in state.type.shape)
    tokens, channels = qkv.shape
    divide(heads, key_heads)
    need(channels == 2 * key_heads * dim + heads * width, f"{channels} channels are not q, k and v of {state.type}")
    need(z == Type(qkv.dtype, (tokens, heads * width)), f"the gate is {z} for {state.type}")
    need(b.shape == (tokens, heads), f"beta is {b} for {heads} heads")
    need(kind in ACTIVATIONS, f"{kind} is no activation")
    need(norm.shape == (width,), f"the norm is {norm} for {state.type}")
    OPS["batched_causal_conv"].infer(qkv, conv_state, batch, conv, kind="silu")
    ssm_decay.infer(a, a_log, bias, floor=floor)
    need(int(a.shape[1]) in (heads, heads * dim), f"the decays are {a} for {state.type}")
    return z


@op(_gated_delta_net, level=LOWERED, state=True, state_flops=6)
def gated_delta_net(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, state: Tensor, batch: Batch, conv: Tensor,
    a_log: Tensor, bias: Tensor, norm: Tensor, *, key_heads: int, scale: float, eps: float, kind: str = "silu",
    beta_scale: float = 1.0, normalize: bool = False, floor: float | None = None,
) -> Tensor:  # fmt: skip
    """The gated delta rule of a batch with its convolution, gates and norm, between the projections of its block.

    qkv [T, 2 Nk K + N V], z [T, N V], a [T, N] or [T, N K], b [T, N], conv [2 Nk K + N V, taps], a_log [N], bias as a,
    norm [V], states of slots as in the ops that it is made of -> [T, N V]

    q, k, v = causal_conv(qkv); o = gated_delta(q, k, v, ssm_decay(a, a_log, bias), sigmoid(b) beta_scale);
    rms_norm(o, norm) act(z), head by head

    kind: of the activation of z; floor: as in ssm_decay
    """
    heads, dim, _ = state.shape[2:]
    mixed = OPS["batched_causal_conv"](qkv, conv_state, batch, conv, kind="silu")
    q, k, v = mixed.split([key_heads * dim, key_heads * dim, z.shape[1]], 1)
    q, k, v = split_heads(q, heads=key_heads), split_heads(k, heads=key_heads), split_heads(v, heads=heads)
    decay = ssm_decay(a, a_log, bias, floor=floor)
    decay = decay if decay.shape[1] == heads else split_heads(decay, heads=heads)
    beta = activate(b, kind="sigmoid") * beta_scale
    o = OPS["batched_gated_delta"](q, k, v, decay, beta, state, batch, scale=scale, normalize=normalize)
    gate = activate(split_heads(z, heads=heads), kind=kind)
    made: Tensor = merge_heads(mul(rms_norm(o, norm, eps=eps), gate))
    return made


def _lightning(q: Type, k: Type, v: Type, state: State, slopes: Type, *, scale: float = 1.0) -> Type:
    need(len(q.shape) == len(v.shape) == 3, f"q and v have heads: q is {q}, v {v}")
    _, heads, value_dim = v.shape
    need(q == k and (q.shape[:2], q.dtype) == (v.shape[:2], v.dtype), f"q is {q}, k {k}, v {v}")
    need(slopes.shape == (heads,), f"the slopes are {slopes} for v {v}")
    need(state.type.shape == (heads, q.shape[2], value_dim), f"the state is {state.type} for q {q} and v {v}")
    return v


@recurrent(_lightning, heads={"q": 1, "k": 1, "v": 1, "state": 0, "slopes": 0}, flops=4)
def lightning(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, *,
              scale: float = 1.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Lightning attention (Qin et al. 2024): linear attention whose heads have a fixed decay, in float32.

    q and k [T, N, K], v [T, N, V], state [N, K, V], slopes [N], the negative logarithms of the decays -> [T, N, V]

    S = exp(-slope) S + k v^T; o = S^T q scale
    """
    kept = torch.exp(-slopes.float()).view(-1, 1, 1)
    q, k, wide = q.float() * scale, k.float(), v.float()
    state, out = state.float(), torch.empty_like(v)
    for t in range(len(v)):
        state = kept * state + k[t].unsqueeze(-1) * wide[t].unsqueeze(-2)
        out[t] = read(state, q[t])
    return out, state

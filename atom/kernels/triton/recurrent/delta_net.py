"""A gated delta net between its projections: convolution, gates, rule, norm.

    o = gated_delta_net(qkv, z, a, b, conv_state, state, batch, conv, a_log, bias, norm, key_heads=16, scale=…, eps=…)

A kernel for each part, see `causal_conv` and `gated_delta`. Backends for some GPUs take decodes in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.activations import activation, softplus
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.recurrent.causal_conv import batched_causal_conv
from atom.kernels.triton.recurrent.gated_delta import batched_gated_delta

ROWS = 4  # heads whose outputs a program norms
DECAYS = 512  # of a token, that a warp computes: by dim there are many


@jit(do_not_specialize_on_alignment=["a", "b"])
def _gated_delta_gates(
    a, b, a_log, bias, decay, beta, a_stride, b_stride, BETA_SCALE: tl.constexpr, FLOOR: tl.constexpr,
    HEADS: tl.constexpr, DECAYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a token: the logarithms of its decays [DECAYS], and beta [HEADS]."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads, numbers = tl.arange(0, triton.next_power_of_2(HEADS)), tl.arange(0, triton.next_power_of_2(DECAYS))
    step = tl.sigmoid(tl.load(b + token * b_stride + heads, mask=heads < HEADS, other=0.0).to(tl.float32))
    tl.store(beta + token * HEADS + heads, step * BETA_SCALE, mask=heads < HEADS)
    is_number = numbers < DECAYS
    rate = tl.exp(tl.load(a_log + numbers // (DECAYS // HEADS), mask=is_number, other=0.0).to(tl.float32))
    raw = tl.load(a + token * a_stride + numbers, mask=is_number, other=0.0).to(tl.float32)
    raw += tl.load(bias + numbers, mask=is_number, other=0.0).to(tl.float32)
    tl.store(decay + token * DECAYS + numbers, logarithm_of_decay(rate, raw, FLOOR), mask=is_number)


@jit
def logarithm_of_decay(rate, raw, FLOOR: tl.constexpr):
    """rate and raw fp32 -> fp32, as the op `ssm_decay`"""
    return -rate * softplus(raw) if FLOOR is None else FLOOR * tl.sigmoid(rate * raw)


@jit
def _gated_delta_norm(
    o, z, norm, out, num_rows, z_stride, EPS: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rms_norm(o) act(z) of BLOCK heads, those of a token after those of the one before."""
    wait_for_inputs(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))
    is_there = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    places = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(o + places, mask=is_there, other=0.0).to(tl.float32)
    offsets = (rows // HEADS * z_stride + rows % HEADS * WIDTH)[:, None] + columns[None, :]
    gate = tl.load(z + offsets, mask=is_there, other=0.0).to(tl.float32)
    weight = tl.load(norm + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + EPS)[:, None] * weight[None, :]
    tl.store(out + places, (x * activation(gate, KIND)).to(out.dtype.element_ty), mask=is_there)


def gated_delta_net(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, state: Tensor, batch: Batch, conv: Tensor,
    a_log: Tensor, bias: Tensor, norm: Tensor, *, key_heads: int, scale: float, eps: float, kind: str = "silu",
    beta_scale: float = 1.0, normalize: bool = False, floor: float | None = None,
) -> Tensor:  # fmt: skip
    """Shapes as in the op. What it gives for tokens of no sequence is unset."""
    assert batch.slots is not None and state.is_contiguous() and conv_state.is_contiguous() and conv.is_contiguous()
    assert all(each.stride(1) == 1 for each in (qkv, z, a, b))
    heads, dim, width = state.shape[2:]
    num_tokens, options = len(qkv), find_gpu(qkv.device).options
    out = z.new_empty(num_tokens, heads * width)
    mixed = batched_causal_conv(qkv, conv_state, batch, conv, kind="silu")
    q, k, v = mixed.split([key_heads * dim, key_heads * dim, heads * width], 1)
    decay = a.new_empty(num_tokens, heads, *[dim] * (a.shape[1] > heads), dtype=torch.float32)
    beta = b.new_empty(num_tokens, heads, dtype=torch.float32)
    warps = max(1, min(8, next_power_of_2(a.shape[1]) // DECAYS))
    _gated_delta_gates[num_tokens,](
        a, b, a_log, bias, decay, beta, a.stride(0), b.stride(0), beta_scale, floor, heads, a.shape[1],
        num_warps=warps, **options,
    )  # fmt: skip
    keys, queries = k.view(num_tokens, key_heads, dim), q.view(num_tokens, key_heads, dim)
    o = batched_gated_delta(queries, keys, v.view(num_tokens, heads, width), decay, beta, state, batch, scale=scale,
                            normalize=normalize)  # fmt: skip
    _gated_delta_norm[-(-num_tokens * heads // ROWS),](
        o, z, norm, out, num_tokens * heads, z.stride(0), eps, kind, heads, width, BLOCK=ROWS, num_warps=1, **options
    )
    return out

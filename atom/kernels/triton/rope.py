"""Norm of heads, rotary position and cache write in one launch, for one token as for a long prompt.

    q = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, slots, eps=1e-6)

q, k and v may be views of one product. A program takes some rows, which are the heads of all tokens laid end to end:
of q, or of k and v. Rounds once, after the rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.tiles import find_gpu, has_rows, wait_for_inputs


@triton.jit
def _turn(x, out, tokens, is_row, cos, sin, norm, EPS: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
          HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Heads at the pointers x [rows] to those at out [rows]: normed, and their first 2 HALF dims turned."""
    turning = tl.arange(0, BLOCK_H)
    first = 2 * turning if INTERLEAVED else turning
    second = first + 1 if INTERLEAVED else first + HALF
    resting = 2 * HALF + tl.arange(0, BLOCK_R)
    is_turning = is_row[:, None] & (turning < HALF)[None, :]
    is_resting = is_row[:, None] & (resting < DIM)[None, :]
    if HALF > 0:
        a = tl.load(x[:, None] + first[None, :], mask=is_turning, other=0.0).to(tl.float32)
        b = tl.load(x[:, None] + second[None, :], mask=is_turning, other=0.0).to(tl.float32)
    if DIM > 2 * HALF:
        rest = tl.load(x[:, None] + resting[None, :], mask=is_resting, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.zeros([x.shape[0]], tl.float32)
        if HALF > 0:
            squares += tl.sum(a * a + b * b, 1)
        if DIM > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / DIM + EPS)[:, None]
        if HALF > 0:
            a = a * factor * tl.load(norm + first, mask=turning < HALF, other=0.0).to(tl.float32)[None, :]
            b = b * factor * tl.load(norm + second, mask=turning < HALF, other=0.0).to(tl.float32)[None, :]
        if DIM > 2 * HALF:
            rest = rest * factor * tl.load(norm + resting, mask=resting < DIM, other=0.0).to(tl.float32)[None, :]
    if HALF > 0:
        angles = tokens[:, None] * HALF + turning[None, :]
        c = tl.load(cos + angles, mask=is_turning, other=0.0)
        s = tl.load(sin + angles, mask=is_turning, other=0.0)
        tl.store(out[:, None] + first[None, :], (a * c - b * s).to(out.dtype.element_ty), mask=is_turning)
        tl.store(out[:, None] + second[None, :], (b * c + a * s).to(out.dtype.element_ty), mask=is_turning)
    if DIM > 2 * HALF:
        tl.store(out[:, None] + resting[None, :], rest.to(out.dtype.element_ty), mask=is_resting)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _norm_rope_write(
    q, k, v, cos, sin, q_norm, k_norm, cache, slots, out, num_tokens, q_stride, k_stride, v_stride,
    EPS: tl.constexpr, INTERLEAVED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of q, then of k with those of v."""
    wait_for_inputs(PDL)
    num_q_programs = tl.cdiv(num_tokens * Q_HEADS, ROWS)
    program = tl.program_id(0)
    if program < num_q_programs:
        rows = program * ROWS + tl.arange(0, ROWS)
        tokens = (rows // Q_HEADS).to(tl.int64)
        heads = rows % Q_HEADS
        _turn(q + tokens * q_stride + heads * DIM, out + rows.to(tl.int64) * DIM, tokens, tokens < num_tokens, cos,
              sin, q_norm, EPS, INTERLEAVED, DIM, HALF, BLOCK_H, BLOCK_R)  # fmt: skip
    else:
        rows = (program - num_q_programs) * ROWS + tl.arange(0, ROWS)
        tokens = (rows // KV_HEADS).to(tl.int64)
        heads = rows % KV_HEADS
        is_row = tokens < num_tokens
        columns = tl.arange(0, BLOCK_D)
        is_there = is_row[:, None] & (columns < DIM)[None, :]
        value_rows = v + tokens * v_stride + heads * DIM
        values = tl.load(value_rows[:, None] + columns[None, :], mask=is_there, other=0.0)
        slot = tl.load(slots + tokens, mask=is_row, other=0)
        entries = cache + (slot * (2 * KV_HEADS) + heads) * DIM
        _turn(k + tokens * k_stride + heads * DIM, entries, tokens, is_row, cos, sin, k_norm, EPS, INTERLEAVED, DIM,
              HALF, BLOCK_H, BLOCK_R)  # fmt: skip
        tl.store((entries + KV_HEADS * DIM)[:, None] + columns[None, :], values.to(cache.dtype.element_ty),
                 mask=is_there)  # fmt: skip


def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: Tensor, slots: Tensor, *, eps: float = 0.0,
                    interleaved: bool = False) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D] -> a new q [T, N, D];
    cache [blocks, block size, 2, K, D], slots i64[T]."""
    num_tokens, q_heads, dim = q.shape
    kv_heads, half = k.shape[1], 0 if cos is None else cos.shape[1]
    assert has_rows(q) and has_rows(k) and has_rows(v) and cache.is_contiguous(), "heads must lie side by side"
    assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous()), "cos and sin must be contiguous"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    gpu = find_gpu(q.device)
    rows = 8 if num_tokens <= 64 else 32  # few tokens: as many programs as there are
    _norm_rope_write[(triton.cdiv(num_tokens * q_heads, rows) + triton.cdiv(num_tokens * kv_heads, rows),)](
        q, k, v, cos, sin, q_norm, k_norm, cache, slots, out, num_tokens, q.stride(0), k.stride(0), v.stride(0),
        eps, interleaved, q_heads, kv_heads, dim, half, rows, triton.next_power_of_2(max(half, 1)),
        triton.next_power_of_2(max(dim - 2 * half, 1)), triton.next_power_of_2(dim), gpu.has_dependent_launch,
        num_warps=4, **gpu.options,
    )  # fmt: skip
    return out

"""Norm, rope and cache write in one launch.

It serves one token as well as a long prompt.

    q = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, batch, eps=1e-6)

q, k and v may be views of one output. A program takes some rows, which are the heads of all tokens laid end to end:
of q, or of k and v. Rounds once, after the rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.kernels.triton.attention.common import has_rows, to_entry, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu

ROWS = 8  # per program


@jit
def find_partner(columns, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The dim that each of the first 2 HALF is rotated with (Su et al. 2021)."""
    return columns ^ 1 if INTERLEAVED else (columns + HALF) % (2 * HALF)


@jit
def find_angle(columns, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The number, of HALF, of the angle that turns each of the first 2 HALF dims."""
    return columns // 2 if INTERLEAVED else columns % HALF


@jit
def rotate(own, other, c, s, columns, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Dims and their partners, and cos and sin of their angles, all fp32 -> the first 2 HALF dims rotated."""
    is_first = columns % 2 == 0 if INTERLEAVED else columns < HALF
    return own * c + other * tl.where(is_first, -s, s)


@jit
def _load_pairs(heads, columns, is_row, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Heads at the pointers [R] -> fp32[R, C] twice: each of the columns [1, C], and what it is rotated with."""
    heads, is_row = heads[:, None], is_row[:, None]
    own = tl.load(heads + columns, mask=is_row & (columns < DIM), other=0.0).to(tl.float32)
    other = own
    if HALF > 0:
        others = heads + find_partner(columns, HALF, INTERLEAVED)
        other = tl.load(others, mask=is_row & (columns < 2 * HALF), other=0.0).to(tl.float32)
    return own, other


@jit
def rotate_heads(heads, columns, tokens, is_row, cos, sin, norms, EPS: tl.constexpr, INTERLEAVED: tl.constexpr,
                 DIM: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Heads at the pointers [R], of tokens i64[R], by norms at pointers [R] -> fp32[R, C], normed, and their first 2
    HALF dims rotated; columns [1, C]: all DIM in any order, and some after them."""
    own, other = _load_pairs(heads, columns, is_row, DIM, HALF, INTERLEAVED)
    if HALF > 0:
        angles = tokens[:, None] * HALF + find_angle(columns, HALF, INTERLEAVED)
        is_turning = is_row[:, None] & (columns < 2 * HALF)
        c = tl.load(cos + angles, mask=is_turning, other=1.0)
        s = tl.load(sin + angles, mask=is_turning, other=0.0)
    if norms is not None:
        weight, other_weight = _load_pairs(norms, columns, is_row, DIM, HALF, INTERLEAVED)
        factor = tl.rsqrt(tl.sum(own * own, 1) / DIM + EPS)[:, None]
        own *= factor * weight
        other *= factor * other_weight
    if HALF > 0:
        own = rotate(own, other, c, s, columns, HALF, INTERLEAVED)
    return own


@jit
def store_rotated(heads, out, scale, tokens, is_row, cos, sin, norm, EPS: tl.constexpr, INTERLEAVED: tl.constexpr,
                 DIM: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """rotate_heads, by one norm, to the pointers out [R]; scale: as in to_entry"""
    norms = None if norm is None else norm + 0 * tokens
    columns = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    rotated = rotate_heads(heads, columns, tokens, is_row, cos, sin, norms, EPS, INTERLEAVED, DIM, HALF)
    entries = to_entry(rotated, scale, out.dtype.element_ty)
    tl.store(out[:, None] + columns, entries, mask=is_row[:, None] & (columns < DIM))


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _norm_rope_write(
    q, k, v, cos, sin, q_norm, k_norm, cache, slots, k_scale, v_scale, out, num_tokens, q_stride, k_stride, v_stride,
    EPS: tl.constexpr, INTERLEAVED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of q, then of k with those of v, to their slots; without v of k only, to the tokens' own places."""
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    if v_scale is not None:
        v_scale = tl.load(v_scale)
    wait_for_inputs(PDL)
    num_q_programs = tl.cdiv(num_tokens * Q_HEADS, ROWS)
    program = tl.program_id(0)
    if program < num_q_programs:
        rows = program * ROWS + tl.arange(0, ROWS)
        tokens = (rows // Q_HEADS).to(tl.int64)
        heads = rows % Q_HEADS
        store_rotated(q + tokens * q_stride + heads * DIM, out + rows.to(tl.int64) * DIM, None, tokens,
                     tokens < num_tokens, cos, sin, q_norm, EPS, INTERLEAVED, DIM, HALF)  # fmt: skip
    else:
        rows = (program - num_q_programs) * ROWS + tl.arange(0, ROWS)
        tokens = (rows // KV_HEADS).to(tl.int64)
        heads = rows % KV_HEADS
        is_row = tokens < num_tokens
        if v is None:
            entries = cache + (tokens * KV_HEADS + heads) * DIM
        else:
            columns = tl.arange(0, triton.next_power_of_2(DIM))
            is_there = is_row[:, None] & (columns < DIM)[None, :]
            value_rows = v + tokens * v_stride + heads * DIM
            values = tl.load(value_rows[:, None] + columns[None, :], mask=is_there, other=0.0)
            slot = tl.load(slots + tokens, mask=is_row, other=0)
            entries = cache + (slot * (2 * KV_HEADS) + heads) * DIM
            tl.store((entries + KV_HEADS * DIM)[:, None] + columns[None, :],
                     to_entry(values, v_scale, cache.dtype.element_ty), mask=is_there)  # fmt: skip
        store_rotated(k + tokens * k_stride + heads * DIM, entries, k_scale, tokens, is_row, cos, sin, k_norm, EPS,
                     INTERLEAVED, DIM, HALF)  # fmt: skip


def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None,
                    v_scale: Tensor | None = None, *, eps: float = 0.0,
                    interleaved: bool = False) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D], cache [blocks, block size, 2, K,
    D], k_scale and v_scale fp32[1] -> a new q [T, N, D]"""
    assert has_rows(v) and cache.blocks.is_contiguous(), "heads must lie side by side"
    slots = batch.slot_mappings[cache.kind]
    return _launch(q, k, v, cos, sin, q_norm, k_norm, cache.blocks, slots, k_scale, v_scale, eps, interleaved)


def norm_rope(q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
              k_norm: Tensor | None, *, eps: float = 0.0,
              interleaved: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, N, D], k [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D] -> a new q and a new k"""
    keys = torch.empty_like(k, memory_format=torch.contiguous_format)
    return _launch(q, k, None, cos, sin, q_norm, k_norm, keys, None, None, None, eps, interleaved), keys


def _launch(q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
            k_norm: Tensor | None, cache: Tensor, slots: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
            eps: float, interleaved: bool) -> Tensor:  # fmt: skip
    num_tokens, q_heads, dim = q.shape
    kv_heads, half = k.shape[1], 0 if cos is None else cos.shape[1]
    assert has_rows(q) and has_rows(k), "heads must lie side by side"
    assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous()), "cos and sin must be contiguous"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    v_stride = 0 if v is None else v.stride(0)
    gpu = find_gpu(q.device)
    _norm_rope_write[(-(-num_tokens * q_heads // ROWS) + -(-num_tokens * kv_heads // ROWS),)](
        q, k, v, cos, sin, q_norm, k_norm, cache, slots, k_scale, v_scale, out, num_tokens, q.stride(0), k.stride(0),
        v_stride, eps, interleaved, q_heads, kv_heads, dim, half, ROWS, num_warps=4, **gpu.options,
    )  # fmt: skip
    return out

"""The gated delta rule of a step's sequences.

    o = batched_gated_delta(q, k, v, decay, beta, state, batch, scale=0.088, normalize=True)

Decodes go token by token: a program keeps some columns of a head's state in registers, so that it is read and written
once. So do prompts that `chunks` does not take, and the last tokens of others if a slot keeps the states after several.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.graph.ops.linear_attention import L2_EPS
from atom.kernels.triton.attention.common import has_rows, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.recurrent import chunks
from atom.kernels.triton.recurrent.states import first_token, row_of

COLUMNS = 32  # of a program


@jit
def _load_row(row, dims, SIZE: tl.constexpr):
    return tl.load(row + dims, mask=dims < SIZE, other=0.0).to(tl.float32)


@jit
def _unit(x, EPS: tl.constexpr):
    """A row divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@jit(
    do_not_specialize=["num_whole", "q_stride", "k_stride", "v_stride"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths"],
)
def _gated_delta(
    q, k, v, decay, beta, states, slots, starts, lengths, out, num_whole, q_stride, k_stride, v_stride,
    SCALE: tl.constexpr, EPS: tl.constexpr, BY_DIM: tl.constexpr, KEPT: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """num_whole: sequences of which all tokens are taken; of the others the last KEPT - 1
    EPS: added to squared lengths of keys and queries, which are normalized then; None: they are not
    """
    wait_for_inputs(PDL)
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    num_before = tl.load(lengths + sequence) - count
    begin = first_token(sequence, count, num_whole, KEPT)
    if begin >= count:
        return
    slot = tl.load(slots + sequence)
    size: tl.constexpr = HEADS * DIM * WIDTH
    places = states + (head * DIM + dims[:, None]) * WIDTH + columns[None, :]
    is_there = (dims < DIM)[:, None] & (columns < WIDTH)[None, :]
    before = places + row_of(slot, num_before + begin, KEPT) * size
    state = tl.load(before, mask=is_there & (num_before + begin > 0), other=0.0).to(tl.float32)
    of_key = head // (HEADS // KEY_HEADS) * DIM
    for t in range(begin, count):
        token = first + t
        key = _load_row(k + token * k_stride + of_key, dims, DIM)
        query = _load_row(q + token * q_stride + of_key, dims, DIM)
        if EPS is not None:
            key, query = _unit(key, EPS), _unit(query, EPS)
        if BY_DIM:
            state *= tl.exp(_load_row(decay + (token * HEADS + head) * DIM, dims, DIM))[:, None]
        else:
            state *= tl.exp(tl.load(decay + token * HEADS + head))
        value = _load_row(v + token * v_stride + head * WIDTH, columns, WIDTH)
        step = tl.load(beta + token * HEADS + head).to(tl.float32) * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * step[None, :]
        read = tl.sum(state * (query * SCALE)[:, None], 0)
        tl.store(out + (token * HEADS + head) * WIDTH + columns, read.to(out.dtype.element_ty), mask=columns < WIDTH)
        if t + KEPT >= count:
            after = places + row_of(slot, num_before + t + 1, KEPT) * size
            tl.store(after, state.to(states.dtype.element_ty), mask=is_there)


def batched_gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch, *,
                        scale: float, normalize: bool = False) -> Tensor:  # fmt: skip
    """Shapes as in the op. What it gives for tokens of no sequence is unset."""
    assert all(map(has_rows, (q, k, v))) and state.is_contiguous()
    heads, width = v.shape[1:]
    key_heads, dim = q.shape[1:]
    out = v.new_empty(v.shape)
    decay, beta, kept, eps = decay.contiguous(), beta.contiguous(), state.shape[1], L2_EPS if normalize else None
    is_chunked = normalize and chunks.suits(v, dim, batch, is_unit=True, by_dim=decay.dim() == 3)
    if is_chunked:
        chunks.attend_chunks(q, k, v, state, batch, out, steps=decay, beta=beta, scale=scale, eps=eps, is_delta=True)
    num_sequences, num_whole = chunks.single_tokens(batch, kept, is_chunked)
    if num_sequences:
        _gated_delta[num_sequences * heads, -(-width // COLUMNS)](
            q, k, v, decay, beta, state, batch.slots, batch.starts, batch.lengths, out, num_whole, q.stride(0),
            k.stride(0), v.stride(0), scale, eps, decay.dim() == 3, kept, key_heads, heads, dim, width,
            BLOCK_V=COLUMNS, num_warps=4, **find_gpu(v.device).options,
        )  # fmt: skip
    return out

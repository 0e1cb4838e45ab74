"""Lightning attention of a step's sequences.

    o = batched_lightning(q, k, v, state, batch, slopes, scale=0.088)

Prompts go in chunks where `chunks` takes them, but for the last tokens if a slot keeps the states after several. Other
tokens go one by one: a program keeps some columns of a head's state in registers, so that it is read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.attention.common import has_rows, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.recurrent import chunks
from atom.kernels.triton.recurrent.states import first_token, row_of

COLUMNS = 32  # of a program


@jit(
    do_not_specialize=["num_whole", "q_stride", "k_stride", "v_stride"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths"],
)
def _lightning(
    q, k, v, states, slots, starts, lengths, slopes, out, num_whole, q_stride, k_stride, v_stride,
    SCALE: tl.constexpr, KEPT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    is_dim, is_column = dims < DIM, columns < WIDTH
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    num_before = tl.load(lengths + sequence) - count
    begin = first_token(sequence, count, num_whole, KEPT)
    if begin >= count:
        return
    slot = tl.load(slots + sequence)
    size: tl.constexpr = HEADS * DIM * WIDTH
    places = states + (head * DIM + dims[:, None]) * WIDTH + columns[None, :]
    is_there = is_dim[:, None] & is_column[None, :]
    before = places + row_of(slot, num_before + begin, KEPT) * size
    state = tl.load(before, mask=is_there & (num_before + begin > 0), other=0.0).to(tl.float32)
    kept = tl.exp(-tl.load(slopes + head).to(tl.float32))
    for t in range(begin, count):
        token = first + t
        key = tl.load(k + token * k_stride + head * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        query = tl.load(q + token * q_stride + head * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + head * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
        state = state * kept + key[:, None] * value[None, :]
        read = tl.sum(state * (query * SCALE)[:, None], 0)
        tl.store(out + (token * HEADS + head) * WIDTH + columns, read.to(out.dtype.element_ty), mask=is_column)
        if t + KEPT >= count:
            after = places + row_of(slot, num_before + t + 1, KEPT) * size
            tl.store(after, state.to(states.dtype.element_ty), mask=is_there)


def batched_lightning(q: Tensor, k: Tensor, v: Tensor, state: Tensor, batch: Batch, slopes: Tensor, *,
                      scale: float = 1.0) -> Tensor:  # fmt: skip
    """Shapes as in the op. What it gives for tokens of no sequence is unset."""
    assert all(map(has_rows, (q, k, v))) and state.is_contiguous()
    heads, width = v.shape[1:]
    out, is_chunked = v.new_empty(v.shape), chunks.suits(v, q.shape[2], batch)
    if is_chunked:
        chunks.attend_chunks(q, k, v, state, batch, out, rates=-slopes.float(), scale=scale)
    num_sequences, num_whole = chunks.single_tokens(batch, state.shape[1], is_chunked)
    if num_sequences:
        _lightning[num_sequences * heads, -(-width // COLUMNS)](
            q, k, v, state, batch.slots, batch.starts, batch.lengths, slopes, out, num_whole, q.stride(0),
            k.stride(0), v.stride(0), scale, state.shape[1], heads, q.shape[2], width, BLOCK_V=COLUMNS, num_warps=4,
            **find_gpu(v.device).options,
        )  # fmt: skip
    return out

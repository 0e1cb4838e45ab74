"""Mamba-2's state space model of a step's sequences.

    y = batched_ssd(x, dt, b, c, state, batch, a_log, d)

Prompts go in chunks where `chunks` takes them, but for the last tokens if a slot keeps the states after several. Other
tokens go one by one: a program keeps some channels of a head's state in registers, so that it is read and written once.
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

CHANNELS = 32  # of a program


@jit(
    do_not_specialize=["num_whole", "x_stride", "b_stride", "c_stride"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths"],
)
def _ssd(
    x, dt, b, c, states, slots, starts, lengths, a_log, d, out, num_whole, x_stride, b_stride, c_stride,
    KEPT: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    channels = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    is_channel, is_column = channels < DIM, columns < SIZE
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    num_before = tl.load(lengths + sequence) - count
    begin = first_token(sequence, count, num_whole, KEPT)
    if begin >= count:
        return
    slot = tl.load(slots + sequence)
    size: tl.constexpr = HEADS * DIM * SIZE
    places = states + (head * DIM + channels[:, None]) * SIZE + columns[None, :]
    is_there = is_channel[:, None] & is_column[None, :]
    before = places + row_of(slot, num_before + begin, KEPT) * size
    state = tl.load(before, mask=is_there & (num_before + begin > 0), other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip = tl.load(d + head).to(tl.float32)
    of_group = head // (HEADS // GROUPS) * SIZE
    for t in range(begin, count):
        token = first + t
        step = tl.load(dt + token * HEADS + head)
        value = tl.load(x + token * x_stride + head * DIM + channels, mask=is_channel, other=0.0).to(tl.float32)
        write = tl.load(b + token * b_stride + of_group + columns, mask=is_column, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_stride + of_group + columns, mask=is_column, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * step) + (value * step)[:, None] * write[None, :]
        y = tl.sum(state * read[None, :], 1) + skip * value
        tl.store(out + (token * HEADS + head) * DIM + channels, y.to(out.dtype.element_ty), mask=is_channel)
        if t + KEPT >= count:
            after = places + row_of(slot, num_before + t + 1, KEPT) * size
            tl.store(after, state.to(states.dtype.element_ty), mask=is_there)


def batched_ssd(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, a_log: Tensor,
                d: Tensor) -> Tensor:  # fmt: skip
    """Shapes as in the op. What it gives for tokens of no sequence is unset."""
    assert all(map(has_rows, (x, b, c))) and state.is_contiguous()
    heads, dim = x.shape[1:]
    groups, size = b.shape[1:]
    out, dt, is_chunked = x.new_empty(x.shape), dt.contiguous(), chunks.suits(x, size, batch)
    if is_chunked:
        rates = -a_log.float().exp()
        chunks.attend_chunks(c, b, x, state, batch, out, steps=dt, rates=rates, beta=dt, skip=d, is_transposed=True)
    num_sequences, num_whole = chunks.single_tokens(batch, state.shape[1], is_chunked)
    if num_sequences:
        _ssd[num_sequences * heads, -(-dim // CHANNELS)](
            x, dt, b, c, state, batch.slots, batch.starts, batch.lengths, a_log, d, out, num_whole, x.stride(0),
            b.stride(0), c.stride(0), state.shape[1], groups, heads, dim, size, BLOCK_P=CHANNELS, num_warps=4,
            **find_gpu(x.device).options,
        )  # fmt: skip
    return out

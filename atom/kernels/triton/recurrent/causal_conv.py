"""The causal convolution of a step's sequences.

    y = batched_causal_conv(x, state, batch, weight, bias, kind="silu")

A program takes a tile of a sequence's tokens, for some channels. That of its first tokens also stores the last states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.activations import activation
from atom.kernels.triton.attention.common import sequence_bucket, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.recurrent.states import find_chunk, num_chunks, row_of

CHANNELS, TOKENS = 128, 32  # of a program


@jit
def keep_inputs(x, states, state, slot, count, num_before, channels, is_channel, x_stride, TAPS: tl.constexpr,
                 KEPT: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Store the inputs before the token that follows each of the last KEPT. state: that before the step"""
    before: tl.constexpr = TAPS - 1
    rows = tl.arange(0, triton.next_power_of_2(KEPT * before))
    end = count - rows // before  # tokens after which a state is kept
    row = end - before + rows % before
    is_kept = ((rows < KEPT * before) & (end > 0))[:, None] & is_channel[None, :]
    is_here, columns = (row >= 0)[:, None], channels[None, :]
    here = tl.load(x + row.to(tl.int64)[:, None] * x_stride + columns, mask=is_kept & is_here, other=0.0)
    past = tl.load(state + (row + before)[:, None] * SIZE + columns, mask=is_kept & ~is_here & (num_before > 0),
                   other=0.0)  # fmt: skip
    last = tl.where(is_here, here, past)
    tl.debug_barrier()  # all threads have read the state
    places = row_of(slot, num_before + end, KEPT) * before + rows % before
    tl.store(states + places[:, None] * SIZE + columns, last, mask=is_kept)


@jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _causal_conv(
    x, states, slots, starts, lengths, weight, bias, out, x_stride, num_sequences, KIND: tl.constexpr,
    TAPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    if BLOCK_T == 1:
        sequence, at = tl.program_id(0), 0
    else:
        sequence, at = find_chunk(starts, tl.program_id(0), num_sequences, BLOCK_T, SEQUENCES)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if at >= count:
        return
    num_before = tl.load(lengths + sequence) - count
    before: tl.constexpr = TAPS - 1
    is_old = num_before > 0
    x += first * x_stride
    out += first * SIZE
    slot = tl.load(slots + sequence)
    state = states + row_of(slot, num_before, KEPT) * before * SIZE
    is_column = columns < SIZE
    tokens = at + tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        share = tl.load(weight + columns * TAPS + tap, mask=is_column, other=0.0).to(tl.float32)
        rows = tokens - before + tap
        is_here = ((rows >= 0) & (rows < count))[:, None] & is_column[None, :]
        inputs = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=is_here, other=0.0)
        if at == 0:  # what was before is in the state
            is_past = ((rows < 0) & is_old)[:, None] & is_column[None, :]
            inputs += tl.load(state + (rows + before)[:, None] * SIZE + columns[None, :], mask=is_past, other=0.0)
        total += inputs.to(tl.float32) * share[None, :]
    if KIND is not None:
        total = activation(total, KIND)
    is_token = (tokens < count)[:, None] & is_column[None, :]
    places = tokens.to(tl.int64)[:, None] * SIZE + columns[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_token)
    if at == 0:
        keep_inputs(x, states, state, slot, count, num_before, columns, is_column, x_stride, TAPS, KEPT, SIZE)


def batched_causal_conv(x: Tensor, state: Tensor, batch: Batch, weight: Tensor, bias: Tensor | None = None, *,
                        kind: str | None = None) -> Tensor:  # fmt: skip
    """Shapes as in the op. What it gives for tokens of no sequence is unset."""
    assert batch.slots is not None and x.stride(1) == 1 and state.is_contiguous() and weight.is_contiguous()
    channels, taps = weight.shape
    out = x.new_empty(x.shape)
    num_sequences = len(batch.slots)
    tokens, programs, sequences = 1, num_sequences, 1
    if batch.num_single_query < num_sequences:
        tokens, programs = TOKENS, num_chunks(len(x), num_sequences, TOKENS)
        sequences = sequence_bucket(num_sequences)
    _causal_conv[programs, -(-channels // CHANNELS)](
        x, state, batch.slots, batch.starts, batch.lengths, weight, bias, out, x.stride(0), num_sequences, kind, taps,
        state.shape[1], channels, sequences, BLOCK_T=tokens, BLOCK_C=CHANNELS, num_warps=4,
        **find_gpu(x.device).options,
    )  # fmt: skip
    return out

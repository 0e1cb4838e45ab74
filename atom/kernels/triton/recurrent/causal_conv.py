"""The causal convolution of a step's sequences.

    y = batched_causal_conv(x, state, batch, weight, bias, kind="silu")

A program takes a sequence's tokens one tile after another, for some channels, and then stores the last states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.activations import activation
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.recurrent.states import row_of

CHANNELS = 128  # of a program
TOKENS = 16  # of a tile


@jit
def _load_inputs(x, state, tokens, columns, is_there, count, x_stride, BEFORE: tl.constexpr, SIZE: tl.constexpr):
    """A sequence's inputs [tokens, columns]; those before its first token are in the state. is_there: the latter are"""
    rows, columns = tokens.to(tl.int64)[:, None], columns[None, :]
    is_column = columns < SIZE
    is_before = (rows < 0) & (rows >= -BEFORE)
    here = tl.load(x + rows * x_stride + columns, mask=(rows >= 0) & (rows < count) & is_column, other=0.0)
    before = tl.load(state + (rows + BEFORE) * SIZE + columns, mask=is_before & is_there & is_column, other=0.0)
    return tl.where(is_before, before, here)


@jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _causal_conv(
    x, states, slots, starts, lengths, weight, bias, out, x_stride, KIND: tl.constexpr, TAPS: tl.constexpr,
    KEPT: tl.constexpr, SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    num_before = tl.load(lengths + sequence) - count
    is_old = num_before > 0
    before: tl.constexpr = TAPS - 1
    x += first * x_stride
    out += first * SIZE
    slot = tl.load(slots + sequence)
    state = states + row_of(slot, num_before, KEPT) * before * SIZE
    is_column = columns < SIZE
    for at in range(0, count, BLOCK_T):
        tokens = at + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        if bias is not None:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            share = tl.load(weight + columns * TAPS + tap, mask=is_column, other=0.0).to(tl.float32)
            inputs = _load_inputs(x, state, tokens - before + tap, columns, is_old, count, x_stride, before, SIZE)
            total += inputs.to(tl.float32) * share[None, :]
        if KIND is not None:
            total = activation(total, KIND)
        is_token = (tokens < count)[:, None] & is_column[None, :]
        places = tokens.to(tl.int64)[:, None] * SIZE + columns[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_token)
    rows = tl.arange(0, triton.next_power_of_2(KEPT * before))
    end = count - rows // before  # tokens after which a state is kept
    last = _load_inputs(x, state, end - before + rows % before, columns, is_old, count, x_stride, before, SIZE)
    tl.debug_barrier()  # all threads have read the state
    is_kept = ((rows < KEPT * before) & (end > 0))[:, None] & is_column[None, :]
    places = row_of(slot, num_before + end, KEPT) * before + rows % before
    tl.store(states + places[:, None] * SIZE + columns[None, :], last, mask=is_kept)


def batched_causal_conv(x: Tensor, state: Tensor, batch: Batch, weight: Tensor, bias: Tensor | None = None, *,
                        kind: str | None = None) -> Tensor:  # fmt: skip
    """Shapes as in the op. What it gives for tokens of no sequence is unset."""
    assert batch.slots is not None and x.stride(1) == 1 and state.is_contiguous() and weight.is_contiguous()
    channels, taps = weight.shape
    out = x.new_empty(x.shape)
    grid = (len(batch.slots), -(-channels // CHANNELS))
    _causal_conv[grid](
        x, state, batch.slots, batch.starts, batch.lengths, weight, bias, out, x.stride(0), kind, taps, state.shape[1],
        channels, BLOCK_T=TOKENS if len(x) > len(batch.slots) else 1, BLOCK_C=CHANNELS, num_warps=4,
        **find_gpu(x.device).options,
    )  # fmt: skip
    return out

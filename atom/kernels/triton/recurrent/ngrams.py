"""The rows of a table that n-grams are hashed to, of a step's sequences.

    rows = batched_ngrams(tokens, state, batch, multipliers, sizes, starts, end=7)    # i64[T, M]

A program takes a tile of a sequence's tokens. That of its first tokens also stores the last states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.attention.common import sequence_bucket, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.recurrent.states import find_chunk, num_chunks, row_of

TOKENS = 32  # of a program, more than an n-gram has


@jit
def keep_tokens(tokens, states, state, slot, count, num_before, BEFORE: tl.constexpr, KEPT: tl.constexpr):
    """Store the tokens before the one that follows each of the last KEPT. state: that before the step"""
    each = tl.arange(0, triton.next_power_of_2(KEPT * BEFORE))
    end = count - each // BEFORE  # tokens after which a state is kept
    place = end - BEFORE + each % BEFORE
    is_kept, is_here = (each < KEPT * BEFORE) & (end > 0), place >= 0
    here = tl.load(tokens + place, mask=is_kept & is_here, other=0) + 1
    past = tl.load(state + place + BEFORE, mask=is_kept & ~is_here & (num_before > 0), other=0)
    last = tl.where(is_here, here, past)
    tl.debug_barrier()  # all threads have read the state
    target = row_of(slot, num_before + end, KEPT) * BEFORE + each % BEFORE
    tl.store(states + target, last, mask=is_kept)


@jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["tokens", "slots", "starts", "lengths"])
def _ngrams(
    tokens, states, slots, starts, lengths, multipliers, sizes, firsts, out, num_sequences, END: tl.constexpr,
    BEFORE: tl.constexpr, HEADS: tl.constexpr, KEPT: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BEFORE: tokens before one that are read; HEADS: of each length. States are 1 + tokens, 0 of none."""
    wait_for_inputs(PDL)
    sequence, at = find_chunk(starts, tl.program_id(0), num_sequences, BLOCK_T, SEQUENCES)
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if at >= count:
        return
    num_before = tl.load(lengths + sequence) - count
    is_old = num_before > 0
    slot = tl.load(slots + sequence)
    state = states + row_of(slot, num_before, KEPT) * BEFORE
    tokens += first
    places, heads = at + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_H)
    is_token, is_head = places < count, heads < HEADS
    hashed = tl.load(tokens + places, mask=is_token, other=0) * tl.load(multipliers)
    newer = tl.full([BLOCK_T], -1, tl.int64)
    rows = out + (first + places)[:, None] * (BEFORE * HEADS) + heads[None, :]
    for back in tl.static_range(1, BEFORE + 1):
        place = places - back
        here = tl.load(tokens + place, mask=is_token & (place >= 0), other=0)
        past = tl.load(state + place + BEFORE, mask=is_token & (place < 0) & is_old, other=0) - 1
        older = tl.where(place >= 0, here, past)
        newer = tl.where((older < 0) | (newer == END), END, older)
        hashed ^= newer * tl.load(multipliers + back)
        own = (back - 1) * HEADS + heads
        size, begin = tl.load(sizes + own, mask=is_head, other=1), tl.load(firsts + own, mask=is_head, other=0)
        ids = hashed[:, None] % size[None, :] + begin[None, :]
        tl.store(rows + (back - 1) * HEADS, ids, mask=is_token[:, None] & is_head[None, :])
    if at == 0:
        keep_tokens(tokens, states, state, slot, count, num_before, BEFORE, KEPT)


def batched_ngrams(tokens: Tensor, state: Tensor, batch: Batch, multipliers: Tensor, sizes: Tensor, starts: Tensor, *,
                   end: int) -> Tensor:  # fmt: skip
    """Shapes as in the op. Tokens of no sequence have row 0."""
    assert batch.slots is not None and tokens.is_contiguous() and state.is_contiguous()
    before, num_sequences = state.shape[2], len(batch.slots)
    out, heads = tokens.new_zeros(len(tokens), len(sizes)), len(sizes) // before
    _ngrams[(num_chunks(len(tokens), num_sequences, TOKENS),)](
        tokens, state, batch.slots, batch.starts, batch.lengths, multipliers, sizes, starts, out, num_sequences, end,
        before, heads, state.shape[1], sequence_bucket(num_sequences), BLOCK_T=TOKENS,
        BLOCK_H=max(2, next_power_of_2(heads)), num_warps=1, **find_gpu(tokens.device).options,
    )  # fmt: skip
    return out

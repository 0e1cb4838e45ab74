"""Draft tokens of a slot and accept them, on a CPU.

    find_ngrams(slots, state, 2, 4)             # to state.drafts: what followed the last tokens earlier
    keys, *rest = draw_noise(slots, state, 3)   # of the next three draws
    gumbel_argmax(logits, keys[0], *rest)       # what a program drafts for the first of them
    accept(drawn, left, max_accepted, state, 1, None)           # which rows draw after their first draft
    drafts = finish_drafts(drawn, left, slots, state, False)    # what is reported of them
    keep_rows(kept, slots, hidden, token_index) # what the next drafts of slots are read from

Shapes by letter as in `atom.kernels.step`; Q: draws per row, the first of which needs no draft.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atom.graph import ops
from atom.graph.noise import hash_seeds, uniform
from atom.kernels.step import MIN_SHARE, State
from atom.sampling_params import MIN_TEMPERATURE


def find_ngrams(slots: Tensor, state: State, min_n: int, max_n: int) -> None:
    """Prompt lookup (Saxena 2023): write to the drafts of slots i32[S] what followed the latest earlier occurrence of
    the last n tokens, for the largest n of min_n to max_n that occurs. It is repeated if too short; -1 if none
    occurs."""
    assert state.history is not None and state.drafts is not None
    num_drafts = state.drafts.shape[1]
    for slot in slots.tolist():
        length = int(state.lengths[slot])
        tokens = state.history[slot, :length].numpy()
        is_same, best = np.ones(max(length - 1, 0), bool), -1  # by place, the index of its last token
        for size in range(1, min(max_n, length) + 1):
            is_same[size - 1 :] &= tokens[: length - size] == tokens[-size]
            is_same[: size - 1] = False
            if size >= min_n and is_same.any():
                best = int(is_same.nonzero()[0][-1])
        if best < 0:
            state.drafts[slot] = -1
            continue
        span = length - best - 1
        state.drafts[slot] = torch.from_numpy(tokens[best + 1 + np.arange(num_drafts) % span].astype(np.int64))


def draw_noise(slots: Tensor, state: State, num_draws: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `ops.gumbel_argmax` for the next draws of slots i32[S]: keys i64[num_draws, S], temperatures
    fp32[S], 0 for greedy ones, and depths fp32[S].

    A depth stands for the filters, which are the model's, over another distribution: see `MIN_SHARE`.
    """
    index = slots.long()
    positions = state.lengths[index] + torch.arange(num_draws)[:, None]
    names = "temperature", "top_k", "top_p", "min_p"
    temperatures, top_k, top_p, min_p = (state.columns[name][index].double() for name in names)
    temperatures = temperatures.where((temperatures >= MIN_TEMPERATURE) & (top_k != 1), 0.0)
    shares = torch.stack([1 - top_p, (1 / top_k).where(top_k > 0, 0.0)]).amax(0) * MIN_SHARE
    depths = -temperatures * torch.maximum(shares, min_p).log()
    depths = depths.nan_to_num(0.0, posinf=torch.inf)  # of greedy ones 0 times infinity
    return hash_seeds(state.seed[index], positions), temperatures.float(), depths.float()


def gumbel_argmax(
    logits: Tensor, keys: Tensor, temperatures: Tensor, depths: Tensor, offsets: Tensor | None = None
) -> Tensor:
    """`ops.gumbel_argmax`; greedy rows need no noise."""
    best: Tensor
    if temperatures.any():
        best = ops.gumbel_argmax(logits, keys, temperatures, depths, offsets)
        return best
    best = logits.max(-1).indices  # argmax takes 4 times as long in bf16
    return best if offsets is None else best + offsets.index_select(0, best)


def accept(drawn: Tensor, left: Tensor, max_accepted: Tensor, state: State, depth: int, rates: Tensor | None) -> None:
    """Write to left[depth] the slots of left[depth - 1] whose draw equals their draft number depth - 1, that of padding
    for others.

    drawn: i64[Q, S]
    left: i32[Q, S]
    max_accepted: i32[S], drafts that may be accepted
    rates: fp32[Q - 1], accept by chance instead, each draft with its probability once those before it were; None: not
    """
    assert state.drafts is not None
    index = left[depth - 1].long()
    is_next = (index < state.num_slots) & (max_accepted >= depth)
    if rates is None:
        is_next &= drawn[depth - 1] == state.drafts[index, depth - 1]
    else:
        is_next &= uniform(hash_seeds(~state.seed[index], state.lengths[index])) < float(rates[depth - 1])
    left[depth] = torch.where(is_next, left[depth - 1], state.num_slots)


def finish_drafts(drawn: Tensor, left: Tensor, slots: Tensor, state: State, is_by_chance: bool) -> Tensor:
    """Write -1 to drawn i64[Q, S] for draws that did not happen; the drafts i64[S, Q - 1] of slots i32[S].

    is_by_chance: a missing draft is 0 instead of -1, since it may be accepted too
    """
    assert state.drafts is not None
    drawn.masked_fill_(left == state.num_slots, -1)
    drafts = state.drafts.index_select(0, slots)[:, : len(drawn) - 1]
    return drafts.clamp(min=0) if is_by_chance else drafts


def keep_rows(kept: Tensor, slots: Tensor, values: Tensor, token_index: Tensor) -> None:
    """Copy the rows token_index i64[R] of values [T, …] to slots i32[R] of kept [slots + 1, …]."""
    kept.index_copy_(0, slots.long(), values.index_select(0, token_index))

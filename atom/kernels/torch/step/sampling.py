"""Sample tokens from logits on a CPU.

What a slot draws does not depend on its batch.

    sample(logits, slots, state, "filtered", out)              # logits [R, V], slots i32[R]
    score_drawn(logits, asked, out, totals, chosen, ranks)     # of drawn tokens; `atom.kernels.logprobs` has the others

The order is that of vLLM's sampler (docs.vllm.ai, vllm.v1.sample.sampler): reported log probabilities from the
unprocessed logits, logit bias, min_tokens, grammar (these three before `sample`), repetition, frequency and presence
penalty, temperature, min_p, top_k, top_p, draw. Among equal logits the lower id comes first, in filters and in an
argmax, so top_k=1 is greedy. A draw is the argmax of the kept logits plus Gumbel noise of seed, position and token
(`atom.graph.noise`). A row whose largest logit is not finite (it holds a nan or an inf, or only -inf) has no
distribution: it draws its largest number, or token 0, without an effect on other rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from atom.graph.noise import LONGEST, NUM_HASHES, gumbel, hash_ids, hash_seeds
from atom.kernels.logprobs import CHUNK_ELEMENTS, most_likely
from atom.kernels.step import State
from atom.sampling_params import MIN_TEMPERATURE, SAMPLING_KINDS

PENALTIES = "repetition_penalty", "frequency_penalty", "presence_penalty"
LARGEST = torch.finfo(torch.float32).max


def sample(logits: Tensor, slots: Tensor, state: State, kind: str, out: Tensor, penalties: bool = False) -> None:
    """Sample the next token of each row to out i64[R], to its slot, whose length and counts advance, and to `reported`.

    logits: bf16, fp16 or fp32[R, V]
    slots: i32[R], unique except for the padding slot, whose rows get token 0 and change nothing
    kind: one of SAMPLING_KINDS; rows of an earlier kind get the same token as in a batch of that kind
    penalties: whether any row has penalties; otherwise no token is counted
    """
    assert kind in SAMPLING_KINDS, f"{kind} is none of {SAMPLING_KINDS}"
    index = slots.long()
    is_random = torch.zeros(len(index), dtype=torch.bool)
    if kind != "greedy":
        is_random = state.columns["temperature"][index] >= MIN_TEMPERATURE
    has_penalties = _have_penalties(state, index) if penalties else torch.zeros_like(is_random)
    is_drawn = (is_random | has_penalties) & (index < state.num_slots)
    tokens = torch.full_like(index, -1) if is_drawn.all() else _largest(logits)
    for rows in _chunks(is_drawn.nonzero()[:, 0], logits.shape[-1]):
        values, chosen = logits[rows].float(), index[rows]
        for row in has_penalties[rows].nonzero()[:, 0].tolist():
            _penalize(values[row], state, int(chosen[row]))
        tokens[rows] = _draw(values, state, chosen, is_random[rows])
    for row in (tokens < 0).nonzero()[:, 0].tolist():
        tokens[row] = logits[row].float().nan_to_num(nan=-torch.inf).argmax()
    is_padding = index == state.num_slots
    lengths, own = state.lengths[index].long(), index[has_penalties]
    flat = index * state.reported.shape[1] + lengths % state.reported.shape[1]
    out.copy_(tokens.masked_fill_(is_padding, 0))
    if is_padding.any():
        index, tokens, lengths, flat = (each[~is_padding] for each in (index, tokens, lengths, flat))
    state.tokens[index] = tokens
    state.reported.view(-1)[flat] = tokens
    if state.history is not None:
        state.history[index, lengths] = tokens.int()
    if penalties:
        state.counts[own, out[has_penalties]] += 2
    state.lengths[index] = (lengths + 1).int()


def score_drawn(logits: Tensor, rows: Tensor, drawn: Tensor, totals: Tensor, chosen: Tensor, ranks: Tensor) -> None:
    """Score the drawn tokens of these rows: write log probabilities to `chosen`, and ranks from 1 to `ranks`.

    logits, rows, totals: of `atom.kernels.logprobs.top_logprobs`
    drawn: i64[R]
    chosen: fp32[A]
    ranks: i32[A]
    """
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for at, part in zip(range(0, len(rows), size), torch.split(rows, size), strict=True):
        values = logits[part].float().nan_to_num(nan=-LARGEST)
        found = values.gather(-1, drawn[part][:, None])
        torch.sub(found[:, 0], totals[at : at + size], out=chosen[at : at + size])
        ranks[at : at + size] = (values > found).sum(-1) + 1


def _have_penalties(state: State, index: Tensor) -> Tensor:
    """bool[R]"""
    repetition, frequency, presence = (state.columns[name][index] for name in PENALTIES)
    return (repetition != 1) | (frequency != 0) | (presence != 0)


def _chunks(rows: Tensor, vocab: int) -> Iterator[Tensor]:
    return iter(torch.split(rows, max(1, CHUNK_ELEMENTS // vocab)) if len(rows) else ())


def _largest(logits: Tensor) -> Tensor:
    """The argmax of each row; -1 if its value is not finite."""
    best, tokens = logits.max(-1)  # argmax takes 4 times as long in bf16 on a CPU
    return torch.where(best.isfinite(), tokens, -1)


def _penalize(values: Tensor, state: State, slot: int) -> None:
    """Apply the penalties of a slot to its logits fp32[V], in place."""
    seen = state.counts[slot].nonzero()[:, 0]
    counts, found = state.counts[slot, seen] >> 1, values[seen]
    repetition, frequency, presence = (float(state.columns[name][slot]) for name in PENALTIES)
    found = torch.where(found > 0, found / repetition, found * repetition)
    penalty = counts * frequency + presence
    values[seen] = torch.where(counts > 0, found - penalty, found)


def _draw(logits: Tensor, state: State, slots: Tensor, is_random: Tensor) -> Tensor:
    """Draw a token for each row; -1 if the row has no distribution. logits: fp32[R, V], after penalties"""
    best = logits.amax(-1, keepdim=True)
    tokens = torch.full_like(slots, -1)
    top_k, is_drawn = state.columns["top_k"][slots], best[:, 0].isfinite()
    is_filtered = (state.columns["top_p"][slots] < 1) | ((top_k > 0) & (top_k < logits.shape[-1]))
    for is_own, draw in (
        (~is_random, _draw_greedy), (is_random & is_filtered, _draw_filtered), (is_random & ~is_filtered, _draw_free),
    ):  # fmt: skip
        (rows,) = (is_drawn & is_own).nonzero(as_tuple=True)
        if len(rows):
            tokens[rows] = draw(logits[rows], best[rows], state, slots[rows])
    return tokens


def _draw_greedy(logits: Tensor, best: Tensor, state: State, slots: Tensor) -> Tensor:
    return logits.max(-1).indices


def _draw_free(logits: Tensor, best: Tensor, state: State, slots: Tensor) -> Tensor:
    """Draw among all tokens, or those that min_p leaves. Only few have noise large enough to win."""
    weights = _weights(logits, best, state, slots)
    hashes = hash_ids(_keys(state, slots), torch.arange(logits.shape[-1], dtype=torch.int32))
    # the likeliest token's time is at most LONGEST, that of one of weight w at least its hash over w
    may_win = (hashes.float() < weights.mul_(LONGEST * NUM_HASHES)).numpy()
    tokens, inverse = torch.empty_like(slots), _inverse(state, slots)
    for row in range(len(slots)):
        ids = torch.from_numpy(np.flatnonzero(may_win[row]))
        noisy = (logits[row, ids] - best[row]).mul_(inverse[row]).add_(gumbel(hashes[row, ids]))
        tokens[row] = ids[noisy.argmax()]
    return tokens


def _draw_filtered(logits: Tensor, best: Tensor, state: State, slots: Tensor) -> Tensor:
    """Draw from the top_k most likely tokens, or from the fewest of them that hold top_p of their mass.

    Only tokens that may be kept are sorted: under top_p those with at least (1 - top_p) / V of the mass, since the
    others together have less than 1 - top_p of it.
    """
    vocab = logits.shape[-1]
    top_k, top_p = state.columns["top_k"][slots, None], state.columns["top_p"][slots, None]
    top_k = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    weights = _weights(logits, best, state, slots)
    mass, limit = top_p, top_k
    if int(top_k.max()) == vocab:
        mass = weights.cumsum(-1, dtype=torch.float64)[:, -1:]  # a sum's order, unlike this one's, depends on the batch
        min_weight = (mass * (1 - top_p) / vocab).float()
        limit = torch.where(top_k < vocab, top_k, (weights >= min_weight).sum(-1, keepdim=True).clamp(min=1))
    ids = most_likely(logits, int(limit.max()))
    kept = weights.gather(-1, ids).double().masked_fill(torch.arange(ids.shape[-1]) >= limit, 0.0)
    running = kept.cumsum(-1)
    mass = torch.where(top_k < vocab, running[:, -1:], mass)
    is_kept = (kept > 0) & (running - kept < top_p * mass)
    noisy = (logits.gather(-1, ids) - best).mul_(_inverse(state, slots))
    noisy += gumbel(hash_ids(_keys(state, slots), ids))
    return ids.gather(-1, noisy.masked_fill_(~is_kept, -torch.inf).argmax(-1, keepdim=True))[:, 0]


def _weights(logits: Tensor, best: Tensor, state: State, slots: Tensor) -> Tensor:
    """Probabilities relative to the best token's, 0 below min_p. fp32[R, V] in 0 to 1."""
    min_p = state.columns["min_p"][slots, None].float()
    weights = (logits - best).mul_(_inverse(state, slots)).exp_()
    return weights.masked_fill_(weights < min_p, 0.0) if min_p.any() else weights


def _inverse(state: State, slots: Tensor) -> Tensor:
    """1 / temperature, fp32[R, 1]"""
    return (1 / state.columns["temperature"][slots, None]).float()


def _keys(state: State, slots: Tensor) -> Tensor:
    """Keys of the noise of each row's next draw, i64[R]."""
    return hash_seeds(state.seed[slots], state.lengths[slots])

"""From logits to tokens, one row a sequence; the batch that a row sits in never changes what it draws.

    tokens, logprobs = sample(logits, sequences)              # logits [R, V], the sequences of the rows that sample
    logprobs = prompt_logprobs(logits, targets, num_top=5)    # logits [P, V] that predict the P targets

The order is that of vLLM's sampler (docs.vllm.ai, vllm.v1.sample.sampler): log probabilities for the report from the
logits as they came, logit bias, min_tokens, repetition, frequency and presence penalty, grammar, temperature, min_p,
top_k, top_p, draw. Among equal logits the lower id comes first, in a cut as in an argmax, so top_k=1 is greedy. A draw
inverts the CDF at `uniform(seed, position)`. A row whose largest logit is not finite (it holds a nan or an inf, or
nothing but -inf) has no distribution: it gives its largest number, or token 0, and leaves the other rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atom.config import SamplingParams
from atom.runtime.logit_processors import shape_next
from atom.runtime.types import Logprobs, Sequence

MIN_TEMPERATURE = 1e-5  # anything lower is greedy, as in vLLM
CHUNK_ELEMENTS = 1 << 22  # logits held in float32 at once


def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[Logprobs | None]]:
    """The next token of each sequence, with log probabilities where they were asked for. logits: [R, V], any float."""
    assert len(logits) == len(sequences), f"{len(logits)} rows of logits for {len(sequences)} sequences"
    shaped = [row for row, sequence in enumerate(sequences) if _is_random(sequence) or _is_adjusted(sequence)]
    tokens = _largest(logits).tolist() if len(shaped) < len(sequences) else [-1] * len(sequences)
    for rows in _chunks(shaped, logits.shape[-1]):
        chosen = [sequences[row] for row in rows]
        drawn = _draw(_adjust(logits[rows].float(), chosen), chosen)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = token
    for row, token in enumerate(tokens):
        if token < 0:
            tokens[row] = int(logits[row].float().nan_to_num(nan=-torch.inf).argmax())

    num_top = {row: s.params.logprobs for row, s in enumerate(sequences) if s.params.logprobs is not None}
    reports: list[Logprobs | None] = [None] * len(sequences)
    if num_top:
        asked = list(num_top)
        found = _report(logits[asked], [tokens[row] for row in asked], list(num_top.values()))
        for row, report in zip(asked, found, strict=True):
            reports[row] = report
    return tokens, reports


def prompt_logprobs(logits: Tensor, targets: list[int], num_top: int) -> list[Logprobs]:
    """Log probabilities of the targets. logits: [P, V], row i the distribution of targets[i]."""
    return _report(logits, targets, [num_top] * len(targets))


def uniform(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): SplitMix64 (Steele et al. 2014) started at the hashed seed."""
    state = _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], np.uint64))
    counter = np.array(positions, np.uint64) + np.uint64(1)
    bits = _mix(state + counter * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _is_random(sequence: Sequence) -> bool:
    return sequence.params.temperature >= MIN_TEMPERATURE


def _is_adjusted(sequence: Sequence) -> bool:
    p = sequence.params
    penalties = (p.repetition_penalty - 1.0, p.frequency_penalty, p.presence_penalty)
    is_bound = sequence.matcher is not None or len(sequence.output) < p.min_tokens
    return is_bound or bool(p.logit_bias) or any(penalties)


def _is_cut(params: SamplingParams, vocab: int) -> bool:
    return params.top_p < 1 or 0 < params.top_k < vocab


def _chunks(rows: list[int], vocab: int) -> Iterator[list[int]]:
    size = max(1, CHUNK_ELEMENTS // vocab)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _largest(logits: Tensor) -> Tensor:
    """The argmax of each row, -1 where it is not finite."""
    best, tokens = logits.max(-1)  # in bf16 on a CPU argmax alone takes 4 times as long
    return torch.where(best.isfinite(), tokens, -1)


def _adjust(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Applies what comes before temperature, in place. logits: fp32[R, V]."""
    vocab, device = logits.shape[-1], logits.device
    for row, sequence in enumerate(sequences):
        if not _is_adjusted(sequence):
            continue
        values, p, output = logits[row], sequence.params, sequence.output
        bias, banned, allowed = shape_next(sequence, len(output), vocab)
        if bias:
            values[list(bias)] += torch.tensor(list(bias.values()), device=device)
        if banned:
            values[banned] = -torch.inf
        if p.repetition_penalty != 1:
            seen = torch.from_numpy(np.unique(sequence.prompt + output)).to(device)
            found = values[seen]
            values[seen] = torch.where(found > 0, found / p.repetition_penalty, found * p.repetition_penalty)
        if output and (p.frequency_penalty or p.presence_penalty):
            seen, counts = (torch.from_numpy(array).to(device) for array in np.unique(output, return_counts=True))
            values[seen] -= counts * p.frequency_penalty + p.presence_penalty
        if allowed is not None:
            values.masked_fill_(torch.from_numpy(~allowed).to(device), -torch.inf)
    return logits


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """A token for each row, -1 where the row has no distribution. logits: fp32[R, V], adjusted."""
    best, tokens = logits.max(-1, keepdim=True)
    vocab = logits.shape[-1]
    random = [row for row, sequence in enumerate(sequences) if _is_random(sequence)]
    cut = [row for row in random if _is_cut(sequences[row].params, vocab)]
    free = [row for row in random if not _is_cut(sequences[row].params, vocab)]
    for rows, draw in ((cut, _draw_cut), (free, _draw_free)):
        if rows:
            tokens[rows] = draw(logits[rows], best[rows], [sequences[row] for row in rows])
    return torch.where(best.isfinite(), tokens, -1)[:, 0]


def _draw_free(logits: Tensor, best: Tensor, sequences: list[Sequence]) -> Tensor:
    return _invert(_weights(logits, best, sequences), sequences)


def _draw_cut(logits: Tensor, best: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draws from the top_k most likely tokens, or from the fewest of them that hold top_p of their mass.

    Only tokens that may be kept are sorted: under top_p those that weigh at least (1 - top_p) / V of the mass, since
    the others together weigh less than 1 - top_p of it.
    """
    vocab, params = logits.shape[-1], [sequence.params for sequence in sequences]
    top_k = _column([float(p.top_k or vocab) for p in params], logits).long().clamp(max=vocab)
    top_p = _column([p.top_p for p in params], logits)
    weights = _weights(logits, best, sequences)
    mass, limit = top_p, top_k
    if int(top_k.max()) == vocab:
        mass = weights.cumsum(-1, dtype=torch.float64)[:, -1:]  # a sum's order, unlike this one's, depends on the batch
        least = (mass * (1 - top_p) / vocab).float()
        limit = torch.where(top_k < vocab, top_k, (weights >= least).sum(-1, keepdim=True).clamp(min=1))
    ids = _most_likely(logits, int(limit.max()))
    kept = weights.gather(-1, ids).double().masked_fill(torch.arange(ids.shape[-1], device=ids.device) >= limit, 0.0)
    running = kept.cumsum(-1)
    mass = torch.where(top_k < vocab, running[:, -1:], mass)
    return ids.gather(-1, _invert(kept.masked_fill(running - kept >= top_p * mass, 0.0), sequences))


def _weights(logits: Tensor, best: Tensor, sequences: list[Sequence]) -> Tensor:
    """Probabilities relative to the best token's, 0 below min_p. fp32[R, V] in 0 to 1."""
    params = [sequence.params for sequence in sequences]
    weights = (logits - best).div_(_column([p.temperature for p in params], logits)).exp_()
    if any(p.min_p > 0 for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits).float(), 0.0)
    return weights


def _invert(weights: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draws an index for each row in proportion to its weights, never one of weight 0. i64[R, 1]."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    at = torch.from_numpy(uniform([s.seed for s in sequences], [s.num_tokens for s in sequences])).to(cdf.device)
    index = torch.searchsorted(cdf, at[:, None] * cdf[:, -1:], right=True)
    return index.clamp(max=cdf.shape[-1] - 1)  # a row of nan finds no place


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of each row, best first and among equals the lower id first. i64[R, count].

    One integer orders both: the bits of a float32 (they compare as integers once the negative ones are flipped), then
    the id counted from the end.
    """
    vocab = logits.shape[-1]
    key = (logits + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal 0.0
    key ^= (key >> 63).bitwise_and_(0x7FFFFFFF)
    key = key.bitwise_left_shift_(32).add_(torch.arange(vocab - 1, -1, -1, device=key.device))
    return vocab - 1 - (key.topk(count).values & 0xFFFFFFFF)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _report(logits: Tensor, tokens: list[int], num_top: list[int]) -> list[Logprobs]:
    """Log probabilities of the model itself: log_softmax of the logits as they came, a nan counting as the lowest."""
    reports = []
    for rows in _chunks(list(range(len(tokens))), logits.shape[-1]):
        part = logits[rows[0] : rows[-1] + 1].float().nan_to_num(nan=torch.finfo(torch.float32).min)
        total = part.logsumexp(-1, keepdim=True).double()
        chosen = part.gather(-1, torch.tensor([tokens[row] for row in rows], device=part.device)[:, None])
        ranks = (part > chosen).sum(-1) + 1
        ids = _most_likely(part, min(max(num_top[row] for row in rows), part.shape[-1]))
        top = part.gather(-1, ids).double() - total
        columns = ((chosen.double() - total)[:, 0].tolist(), ranks.tolist(), ids.tolist(), top.tolist())
        for row, logprob, rank, best, values in zip(rows, *columns, strict=True):
            reports.append(Logprobs(tokens[row], logprob, rank, list(zip(best, values, strict=True))[: num_top[row]]))
    return reports

"""Samples sequences as a step does: given what they ask for, each in a slot that is not its row's number.

tokens, logprobs = sample(logits, sequences)                           # on the CPU, with torch
tokens, logprobs = sample(logits, sequences, "cuda", "triton")
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.kernels import find_step_kernels
from atom.kernels.logprobs import top_logprobs
from atom.runtime.requests.logit_processors import find_shaping
from atom.runtime.step.input import pack_admission
from atom.runtime.step.request_state import RequestState, send
from atom.runtime.step.runner import shape_logits
from atom.runtime.types import Logprobs, Sequence
from atom.sampling_params import MIN_TEMPERATURE, PENALTY, has_use


def admit(state: RequestState, slots: list[int], sequences: list[Sequence]) -> None:
    admitted = zip(slots, sequences, strict=True)
    state.admit(bytearray(b"".join(pack_admission(slot, s.num_tokens, s.params, s.seed) for slot, s in admitted)))
    for slot, each in zip(slots, sequences, strict=True):
        if has_use(each.params, PENALTY):
            state.set_counts(slot, each.prompt, each.output)


def kind_of(sequences: list[Sequence]) -> str:
    params = [s.params for s in sequences]
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p for p in params):
        return "filtered"
    return "random" if any(p.temperature >= MIN_TEMPERATURE for p in params) else "greedy"


def sample(
    logits: Tensor, sequences: list[Sequence], device: str = "cpu", backend: str = "torch", kind: str | None = None
) -> tuple[list[int], list[Logprobs | None]]:
    (count, vocab), state = logits.shape, RequestState(len(sequences) + 1, logits.shape[1], device)
    order = [(row * 7 + 1) % count for row in range(count)] if count % 7 else list(reversed(range(count)))
    admit(state, order, sequences)
    kernels, logits = find_step_kernels(device, backend), logits.to(device)
    shaped, place = logits, torch.device(device)
    rows = [(row, s, len(s.output)) for row, s in enumerate(sequences)]
    if shaping := find_shaping(rows, vocab):
        shaped = shape_logits(logits, shaping, lambda array, dtype: send(array, dtype, place))
    out = torch.full((count,), -1, device=device)
    slots = torch.tensor(order, dtype=torch.int32, device=device)
    has_penalties = any(has_use(each.params, PENALTY) for each in sequences)
    kernels.sample(shaped, slots, state, kind or kind_of(sequences), out, has_penalties)
    assert state.tokens[order].tolist() == out.tolist()
    assert state.lengths[order].tolist() == [s.num_tokens + 1 for s in sequences]
    assert [state.reported[slot, s.num_tokens % 8] for slot, s in zip(order, sequences, strict=True)] == out.tolist()
    asked = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    found: list[Logprobs | None] = [None] * count
    if asked:
        num_top = [sequences[row].params.logprobs or 0 for row in asked]
        reports = score(logits, asked, out, max(num_top), backend)
        for row, num, report in zip(asked, num_top, reports, strict=True):
            found[row] = Logprobs(report.token, report.logprob, report.rank, report.top[:num])
    return out.tolist(), found


def score(logits: Tensor, rows: list[int], drawn: Tensor, num_top: int, backend: str = "torch") -> list[Logprobs]:
    """Log probabilities of the tokens drawn i64[R] of some rows of logits [R, V]."""
    on_device = torch.tensor(rows, device=logits.device)
    totals, ids, top = top_logprobs(logits, on_device, num_top)
    chosen, ranks = torch.empty_like(totals), torch.empty_like(totals, dtype=torch.int32)
    find_step_kernels(logits.device.type, backend).score_drawn(logits, on_device, drawn, totals, chosen, ranks)
    columns = (each.tolist() for each in (drawn[on_device], chosen, ranks, ids, top))
    return [
        Logprobs(token, logprob, rank, list(zip(best, values, strict=True)))
        for token, logprob, rank, best, values in zip(*columns, strict=True)
    ]

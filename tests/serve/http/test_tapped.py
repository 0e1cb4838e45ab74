"""Bounds of the hidden states that answers have."""

from __future__ import annotations

import pytest

from atom.runtime.types import Tap
from atom.sampling_params import SamplingParams
from atom.serve.auth.tenants import LimitError
from atom.serve.http import tapped
from atom.serve.http.errors import FieldError
from atom.serve.http.tapped import RunningTaps, tapped_bytes

BOTH, PROMPTS = (Tap("model.layers.0", "all"), Tap("model.layers.1", "all")), [[5] * 20, [5] * 10]


def size_of(taps: tuple[Tap, ...], num_prompts: int, n: int, max_tokens: int) -> int:
    every = [SamplingParams(n=n, max_tokens=max_tokens)] * num_prompts
    return tapped_bytes(taps, PROMPTS[:num_prompts], every, columns=48)


def test_answers_have_so_many_hidden_states_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tapped, "MAX_OF_REQUEST", 4 * 48 * 60)  # of 60 tokens
    assert size_of(BOTH, 1, 1, 10) == 4 * 48 * 60
    assert size_of(BOTH[:1], 2, 1, 15) == 4 * 48 * 60
    assert size_of((Tap("model.layers.0", "mean"),), 2, 30, 1000) == 4 * 48 * 60, "of each answer, one row"
    for asked in ((BOTH, 1, 1, 11), (BOTH, 1, 2, 10), (BOTH[:1], 2, 1, 16)):
        with pytest.raises(FieldError, match=r"^taps: hidden states of up to 0 MB, more than 0 MB: lower max_tokens"):
            size_of(*asked)


def test_running_requests_leave_room_for_others_once_they_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tapped, "MAX_RUNNING", 100_000_000)
    running = RunningTaps()
    with running.hold(60_000_000):
        with running.hold(40_000_000):
            assert running.num_bytes == 100_000_000
            with (
                pytest.raises(LimitError, match="take up to 100 of 100 MB, these up to 1 MB") as refused,
                running.hold(1_000_000),
            ):
                pass
            assert refused.value.limit == "tapped_states" and refused.value.retry_after == 1
        with running.hold(40_000_000):
            pass
    assert running.num_bytes == 0

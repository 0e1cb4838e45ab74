"""Drafts of the runner, ahead of the host: the tokens of none, at any run-ahead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from test_speculation import (
    BUSY,
    EVENTFUL,
    GREEDY,
    PARAMS,
    Open,
    assert_ends_within,
    count_next_to_prompts,
    prompts,
    tokens_of,
)
from torch import Tensor

from atom import LLMEngine, SamplingParams
from atom.config import Config
from atom.config.limits import Drafting, acceptance_rates
from atom.runtime.draft.speculation import draft_statistics
from atom.runtime.step.cuda_graphs import Graphs
from atom.runtime.step.runner import Runner

RUN_AHEADS = [0, 1, 2]
LOOKED_UP = Drafting(3, 1, 4)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has runners draft, and run ahead, as on a GPU."""

    def use(run_ahead: int, how: Drafting = LOOKED_UP) -> None:
        monkeypatch.setattr(Config, "drafting", how)
        monkeypatch.setattr("atom.assemble.runner.Runner", partial(Runner, run_ahead=run_ahead))

    return use


@pytest.fixture
def draft_known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has drafts taken from known answers: right as often as the turns say."""

    def use(answers: list[list[int]], turns: list[list[bool]]) -> None:
        numbers = itertools.count()

        def draft(slots: Tensor, state: Any, min_n: int, max_n: int) -> None:
            for slot in slots[slots < state.num_slots].tolist():
                turn = turns[next(numbers) % len(turns)]
                known = state.history[slot, : state.lengths[slot]].tolist()
                following = next((each[len(known) :] for each in answers if each[: len(known)] == known), [])
                drafts = [token if right else (token + 1) % 97 for token, right in zip(following, turn, strict=False)]
                state.drafts[slot] = torch.tensor([*drafts, -1, -1, -1][: state.drafts.shape[1]])

        monkeypatch.setattr("atom.kernels.torch.step.speculation.find_ngrams", draft)

    return use


@pytest.mark.sampled(9)
@pytest.mark.parametrize("run_ahead", RUN_AHEADS)
@pytest.mark.parametrize("limits", [{}, EVENTFUL, BUSY], ids=["roomy", "eventful", "busy"])
def test_looked_up_tokens_are_those_of_none(
    run_ahead: int, limits: dict[str, Any], open_engine: Open, drafting: Any, monkeypatch: pytest.MonkeyPatch
):
    times = 4 if limits == BUSY else 1  # next to prompts few drafts are right
    params = [each for each in PARAMS if each.n == 1] * times
    every = prompts(len(params))
    expected = tokens_of(open_engine("qwen3_window"), params, every)
    drafting(run_ahead)
    counts = count_next_to_prompts(monkeypatch)
    engine = open_engine("qwen3_window", method="ngram", **limits, max_verified_tokens=100)
    for _ in range(2):  # the second time with prefix hits, where they are cached
        assert tokens_of(engine, params, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert limits != BUSY or 0 < counts["accepted"] < counts["drafted"], "in steps that hold prompts"
    if limits == EVENTFUL:
        assert stats.num_preemptions > 0 and stats.num_chunks > 0
    assert (stats.num_ahead > 0) == (run_ahead > 0)
    assert_all_is_free(engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run_ahead", RUN_AHEADS)
def test_padded_steps_give_the_tokens_of_none(
    run_ahead: int, open_engine: Open, drafting: Any, monkeypatch: pytest.MonkeyPatch
):
    """As a CUDA graph pads them, with rows that the host shapes, which have logit_bias or min_tokens."""
    every = prompts(len(PARAMS))
    expected = tokens_of(open_engine("qwen3"), PARAMS, every)
    drafting(run_ahead)
    monkeypatch.setattr(Graphs, "draft_sizes", ((3, 3), (7, 3), (11, 3), (16, 3)))
    engine = open_engine("qwen3", method="ngram", max_num_seqs=16, max_verified_tokens=100)
    assert tokens_of(engine, PARAMS, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


TURNS = {"right": [[True] * 3], "wrong": [[False] * 3], "mixed": [[True, False, True], [True] * 3, [False], [True] * 2]}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "kind", "run_ahead"),  # each two of them meet
    [
        (name, kind, RUN_AHEADS[(at + place) % 3])
        for at, name in enumerate(["qwen3_window", "deepseek_v3", "gpt_oss"])
        for place, kind in enumerate(TURNS)
    ],
)
def test_whatever_is_drafted_the_tokens_are_those_of_none(
    name: str, kind: str, run_ahead: int, open_engine: Open, drafting: Any, draft_known: Any
):
    turns = TURNS[kind]
    params = [each for each in PARAMS if each.n == 1]
    every = prompts(len(params))
    expected = tokens_of(open_engine(name), params, every)
    draft_known([prompt + answer for prompt, answer in zip(every, expected, strict=True)], turns)
    drafting(run_ahead)
    engine = open_engine(name, method="ngram", max_verified_tokens=100)
    assert tokens_of(engine, params, every) == expected
    stats = engine.metrics.scheduler
    found = draft_statistics(stats)["distribution"]
    if turns == [[True] * 3]:
        assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens and found[3] > 0, "but behind an end"
        assert run_ahead or stats.num_accepted_tokens == stats.num_draft_tokens
    elif turns == [[False] * 3]:
        assert stats.num_drafts > 0 and stats.num_accepted_tokens == 0
    else:
        assert all(found[number] > 0 for number in range(4))
    assert_all_is_free(engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run_ahead", RUN_AHEADS)
def test_an_end_within_accepted_tokens_is_the_end(run_ahead: int, open_engine: Open, drafting: Any, draft_known: Any):
    prompt = tiny.prompt(9)
    (answer,) = tokens_of(open_engine("qwen3"), GREEDY, [prompt])
    draft_known([prompt + answer], [[True] * 3])
    drafting(run_ahead)
    engine = open_engine("qwen3", method="ngram")
    assert_ends_within(engine, prompt, answer)
    assert_all_is_free(engine)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 1.5, 2.5, 4])
def test_chance_accepts_as_many_as_configured(length: float, open_engine: Open, drafting: Any):
    drafting(1, Drafting(3, 2, 4, rates=acceptance_rates(length, 3)))
    engine = open_engine("qwen3", method="ngram", max_verified_tokens=100)
    params = [SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, seed=seed) for seed in range(8)]
    tokens_of(engine, params, prompts(8))
    stats = engine.metrics.scheduler
    steps = 8 * 199 - stats.num_accepted_tokens  # the first token comes of the prompt
    assert 8 * 199 / steps == pytest.approx(length, rel=0.02 + 0.03 * (length % 1 > 0))


def assert_all_is_free(engine: LLMEngine) -> None:
    while engine._engine.has_work:  # steps ahead of the last end
        engine._engine.step()
    pools = engine._engine.scheduler.cache.pools
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools)

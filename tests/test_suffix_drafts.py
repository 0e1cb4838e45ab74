"""Suffix drafts in an engine: the tokens of none, verified by the host and by a runner that the host drafts for."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
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
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine
from atom.config import Config
from atom.runtime.draft.speculation import draft_statistics
from atom.runtime.step.cuda_graphs import Graphs

__all__ = ["thread_ranks"]

SUFFIX = {"method": "suffix", "suffix_decoding_max_spec_factor": 4, "max_verified_tokens": 100}


@pytest.fixture(params=["host", "runner"])
def verifier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who verifies: the host, as on a CPU, or the runner, as on a GPU."""
    if request.param == "runner":
        monkeypatch.setattr(Config, "drafting", property(lambda config: config.drafts))
    return request.param


def assert_all_is_free(engine: LLMEngine) -> None:
    scheduler: Any = engine._engine.scheduler
    assert all(pool.num_free == pool.num_blocks - 1 for pool in scheduler.cache.pools)
    assert not scheduler._drafter._streams


@pytest.mark.sampled(6)
@pytest.mark.parametrize("limits", [{}, EVENTFUL, BUSY], ids=["roomy", "eventful", "busy"])
def test_tokens_are_those_of_none(
    verifier: str, limits: dict[str, Any], open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    """Greedy and seeded, with n=2, penalties and filters; the second time, the answers of the first are drafted."""
    every = prompts(len(PARAMS))
    params = PARAMS if not limits else [each for each in PARAMS if each.n == 1]
    every = every[: len(params)]
    expected = tokens_of(open_engine("qwen3_window"), params, every)
    counts = count_next_to_prompts(monkeypatch)
    engine = open_engine("qwen3_window", **SUFFIX, **limits)
    accepted = []
    for _ in range(2):
        assert tokens_of(engine, params, every) == expected
        accepted.append(engine.metrics.scheduler.num_accepted_tokens)
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.num_ahead == 0
    assert accepted[1] > 2.5 * accepted[0]
    found = draft_statistics(stats)["distribution"]
    assert found[0] > 0 and (limits == BUSY or found[7] > 0), "none and all of a step's drafts were right"
    if limits == EVENTFUL:
        assert stats.num_preemptions > 0 and stats.num_chunks > 0
    assert verifier == "host" or limits != BUSY or 0 < counts["accepted"] < counts["drafted"], "in steps with prompts"
    assert_all_is_free(engine)


def test_padded_steps_give_the_tokens_of_none(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    """As a CUDA graph pads them, in rows and in drafts."""
    every = prompts(len(PARAMS))
    expected = tokens_of(open_engine("qwen3"), PARAMS, every)
    monkeypatch.setattr(Config, "drafting", property(lambda config: config.drafts))
    monkeypatch.setattr(Graphs, "draft_sizes", ((3, 2), (3, 7), (7, 7), (16, 4), (16, 7)))
    engine = open_engine("qwen3", **SUFFIX, max_num_seqs=16)
    assert tokens_of(engine, PARAMS, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.sampled(2)
def test_an_end_within_accepted_tokens_is_the_end(verifier: str, open_engine: Open):
    prompt = tiny.prompt(9)
    engine = open_engine("qwen3", **SUFFIX)
    (answer,) = tokens_of(engine, GREEDY, [prompt])
    assert_ends_within(engine, prompt, answer)
    assert_all_is_free(engine)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_drafts_that_are_rejected_leave_no_trace_in_recurrent_state(verifier: str, name: str, open_engine: Open):
    every = [tiny.prompt(9 + seed, seed=seed) for seed in range(3)]
    plain = open_engine(name, block_size=4)
    answers = tokens_of(plain, GREEDY, every)
    talks = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(every, answers, strict=True)]
    further = tokens_of(plain, GREEDY, talks)
    engine = open_engine(name, **SUFFIX, num_speculative_tokens=3, block_size=4, state_interval=4)
    for _ in range(2):
        assert tokens_of(engine, GREEDY, every) == answers
        assert tokens_of(engine, GREEDY, talks) == further
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.num_prefix_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"parallel.data": 2}],
                         ids=["tensor", "pipeline", "data"])  # fmt: skip
def test_ranks_and_groups_get_the_drafts(
    thread_ranks: list[ThreadRanks], verifier: str, fields: dict[str, Any], open_engine: Open
):
    every = prompts(4)
    expected = tokens_of(open_engine("qwen3_moe"), PARAMS[:4], every)
    engine = open_engine("qwen3_moe", **SUFFIX, **fields)
    for _ in range(2):
        assert tokens_of(engine, PARAMS[:4], every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_answers_speed_up_only_requests_of_their_salt(open_engine: Open):
    """Counted by what is accepted: an answer that others have had is drafted in full, or not at all."""
    engine = open_engine("qwen3", **SUFFIX)

    def num_accepted(salt: dict[str, str]) -> int:
        before = engine.metrics.scheduler.num_accepted_tokens
        engine.generate([{"prompt_token_ids": tiny.prompt(9), **salt}], GREEDY)
        return engine.metrics.scheduler.num_accepted_tokens - before

    mine, others = {"cache_salt": "mine"}, {"cache_salt": "others"}
    alone = num_accepted({})
    again = num_accepted({})
    assert again > alone + 8
    assert [num_accepted(mine), num_accepted(others), num_accepted(mine)] == [alone, alone, again]

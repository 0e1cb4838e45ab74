"""Answers that repeat themselves, in an engine, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from test_draft_engine import EVERY, opened
from test_thinking import GREEDY, engine, folder

from atom import LLMEngine
from atom.config import Config
from atom.config.limits import Drafting
from atom.runtime.step.runner import Runner

__all__ = ["engine", "folder"]


@pytest.mark.parametrize("run_ahead", [None, 0, 2])
def test_an_answer_that_repeats_itself_ends_there_also_within_accepted_drafts(
    folder: Path, engine: LLMEngine, run_ahead: int | None, monkeypatch: pytest.MonkeyPatch
):
    limits = {"max_pattern_size": 4, "min_count": 3}
    params = [replace(GREEDY, max_tokens=60, seed=seed) for seed in range(len(EVERY))]
    whole = [each["token_ids"] for each in engine.generate(EVERY, params)]
    if run_ahead is not None:
        monkeypatch.setattr(Config, "drafting", Drafting(3, 1, 4))
        monkeypatch.setattr("atom.assemble.runner.Runner", partial(Runner, run_ahead=run_ahead))
    looking = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    drafting = opened(folder, **looking)
    found = drafting.generate(EVERY, [replace(each, repetition_detection=limits) for each in params])
    for tokens, answer in zip(whole, found, strict=True):
        ends = (end for end in range(1, 61) if any(tokens[:end][-3 * size :] == tokens[:end][-size:] * 3
                and 3 * size <= end for size in range(1, 5)))  # fmt: skip
        end = next(ends, None)
        assert answer["token_ids"] == tokens[:end]
        assert answer["finish_reason"] == ("repetition" if end else "max_tokens")
    assert Counter(each["finish_reason"] for each in found)["repetition"] > 3
    assert drafting.metrics.scheduler.num_accepted_tokens > 0
    drafting.close()

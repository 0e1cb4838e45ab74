"""Decodes that share a prefix and are grouped for its attention, in CUDA graphs and without: the tokens of others."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from gpu.steps import FIELDS, set_depth

from atom import LLMEngine, SamplingParams
from atom.config import Config
from atom.config.limits import Drafting
from atom.kernels.triton.attention import shared_prefix
from atom.runtime.step import prefix_groups

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHARED = tiny.prompt(150), tiny.prompt(140, seed=1)
PROMPTS = [[*SHARED[row % 2], *tiny.prompt(3 + 5 * row, seed=row)] for row in range(7)] + [tiny.prompt(40, seed=9)]
LIMITS = {"max_model_len": 256, "enable_prefix_caching": True}


@pytest.mark.parametrize("level", [3, 2])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_window", "gpt_oss", "qwen3_5"])
def test_tokens_are_those_of_none(name: str, level: int, checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    """Answers begin while other prompts are computed, and end one after another."""
    fields: dict[str, Any] = {**FIELDS, **LIMITS, "level": level, "max_num_batched_tokens": 128}
    params = [SamplingParams(temperature=0, max_tokens=10 + 3 * row, ignore_eos=True) for row in range(len(PROMPTS))]
    plain = LLMEngine(str(checkpoints(name)), **fields)
    expected = [answer["token_ids"] for answer in plain.generate(PROMPTS, params)]
    plain.close()
    calls: list[int] = []
    attend = shared_prefix.PrefixAttention.__call__
    monkeypatch.setattr(shared_prefix.PrefixAttention, "__call__", lambda *args: calls.append(1) or attend(*args))
    monkeypatch.setattr(prefix_groups, "SAVED_BYTES", {256: 1})
    engine = LLMEngine(str(checkpoints(name)), **fields)
    calls.clear()
    for run_ahead in (2, 0):
        set_depth(engine, run_ahead)
        assert [answer["token_ids"] for answer in engine.generate(PROMPTS, params)] == expected
        engine.reset_prefix_cache()
    assert calls, "no step was grouped"
    engine.close()


def test_drafts_of_grouped_decodes_are_verified_alike(checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    fields = {**FIELDS, **LIMITS, "level": 3}
    plain = LLMEngine(str(checkpoints("qwen3")), **fields)
    expected = [answer["token_ids"] for answer in plain.generate(PROMPTS, GREEDY)]
    plain.close()
    monkeypatch.setattr(Config, "drafting", Drafting(3, 1, 4))
    monkeypatch.setattr(prefix_groups, "SAVED_BYTES", {256: 1})
    engine = LLMEngine(str(checkpoints("qwen3")), **fields, method="ngram")
    assert [answer["token_ids"] for answer in engine.generate(PROMPTS, GREEDY)] == expected
    stats = engine._engine.stats().scheduler
    assert stats.num_draft_tokens > 0
    assert engine._engine.runner.graphs._with_prefixes, "no step was grouped"
    engine.close()


def test_a_graph_serves_any_groups(checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    """The same size comes with two groups, then one of all, then one of some."""
    monkeypatch.setattr(prefix_groups, "SAVED_BYTES", {256: 1})
    engine = LLMEngine(str(checkpoints("qwen3")), **FIELDS, **LIMITS, level=3)
    batches = [
        PROMPTS[:7],
        [[*SHARED[0], *tiny.prompt(9, seed=row)] for row in range(6)],
        [*PROMPTS[:5], *(tiny.prompt(50 + row, seed=row) for row in range(2))],
    ]
    grouped = [[answer["token_ids"] for answer in engine.generate(batch, GREEDY)] for batch in batches]
    graphs = engine._engine.runner.graphs
    assert graphs._with_prefixes[8].sent_prefixes is not None
    engine.close()
    monkeypatch.undo()
    plain = LLMEngine(str(checkpoints("qwen3")), **FIELDS, **LIMITS, level=3)
    assert grouped == [[answer["token_ids"] for answer in plain.generate(batch, GREEDY)] for batch in batches]
    plain.close()

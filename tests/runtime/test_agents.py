"""What agents ask for, all at once: suffix drafts, groups, small chunks, retained prompts. The tokens are those of none."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import tiny

from atom import SamplingParams
from atom.config import Config
from atom.runtime.step import prefix_groups
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import PrefixRule
from atom.runtime.step.prefix_groups import PrefixGroups
from atom.runtime.types import Plan

SHARED = tiny.prompt(30), tiny.prompt(21, seed=1)
PROMPTS = [[*SHARED[row % 2], *tiny.prompt(3 * row, seed=row % 3)] for row in range(8)]
PARAMS = [
    SamplingParams(temperature=0.9 * (row % 3 == 1), seed=row, max_tokens=8 + 3 * row, ignore_eos=True)
    for row in range(len(PROMPTS))
]
POOL = {"block_size": 4, "num_kvcache_blocks": 40, "max_model_len": 128, "max_num_batched_tokens": 24}
DRAFTS = {"method": "suffix", "suffix_decoding_max_spec_factor": 4, "max_verified_tokens": 40}


@pytest.mark.parametrize(("name", "state"), [("gemma2", {}), ("qwen3_5", {"state_memory": 200_000})])
def test_tokens_are_those_of_none(name: str, state: Any, open_engine: Any, monkeypatch: pytest.MonkeyPatch):
    """Some steps fail, and what is left of them is computed in halves or begins again."""
    plain = open_engine(name, block_size=4, max_model_len=128, **state)
    expected = [answer["token_ids"] for answer in plain.generate(PROMPTS, PARAMS)]
    monkeypatch.setattr(Config, "drafting", property(lambda config: config.drafts))  # as on a GPU
    for constant, value in (("PREFIX_MULTIPLE", 4), ("ROW_TOKENS", 0)):
        monkeypatch.setattr(prefix_groups, constant, value)
    engine = open_engine(name, **POOL, **DRAFTS, **state, enable_prefix_caching=True, max_itl_ms=20)
    inner = engine._engine
    inner.runner.model.prefix_rule = PrefixRule("full", 1, 1)
    inner.builder = StepBuilder(inner.runner.capacity)
    find, build, execute = PrefixGroups.find, inner.builder.build, inner.runner.execute
    rows, checks, counts = list[Any](), list[bool](), itertools.count(1)

    def check_groups(groups: PrefixGroups, tables: Any, ends: Any, size: int) -> bytearray:
        sent = find(groups, tables, ends, size)
        if sent:
            lengths = memoryview(sent).cast("i")[:size].tolist()
            shared = [(length, tables[row][: length // 4]) for row, length in enumerate(lengths) if length]
            checks.append(all(shared.count(each) > 1 for each in shared))
        return sent

    def note_rows(plan: Plan) -> Any:
        rows[:] = plan.rows
        return build(plan)

    def fail_at_times(step: Any) -> Any:
        if next(counts) % 13 == 0 and len(rows) > 1:
            raise ValueError("the step fails")
        return execute(step)

    monkeypatch.setattr(PrefixGroups, "find", check_groups)
    monkeypatch.setattr(inner.builder, "build", note_rows)
    monkeypatch.setattr(inner.runner, "execute", fail_at_times)
    retaining = [
        replace(each, cache_retention={"seconds": 600, "priority": 10 * row}) if row % 3 else each
        for row, each in enumerate(PARAMS)
    ]
    for _ in range(2):
        assert [answer["token_ids"] for answer in engine.generate(PROMPTS, retaining)] == expected
    stats = engine.metrics.scheduler
    assert all(checks) and len(checks) > 10
    assert stats.num_preemptions > 0 and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert engine.metrics.num_retained_found > 0 and engine.metrics.num_retained_overridden > 0
    assert all(pool.num_free == pool.num_blocks - 1 for pool in inner.scheduler.cache.pools)

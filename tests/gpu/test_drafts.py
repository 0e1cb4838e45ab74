"""Drafts that a GPU makes and verifies by itself, in CUDA graphs and without, ahead of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from gpu.steps import FIELDS, set_depth
from test_draft_engine import CASES, VOCAB
from test_speculation import GREEDY, assert_ends_within

from atom import LLMEngine, SamplingParams
from atom.config import Config
from atom.config.limits import Drafting, acceptance_rates
from atom.runtime.draft.speculation import draft_statistics

pytestmark = pytest.mark.gpu
LOOKED_UP = Drafting(3, 1, 4)
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 60, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(**SEEDED),
    SamplingParams(**SEEDED, top_p=0.8, top_k=20),
    SamplingParams(**SEEDED, min_p=0.1),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.2),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=9),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={3: 1.5}),
    SamplingParams(**SEEDED, frequency_penalty=0.3),
    SamplingParams(**SEEDED, top_p=0.9, n=2),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, frequency_penalty=-2.0),  # repeats itself
]
PROMPTS = [tiny.prompt(9, seed=seed) * (3 if seed % 2 else 1) + [seed] for seed in range(len(PARAMS))]
TIGHT = {"num_kvcache_blocks": 40, "block_size": 4, "max_model_len": 100, "max_num_batched_tokens": 24,
         "enable_prefix_caching": True}  # fmt: skip


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    return [answer["token_ids"] for answer in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "fields", [{"level": 3}, {"level": 2}, {"level": 3, **TIGHT}], ids=["graphs", "eager", "tight"]
)
@pytest.mark.parametrize("name", ["qwen3_window", "deepseek_v3", "gpt_oss", "qwen3_5", "nemotron_h"])
def test_tokens_are_those_of_none(name: str, fields: dict[str, Any], checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    fields = {**FIELDS, **fields}
    plain = LLMEngine(str(checkpoints(name)), **fields)
    expected = tokens_of(plain)
    plain.close()
    monkeypatch.setattr(Config, "drafting", LOOKED_UP)
    engine = LLMEngine(str(checkpoints(name)), **fields, method="ngram")
    for run_ahead in (2, 1, 0):
        set_depth(engine, run_ahead)
        assert tokens_of(engine) == expected
    stats = engine._engine.stats().scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_ahead > 0
    assert draft_statistics(stats)["distribution"][3] > 0, "all drafts of a step were accepted"
    if "block_size" in fields:
        assert stats.num_preemptions > 0
    engine.close()


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_model_that_drafts_for_itself_is_always_right(run_ahead: int, checkpoints: Any):
    """Greedy and sampled, with the noise of the draw; and an end within accepted tokens is the end."""
    folder = str(checkpoints("qwen3_window"))
    own = {"method": "draft", "draft_model": folder, "num_speculative_tokens": 3, "max_verified_tokens": 256}
    engine = LLMEngine(folder, **FIELDS, level=3, **own)
    set_depth(engine, run_ahead)
    hot = [SamplingParams(temperature=heat, seed=9, max_tokens=24, ignore_eos=True) for heat in (0.7, 1.0, 3.0)]
    answers = [engine.generate(PROMPTS[:3], params) for params in (GREEDY, hot)]
    stats = engine._engine.stats().scheduler
    assert stats.num_accepted_tokens > 6 * 14
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens, "but behind an end"
    assert run_ahead or stats.num_accepted_tokens == stats.num_draft_tokens
    assert (stats.num_ahead > 0) == (run_ahead > 0)
    assert_ends_within(engine, PROMPTS[0], answers[0][0]["token_ids"])
    engine.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_programs_draft_as_on_a_cpu(name: str, num_drafts: int, tmp_path: Path):
    """In graphs and without: the same drafts are accepted."""
    case = CASES[name](tmp_path)
    every = [[token % VOCAB for token in prompt] for prompt in PROMPTS]
    found = []
    for fields in ({"device": "cpu", "level": 1}, {"level": 3}, {"level": 2}):
        own = {**FIELDS, **fields, **case.fields, "num_speculative_tokens": num_drafts, "max_verified_tokens": 256}
        if "device" in fields:
            del own["cudagraph_capture_sizes"]
        engine = LLMEngine(str(case.folder), **own)
        if not found:
            plain = LLMEngine(str(case.folder), **{key: own[key] for key in own if key in (*FIELDS, "level")})
            expected = [answer["token_ids"] for answer in plain.generate(every, PARAMS)]
            plain.close()
        assert [answer["token_ids"] for answer in engine.generate(every, PARAMS)] == expected
        stats = engine._engine.stats().scheduler
        found.append(stats.num_accepted_tokens / stats.num_draft_tokens)
        engine.close()
    assert found[0] > 0 and found == pytest.approx([found[0]] * 3, rel=0.2), "behind ends, others are drafted"


@pytest.mark.parametrize("length", [1, 2.5, 4])
def test_chance_accepts_as_many_as_configured(length: float, checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    how = LOOKED_UP._replace(rates=acceptance_rates(length, 3))
    monkeypatch.setattr(Config, "drafting", how)
    engine = LLMEngine(str(checkpoints("qwen3")), **FIELDS, level=3, method="ngram")
    params = [SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, seed=seed) for seed in range(8)]
    engine.generate(PROMPTS[: len(params)], params)
    stats = engine._engine.stats().scheduler
    assert 8 * 199 / (8 * 199 - stats.num_accepted_tokens) == pytest.approx(length, rel=0.05)
    engine.close()

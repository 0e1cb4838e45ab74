"""Prompts that begin alike and arrive together: each gets the tokens that it gets by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom import LLMEngine, SamplingParams

SHARED = 43  # tokens, of which 10 blocks are full
LENGTHS = (11, 1, 2, 23, 6, 5)  # of the others
PROMPTS = [tiny.prompt(SHARED) + tiny.prompt(length, seed=length) for length in LENGTHS]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def open_engine(folder: Path, **options: Any) -> LLMEngine:
    return LLMEngine(model=str(folder), dtype="fp32", level=1, block_size=4, kv_cache_memory=1 << 22, **options)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gemma2", 512),
        ("qwen3_next", 24),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gemma2", 24), ("qwen3_next", 512), ("deepseek_v3", 512), ("deepseek_v3", 24))
        ),
    ],
)
def test_prompts_that_arrive_together_share_what_they_begin_with(
    name: str, budget: int, tmp_path: Path, checkpoints: Callable[[str], Path], references: Callable[[str], Any]
):
    engine = open_engine(checkpoints(name), max_num_batched_tokens=budget, max_num_seqs=8)
    seeded = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(len(PROMPTS))
    ]
    answers = engine.generate(PROMPTS, GREEDY)
    stats = engine.metrics.scheduler
    assert stats.num_prefix_hit_tokens == (len(PROMPTS) - 1) * 40, "all but the first begin after 10 blocks"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tiny.assert_greedy(answer, prompt, references(name))
    engine.reset_prefix_cache()
    drawn = [answer["token_ids"] for answer in engine.generate(PROMPTS, seeded)]
    engine.close()
    alone = open_engine(checkpoints(name), enable_prefix_caching=False, max_num_seqs=1)
    assert [answer["token_ids"] for answer in alone.generate(PROMPTS, seeded)] == drawn
    assert alone.metrics.scheduler.num_prefix_hit_tokens == 0
    alone.close()

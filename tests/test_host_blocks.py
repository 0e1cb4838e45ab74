"""Conversations whose KV goes to host memory and back: the tokens are those of a pool that holds all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from thread_ranks import thread_ranks

from atom import LLMEngine, SamplingParams

__all__ = ["thread_ranks"]

pytestmark = pytest.mark.early

Open = Callable[..., LLMEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NUM_TALKS, NUM_TURNS = 10, 3
SIZES = {"block_size": 4, "max_model_len": 60, "max_num_batched_tokens": 32, "enable_prefix_caching": True}
SMALL = {"num_kvcache_blocks": 16, "swap_space": 1 << 20, **SIZES}  # of 10 conversations of 15 blocks each


def talk(engine: LLMEngine) -> list[list[int]]:
    """Conversations that take turns; their tokens."""
    talks = [tiny.prompt(16, seed=number) for number in range(NUM_TALKS)]
    for turn in range(NUM_TURNS):
        answers = engine.generate(talks, GREEDY)
        talks = [
            [*each, *answer["token_ids"], *tiny.prompt(7, seed=turn)]
            for each, answer in zip(talks, answers, strict=True)
        ]
    return talks


def load_always(engine: LLMEngine) -> LLMEngine:
    """Have it load whatever the host has: times of tiny models say little."""
    scheduler: Any = engine._engine.scheduler
    for group in getattr(scheduler, "groups", [scheduler]):
        group.cache.costs = None
    return engine


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("gpt_oss", {}),
        ("deepseek_v3", {"kv_cache_dtype": "fp8"}),
        ("llama", {"method": "ngram"}),
    ],
)
def test_a_tenth_of_the_pool_gives_the_same_tokens(name: str, fields: dict[str, Any], open_engine: Open):
    expected = talk(open_engine(name, **fields, **SIZES, num_kvcache_blocks=200))
    engine = load_always(open_engine(name, **fields, **SMALL))
    assert talk(engine) == expected
    now = engine.metrics
    stats = now.scheduler
    assert stats.num_saved_blocks > 0 and stats.num_loaded_blocks > 0
    assert stats.num_prefix_hit_tokens >= stats.num_host_hit_tokens > 0.5 * NUM_TALKS * 16
    num_computed = stats.num_prefix_queries - stats.num_prefix_hit_tokens
    assert stats.num_host_hit_tokens > num_computed / 2, "most of what is not new was loaded"
    assert 0 < now.num_host_blocks_used <= now.num_host_blocks and 0 < now.host_cache_usage <= 1

"""Conversations whose KV goes to host memory and back: the tokens are those of a pool that holds all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from kinds import every_kind, full_kind, window_kind
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine, SamplingParams
from atom.config.load import load
from atom.errors import CapacityError, ConfigError, EngineDeadError
from atom.runtime.kv.host_blocks import plan_host_blocks, runs
from atom.runtime.types import SwapCosts

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


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("gpt_oss", {}),
        ("deepseek_v4", {}),
        ("deepseek_v3", {"kv_cache_dtype": "fp8"}),
        ("glm_moe_dsa", {}),  # two states of a layer
        ("deepseek_v32", {"kv_cache_dtype": "fp8"}),
        ("llama", {"method": "ngram"}),
        ("minimax_m3", {}),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_dp_attention": True}),
        ("gpt_oss", {"pipeline_parallel_size": 2}),  # a kind of cache on each stage
        ("llama", {"pipeline_parallel_size": 2, "method": "ngram"}),
    ],
)
def test_each_rank_keeps_its_share(
    name: str, fields: dict[str, Any], open_engine: Open, thread_ranks: list[ThreadRanks]
):
    expected = talk(open_engine(name, **SIZES, num_kvcache_blocks=200))
    engine = load_always(open_engine(name, **fields, **SMALL))
    assert talk(engine) == expected and len(thread_ranks) == 1
    assert engine.metrics.scheduler.num_host_hit_tokens > 0


@pytest.mark.slow
def test_what_takes_longer_to_load_than_to_compute_is_computed(open_engine: Open):
    engine = open_engine("llama", **SMALL)
    measured = engine._engine.scheduler.cache.costs  # type: ignore[union-attr]
    assert measured is not None and measured.compute_token_seconds > 0
    slow = SwapCosts(load_seconds=0.01, load_token_seconds=0.001, compute_token_seconds=0.002)
    assert not slow.pays(10) and slow.pays(11)
    engine._engine.scheduler.cache.costs = slow._replace(load_seconds=1.0)  # type: ignore[union-attr]
    talk(engine)
    stats = engine.metrics.scheduler
    assert stats.num_host_queries > 0 and stats.num_host_hit_tokens == 0 and stats.num_loaded_blocks == 0


def test_a_request_that_is_aborted_while_it_is_loaded_leaves_the_others_running(open_engine: Open):
    expected = talk(open_engine("llama", **SIZES, num_kvcache_blocks=200))
    engine = load_always(open_engine("llama", **{**SMALL, "num_kvcache_blocks": 40}))
    talk(engine)
    inner: Any = engine._engine
    inner.submit(inner.prepare(tiny.prompt(9, seed=99), GREEDY, request_id="other"))
    inner.step()
    num_loaded, index = engine.metrics.scheduler.num_loaded_blocks, 0
    for index, tokens in enumerate(expected):
        inner.submit(inner.prepare(tokens[:40], GREEDY, request_id=f"load-{index}"))
        inner.step()
        if engine.metrics.scheduler.num_loaded_blocks > num_loaded:
            break
    (loading,) = (each for each in inner.scheduler.running if each.request_id == f"load-{index}")
    assert loading.num_planned == loading.num_computed > 0, "its copies are beside a step that it is not in"
    inner.abort(f"load-{index}")
    while inner.has_work:
        inner.step()
    inner.take_ended()
    assert talk(engine) == expected


def test_copies_that_fail_end_the_engine(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = load_always(open_engine("llama", **SMALL))

    def fail(kind: str, pairs: object) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(engine._engine.runner.host, "_load", fail)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="copying KV to the host or back failed: RuntimeError"):
        talk(engine)
    with pytest.raises(EngineDeadError):  # what was not copied is read by no later step
        engine.generate([tiny.prompt(5)], GREEDY)


def test_rows_that_lie_side_by_side_are_one_copy():
    assert list(runs([(9, 4), (2, 5), (7, 6), (1, 2), (3, 3)])) == [(0, 4, 3), (3, 2, 2)]
    assert list(runs([])) == []


def test_the_bytes_are_divided_among_the_kinds():
    kinds = [full_kind(3, 16), window_kind(4, 1, 16, name="window_4")]
    assert plan_host_blocks(kinds, 64 * 10 + 63) == {"full": 10, "window_4": 10}
    with pytest.raises(CapacityError, match=r"serve.swap_space=127 is less than two blocks of KV: raise it to 128"):
        plan_host_blocks(kinds, 127)


def test_kinds_hold_equally_many_tokens_on_the_host():
    kinds = [full_kind(3, 16), every_kind(4, 1, 16), every_kind(64, 2, 16)]  # 48, 16 and, for 4 blocks, 128 bytes
    assert plan_host_blocks(kinds, 10 * 384 + 383) == {"full": 40, "every_4": 40, "every_64": 10}


def test_without_prefixes_nothing_would_be_found_again(checkpoints: Any):
    fields = ["serve.swap_space=4096", "serve.enable_prefix_caching=false"]
    with pytest.raises(ConfigError, match=r"serve.swap_space=4096 keeps KV .*leave serve.enable_prefix_caching=false"):
        load([f"checkpoint={checkpoints('llama')}", *fields])

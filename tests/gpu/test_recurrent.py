"""Tiny models with recurrent state on a GPU, against transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import transformers
from gpu.steps import GREEDY, set_depth
from gpu.test_models import assert_greedy
from packaging.version import Version
from probe import assert_logits

from atom import LLMEngine

pytestmark = pytest.mark.gpu

Open = Callable[..., LLMEngine]
LEFT_OUT = {"zamba2"}  # of which float32 on the CPU is 0.9 of the bound off float64
if Version(transformers.__version__) < Version("5.24"):  # 5.17 norms all groups at once
    LEFT_OUT |= {"bamba", "granitemoehybrid", "mamba2"}
NAMES = [name for name, (config, _) in tiny.RECURRENT.items() if hasattr(transformers, config) and name not in LEFT_OUT]
EVENTFUL = ["lfm2", "qwen3_5", "nemotron_h", "mamba", "minimax_text_01"]


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_logits_at_every_position_and_64_greedy_tokens(name: str, level: int, open_engine: Open, references: Any):
    engine, model = open_engine(name, level=level, max_num_batched_tokens=64), references(name)
    assert_logits(engine, tiny.prompt(100), model)
    assert engine.metrics.scheduler.num_chunks > 0
    assert_greedy(engine, [tiny.prompt(40, seed=1)], model)
    assert engine.metrics.scheduler.num_ahead > 0
    assert (level == 3) == bool(engine._engine.runner.graphs.sizes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", EVENTFUL)
@pytest.mark.parametrize("budget", [7, 33])
def test_chunks_mixed_with_decodes_change_nothing(name: str, budget: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (3, 61, 20, 50)]
    engine = open_engine(name, level=3, max_num_batched_tokens=budget, max_num_seqs=4, block_size=3,
                         cudagraph_capture_sizes=[1, 4])  # fmt: skip
    assert_greedy(engine, prompts, references(name))
    assert engine.metrics.scheduler.num_chunks > (10 if budget == 7 else 0)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("name", EVENTFUL)
def test_copies_preemptions_and_depths_together_change_nothing(
    name: str, depth: int, open_engine: Open, references: Any
):
    engine = open_engine(name, level=3, num_kvcache_blocks=30, block_size=4, max_model_len=106,
                         max_num_batched_tokens=16, enable_prefix_caching=True, state_memory=1 << 20)  # fmt: skip
    set_depth(engine, depth)
    shared = tiny.prompt(30)
    prompts = [shared, tiny.prompt(25, seed=1), shared[:17] + tiny.prompt(24, seed=2)]
    for batch in (prompts, prompts[::-1]):
        assert_greedy(engine, batch, references(name))
    stats = engine.metrics.scheduler
    assert stats.num_chunks > 0 and stats.num_prefix_hit_tokens > 0 and (stats.num_ahead > 0) == (depth > 0)
    assert stats.num_preemptions > 0 or name == "mamba", "without attention nothing grows"
    assert stats.num_overrun == 0


@pytest.mark.parametrize("name", EVENTFUL)
def test_states_go_to_the_host_and_back(name: str, open_engine: Open, references: Any):
    (size,) = {
        pool.kind.block_bytes for pool in open_engine(name)._engine.scheduler.cache.pools if pool.kind.rule.in_slot
    }
    engine = open_engine(name, level=3, num_kvcache_blocks=16, block_size=4, max_model_len=60, swap_space=1 << 20,
                         state_memory=6 * size)  # fmt: skip
    engine._engine.scheduler.cache.costs = None  # loading always pays
    talks, few = [tiny.prompt(16, seed=seed) for seed in range(8)], replace(GREEDY, max_tokens=6)
    for turn in range(3):
        answers = engine.generate(talks, few)
        for answer, talk in zip(answers, talks, strict=True):
            tiny.assert_greedy(answer, talk, references(name))
        talks = [
            [*talk, *answer["token_ids"], *tiny.prompt(7, seed=turn)]
            for talk, answer in zip(talks, answers, strict=True)
        ]
    stats = engine.metrics.scheduler
    assert stats.num_saved_blocks > 0 and stats.num_loaded_blocks > 0 and stats.num_host_hit_tokens > 0


@pytest.mark.parametrize("name", EVENTFUL)
def test_graphs_read_the_states_that_a_wake_up_allocates(name: str, open_engine: Open, references: Any):
    engine = open_engine(name, level=3, enable_sleep_mode=True, enable_prefix_caching=True, block_size=4)
    prompts = [tiny.prompt(30), tiny.prompt(17, seed=1)]
    assert_greedy(engine, prompts, references(name))
    before = engine.metrics.scheduler.num_prefix_hit_tokens
    engine.sleep(level=1)
    engine.wake_up()
    assert_greedy(engine, prompts, references(name))
    assert engine.metrics.scheduler.num_prefix_hit_tokens == before, "states are forgotten over a sleep"

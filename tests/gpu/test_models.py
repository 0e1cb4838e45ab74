"""Tiny models of every family on a GPU, against transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import FIELDS, GREEDY, set_depth
from law import relative_error
from probe import assert_logits, logits_of

from atom import LLMEngine, SamplingParams
from atom.graph import ops

pytestmark = pytest.mark.gpu

Open = Callable[..., LLMEngine]
EVENTFUL = ["llama", "llama_odd_heads", "qwen3_window", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"]


def assert_greedy(engine: LLMEngine, prompts: list[list[int]], model: Any) -> None:
    for answer, prompt in zip(engine.generate(prompts, GREEDY), prompts, strict=True):
        tiny.assert_greedy(answer, prompt, model)


def test_float32_is_float32_here():
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_logits_at_every_position_and_64_greedy_tokens(name: str, level: int, open_engine: Open, references: Any):
    engine, model = open_engine(name, level=level, max_num_batched_tokens=64), references(name)
    tokens = tiny.prompt(100)
    assert_logits(engine, tokens, model)
    assert engine.metrics.scheduler.num_chunks > 0
    assert_greedy(engine, [tiny.prompt(40, seed=1)], model)
    assert engine.metrics.scheduler.num_ahead > 0
    assert (level == 3) == bool(engine._engine.runner.graphs.sizes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("name", "width"), [("qwen2_moe", 48), ("qwen3_next", 24), ("qwen3_5_moe", 24)])
def test_a_gated_shared_expert_is_one_of_the_others(name: str, width: int, level: int, gpu_cache: Path, tmp_path: Path):
    """width: of the shared expert; others have 24"""
    model = tiny.save_changed(name, tmp_path / name, shared_expert_intermediate_size=width).eval()
    fields = {**FIELDS, "cache": str(gpu_cache), "level": level, "max_num_batched_tokens": 64}
    engine = LLMEngine(model=str(tmp_path / name), **fields)
    graph = engine._engine.runner.model.graph  # type: ignore[attr-defined]
    routers = graph.find(ops.router) + graph.find(ops.add_norm_router)
    assert routers and all(router.kwargs["gated"] for router in routers)
    assert_logits(engine, tiny.prompt(100), model)
    assert_greedy(engine, [tiny.prompt(length, seed=length) for length in (40, 1, 17)], model)
    engine.close()


@pytest.mark.parametrize("name", EVENTFUL)
@pytest.mark.parametrize("level", [1, 3])
def test_a_batch_of_odd_lengths_gives_each_its_own_tokens(name: str, level: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (1, 15, 16, 17, 2, 48, 33)]
    engine = open_engine(name, level=level)
    assert_greedy(engine, prompts, references(name))
    assert engine.metrics.scheduler.num_steps < 2 * GREEDY.max_tokens, "they ran together"


@pytest.mark.parametrize("name", EVENTFUL)
@pytest.mark.parametrize("budget", [7, 33])
def test_chunks_mixed_with_decodes_change_nothing(name: str, budget: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (3, 61, 20, 50)]
    engine = open_engine(name, level=3, max_num_batched_tokens=budget, max_num_seqs=4, block_size=3,
                         cudagraph_capture_sizes=[1, 4])  # fmt: skip
    assert_greedy(engine, prompts, references(name))
    assert engine.metrics.scheduler.num_chunks > (10 if budget == 7 else 0)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3_window", "deepseek_v3"])
def test_preemption_prefixes_and_depths_together_change_nothing(
    name: str, depth: int, open_engine: Open, references: Any
):
    engine = open_engine(name, level=3, num_kvcache_blocks=30, block_size=4, max_model_len=106,
                         max_num_batched_tokens=16, enable_prefix_caching=True)  # fmt: skip
    set_depth(engine, depth)
    shared = tiny.prompt(30)
    prompts = [shared, tiny.prompt(25, seed=1), shared[:17] + tiny.prompt(24, seed=2)]
    for batch in (prompts, prompts[::-1]):
        assert_greedy(engine, batch, references(name))
    stats = engine.metrics.scheduler
    assert stats.num_chunks > 0 and stats.num_prefix_hit_tokens > 0 and (stats.num_ahead > 0) == (depth > 0)
    assert stats.num_preemptions > 0 or "window" in name
    assert stats.num_overrun == 0


def test_a_batch_larger_than_any_that_was_captured_runs_without_a_graph(open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in range(1, 8)]
    engine = open_engine("qwen3", level=3, cudagraph_capture_sizes=[2])
    assert_greedy(engine, prompts, references("qwen3"))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_sampled_tokens_do_not_depend_on_graphs_batches_or_depths(name: str, level: int, open_engine: Open):
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=32, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, min_p=0.02, seed=3, max_tokens=32, ignore_eos=True),
        SamplingParams(temperature=0.7, presence_penalty=0.4, repetition_penalty=1.2, seed=5, max_tokens=32),
        SamplingParams(temperature=1.0, seed=9, max_tokens=32, logit_bias={5: 4.0}, min_tokens=4, logprobs=2),
        SamplingParams(temperature=0, max_tokens=32),
    ]
    prompts = [tiny.prompt(length, seed=length) for length in (9, 30, 1, 17, 5)]
    eager = open_engine(name, level=level)
    set_depth(eager, 0)
    expected = [eager.generate([prompt], each)[0]["token_ids"] for prompt, each in zip(prompts, params, strict=True)]
    captured = open_engine(name, level=3)
    for depth in (0, 2, 3):
        set_depth(captured, depth)
        assert [answer["token_ids"] for answer in captured.generate(prompts, params)] == expected


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", tiny.MODEL_FILES)
def test_fp16_is_as_near_to_float32_as_that_of_transformers(
    name: str, level: int, open_engine: Open, checkpoints: Any, references: Any
):
    engine = open_engine(name, dtype="fp16", level=level)
    tiny.assert_fp16(checkpoints(name), references(name), lambda tokens: logits_of(engine, tokens))


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "llama_biases", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_bf16_is_as_near_to_float32_as_that_of_transformers(
    name: str, level: int, open_engine: Open, checkpoints: Any, references: Any
):
    engine, half = open_engine(name, dtype="bf16", level=level), tiny.reference(checkpoints(name), torch.bfloat16)
    ours, theirs = 0.0, 0.0
    for seed in range(20):
        tokens = tiny.prompt(24, seed=seed)
        exact = tiny.logits(references(name), tokens)
        ours += relative_error(logits_of(engine, tokens), exact) / 20
        theirs += relative_error(tiny.logits(half, tokens), exact) / 20
    assert ours <= 1.25 * theirs

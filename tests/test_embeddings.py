"""Embeddings of decoders against the hidden states of transformers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
import torch
from thread_ranks import ThreadRanks, thread_ranks

from atom.errors import RequestError
from atom.runtime.types import RequestOptions
from atom.sampling_params import SamplingParams

__all__ = ["thread_ranks"]

PROMPTS = [tiny.prompt(size, seed=size) for size in (1, 5, 16, 40)]
ONE = SamplingParams(max_tokens=1, temperature=0)
Open = Callable[..., Any]
Vector = npt.NDArray[np.float32]


def pooling_engine(open_engine: Open, name: str, pooling: str, **fields: Any) -> Any:
    """The engine within, with steps of 16 tokens, so that the longest prompt takes three."""
    opened = open_engine(name, max_num_batched_tokens=16, **{"serve.pooler_config.pooling_type": pooling, **fields})
    return opened.engine if hasattr(opened, "engine") else opened._engine


def embed(engine: Any, pooling: str, prompts: list[list[int]] = PROMPTS) -> list[Vector]:
    made = [engine.prepare(prompt, ONE, RequestOptions(pooling=pooling))[0] for prompt in prompts]
    for sequence in made:
        engine.submit([sequence])
    while engine.has_work:
        engine.step()
    return [sequence.embedding for sequence in made]


def expected(model: Any, pooling: str, prompt: list[int]) -> Vector:
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector: Vector = (states[-1] if pooling == "LAST" else states.mean(0)).numpy()
    return vector


def assert_near(found: list[Vector], model: Any, pooling: str, prompts: list[list[int]] = PROMPTS) -> None:
    for prompt, vector in zip(prompts, found, strict=True):
        np.testing.assert_allclose(vector, expected(model, pooling, prompt), atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
@pytest.mark.parametrize(("name", "level"), [("qwen3", 0), ("qwen3", 1), ("mistral_window", 1)])
def test_embeddings_are_of_the_reference(
    name: str, level: int, pooling: str, open_engine: Open, references: Callable[[str], Any]
):
    engine = pooling_engine(open_engine, name, pooling, level=level)
    assert_near(embed(engine, pooling), references(name), pooling)
    (answer,) = engine.prepare(PROMPTS[1], SamplingParams(max_tokens=4, temperature=0))  # the same engine writes text
    engine.submit([answer])
    while engine.has_work:
        engine.step()
    with torch.inference_mode():
        text = references(name).generate(torch.tensor([PROMPTS[1]]), max_new_tokens=4, do_sample=False)
    assert answer.output == text[0, len(PROMPTS[1]) :].tolist() and answer.embedding is None


@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_cached_prefixes_and_preemption_change_nothing(
    pooling: str, open_engine: Open, references: Callable[[str], Any]
):
    fields = {"enable_prefix_caching": True, "num_kvcache_blocks": 8, "max_model_len": 64}
    engine = pooling_engine(open_engine, "qwen3", pooling, **fields)
    shared = tiny.prompt(48, seed=9)
    prompts = [shared, [*shared[:40], 3, 4], shared, tiny.prompt(64, seed=3)]  # the last fills the context
    for prompt in prompts:
        assert_near(embed(engine, pooling, [prompt]), references("qwen3"), pooling, [prompt])
    hits = engine.scheduler.stats.num_prefix_hit_tokens
    assert hits > 0 if pooling == "LAST" else hits == 0
    fresh = tiny.prompt(48, seed=11)
    first = engine.prepare(fresh, ONE, RequestOptions(pooling=pooling))[0]
    engine.submit([first])
    engine.step()
    engine.scheduler._preempt(first)
    while engine.has_work:
        engine.step()
    assert_near([first.embedding], references("qwen3"), pooling, [fresh])
    with pytest.raises(RequestError, match="65 tokens is longer than max_model_len=64"):
        engine.prepare(tiny.prompt(65), ONE, RequestOptions(pooling=pooling))


def test_an_embedding_that_is_aborted_on_its_way_frees_its_blocks_and_leaves_the_others(
    open_engine: Open, references: Callable[[str], Any]
):
    engine = pooling_engine(open_engine, "qwen3", "MEAN")
    free = engine.scheduler.cache.num_free
    aborted, kept = (engine.prepare(PROMPTS[3], ONE, RequestOptions(pooling="MEAN"))[0] for _ in range(2))
    engine.submit([aborted])
    engine.submit([kept])
    engine.step()
    assert aborted.finish_reason is None and engine.is_running(aborted.request_id), "its prompt takes three steps"
    engine.abort(aborted.request_id)
    while engine.has_work:
        engine.step()
    assert aborted.finish_reason == "abort"
    assert engine.scheduler.cache.num_free == free
    assert_near([kept.embedding], references("qwen3"), "MEAN", [PROMPTS[3]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("divided", [{"tensor_parallel_size": 2}, {"parallel.tensor": 2, "parallel.data": 2}])
def test_ranks_give_what_the_reference_gives(
    divided: dict[str, Any], open_engine: Open, references: Callable[[str], Any], thread_ranks: list[ThreadRanks]
):
    engine = pooling_engine(open_engine, "qwen3_moe", "MEAN", **divided)
    assert_near(embed(engine, "MEAN"), references("qwen3_moe"), "MEAN")
    assert len(thread_ranks) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pooling", "fields"),
    [
        ("qwen3", "MEAN", {}),
        ("qwen3", "LAST", {"method": "ngram"}),  # one step at a time
        ("qwen3_moe", "MEAN", {"parallel.data": 2}),
    ],
)
def test_stages_give_what_the_reference_gives(
    name: str, pooling: str, fields: dict[str, Any], open_engine: Open, references: Any, thread_ranks: list[ThreadRanks]
):
    engine = pooling_engine(open_engine, name, pooling, pipeline_parallel_size=2, **fields)
    (answer,) = engine.prepare(PROMPTS[1], SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1))
    engine.submit([answer])  # next to them
    assert_near(embed(engine, pooling), references(name), pooling)
    with torch.inference_mode():
        text = references(name).generate(torch.tensor([PROMPTS[1]]), max_new_tokens=4, do_sample=False)
    assert answer.output == text[0, len(PROMPTS[1]) :].tolist() and len(thread_ranks) == 1

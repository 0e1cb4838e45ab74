"""Greedy answers of engines, held against transformers' model of the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom import LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def opened(saved: tuple[Path, Any]) -> Iterator[Any]:
    """Opens engines over the checkpoint that a module's fixture `saved` wrote, or over others, until the test ends."""
    engines: list[LLMEngine] = []

    def open(folder: Path = saved[0], **fields: Any) -> LLMEngine:
        pool = {} if "num_kvcache_blocks" in fields else {"kv_cache_memory": 1 << 22}
        engines.append(LLMEngine(model=str(folder), **{"dtype": "fp32", "level": 1, **pool, **fields}))
        return engines[-1]

    yield open
    for engine in engines:
        engine.close()


def assert_all_greedy(answers: list[dict[str, Any]], prompts: list[list[int]], model: Any) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        tiny.assert_greedy(answer, prompt, model)


def assert_greedy(engine: LLMEngine, prompts: list[list[int]], model: Any, max_tokens: int = 24) -> None:
    answers = engine.generate(prompts, replace(GREEDY, max_tokens=max_tokens))
    assert_all_greedy(answers, prompts, model)

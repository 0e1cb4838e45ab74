"""Adapters on a GPU: tokens as of merged weights, at each level, in batches of several adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapters
import pytest
import tiny

from atom import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name, level", [("llama", 1), ("qwen3", 3), ("qwen2", 3)])
def test_tokens_are_those_of_merged_weights(name: str, level: int, open_engine: Any, references: Any, tmp_path: Path):
    model = references(name)
    folders = {
        f"a{seed}": adapters.save(model, tmp_path / f"a{seed}", rank=4 + 4 * seed, seed=seed) for seed in range(3)
    }
    models = {None: model} | {each: adapters.merge(model, folder) for each, folder in folders.items()}
    engine = open_engine(
        name, level=level, lora_modules={each: str(folder) for each, folder in folders.items()}, device="cuda",
        num_kvcache_blocks=200, max_num_seqs=16,
    )  # fmt: skip
    names = ["a0", None, "a2", "a1", "a0", "a1", None, "a2"]
    prompts = [tiny.prompt(9 + 7 * seed, seed=seed) for seed in range(8)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=16, temperature=0), adapters=names)
    for prompt, own, answer in zip(prompts, names, answers, strict=True):
        tiny.assert_greedy(answer, prompt, models[own])

"""Images in prompts on a GPU: decodes in captured graphs, chunks with images outside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from gpu.steps import FIELDS
from image_prompts import LARGE, SMALL, answer, assert_greedy, make, models, place
from law import assert_same_logits
from probe import logits_of

from atom import LLMEngine

pytestmark = pytest.mark.gpu
__all__ = ["models"]


@pytest.fixture
def open_model(models: Any, gpu_cache: Path) -> Iterator[Callable[..., tuple[LLMEngine, Any]]]:
    """Engines that read images on the GPU, and their references on the CPU; closed after the test."""
    opened: list[LLMEngine] = []

    def open(name: str = "Qwen3VL", **fields: Any) -> tuple[LLMEngine, Any]:
        folder, model = models(name)
        given = {**FIELDS, "cache": str(gpu_cache), "images": True, "image_memory": 1 << 20, "max_patches": 256}
        opened.append(LLMEngine(model=str(folder), **{**given, **fields}))
        return opened[-1], model

    yield open
    for engine in opened:
        engine.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", vision.MODELS)
def test_logits_at_every_position_and_greedy_tokens(name: str, level: int, open_model: Any) -> None:
    engine, model = open_model(name, level=level, max_num_batched_tokens=64)
    prompts = [make(model, grids, seed) for seed, grids in enumerate((LARGE, (), SMALL, vision.GRIDS))]
    tokens, images = place(prompts[0])
    assert_same_logits(logits_of(engine, tokens, images), vision.logits(model, prompts[0]))
    for sequence, prompt in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence, prompt, model)
    assert (level == 3) == bool(engine._engine.runner.graphs.sizes)  # type: ignore[attr-defined]


def test_images_are_encoded_again_after_a_sleep(open_model: Any) -> None:
    engine, model = open_model(level=3, enable_sleep_mode=True)
    prompt = make(model)
    for _ in range(2):
        (sequence,) = answer(engine, prompt)
        assert_greedy(sequence, prompt, model)
        engine.sleep(level=1)
        engine.wake_up()
    assert engine.metrics.num_encoded_images == 2

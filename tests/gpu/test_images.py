"""Images in prompts on a GPU: decodes in captured graphs, chunks with images outside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from gpu.steps import FIELDS
from image_families import FAMILIES, make_case
from image_prompts import LARGE, SMALL, answer, assert_greedy, make, models, place
from law import assert_greedy_tokens, assert_same_logits, median_error
from probe import logits_of

from atom import LLMEngine, SamplingParams

pytestmark = pytest.mark.gpu
__all__ = ["models"]
BY_TEXT = {"max_num_batched_tokens": 128, "max_patches": 1024}  # a chunk ends inside the largest prompt


@pytest.fixture
def open_folder(gpu_cache: Path) -> Iterator[Callable[..., LLMEngine]]:
    """Engines that read images on the GPU, closed after the test."""
    opened: list[LLMEngine] = []

    def open(folder: Path, **fields: Any) -> LLMEngine:
        given = {**FIELDS, "cache": str(gpu_cache), "images": True, "image_memory": 1 << 20, "max_patches": 256}
        opened.append(LLMEngine(model=str(folder), **{**given, **fields}))
        return opened[-1]

    yield open
    for engine in opened:
        engine.close()
    torch.cuda.empty_cache()


@pytest.fixture
def open_model(models: Any, open_folder: Any) -> Callable[..., tuple[LLMEngine, Any]]:
    """Engines that read images on the GPU, and their references on the CPU."""

    def open(name: str = "Qwen3VL", **fields: Any) -> tuple[LLMEngine, Any]:
        folder, model = models(name)
        return open_folder(folder, **fields), model

    return open


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


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_equal_transformers(name: str, level: int, open_folder: Any, tmp_path: Path) -> None:
    case = make_case(name, tmp_path)
    engine = open_folder(tmp_path, level=level, **BY_TEXT)
    assert_same_logits(logits_of(engine, *case.place(engine)), case.logits())
    is_special = dict.fromkeys(case.special, -100.0)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logit_bias=is_special)
    (made,) = engine.generate(case.asked, params)
    logits = case.logits(made["token_ids"])[-params.max_tokens - 1 : -1].clone()
    logits[:, case.special] = logits.min()
    assert_greedy_tokens(made["token_ids"], logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_are_as_near_in_bf16(name: str, open_folder: Any, tmp_path: Path) -> None:
    case = make_case(name, tmp_path)
    engine = open_folder(tmp_path, level=3, dtype="bf16", **BY_TEXT)
    ours, reference = logits_of(engine, *case.place(engine)).float(), case.logits()
    assert ours.isfinite().all()
    allowed = 1.25 * median_error(case.logits(dtype=torch.bfloat16), reference)
    assert median_error(ours, reference) <= allowed


def test_images_are_encoded_again_after_a_sleep(open_model: Any) -> None:
    engine, model = open_model(level=3, enable_sleep_mode=True)
    prompt = make(model)
    for _ in range(2):
        (sequence,) = answer(engine, prompt)
        assert_greedy(sequence, prompt, model)
        engine.sleep(level=1)
        engine.wake_up()
    assert engine.metrics.num_encoded_images == 2

"""Prompts with images of tiny models, and engines' answers to them, against transformers.

prompt = make(model, LARGE)
(sequence,) = answer(engine, prompt)
assert_greedy(sequence, prompt, model)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from law import assert_greedy_tokens
from xxhash import xxh64_intdigest

from atom import LLMEngine, SamplingParams
from atom.images.types import DIGEST_MASK, Image, PlacedImage, placeholder
from atom.runtime.types import RequestOptions, Sequence

IS_PLACEHOLDER = {7: -100.0, 8: -100.0}  # tokens that transformers takes for images: no answer has them
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logit_bias=IS_PLACEHOLDER)
SMALL, LARGE = ((1, 4, 6),), ((1, 4, 6), (1, 6, 10))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """The folder of a tiny model, and transformers' model."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str, *, again: bool = False) -> tuple[Path, Any]:
        if name not in made or again:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, vision.save(name, folder)
        return made[name]

    return get


def place(prompt: vision.Prompt) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt's tokens with placeholders, and its images."""
    tokens, placed, at = list(prompt.tokens), list[PlacedImage](), 0
    sizes = [rows * columns for _, rows, columns in prompt.grids]
    for grid, count, patches in zip(prompt.grids, prompt.counts, prompt.patches.split(sizes), strict=True):
        pixels = patches.numpy().tobytes()
        image = Image(xxh64_intdigest(pixels) & DIGEST_MASK, pixels, (grid,), count)
        at = tokens.index(vision.IMAGE, at)
        tokens[at : at + count] = [placeholder(image.digest, row) for row in range(count)]
        placed.append(PlacedImage(image, at, at + count))
    return tokens, tuple(placed)


def answer(engine: LLMEngine, *prompts: vision.Prompt, params: SamplingParams = GREEDY) -> list[Sequence]:
    """Answer prompts in one batch."""
    inner = engine._engine
    asked = []
    for prompt in prompts:
        tokens, images = place(prompt)
        asked.append(inner.prepare(tokens, params, RequestOptions(images=images)))
    for sequences in asked:
        inner.submit(sequences)
    while inner.has_work:
        inner.step()
    return [sequence for sequences in asked for sequence in sequences]


def assert_greedy(sequence: Sequence, prompt: vision.Prompt, model: Any) -> None:
    assert sequence.error is None and len(sequence.output) == sequence.params.max_tokens
    whole = prompt._replace(tokens=prompt.tokens + sequence.output)
    logits = logits_like(model, whole)[len(prompt.tokens) - 1 : -1].clone()
    logits[:, list(IS_PLACEHOLDER)] = logits.min()
    assert_greedy_tokens(sequence.output, logits)


@torch.inference_mode()
def logits_like(model: Any, prompt: vision.Prompt) -> torch.Tensor:
    """[T, V] of transformers, which takes no prompt without images as one with them."""
    if prompt.grids:
        return vision.logits(model, prompt)
    made: torch.Tensor = model(torch.tensor([prompt.tokens]), use_cache=False).logits[0]
    return made


def make(model: Any, grids: Any = SMALL, seed: int = 0) -> vision.Prompt:
    torch.manual_seed(seed)
    return vision.make_prompt(model, grids)

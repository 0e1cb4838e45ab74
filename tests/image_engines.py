"""Engines of tiny models that read images, and what is common to tests of them.

engine = open_engine(folder, max_num_batched_tokens=9)          # a fixture; closed after the test
tokens, placed = place_text(engine, "ab<image>c", [pixels])
config = load_with_images(folder, "level=2")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atom import LLMEngine
from atom.config import Config
from atom.config.load import load
from atom.images.types import PlacedImage

FIELDS = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22, "images": True, "image_memory": 1 << 20}


@pytest.fixture
def open_engine() -> Iterator[Callable[..., LLMEngine]]:
    """Opens engines of a checkpoint's folder, with a small KV pool."""
    opened: list[LLMEngine] = []

    def open(folder: Path, **fields: Any) -> LLMEngine:
        opened.append(LLMEngine(model=str(folder), **{**FIELDS, **fields}))
        return opened[-1]

    yield open
    for engine in opened:
        engine.close()


def load_with_images(folder: Path, *overrides: str) -> Config:
    return load([f"checkpoint={folder}", "dtype=fp32", "device=cpu", "serve.images=true", *overrides])


def place_text(engine: LLMEngine, text: str, images: list[np.ndarray]) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt's tokens with placeholders, and its images."""
    assert engine._images is not None and engine.tokenizer is not None
    read = [engine._images.read_local(each) for each in images]
    return engine._images.place(engine.tokenizer.encode(text), read, engine.tokenizer)

"""Mixtures of experts that a GPU keeps packed, against transformers in float32 with the same weights unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import FIELDS, GREEDY
from law import relative_error
from probe import assert_logits, logits_of

from atom import LLMEngine

pytest.importorskip("compressed_tensors", reason="tests/test_quantized.py packs with it")
from test_quantized import LAYOUTS, WIDE_MOE, packed, write

pytestmark = pytest.mark.gpu

WIDE = {**WIDE_MOE, "hidden_size": 192, "moe_intermediate_size": 96}
CASES = {
    "blocks": ("wide_moe", LAYOUTS["deepseek"]),
    "odd blocks": ("qwen3_moe", LAYOUTS["deepseek"]),
    "FP8_DYNAMIC": ("wide_moe", LAYOUTS["FP8_DYNAMIC"]),
    "FP8": ("wide_moe", LAYOUTS["FP8"]),
    "W8A8": ("wide_moe", LAYOUTS["W8A8"]),
    "W4A16": ("wide_moe", packed(4, group=32)),
    "W4A16 asymmetric": ("wide_moe", packed(4, group=32, symmetric=False)),
    "W8A16 asymmetric": ("wide_moe", packed(8, group=32, symmetric=False)),
    "MXFP4": ("wide_moe", LAYOUTS["MXFP4"]),
    "NVFP4": ("wide_moe", LAYOUTS["NVFP4"]),
    "modelopt NVFP4": ("wide_moe", LAYOUTS["modelopt NVFP4"]),
}


@pytest.fixture(params=CASES)
def folders(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A packed checkpoint, and one of the same weights unpacked."""
    monkeypatch.setitem(tiny.VARIANTS, "wide_moe", ("Qwen3MoeConfig", WIDE))
    variant, layout = CASES[request.param]
    return write(variant, layout, tmp_path)


def open_packed(folder: Path, cache: Path, **fields: Any) -> LLMEngine:
    engine = LLMEngine(model=str(folder), **{**FIELDS, "cache": str(cache), **fields})
    graph = engine._engine.runner.model.graph  # type: ignore[attr-defined]
    assert sum(recipe.type.fmt is not None and len(recipe.type.shape) == 3 for recipe in graph.recipes()) == 6
    return engine


@pytest.mark.parametrize("level", [1, 3])
def test_tokens_and_logits_are_those_of_the_weights_unpacked(folders: tuple[Path, Path], level: int, gpu_cache: Path):
    packed, plain = folders
    reference, tokens = tiny.reference(plain), tiny.prompt(100)
    engine = open_packed(packed, gpu_cache, level=level, max_num_batched_tokens=64)
    try:
        assert_logits(engine, tokens, reference)
        (answer,) = engine.generate([tokens[:20]], GREEDY)
        tiny.assert_greedy(answer, tokens[:20], reference)
    finally:
        engine.close()


def test_bf16_is_as_near_to_float32_as_that_of_transformers(folders: tuple[Path, Path], gpu_cache: Path):
    packed, plain = folders
    exact, half = tiny.reference(plain), tiny.reference(plain, torch.bfloat16)
    engine, ours, theirs = open_packed(packed, gpu_cache, dtype="bf16", level=3), 0.0, 0.0
    try:
        for seed in range(20):
            tokens = tiny.prompt(24, seed=seed)
            wanted = tiny.logits(exact, tokens)
            ours += relative_error(logits_of(engine, tokens), wanted) / 20
            theirs += relative_error(tiny.logits(half, tokens), wanted) / 20
    finally:
        engine.close()
    assert ours <= 1.25 * theirs

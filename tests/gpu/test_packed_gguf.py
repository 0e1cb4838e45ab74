"""GGUF files whose blocks a GPU keeps packed, against the same numbers stored in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from gpu.steps import FIELDS, GREEDY
from law import assert_same_logits
from probe import logits_of

from atom import LLMEngine
from atom.dtypes import GGUF_FORMATS

gguf_files = pytest.importorskip("gguf_files")

pytestmark = pytest.mark.gpu
EXPERTS = {"hidden_size": 192, "intermediate_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 2,
           "head_dim": 16}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "no_rope_layers": None}
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 512}  # in which rows are whole blocks of K-quants


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_tokens_and_logits_are_those_of_the_numbers_unpacked(kind: str, level: int, tmp_path: Path, gpu_cache: Path):
    tiny.save_changed("smollm3", tmp_path / "checkpoint", **(WIDE if kind.endswith("_K") else SIZES))
    tokens, made, answers = tiny.prompt(100), [], []
    for packed in (False, True):
        path = gguf_files.convert(tmp_path / "checkpoint", tmp_path / f"{packed}.gguf", rounded=kind, packed=packed)
        engine = LLMEngine(model=str(path), **{**FIELDS, "cache": str(gpu_cache), "level": level})
        graph = engine._engine.runner.model.graph  # type: ignore[attr-defined]
        formats = {recipe.type.fmt for recipe in graph.recipes() if len(recipe.type.shape) == 2}
        try:
            assert (kind.lower() in formats) == packed
            made.append(logits_of(engine, tokens))
            answers.append(engine.generate([tokens[:20]], GREEDY)[0]["token_ids"])
        finally:
            engine.close()
            torch.cuda.empty_cache()
    assert_same_logits(made[1], made[0])
    assert answers[1] == answers[0]


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss"])
def test_experts_stay_packed(variant: str, kind: str, level: int, tmp_path: Path, gpu_cache: Path):
    tiny.save_changed(variant, tmp_path / "checkpoint", **EXPERTS)
    tokens, made = tiny.prompt(100), []
    for packed in (False, True):
        path = gguf_files.convert(tmp_path / "checkpoint", tmp_path / f"{packed}.gguf", rounded=kind, packed=packed)
        engine = LLMEngine(model=str(path), **{**FIELDS, "cache": str(gpu_cache), "level": level})
        graph = engine._engine.runner.model.graph  # type: ignore[attr-defined]
        formats = {recipe.type.fmt for recipe in graph.recipes() if len(recipe.type.shape) == 3}
        try:
            assert formats == {GGUF_FORMATS[kind] if packed else None}
            made.append(logits_of(engine, tokens))
        finally:
            engine.close()
            torch.cuda.empty_cache()
    assert_same_logits(made[1], made[0])

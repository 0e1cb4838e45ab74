"""Experts that no token of a prompt chose, in every family and format: NaN in them changes nothing.

A prompt of one token many times is that token's hidden states many times: all its tokens choose the same experts, and
most experts have none.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import FIELDS
from law import assert_same_logits
from probe import logits_of
from safetensors.torch import load_file, save_file

from atom import LLMEngine

pytest.importorskip("compressed_tensors", reason="tests/test_quantized.py packs with it")
from test_quantized import LAYOUTS, WIDE_MOE, packed, write

pytestmark = pytest.mark.early

PROMPTS = [7], [7] * 40
ODD = {"head_dim": 12, "moe_intermediate_size": 27, "hidden_size": 44, "num_experts": 128, "num_experts_per_tok": 5}
OTHERS = {"qwen3_moe_128_odd": ("Qwen3MoeConfig", ODD), "wide_moe": ("Qwen3MoeConfig", WIDE_MOE)}
FAMILIES = [*filter(tiny.is_mixture, tiny.MODEL_FILES), "deepseek_v2", "mixtral_window_stacked", "qwen3_moe_128_odd"]
FORMATS = {**LAYOUTS, "W4A16 32": packed(4, group=32), "W8A16 asymmetric 32": packed(8, group=32, symmetric=False)}
CASES = [*(("wide_moe", layout) for layout in FORMATS),
         *(("qwen3_moe_128_odd", layout) for layout in ("deepseek", "FP8", "FP8_DYNAMIC", "W8A8"))]  # fmt: skip
DEVICES = [("cpu", 1), pytest.param("cuda", 1, marks=pytest.mark.gpu), pytest.param("cuda", 3, marks=pytest.mark.gpu)]

Chosen = dict[str, set[int]]  # by the name of a layer's experts


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variant in OTHERS.items():
        monkeypatch.setitem(tiny.VARIANTS, name, variant)


def find_chosen(model: Any) -> Chosen:
    """The experts that the prompts' tokens choose, by transformers."""
    chosen: Chosen = defaultdict(set)
    for name, module in experts_of(model):
        module.register_forward_pre_hook(lambda _, args, name=name: chosen[name].update(args[1].flatten().tolist()))
    for tokens in PROMPTS:
        tiny.logits(model, tokens)
    return chosen


def experts_of(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if name.endswith(".experts"))


def check(folder: Path, expected: list[torch.Tensor], device: str, level: int, cache: Path) -> None:
    common: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "kv_cache_memory": 1 << 22}
    fields = {**FIELDS, "cache": str(cache)} if device == "cuda" else common
    engine = LLMEngine(model=str(folder), level=level, **fields)
    try:
        for tokens, logits in zip(PROMPTS, expected, strict=True):
            assert_same_logits(logits_of(engine, tokens), logits)
    finally:
        engine.close()


@pytest.mark.sampled(12, gpu=1)
@pytest.mark.parametrize(("device", "level"), DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_in_every_family(name: str, device: str, level: int, tmp_path: Path):
    folder = tiny.save(name, tmp_path)
    model = tiny.reference(folder)
    expected, chosen = [tiny.logits(model, tokens) for tokens in PROMPTS], find_chosen(model)
    num_spoiled = 0
    for of_layer, module in experts_of(model):
        for tensor in module.parameters(recurse=False):
            others = [expert for expert in range(len(tensor)) if expert not in chosen[of_layer]]
            tensor.data[others] = math.nan
            num_spoiled += len(others)
    assert num_spoiled > 0
    spoiled = tmp_path / "spoiled"
    model.save_pretrained(spoiled, save_original_format="stacked" not in name)
    shutil.copy(folder / "config.json", spoiled)
    check(spoiled, expected, device, level, tmp_path / "cache")


@pytest.mark.sampled(48, gpu=8)
@pytest.mark.parametrize(("device", "level"), DEVICES)
@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_in_every_format(variant: str, layout: str, device: str, level: int, tmp_path: Path):
    stored, plain = write(variant, FORMATS[layout], tmp_path)
    model = tiny.reference(plain)
    expected, chosen = [tiny.logits(model, tokens) for tokens in PROMPTS], find_chosen(model)
    tensors, spoiled = load_file(stored / "model.safetensors"), set[str]()
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        is_number = tensor.dtype is torch.float8_e4m3fn or "scale" in name
        if found and is_number and int(found[2]) not in chosen[found[1]]:
            tensor.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in each float and exponent
            spoiled.add(found[2])
    assert len(spoiled) > 8
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    check(stored, expected, device, level, tmp_path / "cache")

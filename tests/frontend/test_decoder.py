"""Every variant's semantic text, run by the reference interpreter, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import assert_same_logits
from parting import naming_line
from transformers import AutoModelForCausalLM

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.graph import interpret, ops, verify


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_the_semantic_text_gives_the_logits_of_transformers(
    name: str, checkpoints: Callable[[str], Path], references: Any
):
    assert_same_as_transformers(load([f"checkpoint={checkpoints(name)}", "dtype=fp32"]), references(name))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", tiny.COMBINED)
def test_each_model_file_gives_the_logits_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiny.VARIANTS, name, tiny.COMBINED[name])
    folder = tiny.save(name, tmp_path)
    config = load([f"checkpoint={folder}", "dtype=fp32"])
    assert config.model.name == name
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    assert_same_as_transformers(config, model.eval())


@torch.inference_mode()
def assert_same_as_transformers(config: Config, model: Any) -> None:
    graph = semantic_graph(config)
    verify(graph, ops.SEMANTIC)
    checkpoint = open_for(config, SilentProgress())
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    tensors = weights.load(graph.recipes(), checkpoint, SilentProgress())
    tokens = torch.tensor(tiny.prompt(70))
    hidden = interpret(graph, "body", {"tokens": tokens, "positions": torch.arange(70)}, tensors.__getitem__)
    logits = interpret(graph, "head", {"hidden": hidden}, tensors.__getitem__)
    with naming_line(load([*config.overrides, "level=0"]), model, tokens.tolist()):
        assert_same_logits(logits, tiny.logits(model, tokens.tolist()))

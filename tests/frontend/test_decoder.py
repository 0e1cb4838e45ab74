"""Every variant's semantic text, run by the reference interpreter, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from semantic import assert_same_as_transformers
from transformers import AutoModelForCausalLM

from atom.compiler import semantic_graph
from atom.config.load import load


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_the_semantic_text_gives_the_logits_of_transformers(
    name: str, checkpoints: Callable[[str], Path], references: Any
):
    assert_same_as_transformers(load([f"checkpoint={checkpoints(name)}", "dtype=fp32"]), references(name))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", tiny.COMBINED)
def test_each_model_file_gives_the_logits_of_transformers(name: str, tmp_path: Path):
    folder = tiny.save(name, tmp_path)
    config = load([f"checkpoint={folder}", "dtype=fp32"])
    assert config.model.name == name
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    assert_same_as_transformers(config, model.eval())


# one of each op and kind of layer
QUICK = ("lfm2", "lfm3", "qwen3_next", "bamba", "granitemoehybrid_stacked", "nemotron_h_latent_stacked", "zamba2_biases",
         "mamba2_biases", "mamba_biases", "falcon_mamba", "jamba_stacked", "falcon_h1_normed", "zaya", "minimax_text_01",
         "kimi_linear", "bailing_moe_v3", "olmo_hybrid", "qwen3_5", "qwen4_exp")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tiny.RECURRENT]
)
def test_layers_with_recurrent_state_give_the_logits_of_transformers(name: str, tmp_path: Path):
    model = tiny.save_changed(name, tmp_path / name)
    config = load([f"checkpoint={tmp_path / name}", "dtype=fp32"])
    assert name.startswith(config.model.name) and any(state.rule.in_slot for state in semantic_graph(config).states())
    assert_same_as_transformers(config, model.eval())

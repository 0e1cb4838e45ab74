"""Mamba and Mamba-2: names that the first files have, and models without any attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.compiler import semantic_graph
from atom.config.load import load


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_the_first_files_name_the_embedding_in_the_singular(name: str, tmp_path: Path):
    """As state-spaces' own, which transformers' load_hook and vLLM's loader rename."""
    model = tiny.save_changed(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key.replace("embeddings", "embedding"): value for key, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model.eval())


def test_a_model_without_attention_keeps_nothing_for_each_token(tmp_path: Path):
    tiny.save_changed("mamba", tmp_path)
    config = load([f"checkpoint={tmp_path}"])
    assert config.model.attentions == [] and config.model.mlps == []
    assert all(state.rule.in_slot for state in semantic_graph(config).states())

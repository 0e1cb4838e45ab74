"""Mamba and Mamba-2: names that the first files have, and models without any attention."""

from __future__ import annotations

from pathlib import Path

import tiny

from atom.compiler import semantic_graph
from atom.config.load import load


def test_a_model_without_attention_keeps_nothing_for_each_token(tmp_path: Path):
    tiny.save_changed("mamba", tmp_path)
    config = load([f"checkpoint={tmp_path}"])
    assert config.model.attentions == [] and config.model.mlps == []
    assert all(state.rule.in_slot for state in semantic_graph(config).states())

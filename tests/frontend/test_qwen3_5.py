"""Qwen3.5 as its files are on the hub: the text model in one with images, and a layer that drafts."""

from __future__ import annotations

from pathlib import Path

import tiny

from atom.config.load import load


def test_a_part_of_the_layers_keeps_its_types(tmp_path: Path):
    tiny.save_changed("qwen3_5", tmp_path)
    model = load([f"checkpoint={tmp_path}", "model.layers=2"]).model
    assert [model.branches_of(layer) for layer in range(2)] == [["delta", "mlp"], ["attention", "mlp"]]
    assert (model.attention.rope.dims, model.attention.gate) == (4, "query")

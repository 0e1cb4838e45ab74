"""Qwen3.5 as its files are on the hub: the text model in one with images, and a layer that drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.config.load import load


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("qwen3_5", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")],
)
def test_the_text_model_is_read_from_a_checkpoint_with_images(name: str, architecture: str, tmp_path: Path):
    """Names as of Qwen/Qwen3.5-35B-A3B, without layer_types, and A_log and dt_bias in bf16."""
    types = ["linear_attention", "linear_attention", "full_attention"]
    model = tiny.save_changed(name, tmp_path, layer_types=types)
    stored = load_file(tmp_path / "model.safetensors")
    for key in stored:
        if key.endswith(("A_log", "dt_bias")):
            stored[key] = stored[key].bfloat16()
            model.get_parameter(key).data.copy_(stored[key])
    renamed = {key.replace("model.", "model.language_model.", 1): value for key, value in stored.items()}
    more = {
        key: torch.zeros(4)
        for key in ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")
    }
    save_file(renamed | more, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "architectures"):
        del text[key]
    text["full_attention_interval"] = 3
    whole = {"architectures": [architecture], "model_type": name, "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load([f"checkpoint={tmp_path}", "dtype=fp32"])
    assert config.model.name == name
    assert_same_as_transformers(config, model.eval())


def test_a_part_of_the_layers_keeps_its_types(tmp_path: Path):
    tiny.save_changed("qwen3_5", tmp_path)
    model = load([f"checkpoint={tmp_path}", "model.layers=2"]).model
    assert [model.branches_of(layer) for layer in range(2)] == [["delta", "mlp"], ["attention", "mlp"]]
    assert (model.attention.rope.dims, model.attention.gate) == (4, "query")

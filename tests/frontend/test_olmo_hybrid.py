"""OLMo-Hybrid with values wider than keys, which transformers 5.24 writes in three equal parts."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.config.load import load


def test_convolutions_of_keys_and_values_may_have_other_sizes(tmp_path: Path):
    model = tiny.save_changed("olmo_hybrid", tmp_path, linear_key_head_dim=10, linear_value_head_dim=7)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in (0, 2):
        whole = model.model.layers[layer].linear_attn.conv1d.weight.detach()
        for name, part in zip("qkv", torch.split(whole, [20, 20, 42]), strict=True):
            stored[f"model.layers.{layer}.linear_attn.{name}_conv1d.weight"] = part.contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model.eval())

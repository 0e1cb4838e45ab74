"""Kimi-Linear as its files are on the hub."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.config.load import load


def test_layers_are_numbered_from_1_in_an_object_of_their_own(tmp_path: Path):
    """As moonshotai/Kimi-Linear-48B-A3B-Instruct: linear_attn_config, and the mlp of a dense layer under `mlp`."""
    model = tiny.save_changed("kimi_linear", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {key.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): value for key, value in stored.items()}
    assert renamed.keys() != stored.keys(), "transformers writes the dense layers' names as those of experts"
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[key]
    linear = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": 10,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    }
    more = {"linear_attn_config": linear, "first_k_dense_replace": 1, "mla_use_nope": True, "moe_layer_freq": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    loaded = load([f"checkpoint={tmp_path}", "dtype=fp32"])
    assert loaded.model.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert_same_as_transformers(loaded, model.eval())

"""LFM2: the forms of config.json that the hub has, and layers that are not listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from semantic import assert_same_as_transformers

from atom.config.load import load
from atom.errors import AtomError


def rewrite(folder: Path, **changes: Any) -> None:
    """Write other values to a config.json; None takes a key out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_without_any_types_all_layers_have_attention(tmp_path: Path):
    model = tiny.save_changed("lfm2", tmp_path, layer_types=["full_attention"] * 3)
    rewrite(tmp_path, layer_types=None)
    config = load([f"checkpoint={tmp_path}", "dtype=fp32"])
    assert config.model.layer_types is None
    assert_same_as_transformers(config, model.eval())


def test_fewer_layers_than_the_checkpoint_has_keep_their_types(tmp_path: Path):
    tiny.save_changed("lfm2", tmp_path)
    model = load([f"checkpoint={tmp_path}", "model.layers=2"]).model
    assert model.layer_types == ["conv", "full_attention"]


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("lfm2", {"layer_types": ["conv"]}, "model.layer_types names only 1 layers, the model has 3"),
        (
            "lfm2",
            {"layer_types": ["conv", "mamba", "conv"]},
            "model.layer_types: layer type mamba is not supported (supported: full_attention, sliding_attention, conv, linear_attention)",
        ),
        ("lfm2", {"layer_types": "conv"}, "model.layer_types=conv is not a list of texts"),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [1, 3]},
            "model.layer_types: there is no layer 3, the model has 3",
        ),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": "all"},
            "model.layer_types: all is not a list of layers, of 3",
        ),
        ("lfm2", {"conv_L_cache": 1}, "model.blocks.conv.short_conv.taps=1 must be a whole number from 2 to 1024"),
        (
            "lfm2_moe",
            {"layer_types": None},
            "{}: config.json has no layer_types; conf/model/lfm2_moe.yaml needs it for model.layer_types",
        ),
    ],
)
def test_layers_that_cannot_be_are_one_line(variant: str, changes: dict[str, Any], message: str, tmp_path: Path):
    tiny.save_changed(variant, tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(AtomError) as error:
        load([f"checkpoint={tmp_path}"])
    assert str(error.value) == message.format(tmp_path)


def test_a_misshapen_convolution_is_one_line(tmp_path: Path):
    tiny.save_changed("lfm2", tmp_path)
    rewrite(tmp_path, conv_L_cache=4)
    with pytest.raises(
        AtomError, match=r"tensor model.layers.0.conv.conv.weight is \[48, 1, 3\], the model expects \[48, 4\]"
    ):
        assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), None)

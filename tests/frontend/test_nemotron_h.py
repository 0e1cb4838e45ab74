"""Nemotron-H: the forms of config.json that the hub has, and layers that are not built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom.config.load import load
from atom.errors import AtomError


def write_older(folder: Path, pattern: str, **more: Any) -> None:
    """As nvidia/Nemotron-H-8B-Base-8K has it: a letter for each layer."""
    config = json.loads((folder / "config.json").read_text())
    del config["layers_block_type"]
    (folder / "config.json").write_text(json.dumps(config | {"hybrid_override_pattern": pattern} | more))


def test_layers_with_nothing_but_an_mlp_keep_no_state(tmp_path: Path):
    tiny.save_changed("nemotron_h", tmp_path)
    with pytest.raises(AtomError) as error:
        load([f"checkpoint={tmp_path}", "parallel.pipeline=4", "device=cpu"])
    message = "parallel.pipeline=4: the model has 3 layers with attention or a state; set parallel.pipeline to as many at most"
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M-*?M", "model.layer_types: ? in M-*?M is no type of layers; letters: M * - E"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_are_one_line(pattern: str, message: str, tmp_path: Path):
    tiny.save_changed("nemotron_h", tmp_path)
    write_older(tmp_path, pattern)
    with pytest.raises(AtomError) as error:
        load([f"checkpoint={tmp_path}"])
    assert str(error.value) == message

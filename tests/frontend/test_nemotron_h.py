"""Nemotron-H: the forms of config.json that the hub has, and layers that are not built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom.compiler import compile_graph
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
    ("name", "key", "stated", "dtype"),
    [
        ("nemotron_h", "mamba_ssm_cache_dtype", "bfloat16", "bf16"),
        ("nemotron_h", "mamba_ssm_cache_dtype", "float32", "fp32"),
        ("nemotron_h", "mamba_ssm_cache_dtype", None, "fp32"),
        ("qwen3_5", "mamba_ssm_dtype", "float16", "fp16"),
    ],
)
def test_states_have_the_dtype_of_the_checkpoint(name: str, key: str, stated: str | None, dtype: str, tmp_path: Path):
    tiny.save_changed(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config | ({key: stated} if stated else {})))
    graph = compile_graph(load([f"checkpoint={tmp_path}", "dtype=bf16", "device=cpu", "level=0"]))
    states = [state for state in graph.states() if len(state.type.shape) == 3 and state.rule.in_slot]
    assert {state.type.dtype for state in states} == {dtype}


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

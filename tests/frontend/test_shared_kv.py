"""Layers that read the KV of an earlier one, and per-layer inputs: what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom.compiler import semantic_graph
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import ops


def config_of(folder: Path, *overrides: str, **fields: Any) -> Any:
    """The configuration of a folder with a config.json only, of six layers whose last two share KV."""
    class_name, changes = tiny.VARIANTS["gemma4_shared"]
    written = {**tiny.config("gemma4_shared").to_dict(), "architectures": ["Gemma4ForCausalLM"], **fields}
    assert class_name == "Gemma4TextConfig" and changes["num_kv_shared_layers"] == 2
    (folder / "config.json").write_text(json.dumps(written))
    return load([f"checkpoint={folder}", "dtype=fp32", "load_dummy=true", *overrides])


def test_layers_that_share_kv_keep_nothing_of_their_own(tmp_path: Path):
    graph = semantic_graph(config_of(tmp_path))
    calls = graph.find(ops.attention)
    assert [call.args[3].name for call in calls] == [f"model.layers.{layer}" for layer in (0, 1, 2, 3, 2, 3)]
    assert graph.layers() == [f"model.layers.{layer}" for layer in range(4)]
    assert calls[4].args[1:4] == calls[2].args[1:4] and calls[5].args[1:4] == calls[3].args[1:4]
    assert not any("layers.4.self_attn.k" in name for name in graph.stored())


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"num_kv_shared_layers": 5}, [], "model.kv_shared_from=1: no layer of type full_attention before it keeps KV for layer 1; set more"),
        ({"num_kv_shared_layers": 6}, [], "model.kv_shared_from=0 must be a whole number from 1"),
        ({"use_bidirectional_attention": "all"}, [], 'use_bidirectional_attention=all in its config.json is not supported'),
        ({}, ["parallel.pipeline=5"], "parallel.pipeline=5.*: the model has 4 layers with attention or a state"),
        ({}, ["+model.attention.adapter_rank=2", "model.attention.k_is_v=true"], "model.attention.k_is_v=true: with qkv_chunks or adapter_rank"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(fields: dict[str, Any], overrides: list[str], message: str, tmp_path: Path):
    with pytest.raises(AtomError, match=message):
        config_of(tmp_path, *overrides, **fields)

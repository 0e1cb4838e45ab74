"""Layers that attend to what an indexer chooses: that the choice is seen, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from semantic import assert_same_as_transformers
from torch import Tensor
from transformers import HYV4VLConfig, HYV4VLForConditionalGeneration

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import interpret

FAMILIES = ["deepseek_v32", "glm_moe_dsa", "hy_v4"]
TOP_K = tiny.INDEX["index_topk"]


@torch.inference_mode()
def hidden_of(folder: Path, *overrides: str) -> Tensor:
    config = load([f"checkpoint={folder}", "dtype=fp32", *overrides])
    graph = semantic_graph(config)
    tensors = weights.load(graph.recipes(), open_for(config, SilentProgress()), SilentProgress())
    inputs = {"tokens": torch.tensor(tiny.prompt(40)), "positions": torch.arange(40)}
    hidden: Tensor = interpret(graph, "body", inputs, tensors.__getitem__)
    return hidden


@pytest.mark.parametrize("name", FAMILIES)
def test_the_choice_is_seen_from_where_a_query_may_not_choose_all(name: str, checkpoints: Any):
    chosen, dense = (hidden_of(checkpoints(name), *way) for way in ((), ("model.attention.index.top_k=40",)))
    difference = (chosen - dense).abs().amax(-1) / dense.abs().amax()
    assert (difference[:TOP_K] < 1e-5).all()
    assert (difference[TOP_K:] > 1e-3).sum() > 20


@pytest.mark.slow
@pytest.mark.parametrize("original", [True, False])
def test_the_text_of_hy4_vl_turns_pairs(original: bool, tmp_path: Path):
    """Which transformers 5.24 has right there, and halves in Hy4 without images."""
    fields = {
        **tiny.SIZES,
        **tiny.VARIANTS["hy_v4"][1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    del fields["rope_interleave"]
    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "out_hidden_size": 48,
        "max_image_size": 64,
    }
    config = HYV4VLConfig(text_config=fields, vision_config=tower, image_token_id=1)
    model = HYV4VLForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager")
    for tensor in model.parameters():
        tensor.data += torch.randn_like(tensor) * 0.2
    model.save_pretrained(tmp_path, save_original_format=original)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model.eval())


@pytest.mark.parametrize(
    ("fields", "full"),
    [({}, [0, 1, 5]), ({"index_topk_freq": 2}, [0, 1, 3, 5]), ({"index_topk_pattern": "FSFSSF"}, [0, 2, 5])],
)
def test_layers_of_hy4_share_a_choice_by_what_its_config_says(fields: dict[str, Any], full: list[int], tmp_path: Path):
    """As vllm/models/hy_v4/nvidia/attention.py reads these fields; without them as transformers does."""
    config = tiny.config("hy_v4").to_dict() | {"num_hidden_layers": 6, "architectures": ["HYV4ForCausalLM"]}
    unlisted = {key: value for key, value in config.items() if not key.endswith("_types")}
    (tmp_path / "config.json").write_text(json.dumps(unlisted | fields))
    layers = load([f"checkpoint={tmp_path}"]).model.attention.index.layers
    assert layers == ["full" if layer in full else "shared" for layer in range(6)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["full", "shared"]}, "model.attention.index.layers names only 2 layers, the model has 4"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "model.attention.index.layers: half is not full or shared"),
        ({"indexer_types": ["shared"] * 4}, "index.layers: the first layer shares what no layer before it chose"),
        ({"indexer_types": None, "index_topk_freq": 0}, "index.layers: 0 is not a number of layers from 1 to 512"),
        ({"indexer_types": None, "index_topk_pattern": "FXSF"}, "index.layers: X in FXSF is no type of layers; letters: F S"),
        ({"index_head_dim": 6}, "model.attention.index.dim=6 is less than the 8 dims that turn"),
        ({"index_topk": 0}, "model.attention.index.top_k"),
        ({"q_lora_rank": None}, "model.attention.index: it reads the latent of queries, which have none"),
    ],
)  # fmt: skip
def test_an_indexer_that_cannot_be_is_refused_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path):
    config = tiny.config("glm_moe_dsa").to_dict() | changes | {"architectures": ["GlmMoeDsaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AtomError, match=message) as error:
        semantic_graph(load([f"checkpoint={tmp_path}", "device=cpu"]))
    assert "\n" not in str(error.value)

"""Tiny configs of a family: they keep its kinds of layers and its switches."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from atom.jobs.port.stored import group, pattern_of
from atom.jobs.port.tiny import choose_layers, shrink

KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def test_layers_of_each_kind_are_kept_in_order():
    assert choose_layers({"layer_types": KINDS * 4, "other": [1, 2]}, 16) == [0, 1, 2, 3]
    assert choose_layers({"layer_types": ["a"] * 6 + ["b"] * 2}, 8) == [0, 1, 2, 6]
    assert choose_layers({"a": [0, 0, 1, 1], "b": [0, 1, 0, 1]}, 4) == [0, 1, 2, 3], "kinds by all lists"
    assert choose_layers({}, 2) == [0, 1]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (transformers.LlamaConfig(), {"num_key_value_heads": 4, "hidden_act": "silu"}),
        (transformers.Qwen3Config(num_key_value_heads=8), {"num_key_value_heads": 2, "attention_bias": False}),
        (
            transformers.Gemma2Config(),
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 11},
        ),
        (transformers.GPT2Config(), {"n_embd": 64, "n_layer": 4, "activation_function": "gelu_new"}),
    ],
)
def test_a_shrunken_config_keeps_what_is_no_size(config: Any, kept: dict[str, Any]):
    made = shrink(config)
    assert type(made) is type(config) and made.vocab_size == 101 and made.eos_token_id is None
    assert {key: getattr(made, key) for key in kept} == kept


def test_numbers_in_names_become_places():
    assert pattern_of("model.layers.12.mlp.experts.3.up_proj.weight") == (
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", 12,
    )  # fmt: skip
    assert pattern_of("lm_head.weight") == ("lm_head.weight", None)
    assert group({"h.0.a": None, "h.2.a": None})["h.{layer}.a"].layers == (0, 2)

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, StableLmConfig

from atom.checkpoint.base import normalize_rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16.0, "truncate": False}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}, "rope_theta": 3.0},
    ],
)
def test_old_and_new_forms_become_what_transformers_makes_of_them(config: dict[str, Any]) -> None:
    theirs = {key: value for key, value in LlamaConfig.from_dict(config).rope_parameters.items() if key != "type"}
    assert normalize_rope(config)["rope_parameters"] == theirs


def test_a_partial_rotary_factor_at_the_top_moves_in() -> None:
    config = {"rope_theta": 10000, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096}
    assert normalize_rope(config)["rope_parameters"] == StableLmConfig.from_dict(config).rope_parameters
    assert normalize_rope(config).keys() == {"max_position_embeddings", "rope_parameters"}


def test_the_kind_is_there_even_where_a_config_says_nothing_of_rope() -> None:
    assert normalize_rope({"hidden_size": 8}) == {"hidden_size": 8, "rope_parameters": {"rope_type": "default"}}


def test_parameters_by_layer_type_are_left_as_they_are() -> None:
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"rope_parameters": nested, "rope_theta": 3}
    assert normalize_rope(config) == config


def test_the_config_that_came_in_is_not_changed() -> None:
    config = {"rope_theta": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    normalize_rope(config)
    assert config == {"rope_theta": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}

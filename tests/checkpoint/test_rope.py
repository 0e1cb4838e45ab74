from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    StableLmConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from atom.checkpoint.base import normalize_rope
from atom.errors import CheckpointError, UnsupportedError

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


def test_the_kind_is_there_even_where_a_config_has_nothing_of_rope() -> None:
    assert normalize_rope({"hidden_size": 8}) == {"hidden_size": 8, "rope_parameters": {"rope_type": "default"}}


DEFAULT = {"rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
FACTORS = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
CONTEXT = {"max_position_embeddings": 8192}


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    """What transformers has by layer type, full_attention at the top."""
    return nested["full_attention"] | {key: value for key, value in nested.items() if key != "full_attention"}


@pytest.mark.parametrize("kind", [Gemma3TextConfig, Olmo3Config, ModernBertConfig])
@pytest.mark.parametrize(
    "parameters",
    [
        {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": LOCAL},
        {"sliding_attention": LOCAL, "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        {"full_attention": {"type": "yarn", "factor": 2.0, "rope_theta": 1e6}, "sliding_attention": LOCAL},
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
        },
    ],
)
def test_full_attention_is_the_top_and_other_layer_types_are_next_to_it(
    kind: type[PreTrainedConfig], parameters: dict[str, Any]
) -> None:
    config = {"rope_parameters": parameters, **CONTEXT}
    ours = normalize_rope(config)["rope_parameters"]
    theirs = kind.from_dict({**config, "rope_parameters": {key: {**value} for key, value in parameters.items()}})
    without_type = {
        key: {name: entry for name, entry in value.items() if name != "type"}
        for key, value in theirs.rope_parameters.items()
    }
    assert ours == flat(without_type)
    assert list(ours)[-1] == "sliding_attention"


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT},
        },
        {
            "rope_theta": 3.0,
            "rope_local_base_freq": 2.0,
            "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": LOCAL},
        },
        {
            "rope_parameters": {"full_attention": {**DEFAULT, "rope_theta": 1e6}, "sliding_attention": LOCAL},
            "rope_scaling": LINEAR,
        },
    ],
)
def test_the_theta_of_sliding_layers_may_stand_at_the_top_of_the_config(config: dict[str, Any]) -> None:
    made = normalize_rope({**config, **CONTEXT})
    copied = {key: {**value} if isinstance(value, dict) else value for key, value in config.items()}
    if "rope_parameters" in config:  # theirs changes what it is given
        copied["rope_parameters"] = {key: {**value} for key, value in config["rope_parameters"].items()}
    assert made["rope_parameters"] == flat(Gemma3TextConfig.from_dict(copied).rope_parameters)
    assert made.keys() == {"max_position_embeddings", "rope_parameters"}


def test_the_theta_of_sliding_layers_is_that_of_default_rope() -> None:
    config = {
        "rope_theta": 1000000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_local_base_freq": 10000,
    }
    assert normalize_rope(config)["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 1000000,
        "factor": 8.0,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }


def test_a_layer_type_that_is_null_has_no_rope() -> None:
    nested = {"full_attention": LINEAR, "sliding_attention": None, "chunked": None}
    config = {"rope_parameters": nested, "rope_theta": 7.0, "layer_types": ["full_attention", "chunked"]}
    made = normalize_rope(config)["rope_parameters"]
    assert made == {**LINEAR, "rope_theta": 7.0, "sliding_attention": None, "chunked": None}
    nested = {"full_attention": None, "sliding_attention": LOCAL}
    made = normalize_rope({"rope_parameters": nested, "rope_theta": 7.0})["rope_parameters"]
    assert made == {"rope_type": "none", "sliding_attention": LOCAL}


def test_all_layer_types_may_have_other_names() -> None:
    config = {
        "rope_parameters": {"hybrid": LINEAR, "hybrid_sliding": LOCAL},
        "layer_types": ["hybrid", "hybrid_sliding"],
    }
    expected = {"rope_type": "default", "hybrid": LINEAR, "hybrid_sliding": LOCAL}
    assert normalize_rope(config)["rope_parameters"] == expected
    config["rope_parameters"]["rope_type"] = "default"  # as a file of the hub has it
    assert normalize_rope(config | {"layer_types": None})["rope_parameters"] == expected


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_layer_types_without_full_attention_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"has first, compress and no full_attention$"):
        normalize_rope({name: {"first": LOCAL, "compress": LINEAR}, "rope_theta": 1.0})


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "su", **FACTORS}, "rope_theta": 1e4, "original_max_position_embeddings": 4096},
        {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 2048, "rope_theta": 1e4},
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 7,
                **FACTORS,
            },
            "original_max_position_embeddings": 4096,
        },
    ],
)
def test_longrope_keeps_its_factors_and_has_an_old_name(config: dict[str, Any]) -> None:
    config = {
        **config,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
    }  # head_dim / 2 = 4
    ours = normalize_rope(config)
    copied = {key: {**value} if isinstance(value, dict) else value for key, value in config.items()}
    for key in ("rope_scaling", "rope_parameters"):  # theirs takes the context of a longrope, not of its old name
        if copied.get(key, {}).get("type") == "su":
            copied[key]["type"] = "longrope"
    theirs = {key: value for key, value in Phi3Config.from_dict(copied).rope_parameters.items() if key != "type"}
    assert {"partial_rotary_factor": 1.0, **ours["rope_parameters"]} == theirs
    assert ours["rope_parameters"]["rope_type"] == "longrope"
    assert ours["rope_parameters"]["long_factor"] == [1.0, 2.0, 4.0, 8.0]


def test_a_dynamic_rope_is_the_default_up_to_the_context_of_the_model() -> None:
    config = {
        "rope_theta": 5e4,
        "rope_scaling": {"type": "dynamic", "factor": 6.0},
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "num_attention_heads": 4,
    }
    ours = normalize_rope(config)["rope_parameters"]
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(config))
    theirs(torch.zeros(1), torch.arange(64)[None])
    assert ours["rope_type"] == "default"
    freqs = 1 / ours["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(theirs.inv_freq, freqs)


@pytest.mark.parametrize("alpha", ["many", -5.5])
def test_an_alpha_that_stretches_nothing_is_an_error(alpha: Any) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(CheckpointError, match="alpha"):
        normalize_rope({**sizes, "rope_scaling": {"type": "dynamic", "alpha": alpha}})


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 8},
        {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "su", **FACTORS}, "original_max_position_embeddings": 4096, **CONTEXT},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
        {
            "rope_theta": 1e6,
            "rope_parameters": {"full_attention": {"type": "yarn"}, "sliding_attention": {"type": "yarn"}},
            "original_max_position_embeddings": 4,
            **CONTEXT,
        },
        {"rope_theta": 1e6, "rope_parameters": {"full_attention": None, "sliding_attention": {}}},
        {"rope_theta": 1e6, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 2.0}}, "rope_theta": 1e6},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL, "rope_theta": None}},
    ],
)
def test_normalizing_twice_changes_nothing(config: dict[str, Any]) -> None:
    once = normalize_rope(config)
    assert normalize_rope(once) == once
    assert "full_attention" not in once["rope_parameters"]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_rope_that_is_no_object_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"rope_parameters in config\.json is 'yarn', not an object"):
        normalize_rope({name: "yarn"})


def test_the_config_that_came_in_is_not_changed() -> None:
    config = {"rope_theta": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    normalize_rope(config)
    assert config == {"rope_theta": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}


def test_layer_types_that_came_in_are_not_changed() -> None:
    config = {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_local_base_freq": 1.0}
    normalize_rope(config)
    assert config == {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_local_base_freq": 1.0}


def test_layer_types_that_are_no_list_are_left_to_whoever_checks_them():
    config = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "layer_types": 0.5}
    assert normalize_rope(config)["layer_types"] == 0.5

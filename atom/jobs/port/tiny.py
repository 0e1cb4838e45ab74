"""Make a tiny random model of a family that transformers knows.

    save_tiny(Path("/models/new/config.json"), Path("/tmp/tiny"))       # a checkpoint of some 100,000 numbers

The config keeps its kinds of layers and its switches; sizes become small and unequal, so that a dim taken for another
shows. Weights are random, those of norms and biases too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from atom.errors import ConfigError, one_line

# What ends the name of a field -> its size in a tiny model; the first that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(moe|expert\w*|ffn_expert)_(intermediate|hidden|ffn_hidden)_(size|dim)", 24),
    (r"shared_\w*intermediate_size", 20),
    (r"vocab_size\w*", 101),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq\w*|seq_length|max_sequence_length", 256),
    (r"(linear|kda|gdn)_num_key_heads", 2),
    (r"(linear|kda|gdn)_num_(value_)?heads", 4),
    (r"(linear|kda|gdn)_(key_)?head_dim", 10),
    (r"(linear|kda|gdn)_value_head_dim", 6),
    (r"num_(routed_|local_)?experts|n_routed_experts|moe_num_experts|num_experts_pool", 8),
    (r"num_experts_per_tok\w*|moe_top_?k|moe_k|top_k_experts|num_experts_per_token", 2),
    (r"n_group|num_expert_group\w*", 2),
    (r"topk_group", 1),
    (r"q_lora_rank", 20),
    (r"kv_lora_rank", 18),
    (r"qk_rope_head_dim", 8),
    (r"qk_nope_head_dim", 12),
    (r"v_head_dim", 10),
    (r"(global_)?head_dim|attention_head_dim|kv_channels", 24),
    (r"(hidden|ffn)_size_per_layer_input", 12),
    (r"vocab_size_per_layer_input", 101),
    (r"num_attention_heads|n_heads?|num_heads|decoder_attention_heads", 4),
    (
        r"num_key_value_heads|num_kv_heads|n_kv_heads?|num_global_key_value_heads|multi_query_group_num|num_query_groups",
        2,
    ),
    (r"hidden_size|d_model|dim|n_embd|word_embed_proj_dim|model_dim", 64),
    (r"intermediate_size|ffn_dim|n_inner|ffn_hidden_size|d_ff|block_ff_dim|feed_forward_size|inner_hidden_size", 80),
    (r"sliding_window(_size)?|attention_chunk_size|window_size", 11),
    (r"(mamba_|ssm_)?(d_state|state_size)", 10),
    (r"(mamba_|ssm_)?chunk_size", 16),
    (r"rotary_dim", 8),
)
MAX_LAYERS = 4  # more if each of so many kinds of layers is to be there
MAX_NUMBERS = 5_000_000  # of a tiny model; more means that a size was not found
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TOKENS = re.compile(r"(bos|eos|pad|decoder_start|sep|cls|mask)_token_id")


def save_tiny(config_file: Path, folder: Path, seed: int = 0) -> Any:
    """Save a tiny random model of the family of a config.json to a folder; the model.

    ConfigError if transformers does not have the model, or cannot make a small one.
    """
    model = make_model(shrink_file(config_file), seed)
    model.save_pretrained(folder, save_original_format=True)
    return model


def make_model(config: Any, seed: int = 0) -> Any:
    """A random model of a tiny config, which runs. ConfigError if transformers makes none, or a large one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):  # of which nothing is allocated
            count = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        if count > MAX_NUMBERS:
            raise ValueError(f"it would have {count} numbers, as a size of its config was not found")
        torch.manual_seed(seed)
        model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]))
    except Exception as error:
        raise ConfigError(f"transformers makes no tiny {config.model_type} that runs: {one_line(error)}") from None
    return model


def shrink_file(config_file: Path) -> Any:
    """transformers' config of a config.json, of its text if it has others, made tiny."""
    from transformers import CONFIG_MAPPING

    raw = json.loads(config_file.read_text("utf-8"))
    raw = {key: value for key, value in raw.items() if key not in ("quantization_config", "auto_map")}
    kind = raw.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"job.check=true: transformers has no model_type {json.dumps(kind)}; compare the checkpoint itself"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict({"model_type": kind, **raw})
        return shrink(config.get_text_config(decoder=True))
    except Exception as error:
        raise ConfigError(f"job.check=true: {config_file} makes no config of {kind}: {one_line(error)}") from None


def shrink(config: Any) -> Any:
    """A config of the same class with small, unequal sizes."""
    values = config.to_dict()
    depth = next(
        (name for name in (*DEPTH, config.attribute_map.get(DEPTH[0], "")) if type(values.get(name)) is int), None
    )
    changed: dict[str, Any] = {
        key: small for key, value in values.items() if (small := small_value(key, value, config)) is not None
    }
    if depth is not None:
        kept = choose_layers(values, values[depth])
        changed[depth] = len(kept)
        changed |= {key: [value[at] for at in kept] for key, value in lists_by_layer(values, values[depth])}
    changed |= {key: None if may_be_null(config, key) else 0 for key in values if TOKENS.fullmatch(key)}
    keep_equal(values, changed)
    dropped = ("model_type", "transformers_version", "architectures", "dtype")
    return type(config)(**{key: value for key, value in (values | changed).items() if key not in dropped})


def may_be_null(config: Any, key: str) -> bool:
    """Whether a field of a config's class can be None; transformers refuses it otherwise."""
    field = getattr(type(config), "__dataclass_fields__", {}).get(key)
    return field is None or field.type is not int


def small_value(key: str, value: Any, config: Any) -> int | None:
    """The small size of a field; None if it is not one, or is small already."""
    if type(value) is not int or value < 2:
        return None
    names = [key, *(name for name, own in config.attribute_map.items() if own == key)]
    size = next((size for pattern, size in SIZES for name in names if re.fullmatch(pattern, name)), None)
    return None if size is None or size >= value else size


def are_names_of_one(key: str, other: str) -> bool:
    """Whether two fields of configs are names of one size, or of the number of layers."""
    both = [[bool(re.fullmatch(pattern, name)) for pattern, _ in SIZES] for name in (key, other)]
    return any(map(all, zip(*both, strict=True))) or {key, other} <= set(DEPTH)


def keep_equal(values: Mapping[str, Any], changed: dict[str, Any]) -> None:
    """Keep what depends on other sizes: as many heads of keys as of queries, a head's dims, sections of a rope."""
    new = {**values, **changed}
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if kv_heads is not None and kv_heads == heads:
        changed["num_key_value_heads"] = new["num_attention_heads"]
    if "hidden_size" in values and heads and values.get("head_dim") == values["hidden_size"] // heads:
        changed["head_dim"] = new["hidden_size"] // new["num_attention_heads"]
    rope = values.get("rope_parameters") or {}
    if heads and rope.get("mrope_section"):
        dims = {**new, **changed}.get("head_dim") or new["hidden_size"] // new["num_attention_heads"]
        total = int(dims * rope.get("partial_rotary_factor", 1.0)) // 2
        changed["rope_parameters"] = {**rope, "mrope_section": [total - 2 * (total // 3), total // 3, total // 3]}


def lists_by_layer(values: Mapping[str, Any], num_layers: int) -> Iterable[tuple[str, list[Any]]]:
    """The fields that have a value for each layer."""
    return [(key, value) for key, value in values.items() if isinstance(value, list) and len(value) == num_layers > 1]


def choose_layers(values: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers of a tiny model: the first of each kind, by all lists of layers, and some more."""
    listed = [value for _, value in lists_by_layer(values, num_layers)]
    first: dict[str, int] = {}
    for layer in range(num_layers):
        first.setdefault(json.dumps([each[layer] for each in listed], default=str), layer)
    kept = sorted(first.values())[: 2 * MAX_LAYERS]
    others = [layer for layer in range(num_layers) if layer not in kept]
    return sorted(kept + others[: max(min(MAX_LAYERS, num_layers) - len(kept), 0)])


def randomize(model: Any) -> Any:
    """Add noise to all weights, and to buffers by which experts are chosen: norms and biases must matter; the model."""
    choosing = [buffer for name, buffer in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))]
    for tensor in (*model.parameters(), *choosing):
        if tensor.is_floating_point():
            tensor.data += torch.randn_like(tensor) * 0.2
    return model.eval()

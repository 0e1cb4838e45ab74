"""Make a config.json of a GGUF file's metadata.

    config = make_config(path, metadata, tensors, divisors)
    config["hidden_size"], config["rope_parameters"]

Keys that no family reads are passed over; a rope that atom does not have is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atom.checkpoint.base import StoredTensor
from atom.errors import CheckpointError, UnsupportedError
from atom.sampling_params import GGUF

SIZES = {  # integers below `{architecture}.`: their names in config.json, of which a family reads one
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings model_max_length",
    "vocab_size": "vocab_size",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_count": "num_experts num_local_experts n_routed_experts",
    "expert_used_count": "num_experts_per_tok num_experts_per_token top_k_experts",
    "expert_shared_count": "n_shared_experts num_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim conv_kernel mamba_d_conv",
    "ssm.state_size": "linear_key_head_dim ssm_state_size state_size mamba_d_state",
    "ssm.group_count": "linear_num_key_heads n_groups mamba_n_groups",
    "ssm.inner_size": "mamba_d_ssm",
    "kda.head_dim": "linear_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads mamba_num_heads mamba_n_heads num_heads time_step_rank mamba_dt_rank",
}
FLOATS = {
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_weights_scale": "routed_scaling_factor",
}
FLAGS = {"expert_weights_norm": "norm_topk_prob", "ssm.dt_b_c_rms": "mamba_dt_b_c_norm"}
GATING = {1: "softmax", 2: "sigmoid"}  # of expert_gating_func
SCALING = {  # keys below `{architecture}.rope.scaling.`: their names in rope_parameters
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NEUTRAL_AT_1 = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")  # of the same; not supported otherwise
NEVER = 1e20  # a divisor of a rotary frequency from which on no position turns; files have 1e30
FACTORS = {  # names in rope_parameters: tensors with a divisor for each rotary frequency
    "factors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}


def make_generation_config(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Make the generation_config.json of the same model: the tokens that end an answer, and its sampling values."""
    config: dict[str, Any] = {}
    ends = [key for key in (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")) if key in metadata]
    if ends:
        config["eos_token_id"] = sorted({whole_number(path, key, metadata[key]) for key in ends})
    keys = {field: f"general.sampling.{name}" for name, field in GGUF.items()}
    return config | {field: number(path, key, metadata[key]) for field, key in keys.items() if key in metadata}


def make_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], divisors: dict[str, list[float]]
) -> dict[str, Any]:
    """Make the config.json of the same model, as far as the metadata goes; never `architectures`.

    divisors: the rotary tables, by their names in rope_parameters
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str | None):
        raise CheckpointError(f"{path}: general.architecture is {str(architecture)[:100]!r}, not a name")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {"gguf_architecture": architecture}
    own, by_layer = sizes_by_layer(path, own)
    for key in own.keys() & SIZES.keys():
        config |= dict.fromkeys(SIZES[key].split(), whole_number(path, key, own[key]))
    for key in (key for key in FLOATS if key in own):
        config |= dict.fromkeys(FLOATS[key].split(), number(path, key, own[key]))
    config |= {name: bool(own[key]) for key, name in FLAGS.items() if key in own}
    for name in ("bos_token_id", "eos_token_id"):
        if (key := f"tokenizer.ggml.{name}") in metadata:
            config[name] = whole_number(path, key, metadata[key])
    config |= by_layer
    config["sliding_window"] = config.get("sliding_window") or None
    config |= layer_pattern(path, own.get("attention.sliding_window_pattern"))
    if config.get("num_attention_heads") == 0:  # of Mamba
        del config["num_attention_heads"]
    if "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if "model.embed_tokens.weight" in tensors:
        config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    if "model.embed_tokens_per_layer.weight" in tensors:
        config["vocab_size_per_layer_input"] = tensors["model.embed_tokens_per_layer.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config |= {"num_hidden_layers": count} if (count := num_layers(path, metadata)) else {}
    biases = [any(name.endswith(f"self_attn.{part}_proj.bias") for name in tensors) for part in "qkvo"]
    config["attention_bias"] = any(biases)
    if any(biases) and not biases[-1]:  # llama.cpp applies those that are there
        config["attention_out_bias"] = False
    keys, values = ({name for name in tensors if name.endswith(f"self_attn.{part}_proj.weight")} for part in "kv")
    if not {name.replace("k_proj", "v_proj") for name in keys} <= values:
        config["attention_k_eq_v"] = True
    config["mlp_bias"] = any(name.endswith("mlp.down_proj.bias") for name in tensors)
    config |= describe_recurrent(config, tensors)
    is_latent = "kv_lora_rank" in config
    config |= describe_latent(path, own) if is_latent else {}
    config |= describe_routing(path, own, tensors) if "num_experts" in config else {}
    head_dim = None if is_latent else config.get("global_head_dim") or head_dim_of(config)
    config["rope_parameters"] = make_rope(path, own, head_dim, divisors)
    return config


def sizes_by_layer(path: Path, own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata with one number for each size, and what config.json says of layers whose sizes differ (Gemma 4).

    Layers without the window may have heads of another size, and another number of keys' heads; layers that share KV
    may have an mlp of twice the width.
    """
    own, config = dict(own), dict[str, Any]()
    pattern, heads, widths = (
        own.get(key) for key in ("attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length")
    )
    if "attention.key_length_swa" in own:
        config["global_head_dim"] = whole_number(path, "attention.key_length", own.get("attention.key_length"))
        own["attention.key_length"] = own["attention.key_length_swa"]
        if isinstance(pattern, np.ndarray) and isinstance(heads, np.ndarray) and heads.shape == pattern.shape:
            has_window = pattern.astype(bool)
            own["attention.head_count_kv"] = heads[has_window]
            config["num_global_key_value_heads"] = whole_number(path, "attention.head_count_kv", heads[~has_window])
    num_shared = own.get("attention.shared_kv_layers")
    if isinstance(num_shared, int) and isinstance(widths, np.ndarray) and 0 < num_shared < len(widths):
        first, last = widths[:-num_shared], widths[-num_shared:]
        if (last == 2 * first[0]).all():
            own["feed_forward_length"], config["use_double_wide_mlp"] = first, True
    return own, config


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    return config.get("head_dim") or (hidden // heads if heads and hidden else None)


def layer_pattern(path: Path, pattern: Any) -> dict[str, Any]:
    """Which layers have the window: one flag a layer, or a number, of which each such layer has none."""
    if pattern is None:
        return {}
    if isinstance(pattern, np.ndarray):
        return {"layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in pattern]}
    return {"sliding_window_pattern": whole_number(path, "attention.sliding_window_pattern", pattern)}


def num_layers(path: Path, metadata: Mapping[str, Any]) -> int | None:
    """The number of layers of the body; None if the file does not say it."""
    prefix = f"{metadata.get('general.architecture')}."
    keys = [f"{prefix}{key}" for key in ("block_count", "nextn_predict_layers") if prefix + key in metadata]
    counts = [whole_number(path, key.removeprefix(prefix), metadata[key]) for key in keys]
    return counts[0] - sum(counts[1:]) if f"{prefix}block_count" in metadata else None


def describe_recurrent(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """What the tensors say of layers with recurrent state: their types, the dims of a head, biases; {} without any."""
    parts: dict[int, set[str]] = {}
    for name in tensors:
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.(\w+)\..*", name):
            is_router = match[2] == "mlp" and match[3] == "gate"
            parts.setdefault(int(match[1]), set()).add("moe" if is_router else match[2])
    if not any(each & {"conv", "mixer"} for each in parts.values()):
        return {}
    described: dict[str, Any] = {
        "layer_types": [layer_type(parts.get(layer, set())) for layer in range(config.get("num_hidden_layers", 0))]
    }
    if "first_k_dense_replace" not in config and all(each & {"mlp", "moe"} for each in parts.values()):
        described["mlp_layer_types"] = ["sparse" if "moe" in parts[layer] else "dense" for layer in sorted(parts)]
    described |= describe_states(config, tensors)
    conv_bias = any(name.endswith("mixer.conv1d.bias") for name in tensors)
    bias = any(name.endswith("mixer.in_proj.bias") for name in tensors)
    described |= {"use_conv_bias": conv_bias, "mamba_conv_bias": conv_bias, "use_bias": bias, "mamba_proj_bias": bias}
    described["conv_bias"] = any(name.endswith("conv.conv.bias") for name in tensors)
    return described


def describe_states(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Sizes of recurrent state that the metadata have under no name of their own, and whether it is normed."""
    described: dict[str, Any] = {}
    inner, heads, hidden = (config.get(name) for name in ("mamba_d_ssm", "mamba_n_heads", "hidden_size"))
    has_attention = "num_attention_heads" in config
    if inner and heads:
        names = ["linear_value_head_dim", "mamba_head_dim", "mamba_d_head", *([] if has_attention else ["head_dim"])]
        described |= dict.fromkeys(names, inner // heads)
    if inner and hidden and inner % hidden == 0:
        described["mamba_expand"] = inner // hidden
    if not has_attention:  # the hub's configs of Mamba call it so
        described["intermediate_size"] = inner
    if betas := [tensor for name, tensor in tensors.items() if name.endswith("mixer.b_proj.weight")]:
        described["linear_num_heads"] = betas[0].shape[0]
    described["mamba_rms_norm"] = any(name.endswith("mixer.norm.weight") for name in tensors)
    described["mamba_norm_before_gate"] = False  # as llama.cpp computes it
    return described


def layer_type(parts: Collection[str]) -> str:
    """The type of a layer by the parts that the file has of it."""
    if "conv" in parts or "mixer" in parts:
        return "linear_attention"
    if "self_attn" in parts:
        return "full_attention"
    return "moe" if "moe" in parts else "mlp"


def describe_latent(path: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """The dims of a head in latent attention; files from before `…_mla` have them in the keys of other attention."""
    keys = ["attention.key_length", "attention.value_length", "rope.dimension_count"]
    keys[:2] = [f"{key}_mla" if f"{key}_mla" in own else key for key in keys[:2]]
    if missing := [key for key in keys if key not in own]:
        raise CheckpointError(f"{path} has no {missing[0]}, which latent attention needs; convert it again")
    key_dim, value_dim, rotated = (whole_number(path, key, own[key]) for key in keys)
    return {"qk_rope_head_dim": rotated, "qk_nope_head_dim": key_dim - rotated, "v_head_dim": value_dim}


def describe_routing(path: Path, own: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """How tokens choose experts, as the configs of DeepSeek say it."""
    has_correction = any(name.endswith("e_score_correction_bias") for name in tensors)
    described: dict[str, Any] = {"topk_method": "noaux_tc" if has_correction else "group_limited_greedy"}
    described["enable_moe_block"] = True
    described["use_expert_bias"] = has_correction
    if "expert_gating_func" in own:
        gating = whole_number(path, "expert_gating_func", own["expert_gating_func"])
        if gating not in GATING:
            raise UnsupportedError(f"{path}: expert_gating_func {gating} is not supported (supported: 1, 2)")
        described["scoring_func"] = described["moe_router_activation_func"] = GATING[gating]
    return described


def make_rope(
    path: Path, own: Mapping[str, Any], head_dim: int | None, divisors: dict[str, list[float]]
) -> dict[str, Any]:
    """Make `rope_parameters` from the keys below `{architecture}.`; a table of divisors is rope_type "factors".

    head_dim: of which a part may be rotated; None: the metadata count only the rotated dims
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope.freq_base" in own:
        rope["rope_theta"] = number(path, "rope.freq_base", own["rope.freq_base"])
    if head_dim and "rope.dimension_count" in own:
        rotated = whole_number(path, "rope.dimension_count", own["rope.dimension_count"])
        rope |= {"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}
    if isinstance(sections := own.get("rope.dimension_sections"), np.ndarray):  # padded to four
        rope["mrope_section"] = np.trim_zeros(sections, "b").tolist()
    if "rope.freq_base_swa" in own:
        theta = number(path, "rope.freq_base_swa", own["rope.freq_base_swa"])
        rope["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}

    scaling = {key.removeprefix("rope.scaling."): own[key] for key in own if key.startswith("rope.scaling.")}
    kind = str(scaling.pop("type", "linear"))  # llama.cpp's default
    scaling.pop("finetuned", None)
    scaling.setdefault("factor", own.get("rope.scale_linear", 1.0))
    scaling = {key: number(path, f"rope.scaling.{key}", value) for key, value in scaling.items()}
    renamed = {name: scaling[key] for key, name in SCALING.items() if key in scaling}
    if "long_factor" in divisors:
        named = {"attention_factor": scaling["attn_factor"]} if "attn_factor" in scaling else {}
        original = {key: value for key, value in renamed.items() if key != "factor"}
        return rope | {"rope_type": "longrope"} | divisors | named | original
    if kind == "none" or (kind == "linear" and scaling["factor"] in (0, 1)):
        if (part := rotated_part(divisors.get("factors", []))) is not None:
            return rope | {"rope_type": "proportional", "partial_rotary_factor": part}
        return rope | {"rope_type": "factors"} | divisors if divisors else rope
    if kind == "yarn" and head_dim is None and "yarn_log_multiplier" in scaling:
        weight = scaling.pop("yarn_log_multiplier") / 0.1  # which llama.cpp multiplies with ahead of time
        renamed |= {"mscale": weight, "mscale_all_dim": weight}
    odd = [key for key, value in scaling.items() if key not in SCALING and not (key in NEUTRAL_AT_1 and value == 1)]
    odd += [FACTORS[name] for name in divisors]
    if kind not in ("linear", "yarn") or odd:
        raise UnsupportedError(f"{path}: rope.scaling.type {' with '.join([repr(kind), *odd])} is not supported")
    return rope | {"rope_type": kind} | renamed


def rotated_part(divisors: Sequence[float]) -> float | None:
    """The part of a head that is rotated if a table divides the rest's frequencies to nothing; None of other tables."""
    count = sum(divisor == 1 for divisor in divisors)
    is_such = 0 < count < len(divisors) and min(divisors[count:]) >= NEVER
    return count / len(divisors) if is_such else None


def whole_number(path: Path, key: str, value: Any) -> int:
    """A size; if the file has one for each layer, they must be equal, but for 0 where a layer has no such part."""
    values = value.tolist() if isinstance(value, np.ndarray) else [value]
    values = [each for each in values if each != 0] or values
    if any(each != values[0] for each in values):
        raise UnsupportedError(f"{path}: {key} differs from layer to layer")
    if not values or type(values[0]) is not int or values[0] < 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, not a whole number")
    return int(values[0])


def number(path: Path, key: str, value: Any) -> int | float:
    if type(value) not in (int, float):
        raise CheckpointError(f"{path}: {key} is {value!r}, not a number")
    return value  # type: ignore[no-any-return]

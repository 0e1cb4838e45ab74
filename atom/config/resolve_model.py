"""Resolve the fields of `model`: attention, rope, mlp, stored names."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from atom.checkpoint.modules import find_kv_scales
from atom.config.resolve_quant import derive_format
from atom.config.schema import (
    MAX_EXPERTS,
    AttentionConfig,
    BlockConfig,
    BlockSettings,
    Config,
    GatedDeltaConfig,
    Group,
    IndexConfig,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    RopeConfig,
    StreamsConfig,
)
from atom.config.spelling import did_you_mean, spelled
from atom.config.stored_names import find_optional, stored_name
from atom.errors import ConfigError, UnsupportedError
from atom.sampling_params import INT32

BLOCKS = ("attention", "mlp")  # that every model has, besides those of model.blocks
LAYER_TYPES = ("full_attention", "sliding_attention")  # besides those of model.branches
WHICH_LAYERS: dict[str, Any] = {
    "window_from": 0,
    "first": 0,
    "last": None,
    "every": 1,
    "skip": [],
}  # fields of attention and mlp only
MAMBA2_PARTS = ("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt")  # that model.scales names besides roles
CHANNELS = ("q", "o_gate", "gate", "up", "head")  # that model.channel_scales names
# roles that model.scales cannot name, besides tensors
NOT_SCALED = re.compile(
    r"(per_layer_)?embedding|head|layer|router(_in|_mid_[12])?|cca_(head_)?conv|altup_(router|predict|correct)|.*norm"
)
SWIGLUOAI_LIMIT = 7.0  # of gate and up, if none is set
GATED_ONLY = ("swigluoai", "swiglustep", "situ")  # activations of gate and up
SPARSE_MIXED = 2  # experts of a token that sparsemixer chooses
ROPE_FIELDS = {  # that a kind of rope reads, besides kind and theta
    "linear": ("factor",),
    "proportional": ("factor",),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim", "truncate"),
    "longrope": ("factor", "original_max_position", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
STORED_ROPE = {  # field -> key of config.json, where they differ
    "kind": "rope_type",
    "theta": "rope_theta",
    "original_max_position": "original_max_position_embeddings",
}
WITHOUT_CCA: dict[str, Any] = {  # fields of attention and their only values with cca_taps
    "bias": False,
    "qkv_chunks": 1,
    "clip": None,
    "gate": "none",
    "adapter_rank": None,
    "qk_norm": "none",
    "k_is_v": False,
    "value_dim": None,
}
QK_NORMS = {  # kind of attention -> values of qk_norm
    "gqa": ("none", "per_head", "whole", "behind_rope"),
    "mla": ("none", "rotated_key"),
    "mqa": ("none",),
}
ONLY_GQA: dict[str, Any] = {  # fields of attention and their only values of other kinds
    "softcap": None,
    "o_norm": "none",
    "v_norm": False,
    "k_is_v": False,
    "adapter_rank": None,
}
BY_TOKEN: dict[str, Any] = {  # fields of a router and their only values with experts by token
    "bias": False,
    "ranks": "scores",
    "weighs": "outputs",
    "scale_by_expert": False,
    "hidden": None,
    "own_norm": False,
}
OF_SUMS: dict[str, Any] = {  # fields of a model and their only values where blocks are not just added
    "residual": "sequential",
    "residual_gate.kind": "none",
    "per_layer_input.dims": 0,
}
MAX_BRANCHES = 2  # of a layer, each with a norm of its own
# roles that name a tensor, the others a module
TENSOR_ROLES = re.compile(
    r"sinks|d2t|o_gate_bias|[kv]_scale|router_(correction|norm)|image_correction|expert_scale|experts_(gate|up|down)(_bias)?|alpha_[pn]|layer_scalar|section_state|[a-z_]+_channels|(attention|mlp)_residual|altup_scale|\w+_(factor|offset)|router_share|cca_temperature|(delta|mamba)_(decay|step|skip)|hyper_\w+|expert_table|ngram_(multipliers|sizes|starts)|(index_)?run_bias|(attention|mlp|final)_mix_norm"
)


def derive_model(config: Config, max_model_len: int, names: Collection[str]) -> ModelConfig:
    """Check the fields of the model, and replace auto and null. names: of a quantized checkpoint's tensors"""
    check_model(config)
    model, stored = config.model, derive_format(config, names)
    blocks = {
        name: derive_block(config, block, f"model.blocks.{name}", max_model_len) for name, block in model.blocks.items()
    }
    types = model.layer_types
    return replace(
        model,
        embedding_scale=model.hidden**0.5 if model.embedding_scale_root else model.embedding_scale,
        attention=derive_attention(config, model.attention, "model.attention", max_model_len)
        if model.has_attention
        else model.attention,
        mlp=[derive_mlp(mlp, f"model.mlp.{index}", model.stored_layers) for index, mlp in enumerate(model.mlp)],
        blocks=blocks,
        layer_types=None if types is None else types[: model.layers],
        weights=find_kv_scales(names, model.weights) | find_optional(model, names),
        fmt=stored.fmt,
        plain=stored.plain,
        formats=stored.formats,
        act=stored.act,
        ignore=[
            *model.ignore,
            *classifier_tensors(model),
            *stored.unread,
            *unread_of_shared(model),
            *unread_of_skipped(model),
        ],
    )


def classifier_tensors(model: ModelConfig) -> list[str]:
    """Tensors that the graph does not read: the engine applies them to what is pooled."""
    return [] if model.classifier is None else [f"{model.classifier}.weight"]


def check_gated_norms(model: ModelConfig) -> None:
    norm = model.norm
    unknown = {*norm.gated} - {"attention", "mlp", "moe"}
    if unknown:
        raise ConfigError(f"model.norm.gated: {min(unknown)} is not attention, mlp or moe")
    if bool(norm.gated) != bool(norm.gate_rank):
        raise ConfigError(f"model.norm.gate_rank={norm.gate_rank} for {len(norm.gated)} gated norms; set both or none")


def check_model(config: Config) -> None:
    """Check fields of the model against each other, and against config.json."""
    model = config.model
    check_loops(model)
    if model.norm.bias and model.norm.kind != "layer":
        raise ConfigError(f"model.norm.bias: a norm of kind {model.norm.kind} has none, a layer norm has")
    if not model.norm.weight and (model.norm.bias or model.norm.offset or model.norm.final_offset):
        raise ConfigError("model.norm.weight is false; bias and offset are of a norm that has one")
    both = sorted({*model.norm.unweighted} & {*model.norm.weighs_input})
    if both:
        raise ConfigError(f"model.norm.weighs_input: {both[0]} is in model.norm.unweighted, too; leave it out of one")
    if not (model.norm.before or model.norm.after or model.streams.kind == "gated"):
        raise ConfigError("model.norm: before and after are both false; a layer needs one of them")
    if not (model.embedding_norm or model.embedding_norm_weight):
        raise ConfigError("model.embedding_norm_weight is false, and no norm is of the embedding; leave it out")
    if model.residual_gate.kind != "none" and model.residual.startswith("parallel"):
        at = f"model.residual_gate.kind={model.residual_gate.kind}"
        raise UnsupportedError(f"{at}: model.residual={model.residual} adds all blocks at once; leave it out")
    if model.residual != "sequential" and not model.norm.before:
        raise ConfigError(
            f"model.residual={model.residual}: attention and mlp read a norm, so model.norm.before must be true"
        )
    check_assumed(config, model.assumes)
    if model.layers * max((mlp.experts or 0 for mlp in model.mlps), default=0) > MAX_EXPERTS:
        raise ConfigError(f"model.layers={model.layers} of model.mlp.*.experts are more than {MAX_EXPERTS} in all")
    check_gated_norms(model)
    if model.mtp_like is not None and model.mtp_like >= model.layers:
        has = f"is no layer of the body, which has {model.layers}; set at most {model.layers - 1}"
        raise ConfigError(f"model.mtp_like={model.mtp_like} {has}")
    if model.embedding_rows is not None and model.embedding_rows < model.vocab:
        raise ConfigError(f"model.embedding_rows={model.embedding_rows} are fewer than model.vocab={model.vocab}")
    check_streams(model)
    check_ngrams(model)
    check_branches(model)
    check_kv_layers(model)
    check_scales(model)
    check_layer_types(config)
    check_mlp_types(model)
    check_stacked(model)
    check_reasoning(model)


def check_loops(model: ModelConfig) -> None:
    """Check that loops over all layers, and over those of sections, give as many as the model has."""
    if model.layers % model.loops:
        raise ConfigError(f"model.layers={model.layers} is not a multiple of model.loops={model.loops}")
    num_run = sum(section.loops * section.layers for section in model.sections) * model.loops
    if model.sections and num_run != model.layers:
        raise ConfigError(f"model.layers={model.layers}: model.sections and model.loops run {num_run} layers")
    for index, section in enumerate(model.sections):
        if section.own_state and (section.adds_input or section.norm == "before"):
            what = "adds_input=true" if section.adds_input else "norm=before"
            at = f"model.sections.{index}.own_state=true"
            raise UnsupportedError(f"{at}: its loops read that state and the section's input; leave {what} out")


def check_assumed(config: Config, assumed: Mapping[str, Any]) -> None:
    """Check that config.json has these values, or none."""
    for key, value in assumed.items():
        if (found := find_value(config.hf, key)) not in (None, value):
            known = f"(supported: {spelled(value)})"
            raise UnsupportedError(
                f"{config.checkpoint}: {key}={spelled(found)} in its config.json is not supported {known}"
            )


def find_value(hf: Mapping[str, Any], key: str) -> Any:
    """A value of config.json; dots reach inside objects. None without one."""
    found: Any = hf
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def derive_block(config: Config, block: BlockConfig, at: str, max_model_len: int) -> BlockConfig:
    for name, default in WHICH_LAYERS.items():
        if (value := getattr(block.settings, name, default)) != default:
            layers = "layers have the block if model.branches says so"
            raise ConfigError(f"{at}.{block.kinds[0]}.{name}={spelled(value)}: {layers}; leave it out")
    if block.attention is not None:
        attention = derive_attention(config, block.attention, f"{at}.attention", max_model_len)
        return replace(block, attention=attention)
    if block.gated_delta is not None:
        check_multiple(block.gated_delta, "value_heads", "key_heads", f"{at}.gated_delta")
        check_decay(block.gated_delta, f"{at}.gated_delta")
    if block.mamba2 is not None:
        check_multiple(block.mamba2, "heads", "groups", f"{at}.mamba2")
        check_steps(block.mamba2, f"{at}.mamba2")
    return (
        block
        if block.mlp is None
        else replace(block, mlp=derive_mlp(block.mlp, f"{at}.mlp", config.model.stored_layers))
    )


def derive_attention(config: Config, attention: AttentionConfig, at: str, max_model_len: int) -> AttentionConfig:
    model = config.model
    if not attention.heads:
        raise ConfigError(f"{at}.heads=0: layers have this attention; set 1 at least")
    head_dim = mla_head_dim(attention, at) if attention.kind == "mla" else gqa_head_dim(attention, model.hidden, at)
    check_mqa(attention, at)
    if attention.qk_norm not in QK_NORMS[attention.kind]:
        raise UnsupportedError(f"{at}.qk_norm={attention.qk_norm} is not supported for kind {attention.kind}")
    check_compress(attention, at)
    check_value_dim(attention, head_dim, at)
    kv_heads = 1 if attention.kind == "mqa" else attention.kv_heads or attention.heads
    if attention.kind == "gqa" and attention.heads % kv_heads:
        raise ConfigError(f"{at}.heads={attention.heads} is not a multiple of kv_heads={kv_heads}")
    check_qkv_chunks(attention, kv_heads, at)
    check_cca(attention, kv_heads * head_dim, at)
    check_index(attention, at, kv_heads)
    if attention.gate == "none" and attention.gate_act != "sigmoid":
        raise ConfigError(f"{at}.gate_act={attention.gate_act}: the output has no gate; leave it out")
    if attention.gate_bias and attention.gate != "element":
        raise ConfigError(f"{at}.gate_bias=true is for gate=element, not for gate={attention.gate}; leave it out")
    if attention.rope_layers is not None:
        check_count(attention.rope_layers, model.stored_layers, f"{at}.rope_layers")
    if attention.index is not None and attention.index.layers is not None:
        check_count(attention.index.layers, model.stored_layers, f"{at}.index.layers")
        check_shared_choices(model, attention.index.layers, at)
    if attention.k_is_v and (attention.qkv_chunks > 1 or attention.adapter_rank is not None):
        raise UnsupportedError(f"{at}.k_is_v=true: with qkv_chunks or adapter_rank, values are stored; leave it out")
    check_ropes_by_type(config, attention, at)
    if attention.kind == "mla" and attention.rope.query_growth and (attention.nope_dim or 0) % 2:
        raise UnsupportedError(f"{at}.rope.query_growth: nope_dim={attention.nope_dim} is odd, queries grow by pairs")
    rotated = attention.rope_dim if attention.kind == "mla" else head_dim
    assert rotated is not None, "mla_head_dim checks it"
    ropes = [
        derive_rope(rope, rotated, f"{at}.{name}", model.max_position, max_model_len) if rope else None
        for name, rope in (("rope", attention.rope), ("window_rope", attention.window_rope))
    ]
    rope, window_rope = ropes
    assert rope is not None, "it has a default"
    check_index_dim(attention, rope if attention.window is None else window_rope or rope, at)
    mscale = rope_mscale(rope) if attention.kind == "mla" else 1.0
    scale = attention.scale or (attention.scale_dim or head_dim) ** -0.5 * mscale**2
    return replace(
        attention,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        rope=rope,
        window_rope=window_rope,
    )


def types_of_attention(model: ModelConfig, at: str) -> set[str | None]:
    """The types of the layers that have an attention, which its key names."""
    return {model.layer_type(layer) for layer in layers_of_attention(model, at)}


def layers_of_attention(model: ModelConfig, at: str) -> list[int]:
    name = "attention" if at == "model.attention" else at.split(".")[2]
    return [layer for layer in range(model.layers) if name in model.branches_of(layer)]


def check_shared_choices(model: ModelConfig, words: Sequence[str], at: str) -> None:
    """Check that a layer chooses ahead of those that share a choice. words: of the stored layers"""
    first = next((words[model.layer_like(layer)] for layer in layers_of_attention(model, at)), None)
    if first == "shared":
        raise ConfigError(f"{at}.index.layers: the first layer shares what no layer before it chose")


def check_ropes_by_type(config: Config, attention: AttentionConfig, at: str) -> None:
    """Check that the file reads what config.json has for the ropes of an attention's layer types."""
    parameters, types = config.hf.get("rope_parameters") or {}, types_of_attention(config.model, at)
    by_type = [name for name in parameters if isinstance(parameters[name], dict)]
    unknown = [name for name in by_type if name not in config.model.branches]
    has_one = attention.window_rope is None and attention.rope.kind != "none"
    if unknown and has_one and types != {"full_attention"}:
        raise UnsupportedError(
            f"{config.checkpoint}: rope of its own for {', '.join(unknown)}, {at}.window_rope is null"
        )
    for kind in types & {*by_type, *(["full_attention"] if by_type else [])}:
        is_full = kind == "full_attention"
        given = parameters if is_full else parameters[kind]  # that of full_attention is at the top
        rope = attention.rope if is_full or attention.window_rope is None else attention.window_rope
        for name in ("kind", "theta", *ROPE_FIELDS.get(given.get("rope_type", "default"), ())):
            key = STORED_ROPE.get(name, name)
            default, value = getattr(RopeConfig(), name), given.get(key)
            same = (None, default, config.model.max_position if name == "original_max_position" else None)
            if rope.kind != "none" and value not in same and getattr(rope, name) == default:
                raise UnsupportedError(
                    f"{config.checkpoint}: rope_parameters.{kind}.{key}={spelled(value)} in its config.json is not read"
                )


def check_multiple(block: BlockSettings, name: str, divisor: str, at: str) -> None:
    """Check that a field is a multiple of another one."""
    value, by = getattr(block, name), getattr(block, divisor)
    if value % by:
        raise ConfigError(f"{at}.{name}={value} is not a multiple of {divisor}={by}")


def check_steps(block: Mamba2Config, at: str) -> None:
    """Check that the limits of time steps are in order."""
    if block.step_max is not None and block.step_max < block.step_min:
        raise ConfigError(f"{at}.step_max={block.step_max} is less than step_min={block.step_min}")


def check_decay(block: GatedDeltaConfig, at: str) -> None:
    """Check that decays are below 1, and by dim for one reason."""
    if block.decay_floor is not None and block.decay_floor >= 0:
        raise ConfigError(f"{at}.decay_floor={block.decay_floor} is not below 0, as logarithms of decays are")
    if block.decay_rows is not None and block.decay_rows < block.value_heads:
        raise ConfigError(f"{at}.decay_rows={block.decay_rows} are fewer than value_heads={block.value_heads}")
    if block.decay_by_dim and block.decay_rank is not None:
        raise ConfigError(f"{at}.decay_by_dim=true: with decay_rank={block.decay_rank}, decays are; leave it out")


def check_branches(model: ModelConfig) -> None:
    """Check the blocks of model.blocks, and that the layers of model.branches are made of these."""
    for name, block in model.blocks.items():
        at, kinds = f"model.blocks.{name}", block.kinds
        if name in BLOCKS:
            raise ConfigError(f"{at}: the block {name} is model.{name}; choose another name")
        if len(kinds) != 1:
            choices = ", ".join(each.name for each in fields(BlockConfig))
            raise ConfigError(f"{at} has {' and '.join(kinds) or 'no kind'}; it takes one of {choices}")
    known = [*BLOCKS, *model.blocks]
    for kind, names in model.branches.items():
        at = f"model.branches.{kind}"
        groups = [Group.parse(each) for each in names]
        if any(group.ahead for group in groups) and (model.residual != "sequential" or not model.norm.before):
            raise UnsupportedError(f"{at}: a block ahead of another is for model.residual=sequential with norms before")
        is_sum = (
            model.residual == "sequential" and not model.norm.after and model.streams.kind not in ("hyper", "gated")
        )
        if any(group.later for group in groups) and not is_sum:
            raise UnsupportedError(f"{at}: what is added later is for model.residual=sequential without norms after")
        for name in (name for group in groups for name in group.all):
            if name not in known:
                raise ConfigError(
                    f"{at}: there is no block {name}{did_you_mean(name, known)}; blocks: {', '.join(known)}"
                )
        if len(names) > MAX_BRANCHES:
            raise ConfigError(f"{at} has {len(names)} blocks; a layer has {MAX_BRANCHES} at most")
    if any(group.later for group in model.groups_of(model.layers - 1)):
        raise ConfigError("model.branches: no layer comes after the last one, to which its a~b could be added")
    if model.shared_blocks is not None and not any(">" in name for names in model.branches.values() for name in names):
        raise ConfigError(f"model.shared_blocks={model.shared_blocks}: model.branches has no a>b; leave it out")


def check_streams(model: ModelConfig) -> None:
    """Check that several streams are of layers which can read and write them."""
    kind, num = model.streams.kind, model.streams.num
    if (kind in ("one", "attention_residuals")) != (num == 1):
        several = "one stream" if num > 1 else "several streams"
        raise ConfigError(f"model.streams.num={num}: kind {kind} is of {several}")
    if (kind == "attention_residuals") != (model.streams.layers is not None):
        has = "needs a number" if model.streams.layers is None else "has none"
        raise ConfigError(f"model.streams.layers={spelled(model.streams.layers)}: kind {kind} {has}")
    if (kind == "gated") != (model.streams.rank is not None):
        has = "needs a number" if model.streams.rank is None else "has none"
        raise ConfigError(f"model.streams.rank={spelled(model.streams.rank)}: kind {kind} {has}")
    for name, kinds in {**dict.fromkeys(("rounds", "eps", "write_eps", "merge", "in_mtp"), ("hyper",)),
                        "write_scale": ("hyper", "gated")}.items():  # fmt: skip
        if kind not in kinds and (value := getattr(model.streams, name)) != getattr(StreamsConfig, name):
            known = " and ".join(kinds)
            raise ConfigError(f"model.streams.{name}={spelled(value)} is for kind {known}, not for kind {kind}")
    if kind == "one":
        return
    of_one = {"loops": 1, "sections": [], "layer_scalar": False} | ({} if kind == "hyper" else {"mtp_layers": 0})
    for name, default in of_one.items():
        if (value := getattr(model, name)) != default:
            at = f"model.streams.kind={kind}"
            raise UnsupportedError(f"{at}: model.{name}={spelled(value)} is of one stream; leave it out")
    if kind in ("hyper", "gated", "attention_residuals"):
        check_added(model)
    if kind == "gated" and (model.norm.kind != "rms" or model.norm.before):
        norms = "model.streams.kind=gated: streams have the only norm (rms) of what blocks read"
        raise UnsupportedError(f"{norms}; set model.norm.kind=rms and model.norm.before=false")


def check_ngrams(model: ModelConfig) -> None:
    """Check the sizes of n-gram embeddings, and the layers that have some."""
    own, heads, at = model.ngrams, (model.ngrams.size - 1) * model.ngrams.heads, "model.ngrams"
    if not own.layers:
        return
    if own.layers != sorted({*own.layers}) or not 1 <= own.layers[0] <= own.layers[-1] <= model.layers:
        raise ConfigError(f"{at}.layers={spelled(own.layers)} is no ascending list of layers from 1 to {model.layers}")
    if own.dim % heads or not own.dim:
        raise ConfigError(f"{at}.dim={own.dim} is no multiple of the {heads} heads that choose rows")
    if own.end is None:
        raise ConfigError(f"{at}.end has no value; it is the token after which no n-gram has tokens of before")
    if model.loops > 1 or model.sections:
        raise UnsupportedError(f"{at}: layers with n-grams that run several times are not supported")


def check_added(model: ModelConfig) -> None:
    """Check that nothing is asked of the hidden states that blocks would add to."""
    at = f"model.streams.kind={model.streams.kind}"
    for name, only in OF_SUMS.items():
        if (given := operator.attrgetter(name)(model)) != only:
            raise UnsupportedError(f"{at}: model.{name}={spelled(given)} is of blocks that are added; leave it out")
    if any(each.kept != 1 or each.stored for each in model.block_scales.values()):
        raise UnsupportedError(f"{at}: model.block_scales.*.kept is of blocks that are added; leave it out")
    if any(group.later for layer in range(model.layers) for group in model.groups_of(layer)):
        raise UnsupportedError(f"{at}: branches with a~b are of blocks that are added; leave them out")


def check_kv_layers(model: ModelConfig) -> None:
    """Check that the layers that share KV have attention of kind gqa, and an earlier layer of their type."""
    first, at = model.kv_shared_from, f"model.kv_shared_from={model.kv_shared_from}"
    for layer in range(model.layers if first is None else first, model.layers):
        kind, shared = model.layer_type(layer), model.kv_layer(layer)
        if shared == layer:
            raise ConfigError(f"{at}: no layer of type {kind} before it keeps KV for layer {layer}; set more")
        blocks = [each for name in model.branches_of(layer) if (each := block_named(model, name)) is not None]
        if not any(block.kind == "gqa" and block.cca_taps is None for block in blocks):
            raise UnsupportedError(f"{at}: layer {layer} has no attention of kind gqa, without cca_taps")


def block_named(model: ModelConfig, name: str) -> AttentionConfig | None:
    """The attention of this name, if it is one."""
    if name in BLOCKS:
        return model.attention if name == "attention" else None
    return model.blocks[name].attention


def unread_of_shared(model: ModelConfig) -> list[str]:
    """The tensors that layers which share KV may have stored all the same, of keys and values."""
    layers = [layer for layer in range(model.layers) if model.kv_layer(layer) != layer]
    roles = [role for role in ("k", "v", "k_norm", "k_scale", "v_scale") if role in model.weights]
    stored = [stored_name(model, role, layer) for layer in layers for role in roles]
    own = {stored_name(model, role, layer) for layer in layers for role in ("q", "o") if role in model.weights}
    return [f"{name}*" for name in stored if name not in own]


def unread_of_skipped(model: ModelConfig) -> list[str]:
    """The tensors of layers without blocks, such as those that only images reach."""
    return [f"{stored_name(model, 'layer', layer)}.*" for layer in range(model.layers) if not model.groups_of(layer)]


def check_scales(model: ModelConfig) -> None:
    """Check that what scales of model and own_norms name is there, and that scales are above 0."""
    linears = [role for role in model.weights if not (TENSOR_ROLES.fullmatch(role) or NOT_SCALED.fullmatch(role))]
    for at, named, known in (
        ("model.scales", model.scales, [*linears, *MAMBA2_PARTS]),
        ("model.channel_scales", model.channel_scales, [*CHANNELS]),
        ("model.block_scales", model.block_scales, [*BLOCKS, *model.blocks]),
        ("model.own_norms", model.own_norms, [*BLOCKS, *model.blocks]),
    ):
        for name in named:
            if name not in known:
                raise ConfigError(f"{at}.{name}: there is no such name{did_you_mean(name, known)}")
    for name, scales in model.block_scales.items():
        if (scales.kept != 1 or scales.stored) and model.residual.startswith("parallel"):
            at = f"model.block_scales.{name}.{'stored=true' if scales.stored else f'kept={scales.kept}'}"
            raise ConfigError(f"{at}: model.residual={model.residual} adds all blocks at once; leave it out")
    for name, scale in model.scales.items():
        if not 0 < scale < math.inf:
            raise ConfigError(f"model.scales.{name}={scale} is not a number above 0")


def check_layer_types(config: Config) -> None:
    """Check that each layer has a type, and that all types are known."""
    model = config.model
    for at, types in (("model.layer_types", model.layer_types), ("model.layer_pattern", model.layer_pattern)):
        for kind in types or ():
            if kind not in (known := [*LAYER_TYPES, *model.branches]):
                supported = ", ".join(dict.fromkeys(known))
                raise UnsupportedError(f"{at}: layer type {kind} is not supported (supported: {supported})")
    if model.layer_types is not None:
        check_count(model.layer_types, model.stored_layers, "model.layer_types")


def check_count(listed: Sequence[object], num_layers: int, at: str) -> None:
    """Check that a field has an entry for each layer."""
    if len(listed) < num_layers:
        raise ConfigError(f"{at} names only {len(listed)} layers, the model has {num_layers}")


def gqa_head_dim(attention: AttentionConfig, hidden: int, at: str) -> int:
    if attention.head_dim is None and hidden % attention.heads:
        divided = f"model.hidden={hidden} is not a multiple of {at}.heads={attention.heads}"
        raise ConfigError(f"{divided}; set {at}.head_dim")
    return attention.head_dim or hidden // attention.heads


def check_qkv_chunks(attention: AttentionConfig, kv_heads: int, at: str) -> None:
    """Check that the heads of q, k and v divide into the chunks of a stored tensor."""
    chunks = f"{at}.qkv_chunks={attention.qkv_chunks}"
    if attention.gate == "query" and attention.qkv_chunks > 1:
        raise ConfigError(f"{chunks}: a query gate is stored with q alone; leave it out")
    if attention.heads % attention.qkv_chunks or kv_heads % attention.qkv_chunks:
        raise ConfigError(f"{chunks} does not divide heads={attention.heads} and kv_heads={kv_heads}")


def check_cca(attention: AttentionConfig, kv_size: int, at: str) -> None:
    """Check that nothing else is asked of attention whose queries and keys pass convolutions."""
    if attention.cca_taps is None:
        return
    taps = f"with cca_taps={attention.cca_taps}"
    for name, value in {**WITHOUT_CCA, "kind": "gqa"}.items():
        if getattr(attention, name) != value:
            raise UnsupportedError(f"{at}.{name}={spelled(getattr(attention, name))} is not supported {taps}")
    if kv_size % 2:
        raise ConfigError(f"{at}: {kv_size} columns of values do not divide into halves {taps}")


def check_value_dim(attention: AttentionConfig, head_dim: int, at: str) -> None:
    """Check that values fit into the cache, which keeps keys and values of one size."""
    if attention.kind == "gqa" and attention.value_dim is not None and attention.value_dim > head_dim:
        more = f"{at}.value_dim={attention.value_dim} is more than head_dim={head_dim}"
        raise UnsupportedError(f"{more}, the dims of keys; values of fewer dims are supported")


def check_mqa(attention: AttentionConfig, at: str) -> None:
    """Check the fields of attention whose only key is its value."""
    if attention.kind != "mqa":
        return
    check_only_gqa(attention, at)
    if attention.gate != "none":
        raise UnsupportedError(f"{at}.gate={attention.gate} is not supported for kind mqa")
    for name in ("q_rank", "o_rank"):
        if getattr(attention, name) is None:
            raise ConfigError(f"{at}.{name} has no value; kind mqa needs it")
    if attention.kv_heads not in (None, 1):
        raise UnsupportedError(f"{at}.kv_heads={attention.kv_heads}: kind mqa has one key for all heads; leave it out")
    if attention.heads % attention.o_groups:
        raise ConfigError(f"{at}.heads={attention.heads} is not a multiple of o_groups={attention.o_groups}")
    if attention.rope.query_growth:
        raise UnsupportedError(f"{at}.rope.query_growth is not supported for kind mqa, whose output is turned back")


def check_compress(attention: AttentionConfig, at: str) -> None:
    """Check the entries of runs, and the indexer that chooses among them."""
    compress, index = attention.compress, attention.index
    if compress is None:
        if attention.kind == "mqa" and index is not None:
            raise UnsupportedError(f"{at}.index: kind mqa chooses among entries of runs; set {at}.compress")
        return
    if attention.kind != "mqa":
        raise UnsupportedError(f"{at}.compress is not supported for kind {attention.kind} (supported: mqa)")
    if not compress.every:
        raise ConfigError(f"{at}.compress.every has no value; it is the tokens of a run")


def check_only_gqa(attention: AttentionConfig, at: str) -> None:
    """Check that other kinds have none of gqa's fields."""
    for name, value in ONLY_GQA.items():
        if getattr(attention, name) != value:
            kind = f"kind {attention.kind}"
            raise UnsupportedError(f"{at}.{name}={spelled(getattr(attention, name))} is not supported for {kind}")


def mla_head_dim(attention: AttentionConfig, at: str) -> int:
    for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
        if getattr(attention, name) is None:
            raise ConfigError(f"{at}.{name} has no value; kind mla needs it")
    check_only_gqa(attention, at)
    if attention.window is not None and attention.index is not None:
        raise UnsupportedError(f"{at}.window={attention.window} is not supported with an index")
    if attention.q_joined and attention.q_rank is None:
        raise ConfigError(f"{at}.q_joined=true: queries have no latent; set {at}.q_rank")
    assert attention.nope_dim is not None and attention.rope_dim is not None, "checked above"
    return attention.nope_dim + attention.rope_dim


def check_index(attention: AttentionConfig, at: str, kv_heads: int) -> None:
    """Check what an indexer's fields say, by the kind of its attention."""
    index = attention.index
    if index is None:
        return
    by_block = attention.kind == "gqa" and index.every == 1
    for name in ("heads", "dim", "top_k", *(("block",) if by_block else ())):
        if not getattr(index, name):
            raise ConfigError(f"{at}.index.{name} has no value; an indexer needs it")
    if index.block is not None and not by_block:
        chosen = "tokens" if attention.kind == "mla" else "runs"
        raise UnsupportedError(f"{at}.index.block={index.block}: kind {attention.kind} chooses {chosen}; leave it out")
    if index.every > 1 and attention.kind == "mqa":
        kinds = "kind mqa (supported: gqa, mla)"
        raise UnsupportedError(f"{at}.index.every={index.every} is not supported for {kinds}")
    words = {"mla": ("full", "shared"), "gqa": ("full", "none"), "mqa": ("full",)}[attention.kind]
    unknown = {*(index.layers or ())} - {*words}
    if unknown:
        raise ConfigError(f"{at}.index.layers: {min(unknown)} is not {' or '.join(words)}")
    if attention.kind == "mla":
        check_token_index(attention, index, at)
    elif attention.kind == "gqa":
        check_block_index(attention, index, at, kv_heads)


def check_index_dim(attention: AttentionConfig, rope: RopeConfig, at: str) -> None:
    """Check that heads of an indexer have the dims that turn in the attention's, too."""
    index, dims = attention.index, rope.dims or 0
    if index is not None and rope.kind != "none" and index.dim < dims:
        raise ConfigError(f"{at}.index.dim={index.dim} is less than the {dims} dims that turn")


def check_token_index(attention: AttentionConfig, index: IndexConfig, at: str) -> None:
    if attention.q_rank is None:
        raise UnsupportedError(f"{at}.index: it reads the latent of queries, which have none; set {at}.q_rank")
    if index.every > 1 and attention.rope.kind != "none":
        every = f"{at}.index.every={index.every}"
        raise UnsupportedError(f"{every}: keys of runs are of layers without positions; set {at}.rope.kind=none")


def check_block_index(attention: AttentionConfig, index: IndexConfig, at: str, kv_heads: int) -> None:
    if index.every == 1 and kv_heads % index.heads:
        raise ConfigError(f"{at}.kv_heads={kv_heads} is not a multiple of index.heads={index.heads}")
    if index.every > 1 and (index.local > 1 or attention.rope.query_growth):
        name = "index.local" if index.local > 1 else "rope.query_growth"
        raise UnsupportedError(f"{at}.{name} is not supported with index.every={index.every}; leave it out")
    if index.local > index.top_k:
        raise ConfigError(f"{at}.index.local={index.local} is more than top_k={index.top_k}, which count them too")
    for name, values in (("window", (None,)), ("alibi", ("none",)), ("qk_norm", ("none", "per_head"))):
        if getattr(attention, name) not in values:
            raise UnsupportedError(f"{at}.{name}={spelled(getattr(attention, name))} is not supported with an index")


def derive_rope(rope: RopeConfig, dims: int, at: str, max_position: int, max_model_len: int) -> RopeConfig:
    """dims: of a head, of which `partial` are rotated"""
    rotated = rope.dims or (dims if rope.kind == "proportional" else int(dims * rope.partial))
    if rope.kind != "none" and (rotated % 2 or not rotated):
        raise ConfigError(f"{at}: {rotated} dims of {dims} would be rotated, an odd number or none")
    if rope.kind != "none" and rotated > dims:
        raise ConfigError(f"{at}.dims={rotated} is more than the {dims} dims of a head; set at most those")
    if rope.query_growth and rope.kind != "none" and rotated < dims:
        raise UnsupportedError(f"{at}.query_growth: {rotated} of {dims} dims are rotated; all or none have to be")
    if rope.query_growth and rope.kind == "none" and dims % 2:
        raise UnsupportedError(f"{at}.query_growth: heads have {dims} dims, an odd number; queries grow by pairs")
    original = rope.original_max_position or max_position
    factor = max_position / original if rope.kind in ("yarn", "longrope") and not rope.factor else rope.factor
    if rope.kind in ("linear", "llama3") and not factor:
        raise ConfigError(f"{at}: kind {rope.kind} needs a factor")
    rope = replace(rope, original_max_position=original, factor=factor or 1.0, dims=rotated)
    if rope.kind == "longrope":
        rope = choose_factors(rope, at, max_model_len)
    if rope.kind == "factors" and len(rope.factors or ()) != rotated // 2:
        counts = f"{len(rope.factors or ())} factors, one for each of the {rotated // 2} frequencies are needed"
        raise ConfigError(f"{at}: there are {counts}")
    return rope


def choose_factors(rope: RopeConfig, at: str, max_model_len: int) -> RopeConfig:
    """Turn longrope (Ding et al. 2024) into plain factors.

    These are the long ones if sequences may become longer than the original context. All sequences have the same,
    since the KV of a sequence must not change while it grows.
    """
    assert rope.original_max_position is not None, "derive_rope sets it"
    scale = rope.attention_factor
    if scale is None and rope.original_max_position == 1:
        raise ConfigError(f"{at}: a context of 1 token is extended by no factor; set {at}.original_max_position")
    if scale is None:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    is_long = max_model_len > rope.original_max_position
    factors, own = (rope.long_factor, rope.long_mscale) if is_long else (rope.short_factor, rope.short_mscale)
    return replace(rope, kind="factors", factors=factors, attention_factor=scale if own is None else own)


def rope_mscale(rope: RopeConfig) -> float:
    """The factor of queries and keys in latent attention under yarn (DeepSeek-AI 2024)."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def derive_limits(mlp: MLPConfig, at: str, num_layers: int, is_plain: bool) -> MLPConfig:
    """Check what gate and up are clamped to, and replace null."""
    for name in ("limits", "shared_limits"):
        if (limits := getattr(mlp, name)) is not None:
            check_count(limits, num_layers, f"{at}.{name}")
            if (wrong := next((each for each in limits if not 0 <= (each or 0) < math.inf), None)) is not None:
                raise ConfigError(f"{at}.{name}: {wrong} is not a number from 0")
            if mlp.activation == "swigluoai" and not all(limits):
                raise UnsupportedError(f"{at}.{name}: swigluoai needs a limit in each layer")
        if is_plain and (limits is not None or mlp.limit is not None):
            raise UnsupportedError(f"{at}: limits are for gated mlps, not for plain ones")
    default = SWIGLUOAI_LIMIT if mlp.activation == "swigluoai" and mlp.limits is None else None
    return replace(mlp, limit=mlp.limit or default)


def check_by_layer(mlp: MLPConfig, at: str, num_layers: int) -> None:
    """Check the widths and the sparsity of layers."""
    for name, values, kinds in (
        ("widths", mlp.widths, ("gated", "plain")),
        ("sparsity", mlp.sparsity, ("gated",)),
    ):
        if values is None:
            continue
        if mlp.kind not in kinds:
            raise UnsupportedError(f"{at}.{name} is for kind {' and '.join(kinds)}, not for kind {mlp.kind}")
        check_count(values, num_layers, f"{at}.{name}")
        if (wrong := next((each for each in values if not is_of_layer(name, each)), None)) is not None:
            wanted = f"a number from 1 to {INT32}" if name == "widths" else "a share from 0 to less than 1"
            raise ConfigError(f"{at}.{name}: {spelled(wrong)} is not {wanted}")


def is_of_layer(name: str, value: float) -> bool:
    return 1 <= value <= INT32 if name == "widths" else 0 <= value < 1


def derive_mlp(mlp: MLPConfig, at: str, num_layers: int) -> MLPConfig:
    check_by_layer(mlp, at, num_layers)
    is_plain = mlp.kind == "plain" or (mlp.kind == "moe" and mlp.expert == "plain")
    if is_plain and mlp.activation in GATED_ONLY:
        raise UnsupportedError(f"{at}.activation={mlp.activation} is for gated mlps, not for plain ones")
    if mlp.activation == "xielu" and mlp.kind != "plain":
        raise UnsupportedError(f"{at}.activation=xielu is for kind plain, not for kind {mlp.kind}")
    mlp = derive_limits(mlp, at, num_layers, is_plain)
    if mlp.adapter_rank is not None and mlp.kind != "gated":
        raise UnsupportedError(f"{at}.adapter_rank={mlp.adapter_rank} is for kind gated, not for kind {mlp.kind}")
    if mlp.down_norm and mlp.kind == "moe":
        raise UnsupportedError(f"{at}.down_norm=true is for kinds gated and plain, not for kind moe")
    if mlp.kind != "moe":
        return mlp
    if mlp.expert_norm and (mlp.expert == "plain" or mlp.zero_experts):
        raise UnsupportedError(f"{at}.expert_norm=true is for gated experts, all of which compute something")
    if mlp.latent_norm != "none" and mlp.latent is None:
        raise ConfigError(f"{at}.latent_norm={mlp.latent_norm}: there is no latent; set {at}.latent, or leave it out")
    for name in ("experts", "top_k"):
        if getattr(mlp, name) is None:
            raise ConfigError(f"{at}.{name} has no value; kind moe needs it")
    if mlp.expert == "plain" and mlp.bias:
        raise UnsupportedError(f"{at}.bias=true is not supported for plain experts")
    router, experts, top_k = mlp.router, (mlp.experts or 0) + mlp.zero_experts, mlp.top_k or 0
    check_router(mlp, at)
    is_grouped = router.method not in ("greedy", "sparsemixer", "by_token")  # which ignore groups
    if is_grouped and experts % router.groups:
        raise ConfigError(f"{at}.router.groups={router.groups}: {experts} experts do not divide into them")
    if is_grouped and router.top_groups > router.groups:
        raise ConfigError(f"{at}.router.top_groups={router.top_groups} is more than its groups={router.groups}")
    candidates = router.top_groups * experts // router.groups if is_grouped else experts
    if top_k > candidates:
        raise ConfigError(f"{at}.top_k={top_k} is more than the {candidates} experts that a token may choose from")
    score = router.score or ("sigmoid" if router.method == "noaux_tc" else "softmax")
    width = mlp.shared_width or mlp.shared * mlp.width
    shared_bias = mlp.bias if mlp.shared_bias is None else mlp.shared_bias
    down_transposed = mlp.transposed if mlp.down_transposed is None else mlp.down_transposed
    return replace(
        mlp,
        router=replace(router, score=score),
        shared_width=width or None,
        shared_bias=shared_bias,
        down_transposed=down_transposed,
    )


def check_router(mlp: MLPConfig, at: str) -> None:
    """Check fields of a router against those of its experts."""
    router, top_k = mlp.router, mlp.top_k
    if mlp.expert == "plain" and mlp.zero_experts:
        raise UnsupportedError(f"{at}.zero_experts={mlp.zero_experts} is not supported for plain experts")
    if mlp.zero_gives != "input" and not mlp.zero_experts:
        raise ConfigError(f"{at}.zero_gives={mlp.zero_gives}: there are no zero_experts; leave it out")
    if router.method == "by_token":
        for name, value in BY_TOKEN.items():
            if getattr(router, name) != value:
                given = f"{at}.router.{name}={spelled(getattr(router, name))}"
                raise UnsupportedError(f"{given} is not supported for method by_token; leave it out")
        if mlp.zero_experts:
            raise UnsupportedError(f"{at}.zero_experts={mlp.zero_experts} is not supported for router.method=by_token")
    if router.carried and router.hidden is None:
        raise ConfigError(f"{at}.router.carried=true: the router is a linear; set {at}.router.hidden")
    if router.logits_scale is not None and (router.hidden is not None or router.bias):
        raise UnsupportedError(f"{at}.router.logits_scale is of a router that is a linear without a bias")
    if router.weighs == "inputs" and top_k != 1:
        raise UnsupportedError(f"{at}.router.weighs=inputs is for top_k=1, not for top_k={top_k}")
    if router.method == "sparsemixer" and top_k != SPARSE_MIXED:
        raise UnsupportedError(f"{at}.router.method=sparsemixer is for top_k={SPARSE_MIXED}, not for top_k={top_k}")


def check_mlp_types(model: ModelConfig) -> None:
    """Check that model.mlp_layer_types names a kind that model.mlp has for each layer."""
    listed, at = model.mlp_layer_types, "model.mlp_layer_types"
    if listed is None:
        return
    check_count(listed, model.stored_layers, at)
    kinds = {"sparse" if mlp.kind == "moe" else "dense" for mlp in model.mlp}
    for kind in listed:
        if kind not in kinds:
            supported = ", ".join(sorted(kinds))
            raise UnsupportedError(f"{at}: {kind} is not supported for this model (supported: {supported})")


def check_stacked(model: ModelConfig) -> None:
    """Check the parts of model.stacked against the roles of model.weights."""
    for name, parts in model.stacked.items():
        for part in parts:
            role, _, tensor = part.partition(".")
            at = f"model.stacked: {name} holds {part}"
            if role not in model.weights:
                hint = did_you_mean(role, model.weights)
                raise ConfigError(f"{at}, there is no such role{hint}; roles: {', '.join(model.weights)}")
            if TENSOR_ROLES.fullmatch(role):
                if tensor:
                    raise ConfigError(f"{at}, the role {role} names a tensor already; write {role}")
            elif tensor not in ("weight", "bias"):
                raise ConfigError(f"{at}, the role {role} names a module; choices: {role}.weight, {role}.bias")


def check_reasoning(model: ModelConfig) -> None:
    """Check that model.reasoning is two different markers."""
    markers = model.reasoning
    if markers is not None and not (len(markers) == 2 and all(markers) and markers[0] != markers[1]):
        given = f"model.reasoning={json.dumps(markers, ensure_ascii=False)}"
        raise ConfigError(f"{given} must be two different markers, as in ['<think>','</think>'], or null")

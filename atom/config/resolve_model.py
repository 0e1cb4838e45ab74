"""Resolve the fields of `model`: blocks, layers, mlp, stored names."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from atom.checkpoint.modules import find_kv_scales
from atom.config.resolve_attention import check_count, derive_attention
from atom.config.resolve_quant import derive_format
from atom.config.schema import (
    MAX_EXPERTS,
    AttentionConfig,
    BlockConfig,
    BlockSettings,
    Config,
    GatedDeltaConfig,
    Group,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
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
    r"sinks|d2t|o_gate_bias|[kv]_scale|router_(correction|norm)|image_correction|expert_scale|experts_(gate|up|down)(_bias)?|alpha_[pn]|layer_scalar|section_state|[a-z_]+_channels|(attention|mlp)_residual|altup_scale|\w+_(factor|offset)|router_share|cca_temperature|rope_exponents|(index_)?ssmax_(scale|bias)|(delta|mamba)_(decay|step|skip)|hyper_\w+|expert_table|ngram_(multipliers|sizes|starts)|(index_)?run_bias|(attention|mlp|final)_mix_norm"
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
    if model.streams.kind == "attention_residuals":
        raise UnsupportedError(f"{at}: model.streams.kind=attention_residuals has sums, to which nothing else is added")
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
    """Check that the layers that share KV have an attention that can, and an earlier layer like them."""
    first, at = model.kv_shared_from, f"model.kv_shared_from={model.kv_shared_from}"
    if model.kv_layers is not None:
        return check_listed_kv(model, model.kv_layers)
    for layer in range(model.layers if first is None else first, model.layers):
        kind, shared = model.layer_type(layer), model.kv_layer(layer)
        if shared == layer:
            raise ConfigError(f"{at}: no layer of type {kind} before it keeps KV for layer {layer}; set more")
        if not shares_kv(model, layer):
            raise UnsupportedError(f"{at}: layer {layer} has no attention of kind gqa, without cca_taps, or mla")


def check_listed_kv(model: ModelConfig, listed: Sequence[int]) -> None:
    """Check that model.kv_layers names an earlier layer for each that keeps no KV, alike in what it keeps."""
    at = "model.kv_layers"
    if model.kv_shared_from is not None:
        raise ConfigError(f"{at}: model.kv_shared_from={model.kv_shared_from} says it, too; leave one out")
    check_count(listed, model.layers, at)
    for layer, source in enumerate(listed[: model.layers]):
        given = f"{at}: layer {layer} reads the KV of layer {source}"
        if not 0 <= source <= layer or listed[source] != source:
            raise ConfigError(f"{given}, which is no earlier layer with KV of its own")
        if source == layer:
            continue
        if model.layer_type(layer) != model.layer_type(source):
            raise ConfigError(f"{given}, which is of another type")
        if not shares_kv(model, layer):
            raise UnsupportedError(f"{given}; its attention is not of kind gqa, without cca_taps, or mla")


def shares_kv(model: ModelConfig, layer: int) -> bool:
    """Whether all attentions of a layer, of which it has one, can read what another layer keeps."""
    blocks = [each for name in model.branches_of(layer) if (each := block_named(model, name)) is not None]
    return bool(blocks) and all(block.kind != "mqa" and block.cca_taps is None for block in blocks)


def block_named(model: ModelConfig, name: str) -> AttentionConfig | None:
    """The attention of this name, if it is one."""
    if name in BLOCKS:
        return model.attention if name == "attention" else None
    return model.blocks[name].attention


def unread_of_shared(model: ModelConfig) -> list[str]:
    """The tensors that layers which share KV may have stored all the same, of keys and values."""
    layers = [layer for layer in range(model.layers) if model.kv_layer(layer) != layer]
    roles = [role for role in ("k", "v", "k_norm", "kv_a", "kv_a_norm", "k_scale", "v_scale") if role in model.weights]
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

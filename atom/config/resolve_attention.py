"""Resolve the fields of an attention: heads, scale, ropes; check its indexer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from atom.config.schema import AttentionConfig, Config, IndexConfig, ModelConfig, RopeConfig
from atom.config.spelling import spelled
from atom.errors import ConfigError, UnsupportedError

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
ONLY_MLA: dict[str, Any] = {"ssmax": False, "no_rope_key": True}  # as ONLY_GQA
INDEX_KINDS = {
    "interleaved": "mla",
    "last": "mla",
    "reads": "mla",
    "eps": "mla",
    "local": "gqa",
}  # field of an indexer -> its kind


def derive_attention(config: Config, attention: AttentionConfig, at: str, max_model_len: int) -> AttentionConfig:
    model = config.model
    if not attention.heads:
        raise ConfigError(f"{at}.heads=0: layers have this attention; set 1 at least")
    head_dim = mla_head_dim(attention, at) if attention.kind == "mla" else gqa_head_dim(attention, model.hidden, at)
    check_mqa(attention, at)
    if attention.kind != "mla":
        check_only(ONLY_MLA, attention, at)
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
    check_shared_keys(model, attention, at)
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


def check_shared_keys(model: ModelConfig, attention: AttentionConfig, at: str) -> None:
    """Check that layers which read the KV of another one rotate queries as that one does keys."""
    for layer in layers_of_attention(model, at):
        source = model.kv_layer(layer)
        if source != layer and attention.dense_rope and not attention.full_rope:
            raise UnsupportedError(f"{at}.dense_rope=true is not supported with layers that read the KV of others")
        if attention.has_rope(model.layer_like(layer)) != attention.has_rope(model.layer_like(source)):
            raise ConfigError(f"{at}: layer {layer} reads the KV of layer {source}, and only one of them has a rope")


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
    check_only(ONLY_GQA, attention, at)
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


def check_only(values: Mapping[str, Any], attention: AttentionConfig, at: str) -> None:
    """Check that an attention has none of another kind's fields, which have these values then."""
    for name, value in values.items():
        if getattr(attention, name) != value:
            kind = f"kind {attention.kind}"
            raise UnsupportedError(f"{at}.{name}={spelled(getattr(attention, name))} is not supported for {kind}")


def mla_head_dim(attention: AttentionConfig, at: str) -> int:
    for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
        if getattr(attention, name) is None:
            raise ConfigError(f"{at}.{name} has no value; kind mla needs it")
    check_only(ONLY_GQA, attention, at)
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
    for name, kind in INDEX_KINDS.items():
        if kind != attention.kind and (value := getattr(index, name)) != getattr(IndexConfig, name):
            given = f"{at}.index.{name}={spelled(value)}"
            raise UnsupportedError(f"{given} is for kind {kind}, not for kind {attention.kind}; leave it out")
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
    if attention.q_rank is None and index.reads == "latent":
        latent = "it reads the latent of queries, which have none"
        raise UnsupportedError(f"{at}.index: {latent}; set {at}.q_rank, or {at}.index.reads=hidden")
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

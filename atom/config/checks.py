"""Check fields against their ranges and against each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from atom.config.draft_methods import METHODS, WITH_MODEL
from atom.config.schema import Config, HTTPConfig, PassesConfig, ServeConfig
from atom.config.spelling import did_you_mean, spelled
from atom.devices import find_device, is_built_for_amd
from atom.errors import ConfigError, UnsupportedError
from atom.plugins import PASSES, check_module, naming
from atom.sampling_params import out_of_range

LOOKED_UP = 2, 4  # min and max last tokens that ngram looks up, if none is set


def check(value: Any, at: str = "") -> None:
    """Check every field against its range and its choices."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        check(item, f"{at}.{index}")
    for name, item in value.items() if isinstance(value, dict) else ():
        if is_dataclass(item):
            check(item, f"{at}.{name}")
    for each in fields(value) if is_dataclass(value) else ():
        item, key, limits = getattr(value, each.name), f"{at}.{each.name}".lstrip("."), each.metadata
        check(item, key)
        if "built" in limits and item not in limits["built"]:
            built = [spelled(choice) for choice in limits["built"]]
            if item in limits["later"] or key.startswith("model."):
                raise UnsupportedError(f"{key}={spelled(item)} is not supported (supported: {', '.join(built)})")
            hint = did_you_mean(str(item), built)
            raise ConfigError(f"{key}={item}: there is no such choice{hint}; choices: {', '.join(built)}")
        if "low" in limits and item is not None and (fault := out_of_range(item, limits)):
            raise ConfigError(f"{key}={item} must be {fault}")


def check_passes(passes: PassesConfig) -> None:
    """Check that the modules of users' passes are there, which are imported later."""
    for extra in passes.extra:
        with naming(f"passes.extra: {extra}"):
            check_module(extra.partition("@")[0], PASSES)


def check_device(config: Config, device: str) -> None:
    """Check that torch has the device, and that it has what the level needs."""
    if config.device == "rocm":
        check_rocm(config)
    enforces_eager = config.serve.enforce_eager
    if config.level == 3 and (device == "cpu" or enforces_eager):
        why = "serve.enforce_eager=true" if enforces_eager else f"device={device}"
        raise UnsupportedError(f"level=3 captures CUDA graphs, {why} has none (supported: 0, 1, 2)")


def check_rocm(config: Config) -> None:
    """Check that torch is built for AMD's GPUs, or that a job knows which of them it is about."""
    is_built, is_about = is_built_for_amd(), config.job.kind in ("explain", "plan")
    if not is_about and not is_built:
        raise UnsupportedError("device=rocm: the torch that is installed here is not built for AMD's GPUs")
    if is_about and config.job.gpu is None and not (is_built and find_device() == "cuda"):
        raise ConfigError("device=rocm: there is no such GPU here; name the one to explain, as in job.gpu=mi300x")


def check_http(http: HTTPConfig) -> None:
    """Check what a server is reached by."""
    if http.root_path and not re.fullmatch(r"(/[\w.~-]+)+", http.root_path):
        raise ConfigError(f"serve.http.root_path={http.root_path} is not a path; write it as /llm")
    if http.ssl_keyfile is not None and http.ssl_certfile is None:
        raise ConfigError("serve.http.ssl_keyfile needs serve.http.ssl_certfile; set both")


def check_kept(serve: ServeConfig) -> None:
    """Check that KV which is kept in host memory, or in files, is looked for."""
    if serve.swap_space and not serve.enable_prefix_caching:
        raise ConfigError(
            f"serve.swap_space={serve.swap_space} keeps KV that is found again by its prefix; "
            "leave serve.enable_prefix_caching=false out"
        )
    if serve.kv_cache_dir == "":  # a variable of a script that is not set; the folder would be the current one
        raise ConfigError("serve.kv_cache_dir is empty; name a folder, or leave it out")
    if serve.kv_cache_dir is not None and not serve.swap_space:
        raise ConfigError(
            f"serve.kv_cache_dir={serve.kv_cache_dir} keeps what leaves host memory; set serve.swap_space too"
        )


def check_tune(config: Config, device: str) -> None:
    """Check that there are matmuls to measure."""
    if config.tune and (device == "cpu" or config.level == 0 or config.job.kind in ("explain", "cache")):
        why = "level=0 has no kernels for them" if config.level == 0 else f"job={config.job.kind} opens no model"
        why = f"device={device} has none" if device == "cpu" else why
        raise ConfigError(f"tune=true measures matmuls on a GPU, {why}; leave tune out")
    if config.tune and config.batch_invariant:
        raise ConfigError(
            "tune=true finds tiles by the rows of a step, batch_invariant=true has fixed ones; leave one out"
        )


def check_capture_sizes(serve: ServeConfig) -> None:
    """Check that each size of a CUDA graph is one of a step."""
    for size in serve.cudagraph_capture_sizes or ():
        if not 1 <= size <= serve.max_num_seqs:
            limit = f"from 1 to serve.max_num_seqs={serve.max_num_seqs}"
            raise ConfigError(f"serve.cudagraph_capture_sizes: {size} must be {limit}")


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
    if serve.lora_experts and not any(mlp.kind == "moe" for mlp in config.model.mlps):
        raise ConfigError("serve.lora_experts=true: the model has no experts; leave it out")
    if len(modules) > serve.max_loras:
        held = f"serve.max_loras={serve.max_loras} holds fewer than the {len(modules)} of serve.lora_modules"
        raise ConfigError(f"{held}; set serve.max_loras={len(modules)}")
    for name in map(str, modules):
        if name in config.served_names:
            raise ConfigError(f"serve.lora_modules: {name} is the model's own name; choose another")


def check_sleep(config: Config) -> None:
    """Check that what sleeps is one rank, whose KV can be dropped."""
    serve, sleep_mode = config.serve, "serve.enable_sleep_mode=true"
    if serve.enable_sleep_mode and (num_ranks := config.parallel.num_ranks) > 1:
        raise UnsupportedError(f"{sleep_mode} with {num_ranks} ranks is not supported; leave it out, or use one GPU")
    if serve.enable_sleep_mode and serve.swap_space:
        raise UnsupportedError(f"{sleep_mode} drops KV, and serve.swap_space keeps it: set one of them")


def check_models(serve: ServeConfig) -> None:
    """Check that what is said of models that sleep has an effect."""
    if serve.max_awake is not None and not serve.models:
        raise ConfigError(f"serve.max_awake={serve.max_awake} is of several models; set serve.models, or leave it out")
    if serve.spare_engine and serve.idle_sleep_seconds is None and not serve.models:
        raise ConfigError("serve.spare_engine=true is for models that wake up; set serve.idle_sleep_seconds")
    if (level := serve.idle_sleep_level) is None:
        return
    if not serve.enable_sleep_mode:
        raise ConfigError(f"serve.idle_sleep_level={level} needs serve.enable_sleep_mode=true; set both")
    if serve.idle_sleep_seconds is None and not serve.models:
        raise ConfigError(f"serve.idle_sleep_level={level}: set serve.idle_sleep_seconds, after which the model sleeps")


def check_offload(config: Config, device: str) -> None:
    """Check that weights which stay in host memory are read by a GPU."""
    if (names := config.serve.cpu_offload_params) and device == "cpu":
        given = f"serve.cpu_offload_params=[{','.join(names)}]"
        raise ConfigError(f"{given} is for GPUs: on device=cpu all weights are in host memory; leave it out")


def check_speculation(config: Config) -> None:
    """Check that drafts can be verified, and looked up."""
    serve = config.serve
    if serve.draft_model is None and serve.method in WITH_MODEL:
        raise ConfigError(f"serve.method={serve.method} drafts with another checkpoint; name it in serve.draft_model")
    if serve.draft_model is not None and serve.method not in WITH_MODEL:
        choices = " or ".join(f"serve.method={method}" for method in WITH_MODEL)
        why = "drafts nothing by itself" if serve.method is None else f"is not read by serve.method={serve.method}"
        raise ConfigError(f"serve.draft_model={serve.draft_model} {why}; set {choices}")
    if serve.acceptance_length is not None:
        given, drafts = f"serve.acceptance_length={serve.acceptance_length:g}", serve.draft_method
        if drafts is None or not config.load_dummy:
            raise ConfigError(f"{given} accepts drafts by chance, to measure; set serve.method and load_dummy=true")
        if drafts.reads_answers:
            raise ConfigError(f"{given} accepts drafts of a runner; serve.method={serve.method} has the host draft")
        if serve.acceptance_length > 1 + (serve.num_speculative_tokens or drafts.num_tokens):
            raise ConfigError(f"{given} is more than a step's token and its drafts; raise serve.num_speculative_tokens")
    for name in ("num_speculative_tokens", "max_verified_tokens"):
        if serve.method is None and (number := getattr(serve, name)) is not None:
            raise ConfigError(f"serve.{name}={number} drafts nothing by itself; set serve.method, or leave it out")
    for method, name in [(method, name) for method, each in METHODS.items() for name in each.options]:
        if serve.method != method and (number := getattr(serve, name)) is not None:
            raise ConfigError(f"serve.{name}={number} is read only by serve.method={method}; set that, or leave it out")
    min_tokens, max_tokens = serve.prompt_lookup_min, serve.prompt_lookup_max
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise ConfigError(
            f"serve.prompt_lookup_min={min_tokens} is more than serve.prompt_lookup_max={max_tokens}; raise that"
        )

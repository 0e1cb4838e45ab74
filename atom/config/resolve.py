"""Resolve auto and null to final values, and check them.

config = derive(config)
config.dtype, config.model.attention.scale       # no longer auto, no longer None
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atom.config.aliases import respell
from atom.config.check_parallel import check_parallel, check_replicas
from atom.config.checks import (
    LOOKED_UP,
    check,
    check_capture_sizes,
    check_device,
    check_http,
    check_kept,
    check_lora,
    check_models,
    check_offload,
    check_passes,
    check_sleep,
    check_speculation,
    check_tune,
    has_lora,
)
from atom.config.parallel import derive_parallel
from atom.config.resolve_model import derive_model
from atom.config.resolve_quant import derive_quant
from atom.config.schema import Config
from atom.config.taps import check_taps
from atom.config.vision import choose_images, derive_vision
from atom.devices import find_device
from atom.dtypes import BY_NAME
from atom.errors import ConfigError


def derive(config: Config, names: Collection[str] = ()) -> Config:
    """Replace auto and null by final values, and check all. Nothing is assigned later.

    names: of a quantized checkpoint's tensors, if they are known.
    """
    config = with_pooler(respell(config))
    check(config)
    model, serve, drafts = config.model, config.serve, config.serve.draft_method
    max_model_len = serve.max_model_len or model.max_position
    if max_model_len > model.max_position:
        limit = f"the {model.max_position} tokens of context that the model was made for"
        raise ConfigError(f"serve.max_model_len={max_model_len} is more than {limit}")
    dtype = stored_dtype(config.hf) if config.dtype == "auto" else config.dtype
    device = find_device() if config.device == "auto" else "cuda" if config.device == "rocm" else config.device
    check_device(config, device)
    check_http(serve.http)
    check_kept(serve)
    check_tune(config, device)
    check_capture_sizes(serve)
    derived = derive_model(config, max_model_len, names)
    check_passes(config.passes)
    check_parallel(config, derived, device)
    check_lora(config)
    check_taps(config, derived)
    check_offload(config, device)
    check_sleep(config)
    check_models(serve)
    check_speculation(config)
    check_replicas(config)
    images = choose_images(config)
    return replace(
        config,
        model=replace(derived, vision=derive_vision(config)) if images else derived,
        passes=replace(config.passes, steer={str(name): path for name, path in (config.passes.steer or {}).items()}),
        parallel=derive_parallel(config, derived),
        quant=derive_quant(config, derived),
        serve=replace(
            serve,
            kv_cache_dtype=dtype if serve.kv_cache_dtype == "auto" else serve.kv_cache_dtype,
            max_model_len=max_model_len,
            enable_lora=has_lora(serve),
            images=images,
            lora_modules={str(name): path for name, path in (serve.lora_modules or {}).items()},
            num_speculative_tokens=drafts and (serve.num_speculative_tokens or drafts.num_tokens),
            prompt_lookup_min=serve.prompt_lookup_min or min(LOOKED_UP[0], serve.prompt_lookup_max or LOOKED_UP[0]),
            prompt_lookup_max=serve.prompt_lookup_max or max(LOOKED_UP[1], serve.prompt_lookup_min or LOOKED_UP[1]),
        ),
        dtype=dtype,
        device=device,
        cache=cache_folder(config.cache),
    )


def cache_folder(folder: str | None) -> str:
    """The cache folder; ConfigError if it would be in the home of a user that has none."""
    try:
        return str(Path(folder or "~/.cache/atom-run").expanduser())
    except RuntimeError:
        raise ConfigError("the cache folder is ~/.cache/atom-run, and this user has no home; set cache=") from None


def with_pooler(config: Config) -> Config:
    """Take the pooling from sentence-transformers' files, if the configuration leaves it to them."""
    pooler, stored = config.serve.pooler_config, config.hf.get("sentence_transformers") or {}
    kind = stored.get("pooling") if pooler.pooling_type == "auto" else pooler.pooling_type
    if config.classifies:
        if kind not in (None, "LAST"):
            raise ConfigError(
                f"serve.pooler_config.pooling_type={kind}: labels are scored by the last token; leave it out"
            )
        kind = "LAST"
    normalize = stored.get("normalize", True) if pooler.normalize is None else pooler.normalize
    made = replace(pooler, pooling_type=kind, normalize=normalize)
    return replace(config, serve=replace(config.serve, pooler_config=made))


def stored_dtype(hf: Mapping[str, Any]) -> str:
    """The dtype of config.json; bf16 if it has none."""
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in BY_NAME:
        raise ConfigError(f"dtype=auto: the checkpoint says {dtype}; choose dtype=bf16, fp16 or fp32")
    return BY_NAME[dtype]

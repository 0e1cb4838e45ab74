"""Resolve the formats of weights: those stored, and those packed while they load."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from atom.checkpoint import DRAFT_PREFIX, quantization
from atom.checkpoint.modules import check_pattern, find_packed, find_plain, format_of, matches
from atom.checkpoint.quantization import Quantization
from atom.checkpoint.typed_config import KEY
from atom.config.schema import Config, ModelConfig, QuantConfig
from atom.config.spelling import did_you_mean
from atom.config.stored_names import expert_names, find_modules, modules_of
from atom.dtypes import FORMATS, GGUF_FORMATS, ONLINE
from atom.errors import CheckpointError, ConfigError, UnsupportedError

BUDGET = "budget"  # quant.fmt: formats by module that are measured, see atom.assemble.format_budget
MODELOPT_FP4 = "modelopt_fp4"  # vLLM's name for modelopt's NVFP4


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
    packed = find_packed(names, of, read.unread)
    plain = list(dict.fromkeys([*read.plain, *find_plain(names, packed), *plain]))
    matrices = find_modules(
        config.model, packed, "embedding", "head", "router", "mtp_embedding_proj", "mtp_hidden_proj"
    )
    named = {module: format_of(module, fmt, plain, formats) for module in sorted(matrices)}
    return replace(read, fmt=fmt, plain=plain, formats=formats | {module: own for module, own in named.items() if own})


def derive_quant(config: Config, model: ModelConfig) -> QuantConfig:
    """Derive the formats, with their blocks, to which weights are packed while they load."""
    quant = derive_method(config)
    modules = modules_of(model)
    if config.draft is not None:
        of_draft = modules_of(config.draft)
        modules |= of_draft | {DRAFT_PREFIX + module for module in of_draft}
    for pattern in quant.plain:
        check_pattern(pattern, "quant.plain", ConfigError)
        if not any(matches(module, pattern) for module in modules):
            raise ConfigError(f"quant.plain: the model has no module {pattern}; mend it, or leave it out")
    own = derive_own_formats(quant, modules)
    choices = derive_budget(quant)
    if quant.experts is not None and not any(mlp.kind == "moe" for mlp in model.mlps):
        raise ConfigError(f"quant.experts={quant.experts}: the model has no experts; leave it out")
    chosen = {"quant.fmt": quant.fmt or "none", "quant.experts": quant.experts, "quant.head": quant.head}
    words = {"quant.fmt": ("auto", "none", BUDGET), "quant.experts": ("plain",), "quant.head": ("plain",)}
    fmt, experts, head = (each and online_format(key, each, words[key]) for key, each in chosen.items())
    packed = [key for key, each in chosen.items() if each and each not in ("auto", "none", "plain")]
    chosen |= {f"quant.formats.{pattern}": each for pattern, each in own.items() if each != "plain"}
    packed += [key for key in chosen if key.startswith("quant.formats.")][:1]
    formats = {each for each in (model.fmt, *model.formats.values()) if each}
    stored = {each.partition("[")[0] for each in formats}
    is_named = len(stored) == 1 and fmt == ONLINE.get(*stored)  # quant=fp8 names fp8 of any block
    if packed == ["quant.fmt"] and (is_named or formats == {fmt}):
        fmt, packed = "auto", []  # the checkpoint has what is asked for
    if packed and stored - {*GGUF_FORMATS.values()}:  # GGUF's blocks are unpacked, and packed anew
        has = f"the checkpoint's weights are packed already, as {model.fmt or next(iter(model.formats.values()))}"
        raise ConfigError(f"{packed[0]}={chosen[packed[0]]}: {has}; leave it out, or quant=none unpacks them")
    kinds = {each.partition("[")[0] for each in (fmt, experts, head, *own.values(), *choices) if each}
    if quant.calibration not in ("auto", "none") and not kinds & {*ONLINE}:
        why = "no weight is packed while it loads, as quant=int4 does"
        raise ConfigError(f"quant.calibration={quant.calibration}: {why}; leave it out")
    return replace(
        quant, fmt=fmt, experts=experts, head=head or "plain", formats=own, choices=choices or quant.choices, kv="auto"
    )


def derive_own_formats(quant: QuantConfig, modules: Collection[str]) -> dict[str, str]:
    """The formats of single modules, with their blocks. ConfigError for an unknown one, or a pattern of no module."""
    for pattern in quant.formats:
        check_pattern(pattern, "quant.formats", ConfigError)
        if pattern not in modules and not any(matches(module, pattern) for module in modules):
            raise ConfigError(f"quant.formats: the model has no module {pattern}; mend it, or leave it out")
    return {
        pattern: online_format(f"quant.formats.{pattern}", fmt, ("plain",)) for pattern, fmt in quant.formats.items()
    }


def derive_budget(quant: QuantConfig) -> list[str]:
    """The formats that quant=budget chooses among, with their blocks; none without it. ConfigError for a field that
    misses or does nothing."""
    if quant.fmt != BUDGET:
        if quant.max_kl is not None:
            raise ConfigError(f"quant.max_kl={quant.max_kl} is the budget of quant=budget; write that, or leave it out")
        return []
    if quant.max_kl is None:
        raise ConfigError("quant.fmt=budget has no budget; write quant=budget, or set quant.max_kl")
    for name in ("experts", "formats"):
        if value := getattr(quant, name):
            raise ConfigError(f"quant.{name}={value}: quant=budget chooses the formats; leave one of them out")
    if not quant.choices:
        raise ConfigError("quant.choices=[] leaves nothing to choose; name formats, as in quant.choices=[int4,int8]")
    return [online_format("quant.choices", each, ()) for each in dict.fromkeys(quant.choices)]


def derive_method(config: Config) -> QuantConfig:
    """Hold quant.method against the checkpoint's quant_method; of plain weights it is the format to pack them to."""
    quant, method = config.quant, config.quant.method
    if method is None:
        return quant
    known = list(dict.fromkeys((*quantization.READERS, MODELOPT_FP4, *ONLINE)))
    if method not in known:
        hint = f"there is no such choice{did_you_mean(method, known)}; choices: {', '.join(known)}"
        raise ConfigError(f"quant.method={method}: {hint}")
    stored_config = config.hf.get(KEY) or {}
    stored = stored_config.get("quant_method") if isinstance(stored_config, dict) else None
    if stored == "modelopt" and method == MODELOPT_FP4 and (algo := stored_config.get("quant_algo")) != "NVFP4":
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


def online_format(key: str, value: str, words: Collection[str]) -> str:
    """The format that a value of `quant` means."""
    fmt = ONLINE.get(value, value)
    if value in words or (is_format(fmt) and fmt.partition("[")[0] in ONLINE):
        return fmt
    choices = f"{', '.join((*words, *ONLINE))}, also with a block, as in fp8[64, 128] or int4[1, 32]"
    raise ConfigError(f"{key}={value}: there is no such choice{did_you_mean(value, ONLINE)}; choices: {choices}")


def unknown_format(key: str, fmt: str) -> ConfigError:
    choices = f"auto, none, {', '.join(FORMATS)}, also with a block, as in fp8[128, 128] or int4[1, *]"
    return ConfigError(f"{key}={fmt}: there is no such format{did_you_mean(fmt, FORMATS)}; choices: {choices}")


def is_format(fmt: str) -> bool:
    """Whether `atom.graph.formats.parse_format` takes it."""
    match = re.fullmatch(r"(\w+)(?:\[(?:[1-9]\d*|\*), (?:[1-9]\d*|\*)\])?", fmt, re.ASCII)
    return match is not None and match[1] in FORMATS

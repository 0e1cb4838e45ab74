"""Match modules by name: with patterns, and with the tensors of a file.

matches("model.layers.0.mlp.gate_proj", "re:.*gate_proj$")
packed = find_packed(names, ["gptq_int4[1, 128]"], unread=["*.g_idx"])      # of a file with tensors of these names
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from typing import Any

from atom.dtypes import FORMATS


def matches(module: str, pattern: str) -> bool:
    """Whether a pattern of quantization_config is of a module.

    It is the name of the module or of an outer one, with wildcards, or `re:` and a regular expression.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}." or fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*")


def module_of(name: str) -> str:
    """The module of a weight, by the name that a role has; of experts the first, since all are alike."""
    return name.removesuffix(".weight").replace("{expert}", "0")


def format_of(module: str, fmt: str | None, plain: Collection[str], formats: Mapping[str, str]) -> str | None:
    """The stored format of a module's weight, None for a plain one."""
    if any(matches(module, pattern) for pattern in plain):
        return None
    return next((own for pattern, own in formats.items() if matches(module, pattern)), fmt)


def check_pattern(pattern: Any, at: str, error: type[Exception]) -> None:
    """Raise the error if a pattern is no string, or what follows `re:` no regular expression."""
    if not isinstance(pattern, str):
        raise error(f"{at}: {json.dumps(pattern)} is not a string; mend it")
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except (re.error, RecursionError, OverflowError) as fault:
        raise error(f"{at}: {pattern} is not a regular expression ({fault}); mend it") from None


def generalize(module: str) -> str:
    """A regular expression of the modules of this name in all layers."""
    return re.sub("[0-9]+", "[0-9]+", re.escape(module))


READS_MORE = ("vision_config", "vit_config", "img_processor", "audio_config", "sound_config")


def reads_more(config: Mapping[str, Any]) -> bool:
    """Whether a model also reads images or sound, by its config.json."""
    return any(config.get(key) is not None for key in READS_MORE)


LANGUAGE_MODEL = re.compile(r"\.?language_model$|(?:language_model|thinker)(?:\\\.|\[\.\]|\.(?![*+?{]))?")


def text_pattern(pattern: str) -> str:
    """A pattern of a model that also reads images, for the names that its text model has by itself.

    `model.language_model.layers.*.mlp` becomes `model.layers.*.mlp`, and so does a regular expression.
    """
    return LANGUAGE_MODEL.sub("", pattern) or "model"


def find_packed(names: Collection[str], formats: Collection[str], unread: Collection[str]) -> set[str]:
    """The modules of a file that have scales, or other parts of these formats.

    Experts that are stored as one tensor are one module.

    unread: patterns of other tensors.
    """
    parts = [part for fmt in formats for part in FORMATS[fmt.partition("[")[0]].parts.values()]
    suffixes = {part.suffix for part in parts} - {""}
    packed = set()
    for name, suffix in ((name, suffix) for name in names for suffix in suffixes if name.endswith(suffix)):
        stem = name.removesuffix(suffix)
        if suffix.startswith(".") or stem.endswith(".weight") or not any(fnmatch(name, each) for each in unread):
            packed.add(stem.removesuffix(".weight"))
    return packed


def find_plain(names: Collection[str], packed: Collection[str]) -> list[str]:
    """Patterns of the modules of a file that have a weight and are not packed.

    Layers that predict further tokens, for one, are plain in many a checkpoint that does not say so.
    """
    if not packed:
        return []
    plain = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}.difference(packed)
    mixed = {generalize(module) for module in packed}
    patterns = {module if generalize(module) in mixed else f"re:{generalize(module)}$" for module in plain}
    return sorted(patterns)


def find_kv_scales(names: Collection[str], weights: Mapping[str, str]) -> dict[str, str]:
    """The roles k_scale and v_scale, of keys and values in fp8, by what a file of these tensors calls them; {} if it
    has neither. If it has only one, the other gets the usual name, which is then found missing.

    weights: the names of other roles. A scale is the attention's own (compressed-tensors), the projection's (modelopt),
    its output's (Quark), or one for both. Latent attention's are named alike, as if it had projections of keys and
    values; that of the keys is the latents'.
    """
    stored = {re.sub("[0-9]+", "{layer}", name) for name in names if name.endswith("_scale")}
    found, usual = dict[str, str](), dict[str, str]()
    for role in ("k", "v"):
        module = weights.get(role) or weights.get("kv_b", "").replace("kv_b", role)
        attention, scale = module.rpartition(".")[0], f"{role}_scale"
        usual[scale] = f"{attention}.{scale}"
        for name in (usual[scale], f"{module}.{scale}", f"{module}.output_scale", f"{attention}.kv_scale"):
            if re.sub("[0-9]+", "{layer}", name) in stored:
                found.setdefault(scale, name)
    return usual | found if found else {}

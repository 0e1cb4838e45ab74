"""Write ROCm/ATOM's --online_quant_config as overrides of `quant`.

write_online_quant('{"global_quant_config": "ptpc_fp8", "exclude_layer": "*expert*"}')
# ["quant.fmt='fp8'", "quant.plain=['*expert*']"]
"""

from __future__ import annotations

from typing import Any

from atom.config.spelling import did_you_mean, override
from atom.config.typed_json import read_object
from atom.errors import ConfigError

FLAG = "--online-quant-config"
FORMATS = {"ptpc_fp8": "fp8", "mxfp4": "mxfp4"}  # ROCm/ATOM's name -> ours; with fp8 weights activations are, too
FIELDS = ("global_quant_config", "layer_quant_config", "exclude_layer")
UNPACKED = ("lm_head", "model.embed_tokens", "embed_tokens")  # which quant.fmt leaves plain


def write_online_quant(text: str) -> list[str]:
    """The overrides of a JSON object: the format of linears, that of experts and of the head, and what stays plain."""
    given = read_object(f"{FLAG}={text}", text)
    for name in given:
        if name not in FIELDS:
            raise ConfigError(f"{FLAG}: there is no {name}{did_you_mean(name, FIELDS)} (known: {', '.join(FIELDS)})")
    excluded = given.get("exclude_layer") or []
    plain = [name for name in ([excluded] if isinstance(excluded, str) else excluded) if name not in UNPACKED]
    texts = [override("quant.fmt", format_of(given["global_quant_config"]))] if "global_quant_config" in given else []
    for pattern, name in (given.get("layer_quant_config") or {}).items():
        texts.append(override(field_of(str(pattern)), format_of(name)))
    return [*texts, *([override("quant.plain", plain)] if plain else [])]


def format_of(name: Any) -> str:
    if name not in FORMATS:
        raise ConfigError(f"{FLAG}: there is no format {name} (supported: {', '.join(FORMATS)})")
    return FORMATS[name]


def field_of(pattern: str) -> str:
    """The field for the layers of a pattern: experts and the head have one each."""
    if "expert" in pattern:
        return "quant.experts"
    if "lm_head" in pattern:
        return "quant.head"
    fix = "--set quant.plain=[…] names what stays plain, and --set quant.experts=… is of experts"
    raise ConfigError(f"{FLAG}: {pattern} has a format of its own, which only experts and lm_head can have; {fix}")

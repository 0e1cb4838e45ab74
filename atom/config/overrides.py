"""Rewrite users' overrides into Hydra's grammar.

    rewrite(["prompts=What is 2+2?"])               # ["prompts='What is 2+2?'"]
    rewrite(["recipe=smollm2_greedy", "seed=1"])    # the recipe's overrides, then "seed=1"; +recipe= is the same

One set of rules serves the command line, each job of a sweep, and keyword arguments. It knows keys, not types.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from atom.config.bounded_yaml import MAX_DEPTH
from atom.config.folders import CONF, check_config_dirs
from atom.config.recipes import format_recipe, read_recipe
from atom.config.schema import Config
from atom.config.schema_keys import blocks, types_of
from atom.config.shorthand import as_overrides
from atom.config.spelling import ALIASES, HIDDEN, is_secret, override, spell
from atom.config.typed_json import parse_values
from atom.errors import ConfigError, one_line

LISTS_OF_TEXT = ("prompts", "images", "sampling.stop_strings", "sampling.bad_words", "serve.models", "job.texts",
                 "job.tasks")  # fmt: skip
JOB_TEXTS = ("job.gpu", "job.graph", "job.save_recipe", "job.save_tokenizer", "job.output_file", "job.entry",
             "job.prune", "job.export", "job.import_from", "job.dataset_path", "job.trace", "job.a", "job.b",
             "job.reference")  # fmt: skip
SECRET = "serve.http.api_keys"
FORMAT_TEXTS = ("quant.fmt", "quant.experts", "quant.head")
HTTP_TEXTS = ("serve.http.root_path", "serve.http.ssl_certfile", "serve.http.ssl_keyfile")
BYTES = (
    "serve.kv_cache_memory", "serve.swap_space", "serve.kv_cache_dir_bytes", "serve.http.response_store_bytes",
)  # fmt: skip
UNITS = {
    **{"MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    **{"M": 1 << 20, "G": 1 << 30, "T": 1 << 40},  # as vLLM reads capitals
}
MAX_NAME = 250  # characters of a file's, without its ending
MAX_ITEMS = 4096  # of an override; Hydra parses as many in a second or two, and four times as many in half a minute
JSON = re.compile(
    r'\s*(?:\{\s*"|\[(?!.*\$\{))', re.DOTALL
)  # what may be JSON: an object, or a list without interpolations
QUOTED = re.compile(r"'(?:\\.|[^'\\])*(?:'|\Z)|\"(?:\\.|[^\"\\])*(?:\"|\Z)", re.DOTALL)
TEXTS = (*LISTS_OF_TEXT, *FORMAT_TEXTS, "checkpoint", "revision", "cache", "recipe", "serve.torch_profiler_dir",
         "serve.kv_cache_dir",
         "parallel.address", "parallel.key_file", "parallel.host", SECRET, *HTTP_TEXTS, *JOB_TEXTS)  # fmt: skip


def rewrite(overrides: Iterable[str], *, config_dirs: Sequence[str] = (), multirun: bool = False) -> list[str]:
    """Rewrite overrides in Hydra's grammar, with recipes opened in their order and put before the rest.

    A value is plain text unless it is quoted, a list or, with `multirun`, the choices of a sweep. An object or a list
    may be JSON. ConfigError for what is no override, no recipe or no config dir.
    """
    check_config_dirs(config_dirs)
    result: list[str] = []
    recipes: list[str] = []
    written: dict[str, str] = {}  # field -> as it is spelled here
    overrides = list(overrides)
    for text in overrides:
        match = re.fullmatch(r"([+~]{0,2})([^=\s]+)(?:=(.*))?", text, re.DOTALL)
        if not match or (match[3] is None and match[1] != "~"):
            meant = as_overrides([each for each in overrides if "=" not in each])
            is_clear = meant != [] and all("=" in each for each in meant)
            write = " ".join(meant) if is_clear else "key=value; atom-run --help lists the keys"
            raise ConfigError(f"'{text}' is not an override; write {write}")
        sign, key, value = match[1], ALIASES.get(match[2], match[2]), match[3]
        if (other := written.setdefault(key, match[2])) != match[2]:
            raise same_option(other, match[2])
        if key == "model" and value and value[0] in "~/.":
            raise no_model(value)
        if value is not None and key not in TEXTS and JSON.match(value):
            value = respell(key, value)
        if value is not None and not sign and key in mappings():
            sign = "++"  # Hydra adds no key to a mapping without it
        if value is not None and is_group(key):
            check_choice(key, value)
        if key == "parallel" and value and (sizes := ranks_of(value)):
            result += sizes
            continue
        if key in BYTES and value is not None:
            value = re.sub(
                r"(?<![\w.])(\d{0,30}\.?\d{1,30})([MGT](?:i?B)?)\b",
                lambda at: str(round(float(at[1]) * UNITS[at[2]])),
                value,
            )
        if key in TEXTS and value is not None:
            value = quote(key, value, multirun)
        if key == "recipe" and value is not None and not (parsed := parse(f"{key}={value}")).is_sweep_override():
            opened = read_recipe(plain(parsed), config_dirs).overrides
            if multirun and not any(is_for_sweep(text) for text in opened):
                result.append(f"{key}={value}")  # each job opens it
            else:
                recipes += opened
        else:
            result.append(f"{sign}{key}" if value is None else f"{sign}{key}={value}")
    return [*rewrite(recipes), *result] if recipes else result


@functools.cache
def mappings() -> frozenset[str]:
    """The fields that are mappings with keys of their own."""
    return frozenset(
        f"{at}{name}"
        for at, block in blocks(Config)
        for name, kind in types_of(block).items()
        if get_origin(kind) is dict
    )


def is_group(key: str) -> bool:
    """Whether a key chooses a file of a group, of conf/ or of Hydra's own."""
    name = key.partition("@")[0]
    return "/" in name or (name.isidentifier() and (CONF / name).is_dir())


def check_choice(key: str, value: str) -> None:
    """Raise ConfigError if Hydra would raise another error for what is chosen of a group."""
    parsed = parse(f"{key}={value}")
    choice = "" if parsed.is_sweep_override() else parsed.value()
    names = choice if isinstance(choice, list) else [choice]
    is_name = all(isinstance(each, str) and len(each) <= MAX_NAME for each in names)
    if not is_name and not isinstance(choice, dict):
        raise ConfigError(f"{key}={value:.80}: it takes the name of a file; leave it out for its default")


def ranks_of(name: str) -> list[str]:
    """The overrides of a parallel layout without a file, as tp3, tp8_ep4, tp2_pp2 or dp2_tp2; empty for others."""
    parts = name.split("_")
    known = re.compile(r"(dp|tp|pp|ep)[1-9]\d{0,5}|ep")
    sizes = {part[:2]: int(part[2:] or 0) for part in parts if known.fullmatch(part)}
    if len(sizes) < len(parts) or sizes.keys() == {"ep"} or (CONF / "parallel" / f"{name}.yaml").is_file():
        return []
    num, tensor, stages = (sizes.get(each, 1) for each in ("dp", "tp", "pp"))
    if "ep" in sizes:  # groups that share experts are of one engine
        found = {"tensor": tensor, "data": num, "experts": sizes["ep"] or num * tensor, "pipeline": stages}
    else:
        found = {"tensor": tensor, "pipeline": stages, "replicas": num}
    return [f"parallel.{field}={size}" for field, size in found.items() if size > 1] or ["parallel.tensor=1"]


def no_model(name: str) -> ConfigError:
    return ConfigError(f"model={name}: model is the name of a file in conf/model; write checkpoint={name}")


def same_option(name: str, other: str) -> ConfigError:
    return ConfigError(f"{name} and {other} are the same option; give one")


def is_for_sweep(text: str) -> bool:
    """Whether an override is one of Hydra's, or has choices."""
    parsed = parse(text)
    return bool(parsed.is_sweep_override() or parsed.is_hydra_override())


def quote(key: str, value: str, multirun: bool) -> str:
    """Quote a value for Hydra's grammar."""
    text = value.strip()
    if text.lower() in ("", "null"):
        return text
    result = spell(value)
    if key in LISTS_OF_TEXT and text[0] in '["':
        with suppress(ValueError, RecursionError):
            text = result = spell(json.loads(text))
    is_interpolation = "${" in text and key not in LISTS_OF_TEXT
    if (text[0] in "'\"[" or multirun or is_interpolation) and is_value(key, text, multirun):
        result = text
    return f"[{result}]" if key in LISTS_OF_TEXT[1:] and result[0] in "'\"" else result


def respell(key: str, value: str) -> str:
    """JSON in Hydra's grammar, as `k={"a": false}`, also several choices of a sweep; another text as it is."""
    check_size(key, value)
    try:
        return ",".join(map(spell, parse_values(key, value)))
    except ValueError:
        return value
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from None


def is_value(key: str, text: str, multirun: bool) -> bool:
    """Whether Hydra's grammar takes the text as a value or, with `multirun`, as a sweep."""
    check_size(key, text)
    try:
        parsed = parse(f"{key}={text}")
    except ConfigError:
        return False
    return multirun or not parsed.is_sweep_override()


@functools.lru_cache(1024)
def parse(text: str) -> Override:
    """Parse an override as Hydra does, whose parser takes the square of the items' number, and recurses."""
    key = text.partition("=")[0]
    check_size(key, text)
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        hint = f"quote the value: {key}=\"'…'\""
        raise ConfigError(f"'{text}' is not an override ({one_line(error)}); {hint}") from None
    except ValueError:  # of int
        raise ConfigError(f"{key}: a number has more digits than any field takes; quote it if it is a text") from None


def check_size(key: str, text: str) -> None:
    """Raise ConfigError for more items than Hydra parses in a second, and for nesting that no value has."""
    unquoted = QUOTED.sub("", text)
    if unquoted.count(",") >= MAX_ITEMS:
        file = "; prompts=@FILE takes any number" if key.endswith("prompts") else ""
        raise ConfigError(f"{key}: there are more than {MAX_ITEMS:,} items{file}")
    depth = 0
    for bracket in re.findall(r"[\[\](){}]", unquoted):
        depth += 1 if bracket in "[({" else -1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{key}: it is nested deeper than {MAX_DEPTH}")


def plain(parsed: Override) -> Any:
    """The value of an override, interpolations resolved."""
    values: Any = OmegaConf.to_container(OmegaConf.create({"value": parsed.value()}), resolve=True)
    return values["value"]


def write_recipe(path: str, overrides: Iterable[str], about: Mapping[str, Any]) -> bool:
    """Write a recipe of these overrides. Whether API keys were among them, which a recipe does not hold."""
    own = [text for text in overrides if not text.startswith("job.save_recipe=")]
    kept = [text for text in own if not has_secret(text)]
    try:
        Path(path).expanduser().write_text(format_recipe(kept, about), "utf-8")
    except OSError as error:
        raise ConfigError(f"job.save_recipe={path} cannot be written: {error.strerror}") from None
    return len(kept) < len(own)


def has_secret(text: str) -> bool:
    """Whether an override, in Hydra's grammar, sets API keys themselves and not a file of them."""
    if "api_keys" not in text:
        return False
    parsed = parse(text)
    key, value = parsed.key_or_group, parsed.value()
    if not parsed.is_sweep_override() and SECRET.startswith(f"{key}."):
        for part in SECRET.removeprefix(f"{key}.").split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        key = SECRET
    return key == SECRET and (parsed.is_sweep_override() or is_secret(value))


def hide_secret(text: str) -> str:
    """An override as it may be shown."""
    return override(SECRET, HIDDEN) if has_secret(text) else text

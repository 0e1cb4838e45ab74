"""Write Python values as overrides in Hydra's grammar.

    override("prompts", ["a, b", "c"])              # "prompts=['a, b','c']"
    spelled(None), spelled(True)                    # "null", "true"

It imports no Hydra: flags and recipes are written where nothing is composed.
"""

from __future__ import annotations

import difflib
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from atom.errors import ConfigError

ALIASES = {  # other spellings of a field, that are taken
    "serve.kv_cache_block_size": "serve.block_size",
    "serve.tensor_parallel_size": "parallel.tensor",
    "serve.pipeline_parallel_size": "parallel.pipeline",
    "serve.data_parallel_size": "parallel.replicas",
    "job.import": "job.import_from",
}
MOVED = {  # former names of fields and blocks, which errors answer with the present one
    **{f"serve.http.{name}": f"advanced.{name}" for name in ("max_values", "max_items", "max_header")},
    **{f"serve.http.{name}_seconds": f"advanced.{name}_seconds" for name in ("read", "write", "comment", "heartbeat")},
    **{f"serve.http.{name}": f"advanced.{name}" for name in ("notify_socket", "listen_fds", "listen_pid")},
    "parallel.torchrun": "advanced.torchrun",
    "model.attention.layer_types": "model.layer_types",
    "model.attention.full_every": "model.layer_pattern",
}
HIDDEN = "***"  # shown in place of a secret


def override(key: str, value: Any) -> str:
    """The override that sets `key` to a Python value: text, path, number, bool, None, lists and dicts of them."""
    try:
        return f"{key}={spell(value)}"
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from None


def spell(value: Any) -> str:
    """A Python value in Hydra's grammar."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str() | os.PathLike():
            # a backslash keeps OmegaConf from reading ${ as an interpolation; those before it are doubled
            text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(os.fspath(value)))
            text = re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", "\\'")
            return f"'{text}'"
        case numbers.Integral():
            return str(int(value))
        case numbers.Real():
            return repr(float(value))
        case Mapping():
            return "{" + ",".join(f"{spell_key(key)}:{spell(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(spell, value)) + "]"
    if str(value).startswith("torch."):  # a dtype: torch is not imported to find out
        return spell(str(value).removeprefix("torch."))
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as an override")


TYPED = re.compile(r"true|false|null|[+-]?(?:nan|inf|[\d_.]+(?:e[+-]?[\d_]+)?)", re.IGNORECASE)  # of Hydra: no texts


def spell_key(key: Any) -> str:
    """A key of a dict, which Hydra's grammar cannot quote."""
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    if (
        isinstance(key, str)
        and re.fullmatch(r"[\w/+.$%*@?|()\[\]{}:=, \t\\-]+", key, re.ASCII)
        and not TYPED.fullmatch(key)
    ):
        return re.sub(r"([()\[\]{}:=, \t\\])", r"\\\1", key)
    raise TypeError(f"the key {key!r} cannot be written as an override: only whole numbers, names and patterns can")


def spelled(value: Any) -> str:
    """A value as users write it."""
    return "null" if value is None else str(value).lower()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error's message: the known name that may be meant."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def is_secret(value: Any) -> bool:
    """Whether this value of serve.http.api_keys must not be shown: it is the keys themselves, and no file of them."""
    return value is not None and not str(value).startswith("@")

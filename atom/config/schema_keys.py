"""Look up fields of the schema by dotted key: type, jobs, block.

keys(Config)                             # ("model.name", …, "serve.block_size", …)
jobs_of("job.stage")                     # Jobs(names=("explain",), implied="explain")
*_, field = fields_along("serve.http.port")
for at, block in blocks(Config): …       # "serve.http.", HTTPConfig
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from atom.config.schema import SET_BY_LOAD, Config, Jobs

ENTRIES = {list: ".0", dict: ".NAME"}  # what stands for an entry in a key
SCALARS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}  # in words


def types_of(kind: Any) -> Mapping[str, Any]:
    """The type of each field of a block, read from its text once."""
    return _types_of(kind)  # to mypy, the class of a dataclass cannot be hashed


@functools.cache
def _types_of(kind: Any) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(kind))


def fields_along(key: str) -> Iterator[Field[Any]]:
    """The fields along a dotted key, the field itself last, as far as they exist."""
    kind: Any = Config
    for name in key.split("."):
        config_field = next((each for each in fields(kind) if each.name == name), None) if is_dataclass(kind) else None
        if config_field is None:
            return
        yield config_field
        kind = types_of(kind)[name]


def jobs_of(key: str) -> Jobs | None:
    """The jobs that a key is for, a field's own before its block's; None: for all jobs, or it does not exist."""
    found = [each.metadata["jobs"] for each in fields_along(key) if "jobs" in each.metadata]
    return found[-1] if found else None


@functools.cache
def keys(kind: Any) -> tuple[str, ...]:
    """Every dotted key of a schema; an entry of a list has the number 0, one of a mapping the name NAME."""
    return tuple(
        f"{at}{name}"
        for at, block in blocks(kind)
        for name, each in types_of(block).items()
        if block_of(each) is None or f"{at}{name}" in SET_BY_LOAD
    )


def blocks(kind: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every block of a schema, itself first: the beginning of its keys, its class."""
    yield at, kind
    for name, each in types_of(kind).items():
        key, inner = f"{at}{name}", block_of(each)
        if inner is not None and key not in SET_BY_LOAD:
            yield from blocks(inner, f"{key}{ENTRIES.get(get_origin(each), '')}.")


def inner_blocks(kind: Any, at: str = "") -> Iterator[tuple[str, Any, bool]]:
    """The blocks of a schema that may be null or are entries of a list: key, class, whether in a list."""
    for name, each in types_of(kind).items():
        inner = block_of(each)
        if inner is not None and get_origin(each) is not dict:
            if inner is not each:
                yield f"{at}{name}", inner, get_origin(each) is list
            yield from inner_blocks(inner, f"{at}{name}.")


def block_of(kind: Any) -> Any:
    """The class of a block, of one that may be null, or of entries of a list or mapping; None if a type is no block."""
    while get_origin(kind) in (UnionType, list, dict):
        kind = get_args(kind)[1 if get_origin(kind) is dict else 0]
    return kind if is_dataclass(kind) else None


def without_entries(schema: Any, key: str) -> str:
    """A dotted key without the numbers of lists' entries and the names of mappings' entries."""
    kind, kept = schema, []
    for name in key.split("."):
        kind = get_args(kind)[0] if get_origin(kind) is UnionType else kind
        if get_origin(kind) in ENTRIES:
            kind = get_args(kind)[-1]
        else:
            kept.append(name)
            kind = types_of(kind).get(name) if is_dataclass(kind) else None
    return ".".join(kept)


def optional_along(schema: Any, key: str) -> Iterator[str]:
    """The keys along a dotted key, itself included, of blocks that may be null."""
    kind, at = schema, ""
    for name in key.split("."):
        kind = get_args(kind)[0] if get_origin(kind) is UnionType else kind
        if get_origin(kind) in ENTRIES:
            kind = get_args(kind)[-1]
        else:
            kind = types_of(kind).get(name) if is_dataclass(kind) else None
        at = f"{at}.{name}".lstrip(".")
        if get_origin(kind) is UnionType and block_of(kind) is not None:
            yield at


def value_above(schema: Any, key: str) -> tuple[str, str] | None:
    """The field of a text, number or bool that a key continues after: its key, and what it takes; None without one."""
    kind, at = schema, ""
    for name in key.split("."):
        inner = get_args(kind)[0] if get_origin(kind) is UnionType else kind
        if inner in SCALARS:
            return at, SCALARS[inner]
        if get_origin(inner) is list and name.isdecimal():
            kind = get_args(inner)[0]
        elif get_origin(inner) is dict and block_of(inner) is not None:
            kind = block_of(inner)
        elif is_dataclass(inner) and name in types_of(inner):
            kind = types_of(inner)[name]
        else:
            return None
        at = f"{at}.{name}".lstrip(".")
    return None


def plain_fields(schema: Any) -> list[str]:
    """The fields of a schema that are no blocks."""
    return [name for name, kind in types_of(schema).items() if not is_dataclass(kind)]

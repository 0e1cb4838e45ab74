"""Parse JSON that users type: the values of flags and overrides.

read_object("--default-chat-template-kwargs=…", '{"enable_thinking": false}')    # a dict
parse_values("sampling.logit_bias", '{"5": 1},{"5": 2}')                         # two values, choices of a sweep
"""

from __future__ import annotations

import json
import re
from typing import Any

from atom.config.bounded_yaml import MAX_DEPTH
from atom.errors import ConfigError


def number_keys(pairs: list[tuple[str, Any]]) -> dict[str | int, Any]:
    """A JSON object, whose keys are texts: one of a whole number is the number, as of `sampling.logit_bias`."""
    return {int(key) if re.fullmatch(r"-?(?:0|[1-9][0-9]{0,18})", key) else key: value for key, value in pairs}


DECODER = json.JSONDecoder(object_pairs_hook=number_keys)


def parse_values(name: str, text: str) -> list[Any]:
    """The values of a JSON text, separated by commas. ValueError if it is invalid, ConfigError if it is too deep."""
    values = []
    while True:
        text = text.lstrip()
        try:
            value, end = DECODER.raw_decode(text)
        except RecursionError:
            raise ConfigError(f"{name}: it is nested deeper than {MAX_DEPTH}") from None
        values.append(value)
        separator, text = (rest := text[end:].lstrip())[:1], rest[1:]
        if not separator:
            return values
        if separator != ",":
            raise ValueError(f"there is {separator!r} after a value")


def parse_value(name: str, text: str) -> Any:
    """The value of a JSON text. ValueError if it is invalid, ConfigError if it is too deep."""
    value, *others = parse_values(name, text)
    if others:
        raise ValueError("there is more than one value")
    return value


def read_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that a flag or a file has. ConfigError if it is not one."""
    try:
        found = parse_value(name.partition("=")[0], text)
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is no JSON object")
    return found

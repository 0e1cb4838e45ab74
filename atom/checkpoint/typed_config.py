"""A typed reader of quantization_config: one method for each type.

config = TypedConfig({"bits": 4, "group_size": -1})
config.whole("bits"), config.whole("group_size", or_all=True)       # 4, -1
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from atom.checkpoint.modules import check_pattern
from atom.errors import CheckpointError, UnsupportedError

KEY = "quantization_config"
UNPACKED = "take the checkpoint that it was made of, which quant= packs"


class TypedConfig:
    """An object of config.json, read with types; a CheckpointError names what is malformed, an UnsupportedError what
    is not supported."""

    def __init__(self, values: Mapping[str, Any], at: str = KEY, names: Collection[str] = ()) -> None:
        """names: of the checkpoint's tensors, if they are known"""
        self.values, self.at, self.names = values, at, names

    def get(self, key: str, kind: type, what: str) -> Any:
        """A value of this type, None for null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(f"{self.at}.{key}={json.dumps(value)} in its config.json is not {what}; mend it")
        return value

    def object(self, key: str) -> TypedConfig | None:
        """The object at a key, None for null or an empty one."""
        value = self.get(key, dict, "an object")
        return TypedConfig(value, f"{self.at}.{key}") if value else None

    def text(self, key: str) -> str | None:
        value: str | None = self.get(key, str, "a string")
        return value

    def whole(self, key: str, default: int | None = None, *, or_all: bool = False) -> int:
        """A whole number from 1, or -1 if it is a group size that may be a whole row."""
        value = self.values.get(key, default)
        if type(value) is not int or (value < 1 and not (or_all and value == -1)):
            choices = "from 1" + (", or -1" if or_all else "")
            named = f"{self.at}.{key}={json.dumps(value)}"
            raise CheckpointError(f"{named} in its config.json is not a whole number {choices}; mend it")
        return value

    def block(self, key: str) -> str:
        """The rows and columns of a block, as a format's name has them."""
        value = self.values.get(key)
        if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
            named = f"{self.at}.{key}={json.dumps(value)}"
            raise CheckpointError(f"{named} in its config.json is not two whole numbers from 1; mend it")
        return str(value)

    def patterns(self, *keys: str) -> list[str]:
        """The patterns of the first of these lists that has any."""
        for key in keys:
            patterns: list[Any] = self.get(key, list, "a list of strings") or []
            for pattern in patterns:
                check_pattern(pattern, f"{self.at}.{key}", CheckpointError)
            if patterns:
                return patterns
        return []

    def check_keys(self, *known: str) -> TypedConfig:
        """Raise UnsupportedError for a key that is not one of these and has a value; itself otherwise."""
        for key, value in self.values.items():
            if key not in known and value not in (None, False, {}, []):
                raise self.unknown(key)
        return self

    def one_of(self, key: str, *choices: str | None) -> str | None:
        """A string that is one of these, None for null. UnsupportedError for others."""
        value = self.text(key)
        if value not in choices:
            raise self.unknown(key)
        return value

    def unknown(self, key: str) -> UnsupportedError:
        value = json.dumps(self.values.get(key))
        return UnsupportedError(
            f"{self.at}.{key}={value if len(value) < 100 else value[:99] + '…'} is not supported; {UNPACKED}"
        )

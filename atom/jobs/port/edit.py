"""Edit the fields and roles of a draft."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from atom.jobs.port.fit import Draft
from atom.jobs.port.known import Described, Known
from atom.jobs.port.stored import Stored, module_of


@dataclass
class Editor:
    """A draft and what it is written from."""

    draft: Draft
    described: Described  # the file that it begins with
    known: Known
    hf: Mapping[str, Any]  # config.json
    stored: Mapping[str, Stored]

    def has(self, key: str) -> bool:
        return self.hf.get(key.partition(".")[0]) is not None

    def get(self, at: str) -> Any:
        """A field's value as the draft has it, or the file that it begins with."""
        for spec in (self.draft.spec, self.described.spec):
            value: Any = spec
            for part in at.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def set(self, at: str, value: Any) -> None:
        """Set a field of the draft."""
        *path, last = at.split(".")
        block = self.draft.spec
        for part in path:
            block = block.setdefault(part, {})
        block[last] = value

    def set_switch(self, at: str, is_on: bool) -> None:
        """Set a field that is true or false, by the key of config.json that other files read for it, if that agrees."""
        keys = [key for key in self.known.keys.get(at, ()) if self.hf.get(key) is is_on]
        self.set(at, f"${{hf:{keys[0]}}}" if keys else is_on)

    def set_mlp(self, at: str, value: Any, *, kinds: Collection[str], is_new: bool = False) -> bool:
        """Set a field of the mlps of these kinds, if is_new only of those that have none; whether one was set."""
        mlps, *path = copy.deepcopy(self.get("mlp") or []), *at.split(".")
        was_set = False
        for mlp in mlps:
            if mlp.get("kind") not in kinds:
                continue
            block = mlp
            for part in path[:-1]:
                block = block.setdefault(part, {})
            if not (is_new and path[-1] in block):
                block[path[-1]], was_set = value, True
        if was_set:
            self.draft.spec["mlp"] = mlps
        return was_set

    def weights(self) -> dict[str, str]:
        """Role -> name, as the draft has it."""
        names = {**self.described.weights, **self.draft.spec.get("weights", {})}
        return {role: name for role, name in names.items() if role != "layer"}

    def name_of(self, role: str) -> str | None:
        return self.weights().get(role)

    def set_name(self, role: str, pattern: str) -> None:
        """Give a role the name of a stored tensor: a module's, unless the role names tensors."""
        old = self.name_of(role) or ""
        names_tensor = old.endswith(".weight") or module_of(pattern) == pattern
        names = self.draft.spec.setdefault("weights", {})
        names[role] = pattern if names_tensor else module_of(pattern)
        if "{layer}" in pattern:
            names["layer"] = pattern.partition("{layer}")[0] + "{layer}"

    def guess(self, line: str) -> None:
        if line not in self.draft.guesses:
            self.draft.guesses.append(line)


def is_read(value: Any) -> bool:
    """Whether a field has a value of config.json."""
    return isinstance(value, str) and "${" in value


def substitute(value: Any, pattern: re.Pattern[str], replacement: str) -> Any:
    """A nested value with a pattern replaced in its texts."""
    match value:
        case str():
            return pattern.sub(replacement, value)
        case Mapping():
            return {key: substitute(each, pattern, replacement) for key, each in value.items()}
        case list():
            return [substitute(each, pattern, replacement) for each in value]
    return value

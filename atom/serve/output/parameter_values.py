"""Convert a parameter's text to JSON, by the tool's schema.

    schema = {"properties": {"days": {"type": "integer"}, "city": {"type": "string"}}}
    write_value("3", schema, "days")      # 3
    write_value("3", schema, "city")      # "3"
    write_value("True", {"properties": {"x": {"type": "boolean"}}}, "x")      # true

    writer = ValueWriter(schema, "city", send)
    writer.push("Par")                    # sends '"Par'
    writer.finish(is_whole=True)          # sends '"'

Formats that write parameters one by one leave out the quotes of strings, so only the schema distinguishes "3" from 3.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atom.serve.output.incremental_json import read_python, read_whole, validate_json
from atom.serve.output.incremental_text import ParseError

KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}  # by first character


class ValueWriter:
    """Writes a parameter's value while it arrives, if it can only be a string; else at its end."""

    def __init__(self, schema: Any, key: str, send: Callable[[str], None], *, is_text: bool | None = None) -> None:
        """is_text: whether the value is written as a string; None: the schema decides"""
        self._schema, self._key, self._send = schema, key, send
        self._is_string = find_types_of(schema, key) == {"string"} if is_text is None else is_text
        self._is_json = is_text is False
        self._held: list[str] = []
        if self._is_string:
            send('"')

    def push(self, text: str) -> None:
        if self._is_string:
            self._send(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._held.append(text)

    def finish(self, *, is_whole: bool) -> None:
        """End the value. A string that is not whole stays open."""
        rest = '"' if self._is_string else self._write("".join(self._held))
        self._send(rest.removesuffix('"') if rest.startswith('"') and not is_whole else rest)

    def _write(self, text: str) -> str:
        if self._is_json:
            with contextlib.suppress(ParseError):
                return validate_json(text.strip())
        return write_value(text, self._schema, self._key)


def write_value(text: str, schema: Any, key: str) -> str:
    """The JSON of a parameter's value: of a type of its schema if it can be read so, else of a string."""
    return write_typed(text, find_types_of(schema, key))


def write_typed(text: str, types: set[str]) -> str:
    """The JSON of a value: of one of these types if it can be read so, else of a string. types: none: any"""
    stripped, may_be_text = text.strip(), not types or "string" in types
    if types != {"string"}:
        with contextlib.suppress(ParseError):
            value = validate_json(stripped)
            kind = KINDS.get(value[0], "number" if any(char in value for char in ".eE") else "integer")
            is_of_type = not types or kind in types or (kind == "integer" and "number" in types)
            if not may_be_text or (is_of_type and kind != "string"):
                return value
    if not may_be_text:
        try:
            return json.dumps(read_whole(stripped, read_python)[1], ensure_ascii=False)
        except (ParseError, ValueError):
            pass
    return json.dumps(text, ensure_ascii=False)


def find_types_of(schema: Any, key: str) -> set[str]:
    """The types of a parameter; none if its schema does not say."""
    return set(find_types(find_member(schema, key), schema))


def find_member(schema: Any, key: str) -> Any:
    """The schema of a member of an object; None if it has none."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    other = schema.get("additionalProperties")
    return properties.get(key, other) if isinstance(properties, Mapping) else other


def find_types(schema: Any, root: Any) -> Iterator[str]:
    """The types that a schema allows; none if it does not say."""
    for each in find_options(schema, root):
        given = each.get("type")
        yield from (kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str))
        if each.get("nullable") is True:
            yield "null"
        if given is None:
            options = each.get("enum", [each["const"]] if "const" in each else ())
            for value in options if isinstance(options, list) else ():
                first = json.dumps(value)[0]
                yield KINDS.get(first, "integer" if isinstance(value, int) else "number")


def find_options(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those that it combines or refers to. What references repeat is read once."""
    seen, waiting = set[int](), deque([schema])
    while waiting:
        each = waiting.popleft()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += each[name] if isinstance(each.get(name), list) else ()
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            found = root
            for part in reference[2:].split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            waiting.append(found)

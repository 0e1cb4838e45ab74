"""Turn a parameter's text into JSON, by the tool's schema.

    schema = {"properties": {"days": {"type": "integer"}, "city": {"type": "string"}}}
    write_value("3", schema, "days")      # 3
    write_value("3", schema, "city")      # "3"
    write_value("True", {"properties": {"x": {"type": "boolean"}}}, "x")      # true

Formats that write parameters one by one leave out the quotes of strings, so the schema alone tells "3" from 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from atom.serve.output.incremental_json import read_json, read_python
from atom.serve.output.incremental_text import ParseError, Reading, T, TextBuffer

KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}  # by first character


def write_value(text: str, schema: Any, key: str) -> str:
    """The JSON of a parameter's value: of a type of its schema if it can be read so, else of a string."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    known = properties.get(key) if isinstance(properties, Mapping) else None
    types = set(find_types(known, schema))
    stripped, may_be_text = text.strip(), not types or "string" in types
    if types != {"string"} and is_json(stripped):
        kind = KINDS.get(stripped[0], "number" if any(char in stripped for char in ".eE") else "integer")
        is_of_type = not types or kind in types or (kind == "integer" and "number" in types)
        if not may_be_text or (is_of_type and kind != "string"):
            return stripped
    if not may_be_text:
        try:
            return json.dumps(read_whole(stripped, read_python), ensure_ascii=False)
        except (ParseError, ValueError):
            pass
    return json.dumps(text, ensure_ascii=False)


def find_types(schema: Any, root: Any) -> Iterator[str]:
    """The types that a schema allows; nothing where it does not say. What references repeat is read once."""
    seen, waiting = set[int](), [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        stated = each.get("type")
        yield from (kind for kind in (stated if isinstance(stated, list) else [stated]) if isinstance(kind, str))
        if each.get("nullable") is True:
            yield "null"
        if stated is None:
            options = each.get("enum", [each["const"]] if "const" in each else ())
            for value in options if isinstance(options, list) else ():
                first = json.dumps(value)[0]
                yield KINDS.get(first, "integer" if isinstance(value, int) else "number")
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += each[name] if isinstance(each.get(name), list) else ()
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            found = root
            for part in reference[2:].split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            waiting.append(found)


def is_json(text: str) -> bool:
    try:
        read_whole(text, read_json)
    except ParseError:
        return False
    return True


def read_whole(text: str, read: Any) -> Any:
    """Read a text that is one value. ParseError where it is not."""
    buffer = TextBuffer()
    buffer.push(text)
    buffer.is_ended = True
    value = run(read(buffer))
    if buffer.at < len(text) or not text:
        raise ParseError
    return value


def run(reading: Reading[T]) -> T:
    """The result of a reading whose text has ended."""
    try:
        while True:
            next(reading)
    except StopIteration as end:
        result: T = end.value
        return result

"""Rewrite a JSON schema to what llguidance keeps, with the same meaning.

    rewritten = rewrite_schema({"type": "object", "propertyNames": {"enum": ["a"]}, "$schema": "…"})
    rewritten.schema            # {"type": "object", "properties": {"a": True}, "additionalProperties": False}
    rewritten.notes             # what is read with less than its meaning: uniqueItems, oneOf that overlaps

One pass: the keywords of KEPT stay, each with its own check; those of REWRITTEN are said in other words; all others are
annotations, which are left out. A reference becomes one to the root's $defs, so that the schema can be moved. What
cannot be kept is a RequestError with the keyword's place and what to write instead. docs/serving.md has the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from atom.runtime.schemas.exact_numbers import BOUNDS, say_exactly
from atom.runtime.schemas.keyword import Keyword
from atom.runtime.schemas.keywords import REWRITTEN
from atom.runtime.schemas.negation import TYPES
from atom.runtime.schemas.references import Place, References

MAX_COUNT = (1 << 31) - 1  # of characters, items and properties
MAX_DEPTH = 60  # of schemas in schemas: llguidance reads JSON to a depth of 128


class Rewritten(NamedTuple):
    schema: dict[str, Any]  # for llguidance, but for numbers that are regular expressions (exact_numbers.py)
    notes: list[str]  # what is read with less than its meaning
    places: list[tuple[dict[str, Any], Place]]  # of the schemas in it


def rewrite_schema(document: Mapping[str, Any]) -> Rewritten:
    """Rewrite a schema. RequestError where its meaning cannot be kept."""
    rewriter = Rewriter(document)
    place = Place("#", document, "")
    schema = rewriter.rewrite(document, place)
    schema = {"allOf": [False]} if schema is False else dict(schema)
    if definitions := rewriter.define():
        schema["$defs"] = definitions
    return Rewritten(schema, list(rewriter.notes), [*rewriter.places, (schema, place)])


class Rewriter:
    def __init__(self, document: Any) -> None:
        self.notes: dict[str, None] = {}
        self.places: list[tuple[dict[str, Any], Place]] = []
        self.resolve = References(document).resolve
        self._names: dict[tuple[str, str], str] = {}  # in $defs, of what is referred to
        self._waiting: deque[tuple[str, Any, Place]] = deque()
        self._depth = 0

    def rewrite(self, schema: Any, place: Place) -> Any:
        """Rewrite a schema that stands at a place."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise place.fault(f"{schema!r} is no schema; give an object, true or false")
        if self._depth == MAX_DEPTH:
            raise place.fault(f"schemas are nested more than {MAX_DEPTH} deep; write a part of them under $defs")
        self._depth += 1
        place = place.enter(schema)
        given = {key: value for key, value in schema.items() if value is not None or key == "const"}
        out = {key: KEPT[key](self, value, place.at(key)) for key, value in given.items() if key in KEPT}
        for key, rewrite in REWRITTEN.items():
            if key in given:
                rewrite(Keyword(self, key, given[key], given, out, place))
        self._depth -= 1
        if False in out.get("allOf", ()):
            return False
        if "patternProperties" in out:  # llguidance reads keywords in order, and additional ones without the patterns
            out = {key: out[key] for key in PROPERTIES if key in out} | out
        out = say_exactly(out, place)
        self.places.append((out, place))
        return out

    def note(self, text: str) -> None:
        self.notes[text] = None

    def refer(self, reference: Any, place: Place) -> str:
        target, found = self.resolve(reference, place)
        name = self._names.get((found.base, found.text))
        if name is None:
            name = self._names[found.base, found.text] = str(len(self._names))
            self._waiting.append((name, target, found))
        return f"#/$defs/{name}"

    def define(self) -> dict[str, Any]:
        """Rewrite what is referred to: the root's $defs."""
        made: dict[str, Any] = {}
        while self._waiting:
            name, target, place = self._waiting.popleft()
            made[name] = self.rewrite(target, place)
        return made


def keep_type(_: Rewriter, value: Any, place: Place) -> Any:
    for each in value if isinstance(value, list) else [value]:
        if each not in (*TYPES, "integer"):
            raise place.fault(f"{each!r} is no type; give {', '.join(TYPES)} or integer")
    return value


def keep_value(_: Rewriter, value: Any, place: Place) -> Any:
    return value


def keep_list(_: Rewriter, value: Any, place: Place) -> Any:
    if not isinstance(value, list):
        raise place.fault(f"{value!r} is not a list")
    return value


def keep_names(_: Rewriter, value: Any, place: Place) -> Any:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise place.fault(f"{value!r} is not a list of names")
    return value


def keep_count(_: Rewriter, value: Any, place: Place) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise place.fault(f"{value!r} is not a whole number of at least 0")
    if value > MAX_COUNT:
        raise place.fault(f"{value!r} is more than {MAX_COUNT}; leave it out")
    return int(value)


def keep_number(_: Rewriter, value: Any, place: Place) -> Any:
    if not isinstance(value, int | float):
        raise place.fault(f"{value!r} is not a number")
    return value


def keep_multiple(rewriter: Rewriter, value: Any, place: Place) -> Any:
    """A step that llguidance finds a whole number of, as it multiplies the float64 by ten."""
    digits = abs(float(keep_number(rewriter, value, place)))
    while digits != int(digits):
        digits *= 10
    if not 0 < digits < 1 << 32:
        raise place.fault(f"multiples of {value!r} cannot be kept; leave it out, or count in smaller units")
    return value


def keep_reference(rewriter: Rewriter, value: Any, place: Place) -> str:
    return rewriter.refer(value, place)


def keep_schema(rewriter: Rewriter, value: Any, place: Place) -> Any:
    return rewriter.rewrite(value, place)


def keep_schemas(rewriter: Rewriter, value: Any, place: Place) -> Any:
    return [rewriter.rewrite(each, place.at(index)) for index, each in enumerate(keep_list(rewriter, value, place))]


def keep_named(rewriter: Rewriter, value: Any, place: Place) -> Any:
    if not isinstance(value, Mapping):
        raise place.fault(f"{value!r} is not an object of schemas")
    return {name: rewriter.rewrite(each, place.at(name)) for name, each in value.items()}


PROPERTIES = ("properties", "patternProperties", "additionalProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
KEPT: dict[str, Callable[[Rewriter, Any, Place], Any]] = {
    "type": keep_type,
    "const": keep_value,
    "enum": keep_list,
    "required": keep_names,
    "$ref": keep_reference,
    "additionalProperties": keep_schema,
    **dict.fromkeys(COUNTS, keep_count),
    **dict.fromkeys(BOUNDS, keep_number),
    "multipleOf": keep_multiple,
    **dict.fromkeys(("allOf", "anyOf", "prefixItems"), keep_schemas),
    **dict.fromkeys(("properties", "patternProperties"), keep_named),
}

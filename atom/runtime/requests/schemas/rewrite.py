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

from atom.runtime.requests.schemas.exact_numbers import BOUNDS, say_exactly
from atom.runtime.requests.schemas.forms import COUNTS, MAX_DEPTH, read_forms
from atom.runtime.requests.schemas.keyword import Keyword
from atom.runtime.requests.schemas.keywords import REWRITTEN
from atom.runtime.requests.schemas.references import Place, References

MAX_WORK = 100_000  # schemas that are read, or compared: a second or two


class Rewritten(NamedTuple):
    schema: dict[str, Any]  # for llguidance, but for numbers that are regular expressions (exact_numbers.py)
    notes: list[str]  # what is read with less than its meaning
    places: list[tuple[dict[str, Any], Place]]  # of the schemas in it


def rewrite_schema(document: Mapping[str, Any]) -> Rewritten:
    """Rewrite a schema. RequestError if its meaning cannot be kept."""
    rewriter = Rewriter(document)
    place = Place("#", document, "")
    schema = rewriter.rewrite(read_forms(document, place), place)
    schema = {"allOf": [False]} if schema is False else dict(schema)
    if definitions := rewriter.define():
        schema["$defs"] = definitions
    return Rewritten(schema, list(rewriter.notes), [*rewriter.places, (schema, place)])


class Rewriter:
    def __init__(self, document: Any) -> None:
        self.notes: dict[str, None] = {}
        self.places: list[tuple[dict[str, Any], Place]] = []
        self._references = References(document)
        self._read: dict[tuple[str, str], Any] = {}  # what is referred to, with its forms checked
        self._work = 0
        self._names: dict[tuple[str, str], str] = {}  # in $defs, of what is referred to
        self._waiting: deque[tuple[str, Any, Place]] = deque()
        self._depth = 0

    def rewrite(self, schema: Any, place: Place) -> Any:
        """Rewrite a schema that stands at a place."""
        if isinstance(schema, bool):
            return schema
        self.work(1, place)
        if self._depth == MAX_DEPTH:
            raise place.fault(f"schemas are nested more than {MAX_DEPTH} deep; write a part of them under $defs")
        self._depth += 1
        place = place.enter(schema)
        out = {key: KEPT[key](self, value, place.at(key)) for key, value in schema.items() if key in KEPT}
        for key, rewrite in REWRITTEN.items():
            if key in schema:
                rewrite(Keyword(self, key, schema[key], schema, out, place))
        self._depth -= 1
        if False in out.get("allOf", ()):
            return False
        if "patternProperties" in out:  # llguidance reads keywords in order, and additional ones without the patterns
            out = {key: out[key] for key in PROPERTIES if key in out} | out
        out = say_exactly(out, place)
        self.places.append((out, place))
        return out

    def resolve(self, reference: Any, place: Place) -> tuple[Any, Place]:
        """The schema that a reference means, and its place. RequestError if there is none."""
        self.work(1, place)
        target, found = self._references.resolve(reference, place)
        key = found.base, found.text
        if key not in self._read:
            self._read[key] = read_forms(target, found)
        return self._read[key], found

    def work(self, amount: int, place: Place) -> None:
        """Count what is looked at: schemas that refer to each other may be a small text for very many."""
        self._work += amount
        if self._work > MAX_WORK:
            raise place.fault("the schema takes too long to read here; compare or refer to fewer schemas")

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


def keep_value(_: Rewriter, value: Any, place: Place) -> Any:
    return value


def keep_multiple(rewriter: Rewriter, value: Any, place: Place) -> Any:
    """A step that llguidance finds a whole number of, as it multiplies the float64 by ten."""
    digits = abs(value)
    while digits < 1 << 32 and digits != int(digits):
        digits *= 10.0
    if not 0 < digits < 1 << 32:
        raise place.fault(f"multiples of {value!r:.30} cannot be kept; leave it out, or count in smaller units")
    return value


def keep_reference(rewriter: Rewriter, value: Any, place: Place) -> str:
    return rewriter.refer(value, place)


def keep_schema(rewriter: Rewriter, value: Any, place: Place) -> Any:
    return rewriter.rewrite(value, place)


def keep_schemas(rewriter: Rewriter, value: Any, place: Place) -> Any:
    return [rewriter.rewrite(each, place.at(index)) for index, each in enumerate(value)]


def keep_named(rewriter: Rewriter, value: Any, place: Place) -> Any:
    return {name: rewriter.rewrite(each, place.at(name)) for name, each in value.items()}


PROPERTIES = ("properties", "patternProperties", "additionalProperties")
KEPT: dict[str, Callable[[Rewriter, Any, Place], Any]] = {
    **dict.fromkeys(("type", "const", "enum", "required"), keep_value),
    "$ref": keep_reference,
    "additionalProperties": keep_schema,
    **dict.fromkeys(COUNTS, keep_value),
    **dict.fromkeys(BOUNDS, keep_value),
    "multipleOf": keep_multiple,
    **dict.fromkeys(("allOf", "anyOf", "prefixItems"), keep_schemas),
    **dict.fromkeys(("properties", "patternProperties"), keep_named),
}

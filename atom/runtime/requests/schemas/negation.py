"""Negate JSON schemas: rewrite `not`, which llguidance does not support.

    negate({"type": ["string", "null"]}, resolve)    # {"anyOf": [{"type": ["boolean", "number", "array", "object"]}]}
    negate({"required": ["a"]}, resolve)             # an object without a
    negate({"pattern": "^a"}, resolve)               # None: no schema says this

A schema is the conjunction of its keywords, so its negation is that one of them does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, pairwise
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_SCHEMAS = 200  # in what is negated
MAX_LETTERS = 10_000  # of texts that are excluded: the regular expression is twenty times as long
MAX_WORD = 200  # letters of one: the regular expression nests as deep
Resolve = Callable[[str], Any]  # the schema that a $ref of this one means


class _CannotError(Exception):
    """No schema says this."""


def negate(schema: Any, resolve: Resolve) -> Any:
    """A schema of the values that are not valid against this one; None if no schema says so."""
    try:
        return _negate(schema, resolve, count())
    except _CannotError:
        return None


def _negate(schema: Any, resolve: Resolve, numbers: Iterator[int]) -> Any:
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping) or next(numbers) > MAX_SCHEMAS:
        raise _CannotError

    def inner(each: Any) -> Any:
        return _negate(each, resolve, numbers)

    parts: list[Any] = []
    for key, value in schema.items():
        if key == "$ref":
            parts.append(inner(resolve(value)))
        elif key in NEGATED:
            parts.append(NEGATED[key](value, inner))
        elif key in ASSERTIONS:
            raise _CannotError
    return {"anyOf": parts} if parts else False


def _type(value: Any, _: Any) -> Any:
    types = [value] if isinstance(value, str) else list(value)
    if "integer" in types and "number" not in types:
        raise _CannotError
    others = [each for each in TYPES if each not in types]
    return {"type": others} if others else False


def _required(names: list[str], _: Any) -> Any:
    return {"type": "object", "anyOf": [{"properties": {name: False}} for name in names]} if names else False


def _properties(schemas: Mapping[str, Any], inner: Callable[[Any], Any]) -> Any:
    wrong = [{"required": [name], "properties": {name: inner(each)}} for name, each in schemas.items()]
    return {"type": "object", "anyOf": wrong} if wrong else False


def _enum(values: Iterable[Any], _: Any) -> Any:
    values = list(values)
    if any(isinstance(value, list | Mapping) for value in values):
        raise _CannotError
    words = [value for value in values if isinstance(value, str)]
    if sum(map(len, words)) > MAX_LETTERS or max(map(len, words), default=0) > MAX_WORD:
        raise _CannotError
    flags = [value for value in values if isinstance(value, bool)]
    counts = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    types = {"string": words, "boolean": flags, "number": counts, "null": [value for value in values if value is None]}
    parts: list[Any] = [{"type": [name for name in TYPES if not types.get(name)]}]
    if words:
        parts.append({"type": "string", "pattern": f"^{all_but(words)}$"})
    if flags:
        parts.append({"enum": [flag for flag in (True, False) if flag not in flags]})
    ends = [None, *counts, None]
    for low, high in pairwise(ends) if counts else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        parts.append({"type": "number", **{key: value for key, value in bounds.items() if value is not None}})
    return {"anyOf": parts}


def all_but(words: Iterable[str]) -> str:
    """Regular expression of all texts but these."""
    tails: dict[str, list[str]] = {}
    words = set(words)
    for word in sorted(words):
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    first = f"[^{''.join(map(re.escape, tails))}]" if tails else r"[\s\S]"
    parts = [] if "" in words else [""]
    parts += [f"{re.escape(letter)}{all_but(rest)}" for letter, rest in tails.items()]
    return "(?:" + "|".join([*parts, first + r"[\s\S]*"]) + ")"


def _at_most(key: str, type: str, step: int) -> Callable[[Any, Any], Any]:
    """The negation of a bound of a size: the other bound, next to it."""

    def negated(value: Any, _: Any) -> Any:
        return {"type": type, key: value + step} if value + step >= 0 else False

    return negated


def _bound(key: str) -> Callable[[Any, Any], Any]:
    return lambda value, _: {"type": "number", key: value}


NEGATED: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "type": _type,
    "const": lambda value, inner: _enum([value], inner),
    "enum": _enum,
    "not": lambda value, _: value,
    "anyOf": lambda values, inner: {"allOf": list(map(inner, values))},
    "allOf": lambda values, inner: {"anyOf": list(map(inner, values))},
    "required": _required,
    "properties": _properties,
    "minimum": _bound("exclusiveMaximum"),
    "maximum": _bound("exclusiveMinimum"),
    "exclusiveMinimum": _bound("maximum"),
    "exclusiveMaximum": _bound("minimum"),
    "minLength": _at_most("maxLength", "string", -1),
    "maxLength": _at_most("minLength", "string", 1),
    "minItems": _at_most("maxItems", "array", -1),
    "maxItems": _at_most("minItems", "array", 1),
}
ASSERTIONS = NEGATED.keys() | {  # the keywords that say what is valid; others are annotations
    "$ref", "$dynamicRef", "$recursiveRef", "oneOf", "if", "then", "else", "nullable", "multipleOf", "pattern",
    "format", "items", "prefixItems", "additionalItems", "unevaluatedItems", "uniqueItems", "contains", "minContains",
    "maxContains", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
}  # fmt: skip

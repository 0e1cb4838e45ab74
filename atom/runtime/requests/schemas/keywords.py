"""Rewrite JSON schema keywords into keywords that llguidance supports.

REWRITTEN["items"](Keyword(rewriter, "items", [{"type": "string"}], given, out, place))
out     # {"prefixItems": [{"type": "string"}]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from atom.runtime.requests.schemas.keyword import COMPOSED, Keyword, listed
from atom.runtime.requests.schemas.negation import ASSERTIONS
from atom.runtime.requests.schemas.patterns import has_look_around, split_look_aheads
from atom.runtime.requests.schemas.property_keywords import (
    rewrite_dependencies,
    rewrite_num_properties,
    rewrite_property_names,
    rewrite_unevaluated_properties,
)

MAX_COMPARED = 200  # schemas of a oneOf, each with each other
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def rewrite_exclusive(keyword: Keyword) -> None:
    """Draft 4: true makes the other bound exclusive."""
    if isinstance(keyword.value, bool):
        del keyword.out[keyword.name]
        bound = keyword.name.removeprefix("exclusive").lower()
        if keyword.value and bound in keyword.out:
            keyword.out[keyword.name] = keyword.out.pop(bound)


def rewrite_nullable(keyword: Keyword) -> None:
    """OpenAPI 3.0: null is valid too; next to an enum only if that has null."""
    if keyword.value is True and "type" in keyword.out:
        keyword.out["type"] = [*dict.fromkeys([*listed(keyword.out["type"]), "null"])]


def rewrite_items(keyword: Keyword) -> None:
    """Before draft 2020-12 items could be a list, which is called prefixItems since."""
    if isinstance(keyword.value, list):
        keyword.out["prefixItems"] = [keyword.rewrite(each, index) for index, each in enumerate(keyword.value)]
    else:
        keyword.out["items"] = keyword.rewrite(keyword.value)


def rewrite_additional_items(keyword: Keyword) -> None:
    if isinstance(keyword.given.get("items"), list):
        keyword.out["items"] = keyword.rewrite(keyword.value)


def rewrite_unevaluated_items(keyword: Keyword) -> None:
    if "items" in keyword.out or keyword.value is True:
        return
    if keyword.given.keys() & (COMPOSED | {"allOf", "$ref", "contains"}):
        raise keyword.at.fault("unevaluatedItems cannot be kept next to other schemas; write items in each of them")
    keyword.out["items"] = keyword.rewrite(keyword.value)


def rewrite_unique_items(keyword: Keyword) -> None:
    if keyword.value is True:
        keyword.rewriter.note("uniqueItems is not kept: items may repeat")


def rewrite_contains(keyword: Keyword) -> None:
    if keyword.given.get("minContains") != 0 or "maxContains" in keyword.given:
        raise keyword.at.fault("contains cannot be kept; say with items or prefixItems what each item is")


def rewrite_format(keyword: Keyword) -> None:
    """A format that llguidance does not know is an annotation."""
    if keyword.value in FORMATS:
        keyword.out["format"] = keyword.value


def rewrite_pattern(keyword: Keyword) -> None:
    """Look-aheads at the beginning are patterns that hold too. Next to a known format other look-around is left out."""
    patterns, left_out = split_look_aheads(keyword.value)
    kept = [pattern for pattern in patterns if not has_look_around(pattern)]
    if left_out or len(kept) < len(patterns):
        if keyword.given.get("format") not in FORMATS:
            raise keyword.at.fault("look-around cannot be kept, except (?=…) at the beginning; write it without")
        keyword.rewriter.note("look-around of a pattern next to a format is not kept: the format is")
    for pattern in kept:
        if "pattern" in keyword.out:
            keyword.require({"pattern": pattern})
        else:
            keyword.out["pattern"] = pattern


def rewrite_one_of(keyword: Keyword) -> None:
    """As anyOf: exact for schemas that exclude each other, or that only say which properties there are."""
    given = keyword.value
    schemas = [keyword.rewrite(each, index) for index, each in enumerate(given)]
    if all(
        isinstance(each, Mapping) and "required" in each and each.keys() & ASSERTIONS <= {"required", "type"}
        for each in given
    ):
        keyword.work(len(given) ** 2)
        others = [keyword.negate(each, "write anyOf") for each in given]
        schemas = [{"allOf": [each, *others[:index], *others[index + 1 :]]} for index, each in enumerate(schemas)]
    elif len(given) > MAX_COMPARED or not all(
        are_disjoint(keyword.follow(one), keyword.follow(other), keyword.work) for one, other in combinations(given, 2)
    ):
        keyword.rewriter.note("oneOf is read as anyOf: an answer may be valid against several of its schemas")
    if "anyOf" in keyword.out:
        keyword.require({"anyOf": schemas})
    else:
        keyword.out["anyOf"] = schemas


def are_disjoint(one: Any, other: Any, work: Callable[[int], object]) -> bool:
    """Whether two schemas have different types or values, or properties that do, which both require.

    work: counts what is compared
    """
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    work(1 + sum(len(each.get("enum", ())) for each in (one, other)) // 4)
    values = [_values(each) for each in (one, other)]
    if None not in values and not set(values[0] or ()) & set(values[1] or ()):
        return True
    types = [_types(each) for each in (one, other)]
    if None not in types and not (types[0] or set()) & (types[1] or set()):
        return True
    return any(
        are_disjoint(_property(one, name), _property(other, name), work)
        for name in {*one.get("required", ()), *other.get("required", ())}
    )


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of a property, with no type if it is optional."""
    found = schema.get("properties", {}).get(name, {})
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if is_closed and name not in schema.get("properties", {}):
        return {"type": []}
    return found if name in schema.get("required", ()) else {}


def _values(schema: Mapping[str, Any]) -> list[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if values is None else [json.dumps(value, sort_keys=True) for value in values]


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    types = schema.get("type")
    return None if types is None else {"number" if each == "integer" else each for each in listed(types)}


def rewrite_not(keyword: Keyword) -> None:
    keyword.require(keyword.negate(keyword.value, "say what is allowed instead"))


def rewrite_if(keyword: Keyword) -> None:
    """Either the condition and `then` hold, or its negation and `else`."""
    chosen = [keyword.rewriter.rewrite(keyword.given.get(key, True), keyword.place.at(key)) for key in ("then", "else")]
    if chosen != [True, True]:
        cases = [
            keyword.rewrite(keyword.value),
            keyword.negate(keyword.value, "write anyOf with a schema for each case"),
        ]
        keyword.require({"anyOf": [{"allOf": [case, then]} for case, then in zip(cases, chosen, strict=True)]})


def rewrite_dynamic(keyword: Keyword) -> None:
    """As $ref: a schema of which no other is made by extension means the same."""
    keyword.require(keyword.rewrite({"$ref": keyword.value}))


REWRITTEN: dict[str, Callable[[Keyword], None]] = {
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), rewrite_exclusive),
    "nullable": rewrite_nullable,
    "items": rewrite_items,
    "additionalItems": rewrite_additional_items,
    "unevaluatedItems": rewrite_unevaluated_items,
    "uniqueItems": rewrite_unique_items,
    "contains": rewrite_contains,
    "format": rewrite_format,
    "pattern": rewrite_pattern,
    "unevaluatedProperties": rewrite_unevaluated_properties,
    "propertyNames": rewrite_property_names,
    **dict.fromkeys(("minProperties", "maxProperties"), rewrite_num_properties),
    "oneOf": rewrite_one_of,
    "not": rewrite_not,
    "if": rewrite_if,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), rewrite_dependencies),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), rewrite_dynamic),
}

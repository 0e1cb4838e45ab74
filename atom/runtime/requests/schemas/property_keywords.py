"""Rewrite JSON schema keywords of properties into keywords that llguidance supports.

rewrite_property_names(Keyword(rewriter, "propertyNames", {"enum": ["a"]}, given, out, place))
out     # {"properties": {"a": True}, "additionalProperties": False}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom.runtime.requests.schemas.keyword import COMPOSED, Keyword, listed
from atom.runtime.requests.schemas.negation import ASSERTIONS
from atom.runtime.requests.schemas.patterns import has_look_around

MAX_DEPTH = 20  # of references that are followed
MAX_WITHIN = 8  # of schemas in allOf and $ref of others


def rewrite_property_names(keyword: Keyword) -> None:
    """Names are properties, a pattern of them is one of patternProperties, and there are no additional ones."""
    names, out = read_names(keyword, keyword.value), keyword.out
    if names is None:
        return
    known, others = out.get("properties", {}), out.get("additionalProperties", True)
    if "patternProperties" in out or (known and isinstance(names, str)):
        key, named = ("patternProperties", [names]) if isinstance(names, str) else ("properties", names)
        keyword.require({key: dict.fromkeys(named, True), "additionalProperties": False})
    elif isinstance(names, str):
        out |= {"patternProperties": {names: others}, "additionalProperties": False}
    else:
        allowed = set(names)
        kept = {name: schema for name, schema in known.items() if name in allowed}
        out |= {
            "properties": kept | {name: others for name in names if name not in known},
            "additionalProperties": False,
        }


def read_names(keyword: Keyword, schema: Any, depth: int = 0) -> list[str] | str | None:
    """The names that a schema of names allows, or a pattern of them; None: all. Their format is an annotation."""
    schema = keyword.follow(schema)
    if isinstance(schema, bool):
        return None if schema else []
    if "string" not in listed(schema.get("type", "string")):
        return []
    said = {key: value for key, value in schema.items() if key in ASSERTIONS and key not in ("type", "format")}
    if said.keys() <= {"minLength", "maxLength"}:
        length = f"{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}"
        return rf"^[\s\S]{length}$" if said else None
    ((key, value), *further) = said.items()
    if not further and key in ("enum", "const"):
        return [name for name in (value if key == "enum" else [value]) if isinstance(name, str)]
    if not further and key in ("anyOf", "oneOf") and depth < MAX_DEPTH:
        found = [read_names(keyword, each, depth + 1) for each in value]
        if all(isinstance(names, list) for names in found):
            return [name for names in found for name in names or ()]
    if not further and key == "pattern" and not has_look_around(value):
        return str(value)
    raise keyword.at.fault("propertyNames cannot be kept, except an enum, a pattern, or a length; write properties")


def rewrite_unevaluated_properties(keyword: Keyword) -> None:
    """As additionalProperties, next to the properties that allOf and $ref name."""
    if keyword.value is True or "additionalProperties" in keyword.given:
        return
    names = names_within(keyword, keyword.given)
    if names is None:
        raise keyword.at.fault(
            "unevaluatedProperties cannot be kept next to other schemas; write additionalProperties in each of them"
        )
    if names:
        keyword.out["properties"] = dict.fromkeys(names, True) | keyword.out.get("properties", {})
    keyword.out["additionalProperties"] = keyword.rewrite(keyword.value)


def names_within(keyword: Keyword, schema: Mapping[str, Any], seen: tuple[int, ...] = ()) -> list[str] | None:
    """The properties that allOf and $ref of a schema name; None if that depends on the answer."""
    if schema.keys() & COMPOSED or id(schema) in seen or len(seen) > MAX_WITHIN:
        return None
    names: list[str] = []
    inner = list(schema.get("allOf", ()))
    if "$ref" in schema:
        inner.append(keyword.rewriter.resolve(schema["$ref"], keyword.place)[0])
    for each in inner:
        own = {"patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"}
        if not isinstance(each, Mapping) or each.keys() & own:
            return None
        further = names_within(keyword, each, (*seen, id(schema)))
        if further is None:
            return None
        names += [*each.get("properties", {}), *further]
    return names


def rewrite_num_properties(keyword: Keyword) -> None:
    """Leave out a number of properties that the other keywords imply."""
    out = keyword.out
    if keyword.name == "minProperties":
        is_implied = out["minProperties"] <= len(set(out.get("required", ())))
    else:
        is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
        is_implied = is_closed and len(out.get("properties", {})) <= out["maxProperties"]
    if is_implied:
        del out[keyword.name]


def rewrite_dependencies(keyword: Keyword) -> None:
    """A property is not there, or what it needs is: other properties, or a schema that holds."""
    for name, needed in keyword.value.items():
        there: dict[str, Any] = {"required": [name, *(needed if isinstance(needed, list) else ())]}
        if not isinstance(needed, list):
            there["allOf"] = [keyword.rewrite(needed, name)]
        keyword.require({"anyOf": [{"properties": {name: False}}, there]})

"""Check the values of a JSON schema's keywords before anything uses them.

    read_forms({"not": {"required": ["a"], "items": None}}, place)      # {"not": {"required": ["a"]}}
    read_forms({"not": {"required": 5}}, place)                         # RequestError: #/not/required: 5 is not a list

A keyword whose value is null is left out, as generators write it for one that they have not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atom.runtime.requests.schemas.negation import TYPES
from atom.runtime.requests.schemas.references import Place

MAX_COUNT = (1 << 31) - 1  # of characters, items and properties
MAX_DEPTH = 60  # of schemas in schemas: llguidance reads JSON to a depth of 128


def read_forms(schema: Any, place: Place, depth: int = 0) -> Any:
    """A schema without keywords that are null. RequestError if a value has the wrong form."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise place.fault(f"{schema!r:.60} is no schema; give an object, true or false")
    if depth == MAX_DEPTH:
        raise place.fault(f"schemas are nested more than {MAX_DEPTH} deep; write a part of them under $defs")
    read, place = {}, place.enter(schema)
    for key, value in schema.items():
        if key in FORMS and value is not None:
            read[key] = FORMS[key](value, place.at(key), depth + 1)
        elif value is not None or key == "const":
            read[key] = value
    return read


def read_list(value: Any, place: Place, _: int = 0) -> list[Any]:
    if not isinstance(value, list):
        raise place.fault(f"{value!r:.60} is not a list")
    return value


def read_names(value: Any, place: Place, _: int = 0) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise place.fault(f"{value!r:.60} is not a list of names")
    return value


def read_pattern(value: Any, place: Place, _: int = 0) -> str:
    if not isinstance(value, str):
        raise place.fault(f"{value!r:.60} is no regular expression")
    return value


def read_reference(value: Any, place: Place, _: int = 0) -> str:
    if not isinstance(value, str):
        raise place.fault(f"{value!r:.60} is no reference; write a path as #/$defs/name")
    return value


def read_type(value: Any, place: Place, _: int = 0) -> Any:
    for each in value if isinstance(value, list) else [value]:
        if each not in (*TYPES, "integer"):
            raise place.fault(f"{each!r:.60} is no type; give {', '.join(TYPES)} or integer")
    return value


def read_count(value: Any, place: Place, _: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise place.fault(f"{value!r:.60} is not a whole number of at least 0")
    if value > MAX_COUNT:
        raise place.fault(f"{value!r:.60} is more than {MAX_COUNT}; leave it out")
    return int(value)


def read_number(value: Any, place: Place, _: int = 0) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.fault(f"{value!r:.60} is not a number")
    return value


def read_exclusive(value: Any, place: Place, _: int = 0) -> Any:
    return value if isinstance(value, bool) else read_number(value, place)


def read_schemas(value: Any, place: Place, depth: int) -> list[Any]:
    return [read_forms(each, place.at(index), depth) for index, each in enumerate(read_list(value, place))]


def read_items(value: Any, place: Place, depth: int) -> Any:
    read = read_schemas if isinstance(value, list) else read_forms  # before draft 2020-12 a list
    return read(value, place, depth)


def read_named(value: Any, place: Place, depth: int) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise place.fault(f"{value!r:.60} is not an object of schemas")
    return {name: read_forms(each, place.at(name), depth) for name, each in value.items()}


def read_needs(value: Any, place: Place, depth: int) -> dict[str, Any]:
    """Read what properties need: names of others, or a schema."""
    if not isinstance(value, Mapping):
        raise place.fault(f"{value!r:.60} is not an object")
    return {
        name: read_names(each, place.at(name)) if isinstance(each, list) else read_forms(each, place.at(name), depth)
        for name, each in value.items()
    }


COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
INNER = ("not", "if", "then", "else", "propertyNames", "additionalProperties", "unevaluatedProperties")
FORMS: dict[str, Callable[[Any, Place, int], Any]] = {
    "type": read_type,
    "enum": read_list,
    "required": read_names,
    "pattern": read_pattern,
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), read_reference),
    **dict.fromkeys((*COUNTS, "minContains", "maxContains"), read_count),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), read_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), read_exclusive),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), read_schemas),
    **dict.fromkeys(("properties", "patternProperties"), read_named),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), read_needs),
    **dict.fromkeys((*INNER, "contains", "additionalItems", "unevaluatedItems"), read_forms),
    "items": read_items,
}

"""Schemas whose keywords have not their form, or that would take for ever, are refused with a place, never an error."""

from __future__ import annotations

from typing import Any

import pytest
from schema_grammars import admits, compile_schema

from atom.errors import RequestError

pytest.importorskip("llguidance")

HUGE = 10**400
VALUES: list[Any] = [
    5, "x", [], {}, [5], {"a": 5}, -1, 1e300, True, [[]], [{}], {"$ref": "#"}, [{"$ref": "#"}], HUGE, "[", "^(?=a",
]  # fmt: skip
KEYWORDS = [
    "type", "enum", "const", "required", "properties", "patternProperties", "additionalProperties", "propertyNames",
    "unevaluatedProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains",
    "minItems", "minLength", "maxLength", "minProperties", "maxProperties", "minimum", "exclusiveMaximum", "multipleOf",
    "pattern", "format", "allOf", "anyOf", "oneOf", "not", "if", "then", "dependentRequired", "dependentSchemas", "nullable",
    "dependencies", "$ref", "$dynamicRef", "$id", "$defs",
]  # fmt: skip


def around(key: str, value: Any) -> list[dict[str, Any]]:
    """The places in which a keyword's value is read."""
    return [
        {key: value},
        {"type": "object", key: value, "properties": {"a": {"type": "string"}}, "additionalProperties": False},
        {"not": {key: value}},
        {"if": {key: value}, "then": {"required": ["a"]}},
        {"oneOf": [{key: value}, {"type": "string"}]},
        {"oneOf": [{"required": ["a"]}, {"required": value}]},
        {"properties": {"a": True}, "propertyNames": {key: value}},
        {"allOf": [{key: value}], "unevaluatedProperties": False},
        {"dependentSchemas": {"a": {key: value}}},
        {"minimum": 10**17, key: value},
        {"minProperties": 1, key: value},
    ]


@pytest.mark.parametrize("key", KEYWORDS)
def test_a_keyword_of_any_value_is_kept_or_refused(key: str):
    for schema in (schema for value in VALUES for schema in around(key, value)):
        try:
            compile_schema(schema)
        except RequestError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, schema


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"not": {"allOf": 5}}, "#/not/allOf", "5 is not a list"),
        ({"propertyNames": {"pattern": 5}}, "#/propertyNames/pattern", "5 is no regular expression"),
        ({"oneOf": [{"type": 5}, {"type": "string"}]}, "#/oneOf/0/type", "5 is no type"),
        (
            {"allOf": [{"properties": 5}], "unevaluatedProperties": False},
            "#/allOf/0/properties",
            "no object of schemas",
        ),
        ({"minimum": True}, "#/minimum", "True is not a number"),
        ({"$ref": "#/x", "x": {"not": {"required": 5}}}, "#/x/not/required", "5 is not a list of names"),
    ],
)
def test_a_wrong_form_is_named_with_its_place(schema: dict[str, Any], place: str, reason: str):
    with pytest.raises(RequestError) as caught:
        compile_schema(schema)
    assert f"{place}: " in str(caught.value)
    assert reason.replace("no object", "not an object") in str(caught.value)


def test_keywords_that_are_null_say_nothing_wherever_they_are():
    grammar = compile_schema({"not": {"required": ["a"], "items": None}, "type": "object", "properties": None})
    assert admits(grammar, '{"b":1}') and not admits(grammar, '{"a":1}')


def test_a_number_of_names_may_be_written_with_a_point():
    grammar = compile_schema({"type": "object", "propertyNames": {"minLength": 2.0}})
    assert admits(grammar, '{"ab":1}') and not admits(grammar, '{"a":1}')


def chain(size: int, last: Any, link: Any) -> dict[str, Any]:
    """$defs of which each has the next one several times."""
    return {str(at): link({"$ref": f"#/$defs/{at + 1}"}) for at in range(size)} | {str(size): last}


START = {"$ref": "#/$defs/0"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "schema",
    [
        {"not": START, "$defs": chain(9, {"type": "string"}, lambda next: {"allOf": [next] * 8})},
        {**START, "unevaluatedProperties": False, "$defs": chain(18, {}, lambda next: {"allOf": [next] * 3})},
        {"propertyNames": START, "$defs": chain(18, {"enum": ["a"]}, lambda next: {"anyOf": [next] * 3})},
        {"oneOf": [{"required": [f"a{index}"]} for index in range(40_000)]},
        {"oneOf": [{"const": index} for index in range(40_000)]},
        {"not": {"const": "a" * 5000}},
        {"type": "string", "pattern": "^" + "(?=a)" * 10_000 + "$"},
        {"type": "object", "properties": {"a" * 40: {}}, "propertyNames": {"pattern": "^(a+)+$b"}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "propertyNames": {"$ref": "#/$defs/a"}},
        {"allOf": [{"$ref": "#"}], "unevaluatedProperties": False},
        {"type": "object", "allOf": [{"$ref": "#"}], "properties": {"a": False}, "additionalProperties": False},
    ],
)
def test_what_would_take_for_ever_comes_to_an_end(schema: dict[str, Any]):
    """Within the time that a test has: without a limit these take minutes, and hours."""
    try:
        compile_schema(schema)
    except RequestError as error:
        assert len(str(error)) < 400


def test_a_union_of_many_kinds_is_kept():
    kinds = [{"type": "object", "properties": {"kind": {"const": str(at)}}, "required": ["kind"]} for at in range(400)]
    grammar = compile_schema({"oneOf": kinds})
    assert admits(grammar, '{"kind":"399"}') and not admits(grammar, '{"kind":"400"}')


def test_a_schema_that_is_too_large_is_not_called_wrong_json():
    with pytest.raises(RequestError, match=r"^structured_outputs: the JSON schema has \d+ bytes, more than 1048576$"):
        compile_schema({"enum": ["a" * (1 << 21)]})

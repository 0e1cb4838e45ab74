from __future__ import annotations

import re
from typing import Any

import pytest

from atom.runtime.requests.schemas.negation import all_but, negate

validators = pytest.importorskip("jsonschema_rs")

VALUES = [None, True, False, 0, 1, 2, 2.5, -1, "", "a", "ab", "b", [], [1], [1, 2], {}, {"a": 1}, {"a": "x", "b": 2}]


@pytest.mark.parametrize(
    "schema",
    [
        True, False, {}, {"title": "any"}, {"type": "string"}, {"type": ["null", "number"]}, {"type": "number", "minimum": 1},
        {"const": "a"}, {"const": 1}, {"const": None}, {"enum": ["a", 2, True]}, {"enum": []}, {"required": []},
        {"required": ["a"]}, {"required": ["a", "b"]}, {"properties": {"a": {"type": "string"}}}, {"not": {"type": "null"}},
        {"anyOf": [{"type": "string"}, {"const": 1}]}, {"allOf": [{"minLength": 1}, {"maxLength": 1}]},
        {"minItems": 1}, {"maxItems": 1}, {"minLength": 0}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 1}, {"maximum": 1},
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"$ref": "#/$defs/text"},
    ],
)  # fmt: skip
def test_a_value_is_valid_against_one_of_a_schema_and_its_negation(schema: Any):
    negated = negate(schema, lambda _: {"type": "string"})
    documents = [{"allOf": [each], "$defs": {"text": {"type": "string"}}} for each in (schema, negated)]
    for value in VALUES:
        assert validators.is_valid(documents[0], value) != validators.is_valid(documents[1], value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a"},
        {"type": "integer"},
        {"const": {"a": 1}},
        {"items": {}},
        {"properties": {"a": {"pattern": "b"}}},
    ],
)
def test_what_no_schema_says_is_not_negated(schema: Any):
    assert negate(schema, lambda _: True) is None


def test_a_reference_to_itself_is_not_negated():
    loop = {"$ref": "#"}
    assert negate(loop, lambda _: loop) is None


def test_all_texts_but_some():
    words = ["", "a", "ab", "b]", "^", "a-"]
    pattern = re.compile(all_but(words))
    for text in [*words, "abc", "b", "c", "]", "b]]", "aa", "-", "\n", "a\n", "^^"]:
        assert bool(pattern.fullmatch(text)) == (text not in words), text

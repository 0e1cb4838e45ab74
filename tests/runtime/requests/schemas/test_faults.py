from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom.runtime.requests.schemas import faults
from atom.runtime.requests.schemas.rewrite import rewrite_schema


def refuses(word: str, reason: str = "bad") -> Any:
    """Refuse schemas with a word in them."""
    return lambda schema: reason if word in repr(schema) else ""


def find(schema: Mapping[str, Any], check: Any) -> str | None:
    place = faults.find_fault(rewrite_schema(schema), check)
    return place and place.text


def test_the_smallest_part_that_is_refused_is_found():
    schema = {"properties": {"a": {"type": "string"}, "b": {"anyOf": [{}, {"items": {"pattern": "odd"}}]}}}
    assert find(schema, refuses("odd")) == "#/properties/b/anyOf/1/items"
    assert (
        find({"properties": {"a": {"$ref": "#/x"}}, "x": {"items": {"pattern": "odd"}}}, refuses("odd")) == "#/x/items"
    )
    assert find(schema, refuses("even")) is None


def test_what_only_the_whole_is_refused_for_has_no_place():
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "null"}}}
    assert find(schema, lambda each: "bad" if "null" in repr(each) and "string" in repr(each) else "") is None


def test_a_part_that_nothing_fits_is_no_fault_of_another_kind():
    schema = {"properties": {"a": {"enum": []}, "b": {"pattern": "odd"}}}

    def check(each: Mapping[str, Any]) -> str:
        return "bad" if "odd" in repr(each) else "Unsatisfiable" if "[]" in repr(each) else ""

    assert find(schema, check) == "#/properties/b"


def test_a_large_schema_is_searched_in_part_only(monkeypatch: Any):
    monkeypatch.setattr(faults, "MAX_CHECKS", 5)
    properties = {f"p{index}": {"type": "string"} for index in range(20)} | {"last": {"pattern": "odd"}}
    assert find({"properties": properties}, refuses("odd")) is None


def test_a_schema_that_refers_to_itself_is_searched_once():
    schema = {"$ref": "#/$defs/node", "$defs": {"node": {"$ref": "#/$defs/node", "items": {"pattern": "odd"}}}}
    assert find(schema, lambda each: "bad" if "$ref" in each else "") == "#/$defs/node"
    assert find(schema, refuses("odd")) == "#/$defs/node/items"

"""What grammars of JSON schemas admit. The values are those of the specification, draft 2020-12, written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schema_grammars import admits, byte_compiler, compile_schema

from atom.errors import RequestError
from atom.runtime.requests.schemas.outline import write_outline
from atom.runtime.requests.schemas.rewrite import rewrite_schema

pytest.importorskip("llguidance")

NUMBERS = {"type": "number"}
TAGGED = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "square"]}, "radius": {"type": "integer"}, "side": {"type": "integer"}},
    "required": ["kind"],
    "additionalProperties": False,
}


def holds(schema: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    grammar = compile_schema(schema)
    assert [text for text in valid if not admits(grammar, text)] == []
    assert [text for text in invalid if admits(grammar, text)] == []


def test_annotations_change_nothing():
    notes = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "a", "title": "T", "description": "d",
        "default": 3, "examples": [1], "deprecated": True, "readOnly": True, "writeOnly": False, "x-order": 1,
        "example": 1, "discriminator": {"propertyName": "a"}, "contentEncoding": "base64", "$anchor": "here",
    }  # fmt: skip
    holds({"type": "integer", **notes}, ["3", "-14"], ["true", '"3"'])
    assert rewrite_schema(notes).schema == {}


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True, {"minLength": 0}])
def test_names_that_may_be_any_text_say_nothing(names: Any):
    schema = {"type": "object", "propertyNames": names, "additionalProperties": NUMBERS}
    holds(schema, ["{}", '{"a":1,"b c":2.5}'], ['{"a":"x"}'])


@pytest.mark.parametrize(
    "names",
    [
        {"enum": ["a", "b"]},
        {"type": "string", "enum": ["a", "b"]},
        {"anyOf": [{"type": "string", "const": "a"}, {"type": "string", "const": "b"}]},
        {"$ref": "#/$defs/names"},
    ],
)
def test_names_of_an_enum_are_the_properties(names: dict[str, Any]):
    schema = {"type": "object", "propertyNames": names, "additionalProperties": NUMBERS}
    schema["$defs"] = {"names": {"enum": ["a", "b"]}}
    holds(schema, ["{}", '{"a":1}', '{"b":2}', '{"a":1,"b":2}'], ['{"c":1}', '{"a":"x"}'])
    holds(schema | {"required": ["b"]}, ['{"b":2}', '{"a":1,"b":2}'], ["{}", '{"a":1}'])


def test_names_are_joined_with_the_properties_that_there_are():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "z": {"type": "string"}},
        "propertyNames": {"enum": ["a", "b"]},
    }
    holds(schema, ['{"a":"x"}', '{"a":"x","b":[]}', '{"b":null}'], ['{"a":1}', '{"z":"x"}', '{"c":1}'])
    holds(schema | {"additionalProperties": False}, ["{}", '{"a":"x"}'], ['{"b":1}', '{"z":"x"}'])


def test_a_pattern_of_names_is_one_of_properties():
    schema = {"type": "object", "propertyNames": {"pattern": "^x-[a-z]+$"}, "additionalProperties": NUMBERS}
    holds(schema, ["{}", '{"x-a":1}', '{"x-a":1,"x-bc":2}'], ['{"a":1}', '{"x-":1}', '{"x-a":"1"}'])
    known = {"type": "object", "propertyNames": {"pattern": "^x"}, "properties": {"xa": NUMBERS, "b": NUMBERS}}
    holds(known, ["{}", '{"xa":1}', '{"xa":1,"xb":"t"}'], ['{"b":1}', '{"xa":"t"}'])
    holds(
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']
    )


def test_names_and_patterns_of_properties_hold_together():
    schema = {"type": "object", "propertyNames": {"enum": ["ab", "b"]}, "patternProperties": {"^a": NUMBERS}}
    holds(schema, ["{}", '{"ab":1}', '{"b":"x"}'], ['{"ab":"x"}', '{"a":1}', '{"c":1}'])
    known = {"type": "object", "propertyNames": {"pattern": "^x"}, "properties": {"xa": {"type": "string"}}}
    holds(known | {"additionalProperties": NUMBERS}, ['{"xa":"t"}', '{"xb":1}'], ['{"xa":1}', '{"xb":"t"}', '{"b":1}'])


def test_no_name_is_no_property():
    holds({"type": "object", "propertyNames": False}, ["{}"], ['{"a":1}'])
    holds({"type": "object", "propertyNames": {"type": "number"}}, ["{}"], ['{"a":1}'])


def test_unknown_formats_are_annotations_and_known_ones_hold():
    holds({"type": "string", "format": "phone"}, ['""', '"anything"'], ["1"])
    holds({"type": "integer", "format": "int64"}, ["1"], ["1.5"])
    for format, valid, invalid in [
        ("date", "2024-02-29", "2024-2-9"),
        ("time", "10:11:12Z", "10h"),
        ("date-time", "2024-02-29T10:11:12Z", "2024-02-29"),
        ("duration", "P1DT2H", "1 day"),
        ("email", "a@b.org", "a"),
        ("hostname", "a.b-c", "a_b"),
        ("ipv4", "127.0.0.1", "127.0.0"),
        ("ipv6", "::1", "1"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
        ("uri", "https://a.b/c?d", "//a b"),
    ]:
        holds({"type": "string", "format": format}, [json.dumps(valid)], [json.dumps(invalid)])


def test_unique_items_are_noted_and_not_kept(caplog: pytest.LogCaptureFixture):
    byte_compiler()._noted.clear()
    schema = {"type": "array", "items": NUMBERS, "uniqueItems": True}
    for _ in range(2):
        holds(schema, ["[]", "[1,2]", "[1,1]"], ['["a"]'])
    assert [record.message for record in caplog.records] == [
        "structured outputs: uniqueItems is not kept: items may repeat"
    ]
    assert rewrite_schema({"uniqueItems": False}).notes == []


@pytest.mark.parametrize(
    ("bounds", "valid", "invalid"),
    [
        ({"minimum": 9007199254740993, "maximum": 9007199254740993}, ["9007199254740993"],
         ["9007199254740992", "9007199254740994", "900719925474099", "0"]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, ["0", "-1", "9223372036854775807", "-9223372036854775808"],
         ["9223372036854775808", "-9223372036854775809", "1.5", "1e3"]),
        ({"minimum": 0, "maximum": 2**64 - 1}, ["0", "18446744073709551615"], ["-1", "18446744073709551616"]),
        ({"exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 2}, ["1152921504606846977"],
         ["1152921504606846976", "1152921504606846978"]),
        ({"exclusiveMinimum": -(2**60) - 2, "exclusiveMaximum": -(2**60)}, ["-1152921504606846977"],
         ["-1152921504606846976", "-1152921504606846978"]),
        ({"minimum": 2**53 + 1}, ["9007199254740993", "1" + "0" * 30], ["9007199254740992", "5"]),
        ({"maximum": 2**63 - 1}, ["-" + "9" * 40, "9223372036854775807"], ["9223372036854775808"]),
        ({"minimum": 1e18}, ["1000000000000000000"], ["999999999999999999"]),
    ],
)  # fmt: skip
def test_bounds_of_integers_beyond_float64_are_exact(bounds: dict[str, Any], valid: list[str], invalid: list[str]):
    holds({"type": "integer", **bounds}, valid, invalid)
    inner = {"type": "object", "properties": {"n": {"type": "integer", **bounds}}, "additionalProperties": False}
    holds(inner, ["{}", *(f'{{"n": {text}}}' for text in valid)], [f'{{"n": {text}}}' for text in invalid])


def test_a_large_bound_does_not_drop_what_is_next_to_it():
    for more in (
        {"anyOf": [{"const": 1}]},
        {"allOf": [{"const": 1}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}},
    ):
        with pytest.raises(RequestError, match="cannot be kept next to allOf, anyOf, not or"):
            compile_schema({"maximum": 2**64 - 1, **more})


def test_bounds_at_the_ends_of_float32_and_float64_are_taken():
    single = {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}
    holds(
        single,
        ["0", "-0.5", "6.02e23", "-1e-7", "12345678901234567890.5", "34028234663852886" + "0" * 22],
        ["1e39", "-1e39", "34028234663852887" + "0" * 22, "3.5e38"],
    )
    double = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
    holds(double, ["0", "-0.5", "1e307", "-6.02e23"], ["1e309", "-1e400"])
    holds(
        {"type": ["number", "null"], "maximum": 1e30}, ["null", "-1" + "0" * 40, "1" + "0" * 30], ["1" + "0" * 29 + "1"]
    )


@pytest.mark.parametrize("number", [9007199254740993, -9007199254740993, 2**64 - 1])
def test_a_constant_integer_beyond_float64_is_exact(number: int):
    """llguidance reads numbers as float64."""
    holds({"const": number}, [str(number)], [str(number - 1), str(number + 1)])
    holds({"enum": ["a", number, 3]}, ['"a"', "3", str(number)], [str(number - 1), str(number + 1)])
    holds({"enum": [3, number], "maximum": 2**65, "minimum": 5 - 2**64}, ["3", str(number)], ["4"])


def test_what_has_a_large_number_in_it_keeps_its_meaning():
    large = {"type": "integer", "maximum": 2**63 - 1}
    schema = {
        "type": "object",
        "properties": {"id": large, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "tag": {"const": "t"}},
        "required": ["id", "tag"],
    }
    holds(
        schema,
        ['{"id": 1, "next": {"id":2,"tag":"t"}, "tag" : "t"}', '{"id":9223372036854775807,"tag":"t","more":[{}]}'],
        [
            '{"id":9223372036854775808,"tag":"t"}',
            '{"tag":"t"}',
            '{"id":1}',
            '{"id":1,"tag":"t","id":2}',
            '{"id":1,"tag":"t",}',
        ],
    )
    lists = {
        "type": "array",
        "items": {"type": ["integer", "null"], "maximum": 2**63 - 1},
        "minItems": 1,
        "maxItems": 2,
    }
    holds(lists, ["[null]", "[1, -5]"], ["[]", "[1,2,3]", '["a"]', "[9223372036854775808]", "[1,]"])
    for max_items, valid in [(0, ["[]"]), (1, ["[]", "[1]"]), (2, ["[]", "[1]", "[1,2]"])]:
        holds({"type": "array", "items": large, "maxItems": max_items}, valid, [f"[1{',1' * max_items}]"])
    named = {"type": ["object", "null"], "additionalProperties": large, "properties": {"a": {"type": "string"}}}
    holds(named, ["null", "{}", '{"b":1}', '{"a":"x","b":1,"c":2}'], ['{"a":1}', '{"b":9223372036854775808}', "[]"])
    patterns = {
        "type": "object",
        "patternProperties": {"^(n|m)$": large},
        "properties": {"a": large},
        "additionalProperties": False,
    }
    holds(patterns, ["{}", '{"n":1,"m":2}', '{"a":1,"n":2}'], ['{"b":1}', '{"n":9223372036854775808}'])


def test_one_of_objects_is_any_of_them(caplog: pytest.LogCaptureFixture):
    byte_compiler()._noted.clear()
    tagged = [
        {"type": "object", "properties": {"t": {"const": tag}, tag: NUMBERS}, "required": ["t"]} for tag in ("a", "b")
    ]
    holds({"oneOf": tagged}, ['{"t":"a","a":1}', '{"t":"b","b":1}', '{"t":"a","b":"x"}'], ['{"t":"a","a":"x"}', "{}"])
    holds({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "string"}], "$defs": {"a": NUMBERS}}, ["1", '"a"'], ["null"])
    assert not caplog.records, "these exclude each other"
    opened = {"oneOf": [{"type": "object", "properties": {name: NUMBERS}} for name in ("a", "b")]}
    holds(opened, ["{}", '{"a":1}', '{"b":1}'], ['{"a":"x","b":"x"}', "1"])
    assert [record.message for record in caplog.records] == [
        "structured outputs: oneOf is read as anyOf: an answer may be valid against several of its schemas"
    ]


def test_exactly_one_of_several_properties_is_exact():
    schema = {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    holds(schema, ['{"a":1}', '{"b":1}', '{"a":1,"c":2}'], ["{}", '{"a":1,"b":2}'])


def test_look_aheads_at_the_beginning_are_patterns():
    schema = {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9]).{4,}$"}
    holds(schema, ['"aB3d"', '"A000"'], ['"abcd"', '"ab3d"', '"aBcd"', '"A0"'])


def test_other_look_around_next_to_a_known_format_is_left_out(caplog: pytest.LogCaptureFixture):
    byte_compiler()._noted.clear()
    schema = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"}
    holds(schema, ['"a.b@c.d"'], ['".a@b"', '"a..b@c"', '"A@b"'])
    inner = {"type": "string", "format": "duration", "pattern": r"^P(?:(?=\d)\d+D)$"}
    holds(inner, ['"P1D"'], ['"1D"'])
    assert len(caplog.records) == 1 and "look-around" in caplog.records[0].message


def test_unevaluated_properties_are_additional_ones():
    closed = {"type": "object", "properties": {"a": NUMBERS}, "unevaluatedProperties": False}
    holds(closed, ["{}", '{"a":1}'], ['{"b":1}'])
    holds(closed | {"unevaluatedProperties": {"type": "string"}}, ['{"a":1,"b":"x"}'], ['{"b":1}'])
    base = {"type": "object", "properties": {"a": NUMBERS}, "required": ["a"]}
    more = {"properties": {"b": NUMBERS}, "unevaluatedProperties": False, "$defs": {"base": base}}
    for composed in ({"$ref": "#/$defs/base"}, {"allOf": [{"$ref": "#/$defs/base"}]}):
        holds(composed | more, ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"a":1,"c":2}', '{"a":"x"}'])
    listed = {"type": "array", "prefixItems": [NUMBERS], "unevaluatedItems": False}
    holds(listed, ["[]", "[1]"], ["[1,2]", '["a"]'])


@pytest.mark.parametrize("never", [{"not": {}}, {"not": True}, False, {"not": {"description": "any"}}])
def test_never_is_no_property(never: Any):
    holds({"type": "object", "additionalProperties": never}, ["{}"], ['{"a":1}'])
    holds({"type": "object", "properties": {"a": never, "b": {}}}, ["{}", '{"b":1}', '{"c":1}'], ['{"a":1}'])
    holds({"type": "array", "items": never}, ["[]"], ["[1]"])


@pytest.mark.parametrize(
    ("wrong", "valid", "invalid"),
    [
        ({"type": "null"}, ["1", '"a"', "[]"], ["null"]),
        ({"type": ["string", "number"]}, ["null", "{}"], ["1", '"a"']),
        ({"const": "root"}, ['"roo"', '"roots"', '""', "1", '"Root"'], ['"root"']),
        ({"enum": ["a", "ab", ""]}, ['"b"', '"abc"', '"aa"', "null"], ['"a"', '"ab"', '""']),
        ({"enum": [1, 3]}, ["0", "2", "2.5", "4", '"1"'], ["1", "3"]),
        ({"enum": [None, True]}, ["false", "1"], ["null", "true"]),
        ({"required": ["a", "b"]}, ["{}", '{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "1"]),
        ({"not": {"type": "null"}}, ["null"], ["1"]),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, ["1"], ["null", '"a"']),
        ({"properties": {"a": {"const": 1}}}, ['{"a":2}', '{"a":"x"}'], ["{}", '{"a":1}', "1"]),
        ({"minimum": 5}, ["4.5"], ["5", "6", '"a"']),
        ({"maxLength": 1}, ['"ab"'], ['"a"', "1"]),
    ],
)
def test_not_is_what_is_left(wrong: dict[str, Any], valid: list[str], invalid: list[str]):
    holds({"not": wrong}, valid, invalid)


def test_if_then_else_are_two_cases():
    schema = TAGGED | {
        "allOf": [
            {"if": {"properties": {"kind": {"const": "circle"}}}, "then": {"required": ["radius"]}},
            {"if": {"properties": {"kind": {"const": "square"}}, "required": ["kind"]}, "then": {"required": ["side"]}},
        ]
    }
    holds(
        schema,
        ['{"kind":"circle","radius":1}', '{"kind":"square","side":1}', '{"kind":"circle","radius":1,"side":2}'],
        ['{"kind":"circle"}', '{"kind":"square","radius":1}', '{"radius":1}'],
    )
    holds({"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"const": 1}}, ['"ab"', "1"], ['"a"', "2"])
    holds({"if": False, "then": False}, ["1", "null"], [])


def test_dependencies_hold():
    schema = {"type": "object", "properties": {"card": {}, "bill": {}}, "additionalProperties": False}
    valid, invalid = ["{}", '{"bill":1}', '{"card":1,"bill":1}'], ['{"card":1}']
    for key in ("dependentRequired", "dependencies"):
        holds(schema | {key: {"card": ["bill"]}}, valid, invalid)
    for key in ("dependentSchemas", "dependencies"):
        holds(schema | {key: {"card": {"required": ["bill"]}}}, valid, invalid)


def test_nullable_is_read_as_openapi_does():
    holds({"type": "string", "nullable": True}, ["null", '"a"'], ["1"])
    holds({"type": "string", "nullable": True, "enum": ["a"]}, ['"a"'], ["null"])
    holds({"type": "string", "nullable": False}, ['"a"'], ["null"])


def test_keywords_of_older_drafts_keep_their_meaning():
    pair = {"type": "array", "items": [NUMBERS, {"type": "string"}]}
    holds(pair, ["[]", '[1,"a"]', '[1,"a",null]'], ['["a"]', "[1,2]"])
    holds(pair | {"additionalItems": False}, ['[1,"a"]'], ['[1,"a",null]'])
    holds({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"])
    holds({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"])
    holds({"$ref": "#/definitions/a", "definitions": {"a": NUMBERS}}, ["1"], ['"a"'])


def test_recursive_references_are_kept():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["kids"]}
    holds(tree, ['{"kids":[]}', '{"kids":[{"kids":[]}]}'], ['{"kids":[{}]}', '{"kids":[1]}'])


def test_a_reference_is_within_the_schema_that_has_an_id():
    inner = {"$id": "inner", "$defs": {"n": {"type": "string"}}, "$ref": "#/$defs/n"}
    schema = {"type": "object", "properties": {"a": inner, "b": {"$ref": "inner#/$defs/n"}, "c": {"$ref": "#/$defs/n"}}}
    schema["$defs"] = {"n": NUMBERS, "with/slash~": {"const": 1}}
    schema["properties"]["d"] = {"$ref": "#/$defs/with~1slash~0"}
    holds(schema, ['{"a":"x","b":"y","c":1,"d":1}'], ['{"a":1}', '{"b":1}', '{"c":"x"}', '{"d":2}'])


def test_keywords_that_are_null_are_not_there():
    schema = {"type": "string", "enum": None, "format": None, "pattern": None, "description": None, "minLength": 1.0}
    holds(schema, ['"a"'], ['""', "null"])
    holds({"const": None}, ["null"], ["1"])


def test_patterns_are_read_in_a_time_that_their_length_bounds():
    """Of which a backtracking engine takes ages for the property's name, and a search for each parenthesis for the other."""
    names = {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}, "properties": {"a" * 40 + "!": {}}}
    holds(names, ["{}", '{"aa":1}'], ['{"b":1}'])
    patterns = rewrite_schema({"pattern": "^" + "(?=a)" * 20_000 + "a$"}).schema
    assert len(patterns["allOf"]) == 20_000


def test_numbers_of_properties_that_follow_from_others_are_left_out():
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "additionalProperties": False}
    holds(schema | {"minProperties": 1, "maxProperties": 2}, ['{"a":1}', '{"a":1,"b":2}'], ["{}"])


def test_patterns_of_properties_hold_whatever_is_next_to_them():
    """llguidance reads additionalProperties after allOf as if there were no patterns."""
    schema = {"type": "object", "patternProperties": {"^a": NUMBERS}, "allOf": [{"minProperties": 1}]}
    holds(schema | {"additionalProperties": False}, ['{"ab":1}'], ["{}", '{"b":1}', '{"ab":"x"}'])


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "array", "contains": NUMBERS}, "contains", "say with items or prefixItems what each item is"),
        ({"not": {"pattern": "a"}}, "not", "say what is allowed instead"),
        ({"if": {"pattern": "a"}, "then": False}, "if", "write anyOf with a schema for each case"),
        ({"pattern": "a(?=b)"}, "pattern", "look-around cannot be kept"),
        ({"pattern": "^(?!b)a", "format": "phone"}, "pattern", "write it without"),
        (
            {"anyOf": [{}], "unevaluatedProperties": False},
            "unevaluatedProperties",
            "write additionalProperties in each",
        ),
        ({"anyOf": [{}], "unevaluatedItems": False}, "unevaluatedItems", "write items in each of them"),
        ({"propertyNames": {"not": {"const": "a"}}}, "propertyNames", "except an enum, a pattern, or a length"),
        ({"$ref": "#/$defs/gone"}, "$ref", "there is no #/$defs/gone"),
        ({"$ref": "https://example.org/a"}, "$ref", "is in another document, which is not fetched; copy it to $defs"),
        ({"$dynamicRef": "#node"}, "$dynamicRef/$ref", "write a path as #/$defs/name"),
        ({"multipleOf": 0.07}, "multipleOf", "leave it out, or count in smaller units"),
        ({"enum": [[2**60 + 1]]}, "", "integers beyond 2^53"),
        ({"allOf": [{"type": "integer", "minimum": 2**60 + 1}]}, "", "can be kept in properties, items and anyOf"),
        ({"type": "integer", "multipleOf": 2, "maximum": 2**60}, "", "leave out the bound"),
        ({"type": "text"}, "type", "'text' is no type; give null, boolean, number"),
        ({"required": True}, "required", "True is not a list of names"),
        ({"minLength": -1}, "minLength", "-1 is not a whole number of at least 0"),
        ({"minimum": "0"}, "minimum", "'0' is not a number"),
        ({"items": 5}, "items", "5 is no schema"),
        ({"pattern": "("}, "", ""),  # and why, in llguidance's words
        ({"patternProperties": {"^a": {}, "b$": {}}}, "", ""),
        ({"type": "object", "properties": {"x": {}}, "minProperties": 1}, "", ""),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(schema: dict[str, Any], place: str, reason: str):
    document = {"type": "object", "properties": {"p": schema, "ok": {"type": "string"}}}
    with pytest.raises(RequestError) as error:
        compile_schema(document)
    start = "structured_outputs: #/properties/p" + (f"/{place}" if place else "")
    assert str(error.value).startswith(f"{start}: ") and reason in str(error.value)
    with pytest.raises(RequestError, match=r"^structured_outputs: tool_1#/properties/p"):
        compile_schema({"anyOf": [{"type": "null"}, {"$id": "tool_1", **document}]})


def test_schemas_nest_only_so_deep():
    def nested(depth: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}

    assert admits(compile_schema(nested(59)), '{"a":{"a":{}}}')
    with pytest.raises(RequestError, match="schemas are nested more than 60 deep"):
        compile_schema(nested(60))


def test_a_value_with_the_key_of_our_own_numbers_is_a_value():
    holds({"const": {"x-number": "1"}}, ['{"x-number":"1"}'], ["1", '{"x-number":"2"}'])
    holds({"enum": [{"x-number": "[0-9]"}, 2**60 + 1]}, ['{"x-number":"[0-9]"}', str(2**60 + 1)], ["7", str(2**60)])


LARGE = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}


def chain(count: int, width: int) -> dict[str, Any]:
    """Schemas of which each refers to the next one some times."""
    links = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * width} for at in range(count)}
    return {"$defs": links | {f"a{count}": {"enum": ["a"]}}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (chain(8, 8) | {"not": {"$ref": "#/$defs/a0"}}, "say what is allowed instead"),
        (chain(40, 2) | {"allOf": [{"$ref": "#/$defs/a0"}], "unevaluatedProperties": False}, "each of them"),
        ({"oneOf": [{"required": [str(at)]} for at in range(3000)]}, "takes too long"),
        ({"oneOf": [{"const": at} for at in range(4000)]}, None),
        ({"not": {"enum": ["a" * 5000]}}, "say what is allowed instead"),
        ({"pattern": "^" + "(?=a)" * 20_000}, None),
        ({"propertyNames": {"pattern": "^(a+)+$"}, "properties": {"a" * 50 + "!": True}}, None),
        ({"patternProperties": {"^(a+)+$": True}, "additionalProperties": False, "properties": {"a" * 50 + "!": LARGE}},
         None),
        ({"$ref": "#/$defs/0", "$defs": {str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(1500)}
          | {"1500": LARGE}}, None),
        ({"multipleOf": 10**400}, "multiples of"),
        ({"maximum": 10**400}, None),
    ],
)  # fmt: skip
def test_no_schema_takes_long_to_rewrite(schema: dict[str, Any], fault: str | None):
    def write() -> None:
        rewritten = rewrite_schema(schema)
        write_outline(rewritten.schema, rewritten.places)

    if fault is None:
        write()
    else:
        with pytest.raises(RequestError, match=fault):
            write()

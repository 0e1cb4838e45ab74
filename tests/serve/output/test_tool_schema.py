from __future__ import annotations

import json
from typing import Any

import pytest

from atom.config.tool_formats import read_format
from atom.errors import RequestError
from atom.serve.output.output_parser import OutputParser, gather, tool_names, tool_schema
from atom.serve.output.tool_parser import CallReader

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether generation under this schema can give the text."""
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.get_error()
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def test_required_is_a_list_of_calls():
    call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
    assert tool_schema([tool("f", CITY), tool("g")], "required", "tagged_json") == {
        "type": "array",
        "items": {
            "anyOf": [
                {**call, "properties": {"name": {"const": "f"}, "arguments": CITY}},
                {**call, "properties": {"name": {"const": "g"}, "arguments": NOTHING}},
            ]
        },
        "minItems": 1,
    }


def test_the_key_of_the_arguments_is_the_formats():
    def keys(tool_format: str | None) -> list[str]:
        (call,) = tool_schema([tool("f")], "required", tool_format)["items"]["anyOf"]
        return list(call["properties"])

    assert keys("python_tag") == ["name", "parameters"]
    assert keys("json") == keys("tagged_json") == keys(None) == ["name", "arguments"]


def test_a_named_function_gives_the_schema_of_its_arguments():
    tools = [tool("f", CITY), tool("g"), tool("h", {"properties": {}})]
    assert tool_schema(tools, choice("f"), "json") == CITY
    assert tool_schema(tools, choice("g"), None) == NOTHING
    assert tool_schema(tools, choice("h"), None) == {"type": "object", "properties": {}}


def test_calls_can_be_limited_to_one():
    schema = tool_schema([tool("f")], "required", "json", is_parallel=False)
    one = '{"name": "f", "arguments": {}}'
    assert accepts(schema, f"[{one}]")
    assert not accepts(schema, f"[{one}, {one}]")
    assert accepts(tool_schema([tool("f")], "required", "json"), f"[{one}, {one}]")


def test_references_keep_their_meaning_in_another_place():
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/unit"},
            "inner": {"$ref": "#"},
            "$ref": {"const": "#/x"},
            "const": {"$ref": "#/$defs/unit"},
            "own": {"$id": "https://example.org/own", "properties": {"a": {"$ref": "#"}}},
        },
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F"]}},
    }
    tools = [tool("g"), tool("f", parameters)]
    required = tool_schema(tools, "required", "json")
    moved = required["items"]["anyOf"][1]["properties"]["arguments"]
    assert moved["properties"] == {
        "unit": {"$ref": "#/items/anyOf/1/properties/arguments/$defs/unit"},
        "inner": {"$ref": "#/items/anyOf/1/properties/arguments"},
        "$ref": {"const": "#/x"},
        "const": {"$ref": "#/items/anyOf/1/properties/arguments/$defs/unit"},
        "own": {"$id": "https://example.org/own", "properties": {"a": {"$ref": "#"}}},
    }
    for arguments, is_right in [
        ('{"unit": "C"}', True),
        ('{"unit": "C", "inner": {"unit": "F"}}', True),
        ("{}", False),
    ]:
        assert accepts(tool_schema(tools, choice("f"), "json"), arguments) is is_right
        assert accepts(required, f'[{{"name": "f", "arguments": {arguments}}}]') is is_right
    assert not accepts(required, '[{"name": "f", "arguments": {"unit": "K"}}]')
    assert not accepts(required, '[{"name": "h", "arguments": {}}]')


def test_what_the_schema_gives_is_read_back():
    tools = [tool("f", CITY), tool("g")]
    for tool_format, key in [(None, "arguments"), ("python_tag", "parameters")]:
        text = f'[{{"name": "f", "{key}": {{"city": "Paris"}}}}, {{"name": "g", "{key}": {{}}}}]'
        assert accepts(tool_schema(tools, "required", tool_format), text)
        parser = OutputParser(None, CallReader(read_format("json"), tool_names(tools)))
        answer = gather([parser.push(text), parser.finish()])
        assert [call[:2] for call in answer.calls] == [("f", '{"city": "Paris"}'), ("g", "{}")]
        assert (answer.content, parser.has_whole_calls) == ("", True)
    assert accepts(tool_schema(tools, choice("f"), None), '{"city": "Paris"}')
    parser = OutputParser(None, CallReader(None, None, named="f"))
    assert [call[:2] for call in gather([parser.push('{"city": "Paris"}')]).calls] == [("f", '{"city": "Paris"}')]


@pytest.mark.parametrize(
    ("tools", "chosen", "fault"),
    [
        ([], "required", "tool_choice forces a call, but the request has no tools"),
        ([tool("f")], choice("g"), "tool_choice: there is no function g in tools; there is: f"),
        ([tool("f")], "any", "tool_choice='any' is not required or"),
        ([tool("f")], {"type": "function"}, "tool_choice={'type': 'function'} is not required or"),
        ([tool("f"), tool("f")], "required", r"tools\[1\]: there is another function f"),
        ([{"type": "retrieval"}], "required", r"tools\[0\] is not {\"type\": \"function\""),
        ([tool("")], "required", r"tools\[0\] is not"),
        ([tool("g"), tool("f", [])], "required", r"tools\[1\]\.function\.parameters is not a JSON schema"),
        ([tool("f", {"type": "string"})], choice("f"), r"tools\[0\]\.function\.parameters is not a JSON schema"),
    ],
)
def test_what_cannot_be_chosen_is_a_fault_of_the_request(tools: list[Any], chosen: Any, fault: str):
    with pytest.raises(RequestError, match=fault):
        tool_schema(tools, chosen, "json")


def test_schemas_nest_only_so_deep():
    def nested(depth: int) -> dict[str, Any]:
        return {"properties": {"a": nested(depth - 1)}} if depth else {}

    assert tool_schema([tool("f", nested(100))], choice("f"), None)["type"] == "object"
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters: schemas are nested more than 100 deep"):
        tool_schema([tool("f", nested(101))], choice("f"), None)

from __future__ import annotations

from typing import Any

import pytest
from schema_grammars import admits, compile_schema

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
    pytest.importorskip("llguidance")
    return admits(compile_schema(schema), text)


def test_required_is_a_list_of_calls():
    call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
    city = CITY | {"$id": "f"}
    assert tool_schema([tool("f", CITY), tool("g")], "required", "tagged_json") == {
        "type": "array",
        "items": {
            "anyOf": [
                {**call, "properties": {"name": {"const": "f"}, "arguments": city}},
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
    assert tool_schema(tools, choice("f"), "json") == CITY | {"$id": "f"}
    assert tool_schema(tools, choice("g"), None) == NOTHING
    assert tool_schema(tools, choice("h"), None) == {"type": "object", "properties": {}, "$id": "h"}


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
            "const": {"$ref": "#/$defs/unit"},
            "own": {"$id": "https://example.org/own", "properties": {"a": {"$ref": "#"}}},
        },
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F"]}},
    }
    tools = [tool("g"), tool("f", parameters)]
    required = tool_schema(tools, "required", "json")
    for arguments, is_right in [
        ('{"unit": "C"}', True),
        ('{"unit": "C", "inner": {"unit": "F"}}', True),
        ('{"unit": "C", "const": "F", "own": {"a": {"a": {}}}}', True),
        ('{"unit": "C", "const": "K"}', False),
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
        ([tool("f")], choice("g"), r"tool_choice: there is no function g in tools \(known: f\)"),
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


def test_a_schema_that_cannot_be_kept_is_refused_by_the_tools_name():
    tools = [tool("f", CITY), tool("g", {"type": ["object", "null"], "properties": {"a": {"contains": {}}}})]
    with pytest.raises(RequestError, match=r"structured_outputs: g#/properties/a/contains: contains cannot be kept"):
        accepts(tool_schema(tools, "required", "json"), "[]")
    assert accepts(tool_schema(tools, choice("f"), "json"), '{"city": "Paris"}'), "the other is as it was"

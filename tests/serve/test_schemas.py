"""Schemas as generators write them, on all three APIs: calls and answers that keep to them, and refusals by name."""

from __future__ import annotations

import json
from typing import Any

import asking
import pytest
from asking import CHAT
from serving import Server

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = [CHAT, RESPONSES, MESSAGES]
TERSE = dict.fromkeys(("197", "198", "201", "220", "259"), -100)  # no spaces, and no thinking
ID = 9007199254740993
# what zod, OpenAPI and protobuf write, and one answer that is valid
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Scores",
    "type": "object",
    "properties": {
        "scores": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["ann", "bob"]},
            "additionalProperties": {"type": "integer", "minimum": ID, "maximum": ID},
            "required": ["ann", "bob"],
        },
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "uniqueItems": True, "minItems": 1, "maxItems": 1},
        "none": {"not": {}},
        "unit": {"oneOf": [{"const": "m", "description": "meters"}]},
    },
    "required": ["scores", "tags", "unit"],
    "unevaluatedProperties": False,
    "$defs": {"tag": {"type": "string", "format": "tag", "pattern": "^(?=n).ew$"}},
}
VALID = {"scores": {"ann": ID, "bob": ID}, "tags": ["new"], "unit": "m"}
BAD = {"type": "object", "properties": {"when": {"type": "array", "contains": {"const": 1}}}}


def ask(path: str, tools: dict[str, Any], choice: str | None = None, schema: Any = None) -> dict[str, Any]:
    """A request with tools by name, of which a choice forces one or any, and with a schema of the answer."""
    body: dict[str, Any] = {} if path == MESSAGES else {"logit_bias": TERSE}
    if path == MESSAGES:
        body |= {"model": "talker", "thinking": {"type": "disabled"}}
    body |= {"input": "Hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "Hi"}]}
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 900
    if schema is not None:
        form: dict[str, Any] = {"type": "json_schema", "schema": schema}
        if path == CHAT:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        elif path == RESPONSES:
            body["text"] = {"format": form | {"name": "a"}}
        else:
            body["output_config"] = {"format": form}
    if not tools:
        return body
    if path == MESSAGES:
        body["tools"] = [{"name": name, "input_schema": each} for name, each in tools.items()]
        forced = {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
        return body | {"tool_choice": forced | {"disable_parallel_tool_use": True}}
    body["parallel_tool_calls"] = False
    functions = [{"name": name, "parameters": each} for name, each in tools.items()]
    if path == CHAT:
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        named: Any = {"type": "function", "function": {"name": choice}}
    else:
        body["tools"] = [{"type": "function", **each} for each in functions]
        named = {"type": "function", "name": choice}
    return body | {"tool_choice": "required" if choice == "required" else named}


def read_call(path: str, body: Any) -> tuple[str, Any]:
    if path == CHAT:
        (call,) = (each["function"] for each in body["choices"][0]["message"]["tool_calls"])
        return call["name"], json.loads(call["arguments"])
    if path == RESPONSES:
        (call,) = (each for each in body["output"] if each["type"] == "function_call")
        return call["name"], json.loads(call["arguments"])
    (call,) = (each for each in body["content"] if each["type"] == "tool_use")
    return call["name"], call["input"]


def read_stream(path: str, body: str) -> str:
    """The arguments of a streamed call."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    if path == CHAT:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ()))
    kinds = {RESPONSES: "response.function_call_arguments.delta", MESSAGES: "content_block_delta"}
    found = [event["delta"] for event in events if event["type"] == kinds[path]]
    return "".join(each if isinstance(each, str) else each["partial_json"] for each in found)


def read_text(path: str, body: Any) -> str:
    if path == CHAT:
        return str(body["choices"][0]["message"]["content"])
    if path == RESPONSES:
        return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])
    return "".join(block["text"] for block in body["content"] if block["type"] == "text")


@pytest.mark.parametrize("path", PATHS)
def test_a_forced_call_keeps_to_what_schema_generators_write(server: Server, path: str):
    answer = asking.post(server, path, ask(path, {"score": SCHEMA, "other": BAD}, "score"))
    assert answer.status == 200, answer.body
    assert read_call(path, answer.body) == ("score", VALID)
    streamed = asking.post(server, path, ask(path, {"score": SCHEMA}, "required") | {"stream": True})
    assert json.loads(read_stream(path, streamed.body)) == VALID


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_keeps_to_what_schema_generators_write(server: Server, path: str):
    answer = asking.post(server, path, ask(path, {}, schema=SCHEMA))
    assert answer.status == 200, answer.body
    assert json.loads(read_text(path, answer.body)) == VALID


@pytest.mark.parametrize("path", PATHS)
def test_a_schema_that_cannot_be_kept_is_refused_by_name_and_place(server: Server, path: str):
    advice = "contains cannot be kept; say with items or prefixItems what each item is"
    for choice, tools in (("required", {"fine": SCHEMA, "plan": BAD}), ("plan", {"plan": BAD})):
        answer = asking.post(server, path, ask(path, tools, choice))
        assert answer.status == 400
        assert answer.body["error"]["message"] == f"tools: plan#/properties/when/contains: {advice}"
    answer = asking.post(server, path, ask(path, {}, schema=BAD))
    field = {
        CHAT: "response_format.json_schema",
        RESPONSES: "text.format.schema",
        MESSAGES: "output_config.format.schema",
    }[path]
    assert answer.status == 400
    assert answer.body["error"]["message"] == f"{field}: #/properties/when/contains: {advice}"

"""A response format binds the final text, and the model may call a tool instead: on all three APIs."""

from __future__ import annotations

import json
from typing import Any

import asking
import pytest
from asking import CHAT
from serving import Server

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TERSE = dict.fromkeys(("197", "198", "201", "220", "259"), -100)  # and no thinking
NOTE = {
    "type": "object",
    "properties": {"word": {"enum": ["cat"]}},
    "required": ["word"],
    "additionalProperties": False,
}
ONE = {"disable_parallel_tool_use": True}


def bias(server: Server, **texts: float) -> dict[str, float]:
    """Of the first token of each text."""
    tokens = {
        text: asking.post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}).body["tokens"][0]
        for text in texts
    }
    return TERSE | {str(tokens[text]): value for text, value in texts.items()}


def ask(path: str, **more: Any) -> dict[str, Any]:
    """A request with a format and a tool."""
    tool = {"name": "note", "description": "Notes."}
    if path == CHAT:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        tools: Any = [{"type": "function", "function": tool | {"parameters": NOTE}}]
        body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form, "max_tokens": 400}
    elif path == RESPONSES:
        tools = [{"type": "function", "parameters": NOTE, **tool}]
        form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
        body = {"input": "Hi", "text": form, "max_output_tokens": 400}
    else:
        tools = [tool | {"input_schema": NOTE}]
        body = {
            "model": "talker",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 400,
            "thinking": {"type": "disabled"},
        }
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    one = {} if path == MESSAGES else {"parallel_tool_calls": False}
    return body | one | {"tools": tools} | more


def read(path: str, body: Any) -> tuple[str, list[tuple[str, str]]]:
    """The final text and the calls of an answer."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        found = [call["function"] for call in message.get("tool_calls", [])]
        return message["content"] or "", [(call["name"], call["arguments"]) for call in found]
    if path == RESPONSES:
        items = body["output"]
        text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        return text, [(each["name"], each["arguments"]) for each in items if each["type"] == "function_call"]
    text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    return text, [
        (block["name"], json.dumps(block["input"])) for block in body["content"] if block["type"] == "tool_use"
    ]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_call_can_be_sampled_although_there_is_a_format(server: Server, path: str):
    wanted = bias(server, **{"<tool_call>": 100})
    answer = asking.post(server, path, ask(path, logit_bias=wanted))
    assert answer.status == 200, answer.body
    text, calls = read(path, answer.body)
    assert (text.strip(), {name for name, _ in calls}) == ("", {"note"}), "though it may be cut off"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_the_text_keeps_to_the_format_although_there_are_tools(server: Server, path: str):
    more = {} if path == MESSAGES else {"logit_bias": bias(server, **{"<tool_call>": -100})}
    answer = asking.post(server, path, ask(path, **more))
    assert answer.status == 200, answer.body
    text, calls = read(path, answer.body)
    assert calls or json.loads(text) == {"a": 1}
    assert path == MESSAGES or not calls


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_forced_call_wins_over_a_format(server: Server, path: str):
    choices: dict[str, Any] = {
        CHAT: {"type": "function", "function": {"name": "note"}},
        RESPONSES: {"type": "function", "name": "note"},
        MESSAGES: {"type": "tool", "name": "note", **ONE},
    }
    for choice in (choices[path], {"type": "any", **ONE} if path == MESSAGES else "required"):
        more = {} if path == MESSAGES else {"logit_bias": TERSE}
        answer = asking.post(server, path, ask(path, tool_choice=choice, **more))
        assert answer.status == 200, answer.body
        text, calls = read(path, answer.body)
        assert (text, [(name, json.loads(arguments)) for name, arguments in calls]) == ("", [("note", {"word": "cat"})])

"""Answers that are almost calls are the same streamed and whole, on all three APIs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import scripted
from asking import CHAT
from pydantic_core import from_json
from scripted import Said

from atom.config import Config
from atom.config.load import load

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "size": {"type": "integer"}}}
BROKEN = '<tool_call>{"name": "note", "arguments": {"word": "cat", "size": x}}</tool_call>'
WHOLE = '<tool_call>{"name": "note", "arguments": {"word": "dog"}}</tool_call>'


class Answered(NamedTuple):
    """What a client has at the end."""

    content: str
    calls: list[tuple[str, Any]]  # name, arguments
    end: str | None


# format, text, content, calls, whether all calls are whole
KINDS: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    ("tagged_json", f"Hm. {WHOLE}\nDone.", "Hm. Done.", [("note", '{"word": "dog"}')], True),
    ("tagged_json", '<tool_call>{"name": "note", "arguments": {"word": "a\nb"}</tool_call>', "",
     [("note", '{"word": "a\\nb"}')], True),
    ("tagged_json", '<tool_call>{"name": "note"}</tool_call>', "", [("note", "{}")], True),
    ("tagged_json", '<tool_call>{"name": "note", "arguments": null}</tool_call>', "", [("note", "{}")], True),
    ("tagged_json", '<tool_call>{"name": "note", "arguments": "{\\"size\\": 1}"}</tool_call>', "",
     [("note", '{"size": 1}')], True),
    ("tagged_json", f"{BROKEN} and {WHOLE}", "x}}</tool_call> and ",
     [("note", '{"word": "cat", "size": '), ("note", '{"word": "dog"}')], False),
    ("tagged_json", f"{WHOLE}{BROKEN}", "x}}</tool_call>",
     [("note", '{"word": "dog"}'), ("note", '{"word": "cat", "size": ')], False),
    ("tagged_json", WHOLE[: WHOLE.index('g"}')], "", [("note", '{"word": "do')], False),
    ("tagged_json", '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', [], False),
    ("qwen3_coder", "<function=note>\n<parameter=word>\na <parameter=b>\n<parameter=size>\n3\n</function>", "",
     [("note", '{"word": "a <parameter=b>", "size": 3}')], True),
    ("qwen3_coder", "<function=note>\n<parameter=size>\n3\n</parameter>\n<parameter=word>\nca", "",
     [("note", '{"size": 3, "word": "ca')], False),
]  # fmt: skip


@pytest.fixture(scope="module")
def configure(talker: Path) -> Callable[..., Config]:
    @cache
    def load_talker(tool_format: str) -> Config:
        named = f"serve.http.tool_calls={tool_format}"
        return load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]", named])

    return load_talker


def ask(path: str, *, is_parallel: bool, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "talker", "stream": stream}
    if path == MESSAGES:
        body |= {"max_tokens": 64, "tools": [{"name": "note", "input_schema": SCHEMA}]}
        body |= {} if is_parallel else {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    else:
        function = {"name": "note", "parameters": SCHEMA}
        body["tools"] = [
            {"type": "function", "function": function} if path == CHAT else {"type": "function"} | function
        ]
        body |= {} if is_parallel else {"parallel_tool_calls": False}
    if path == RESPONSES:
        return body | {"input": "Hi"}
    return body | {"messages": [{"role": "user", "content": "Hi"}]}


def read_whole(path: str, body: dict[str, Any]) -> Answered:
    if path == CHAT:
        (choice,) = body["choices"]
        calls = [each["function"] for each in choice["message"].get("tool_calls", [])]
        found = [(each["name"], each["arguments"]) for each in calls]
        return Answered(choice["message"]["content"] or "", found, choice["finish_reason"])
    if path == RESPONSES:
        return read_items(body)
    text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    return Answered(text, [(each["name"], each["input"]) for each in calls], body["stop_reason"])


def read_items(response: dict[str, Any]) -> Answered:
    items = response["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return Answered(text, calls, response["status"])


def read_stream(path: str, text: str) -> Answered:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    content, end, calls = "", None, list[tuple[str, str]]()
    if path == RESPONSES:
        deltas = [each for each in events if each["type"] == "response.output_text.delta"]
        answer = read_items(events[-1]["response"])
        assert "".join(each["delta"] for each in deltas) == answer.content
        return answer
    for each in events:
        if path == CHAT:
            (choice,) = each["choices"]
            content, end = content + (choice["delta"].get("content") or ""), choice["finish_reason"]
            for call in choice["delta"].get("tool_calls", []):
                if call.get("id"):
                    calls.append((call["function"]["name"], ""))
                name, known = calls[call["index"]]
                calls[call["index"]] = name, known + call["function"]["arguments"]
        elif each["type"] == "content_block_start" and each["content_block"]["type"] == "tool_use":
            calls.append((each["content_block"]["name"], ""))
        elif each["type"] == "content_block_delta":
            content += each["delta"].get("text", "")
            if "partial_json" in each["delta"]:
                calls[-1] = calls[-1][0], calls[-1][1] + each["delta"]["partial_json"]
        elif each["type"] == "message_delta":
            end = each["delta"]["stop_reason"]
    return Answered(content, [(name, as_input(known) if path == MESSAGES else known) for name, known in calls], end)


def as_input(arguments: str) -> Any:
    """What Anthropic's SDK makes of a block's pieces."""
    return from_json(arguments or "{}", allow_partial=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("tool_format", "text", "content", "calls", "are_whole"), KINDS)
def test_an_answer_is_the_same_streamed_and_whole(
    configure: Callable[..., Config],
    path: str,
    tool_format: str,
    text: str,
    content: str,
    calls: list[tuple[str, str]],
    are_whole: bool,
):
    config = configure(tool_format)
    ends = {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}
    others = {CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn"}
    shown = [(name, as_input(arguments) if path == MESSAGES else arguments) for name, arguments in calls]
    for is_parallel in (True, False) if len(calls) > 1 else (True,):
        expected_calls = shown if is_parallel else shown[:1]
        is_call = are_whole or (not is_parallel and text.startswith(WHOLE))
        expected = Answered(content, expected_calls, (ends if is_call else others)[path])
        thought = ["<think>Hm.", "</think>\n"]
        whole = scripted.post(config, Said([*thought, text]), ask(path, is_parallel=is_parallel, stream=False), path)[0]
        assert read_whole(path, whole.json()) == expected
        said = Said([*thought, *text])
        stream = scripted.post(config, said, ask(path, is_parallel=is_parallel, stream=True), path)[0]
        assert read_stream(path, stream.text) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_an_answer_that_max_tokens_cuts_off_is_the_same_streamed_and_whole(configure: Callable[..., Config], path: str):
    end = {CHAT: "length", RESPONSES: "incomplete", MESSAGES: "max_tokens"}[path]
    for size in range(1, len(WHOLE) - len('"}}</tool_call>') + 1, 13):
        said = Said([*f"Hm. {WHOLE}"[: 4 + size]], "max_tokens")
        whole = scripted.post(configure("tagged_json"), said, ask(path, is_parallel=True, stream=False), path)[0]
        stream = scripted.post(configure("tagged_json"), said, ask(path, is_parallel=True, stream=True), path)[0]
        answer = read_whole(path, whole.json())
        assert answer == read_stream(path, stream.text) and answer.end == end
        assert bool(answer.calls) == ('"arguments": {' in WHOLE[:size])

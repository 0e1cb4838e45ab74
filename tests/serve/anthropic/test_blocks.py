from __future__ import annotations

import itertools
import json
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.config.tool_formats import read_format
from atom.serve.anthropic.blocks import BlockStream, content_blocks
from atom.serve.output.output_parser import Answer, Delta, OutputParser, ToolCall, ToolDelta, gather
from atom.serve.output.reasoning_parser import ReasoningSplitter
from atom.serve.output.tool_parser import CallReader

TAGS = ("<think>", "</think>")
ANSWER = (
    '<think>\nHm, é.\n</think>\n\nSo "be" it.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>\n'
)
ANSWER += '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>'
BLOCKS = [
    {"type": "thinking", "thinking": "Hm, é.", "signature": ""},
    {"type": "text", "text": 'So "be" it.'},
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1, "x"]}},
    {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
]


def read_events(data: bytes) -> list[dict[str, Any]]:
    """The bodies, each of which bears the name of its event."""
    found = []
    for text in data.decode().split("\n\n")[:-1]:
        name, body = text.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def summarize(events: list[dict[str, Any]]) -> list[Any]:
    """Events in short: ("text", 0) begins a block, "…" adds to the last one, 0 ends it."""
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    found: list[Any] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                found.append((event["content_block"]["type"], event["index"]))
            case "content_block_delta":
                found.append(event["delta"][kinds[event["delta"]["type"]]])
            case "content_block_stop":
                found.append(event["index"])
    return found


def build(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a client puts them together, which is not lenient about their order."""
    blocks: list[dict[str, Any]] = []
    open_block: dict[str, Any] | None = None
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(blocks)
            open_block, texts = event["content_block"], []
            blocks.append(open_block)
            continue
        assert open_block is not None and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            texts += [value for key, value in event["delta"].items() if key != "type"]
        elif open_block["type"] == "tool_use":
            open_block, _ = None, open_block.update(input=json.loads("".join(texts)))
        else:
            open_block, _ = None, open_block.update({open_block["type"]: "".join(texts)})
    assert open_block is None, "the last block is closed"
    return blocks


def test_a_whole_answer_is_thinking_then_text_then_calls():
    answer = Answer("So.", "Hm.", [ToolCall("f", '{"a": 1e400}', "toolu_1")], has_whole_calls=True)
    *others, call = content_blocks(answer)
    assert others == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."}]
    assert bytes(call.pop("input")) == b'{"a": 1e400}', "as the model wrote it"
    assert call == {"type": "tool_use", "id": "toolu_1", "name": "f"}
    assert content_blocks(Answer("", "", [])) == []


@pytest.mark.parametrize("arguments", ["", "{", '{"a": [1, tr', '{"a": [1], "b": "Par', '{"a": [1]'])
def test_the_input_of_a_call_that_was_cut_off_is_what_anthropics_sdk_reads_from_a_stream(arguments: str):
    calls = [ToolCall("f", '{"b": 1e400}', "toolu_1"), ToolCall("f", arguments, "toolu_2", is_whole=False)]
    first, second = content_blocks(Answer("", "", calls))
    assert bytes(first["input"]) == b'{"b": 1e400}'
    assert second["input"] == (jiter.from_json(arguments.encode(), partial_mode=True) if arguments else {})


def test_arguments_that_no_sdk_can_read_are_an_empty_input():
    calls = [ToolCall("f", '{"a": "\\ud800", "b": ', "toolu_1", is_whole=False)]
    (block,) = content_blocks(Answer("", "", calls))
    assert block["input"] == {}


def test_a_block_begins_with_its_first_text_and_ends_before_the_next():
    blocks = BlockStream()
    first = blocks.push(Delta("", "Hm", []))
    assert read_events(first) == [
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
    ]  # fmt: skip
    assert blocks.push(Delta("", "", [])) == b""
    rest = [blocks.push(Delta("", ".", [])), blocks.push(Delta("A", "", [])), blocks.push(Delta("B", "", []))]
    rest += [blocks.push(Delta("", "", [ToolDelta(0, "toolu_1", "f", "")])), blocks.close(), blocks.close()]
    assert summarize(read_events(b"".join(rest))) == [".", 0, ("text", 1), "A", "B", 1, ("tool_use", 2), 2]


def test_a_call_begins_with_its_id_and_name_and_an_empty_input():
    data = BlockStream().push(Delta("", "", [ToolDelta(0, "toolu_1", "f", '{"a"')]))
    assert read_events(data) == [
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
    ]  # fmt: skip


def test_what_ends_a_call_comes_before_the_text_and_the_call_after_it():
    blocks = BlockStream()
    blocks.push(Delta("", "", [ToolDelta(0, "toolu_1", "f", "{")]))
    data = blocks.push(Delta("Then", "", [ToolDelta(0, None, None, "}"), ToolDelta(1, "toolu_2", "g", "{}")]))
    assert summarize(read_events(data)) == ["}", 0, ("text", 1), "Then", 1, ("tool_use", 2), "{}"]


def open_parser() -> OutputParser:
    numbers = itertools.count(1)
    reader = CallReader(read_format("tagged_json"), ["f", "g"], lambda: f"toolu_{next(numbers)}")
    return OutputParser(ReasoningSplitter(TAGS), reader)


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=20))
def test_however_it_is_cut_a_stream_adds_up_to_the_whole_answer(cuts: list[int]):
    parser = open_parser()
    blocks, ends = BlockStream(), [0, *sorted(cuts), len(ANSWER)]
    data = b"".join(blocks.push(parser.push(ANSWER[start:end])) for start, end in itertools.pairwise(ends))
    assert build(read_events(data + blocks.push(parser.finish()) + blocks.close())) == BLOCKS


def test_the_same_answer_at_once_has_the_same_blocks():
    parser = open_parser()
    answer = gather([parser.push(ANSWER), parser.finish()])
    found = content_blocks(answer._replace(has_whole_calls=parser.has_whole_calls))
    for block in found[2:]:
        block["input"] = json.loads(bytes(block["input"]))
    assert found == BLOCKS

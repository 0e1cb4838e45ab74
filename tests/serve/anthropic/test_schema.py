from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from atom.serve.anthropic.schema import CountRequest, MessagesRequest

LEAST: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def faults(body: dict[str, Any], kind: type[CountRequest] = MessagesRequest) -> list[tuple[str, str]]:
    """Where and what, without the tags of a union's alternatives."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    places = [[str(part) for part in each["loc"] if part not in ("a-text", "a-list")] for each in raised.value.errors()]
    return [(".".join(place), each["msg"]) for place, each in zip(places, raised.value.errors(), strict=True)]


def user(*blocks: Any) -> dict[str, Any]:
    return LEAST | {"messages": [{"role": "user", "content": list(blocks)}]}


def test_a_block_of_another_type_is_refused_by_name_in_one_error():
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    there_is = "there is: text, thinking, tool_use, tool_result"
    assert faults(user({"type": "text", "text": "a"}, image)) == [
        ("messages.0.content.1", f"image blocks are not supported here; {there_is}")
    ]
    assert faults(user({"type": "document"})) == [
        ("messages.0.content.0", f"document blocks are not supported here; {there_is}")
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    assert faults(user(result)) == [
        ("messages.0.content.0.tool_result.content.0", "image blocks are not supported here; there is: text")
    ]
    assert faults(LEAST | {"system": [image]}) == [
        ("system.0", "image blocks are not supported here; there is: text"),
    ]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "two words", "input_schema": {"type": "object"}}]}, "tools.0.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.tool.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
         "tool_choice.none.disable_parallel_tool_use"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"metadata": {"user_id": "u" * 2000}}, "metadata.user_id"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_where_it_stands(change: dict[str, Any], place: str):
    assert faults(LEAST | change)[0][0] == place


def test_max_tokens_is_for_an_answer_and_not_for_counting():
    assert ("max_tokens", "Field required") in faults({"model": "m", "messages": LEAST["messages"]})
    assert faults(LEAST, CountRequest) == [("max_tokens", "Extra inputs are not permitted")]


def test_what_the_sdks_own_blocks_have_beside_their_content_is_taken():
    assistant = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
        {"type": "text", "text": "a", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}, "caller": None, "toolset_name": None},
    ]
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    messages = [{"role": "assistant", "content": assistant}, {"role": "user", "content": [marked]}]
    body = MessagesRequest.model_validate(LEAST | {"messages": messages, "system": [marked], "tools": [TOOL]})
    assert [block.type for block in body.messages[0].content if not isinstance(block, str)] == [
        "thinking", "text", "tool_use",
    ]  # fmt: skip

from __future__ import annotations

from typing import Any

import pytest

from atom.errors import RequestError
from atom.serve.anthropic.prompt import plain_messages, read_turns, take_prefill
from atom.serve.anthropic.schema import CountRequest

CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def convert(*messages: tuple[str, Any], system: Any = None) -> tuple[list[dict[str, Any]], str]:
    """Messages for the template, and what the answer begins with."""
    said = [{"role": role, "content": content} for role, content in messages]
    turns = list(read_turns(CountRequest.model_validate({"model": "m", "messages": said, "system": system})))
    prefill = take_prefill(turns)
    return plain_messages(turns), prefill


def test_texts_and_blocks_of_text_are_the_same():
    expected = [{"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "a\nb"}]
    assert convert(("user", "a\nb"), system="Be\nbrief") == (expected, "")
    assert convert(("user", [text("a"), text("b")]), system=[text("Be"), text("brief")]) == (expected, "")


def test_turns_of_one_role_are_one():
    assert convert(("user", "a"), ("user", [text("b")]), ("assistant", "c"), ("assistant", "d"), ("user", "e"))[0] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
    ]


def test_calls_thinking_and_results_stand_where_templates_look_for_them():
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    said = [thinking, text("Let me see."), CALL, {**CALL, "id": "toolu_2", "name": "g", "input": {}}]
    found, _ = convert(("user", "Weather?"), ("assistant", said), ("user", [RESULT, text("And?")]))
    calls = [
        {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "toolu_2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert found == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("change", "content"),
    [
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": None}, ""),
        ({"is_error": True}, "Error: rain"),
        ({"is_error": False}, "rain"),
    ],
)
def test_a_result_is_its_text_with_a_mark_where_it_is_an_error(change: dict[str, Any], content: str):
    found, _ = convert(("assistant", [CALL]), ("user", [RESULT | change]))
    assert found[1]["content"] == content


def test_a_last_message_of_the_assistants_is_what_the_answer_begins_with():
    assert convert(("user", "a"), ("assistant", "It is")) == ([{"role": "user", "content": "a"}], "It is")
    assert convert(("user", "a"), ("assistant", "")) == ([{"role": "user", "content": "a"}], "")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("user", [RESULT])], "a tool_result is for toolu_1, but no tool_use before it has this id"),
        ([("user", [CALL])], "messages.0: a tool_use block does not go with role=user"),
        ([("user", "a"), ("assistant", [RESULT])], "messages.1: a tool_result block does not go with role=assistant"),
        ([("system", [CALL])], "messages.0: a tool_use block does not go with role=system"),
        ([("user", "a"), ("assistant", [CALL])], "the last message is the assistant's and has a tool_use block"),
    ],
)
def test_a_conversation_that_cannot_be_is_refused(messages: list[tuple[str, Any]], reason: str):
    with pytest.raises(RequestError, match=reason):
        convert(*messages)

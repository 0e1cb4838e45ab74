from __future__ import annotations

from typing import Any

import pytest

from atom.errors import RequestError
from atom.serve.anthropic.prompt import plain_messages, read_turns, take_prefill
from atom.serve.anthropic.schema import CountRequest
from atom.serve.prompt_images import PromptImages

CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def convert(*messages: tuple[str, Any], system: Any = None) -> tuple[list[dict[str, Any]], str]:
    """Messages for the template, and what the answer begins with."""
    said = [{"role": role, "content": content} for role, content in messages]
    turns = list(read_turns(CountRequest.model_validate({"model": "m", "messages": said, "system": system})))
    prefill = take_prefill(turns)
    return plain_messages(turns, PromptImages()), prefill


def test_texts_and_blocks_of_text_are_the_same():
    expected = [{"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "a\nb"}]
    assert convert(("user", "a\nb"), system="Be\nbrief") == (expected, "")
    assert convert(("user", [text("a"), text("b")]), system=[text("Be"), text("brief")]) == (expected, "")


def test_a_message_without_blocks_is_an_empty_one():
    assert convert(("user", []), ("assistant", []), ("user", "a")) == (
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": "a"}],
        "",
    )


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


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
NOT_SHOWN = "[image: not shown to this model]"


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (IMAGE, NOT_SHOWN),
        (PDF, "[document: not shown to this model]"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "rain"}}, "rain"),
        ({"type": "document", "source": {"type": "content", "content": [text("rain"), text("sun")]}}, "rain\nsun"),
        ({"type": "document", "source": {"type": "content", "content": [text("rain"), IMAGE]}},
         "[document: not shown to this model]"),
        ({"type": "tool_reference", "tool_name": "g"}, "g"),
        ({"type": "search_result", "source": "a.example", "title": "A", "content": [text("rain")],
          "citations": {"enabled": True}},
         '{"type": "search_result", "source": "a.example", "title": "A", "content": [{"type": "text", "text": "rain"}]}'),
    ],
)  # fmt: skip
def test_a_text_stands_in_a_result_where_the_model_reads_no_other_block(block: dict[str, Any], content: str):
    found, _ = convert(("assistant", [CALL]), ("user", [RESULT | {"content": [text("So:"), block]}]))
    assert found[1]["content"] == f"So:\n{content}"


def test_what_a_tool_showed_next_to_its_result_is_a_text_too():
    """Claude Code sends the pages of a PDF that it has read so."""
    found, _ = convert(("assistant", [CALL]), ("user", [RESULT | {"content": "PDF file read"}, PDF]))
    assert found[1:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "PDF file read"},
        {"role": "user", "content": "[document: not shown to this model]"},
    ]


def test_a_result_may_have_no_blocks():
    found, _ = convert(("assistant", [CALL]), ("user", [RESULT | {"content": []}]))
    assert found[1]["content"] == ""


def test_an_answer_that_was_empty_goes_back():
    empty = ("system", []), ("user", []), ("assistant", []), ("user", "a")
    assert convert(*empty)[0] == [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "a"},
    ]
    assert convert(("user", "a"), ("assistant", [])) == ([{"role": "user", "content": "a"}], "")


def test_a_system_prompt_without_blocks_is_none():
    assert convert(("user", "a"), system=[])[0] == [{"role": "user", "content": "a"}]


def test_blocks_that_only_anthropics_servers_read_are_left_out():
    fallback = {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}
    said = [{"type": "redacted_thinking", "data": "EmwKAhgB"}, text("b"), fallback]
    assert convert(("user", "a"), ("assistant", said), ("user", "c"))[0][1] == {"role": "assistant", "content": "b"}


def test_calls_that_anthropics_servers_ran_are_calls_with_their_results():
    page = {"type": "web_search_result", "title": "Rain", "url": "https://a.example", "encrypted_content": "Eo8CCio"}
    searched = [
        text("I search."),
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "rain"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [page]},
        {**text("It rains."), "citations": [{"type": "web_search_result_location", "url": "https://a.example"}]},
    ]
    found, _ = convert(("user", "Weather?"), ("assistant", searched), ("user", "Thanks"))
    call = {"name": "web_search", "arguments": {"query": "rain"}}
    assert found[1:4] == [
        {"role": "assistant", "content": "I search.",
         "tool_calls": [{"id": "srvtoolu_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "srvtoolu_1", "name": "web_search",
         "content": '[{"type": "web_search_result", "title": "Rain", "url": "https://a.example"}]'},
        {"role": "assistant", "content": "It rains."},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "result", "content"),
    [
        ("mcp_tool_result", {"content": [text("a"), text("b")]}, "a\nb"),
        ("mcp_tool_result", {"content": "a", "is_error": True}, "Error: a"),
        ("bash_code_execution_tool_result",
         {"content": {"type": "bash_code_execution_result", "stdout": "ü", "stderr": "", "return_code": 0, "content": []}},
         '{"type": "bash_code_execution_result", "stdout": "ü", "stderr": "", "return_code": 0, "content": []}'),
        ("web_fetch_tool_result", {"content": {"type": "web_fetch_result", "url": "u", "content": PDF}},
         '{"type": "web_fetch_result", "url": "u", "content": "[document: not shown to this model]"}'),
        ("web_search_tool_result",
         {"content": {"type": "web_search_tool_result_error", "error_code": "unavailable"}},
         '{"type": "web_search_tool_result_error", "error_code": "unavailable"}'),
    ],
)  # fmt: skip
def test_a_result_of_anthropics_servers_is_its_text_or_json(kind: str, result: dict[str, Any], content: str):
    call = CALL | {"type": "mcp_tool_use" if kind.startswith("mcp") else "server_tool_use"}
    said = [call, {"type": kind, "tool_use_id": "toolu_1", **result}]
    assert convert(("user", "a"), ("assistant", said), ("user", "b"))[0][2]["content"] == content


def test_a_reminder_for_one_turn_is_not_read_after_it():
    def read(*more: dict[str, Any]) -> list[str]:
        reminder = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
        stays = {"role": "system", "content": "Be kind.", "clear_at": "never", "output_config": {"effort": "low"}}
        messages = [{"role": "user", "content": "a"}, stays, reminder, {"role": "assistant", "content": "b"}, *more]
        body = CountRequest.model_validate({"model": "m", "messages": messages})
        return [message["content"] for message in plain_messages(read_turns(body), PromptImages())]

    assert read() == ["a", "Be kind.\nBe brief.", "b"]
    assert read({"role": "user", "content": "c"}) == ["a", "Be kind.", "b", "c"]

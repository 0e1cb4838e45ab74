from __future__ import annotations

from typing import Any

import pytest
from library_words import MISSING_FIELD, UNKNOWN_FIELD
from pydantic import ValidationError

from atom.serve.anthropic.schema import CountRequest, HostedTool, MessagesRequest, MessageTool

LEAST: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def faults(body: dict[str, Any], kind: type[CountRequest] = MessagesRequest) -> list[tuple[str, str]]:
    """Where and what, without the tags of a union's alternatives."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    tags = ("a-text", "a-list", "a-tool", "a-hosted-tool")
    places = [[str(part) for part in each["loc"] if part not in tags] for each in raised.value.errors()]
    return [(".".join(place), each["msg"]) for place, each in zip(places, raised.value.errors(), strict=True)]


def user(*blocks: Any) -> dict[str, Any]:
    return LEAST | {"messages": [{"role": "user", "content": list(blocks)}]}


def test_a_block_of_another_type_is_refused_by_name_in_one_error():
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    supported = "(supported: text, thinking, tool_use, tool_result; image, if the model reads images)"
    video = image | {"type": "video"}
    assert faults(user({"type": "text", "text": "a"}, video)) == [
        ("messages.0.content.1", f"video blocks are not supported here {supported}")
    ]
    assert faults(user({"type": "document"})) == [
        ("messages.0.content.0", f"document blocks are not supported here {supported}")
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "video"}]}
    assert faults(user(result)) == [
        (
            "messages.0.content.0.tool_result.content.0",
            "video blocks are not supported here (supported: text; image, if the model reads images)",
        )
    ]
    assert faults(LEAST | {"system": [image]}) == [
        ("system.0", "image blocks are not supported here (supported: text)"),
    ]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"container": "c"}, "container"),
        ({"container": {"id": None, "skills": [{"type": "anthropic", "skill_id": "pptx"}]}}, "container"),
        ({"mcp_servers": [{"type": "url", "name": "a", "url": "https://a.example/mcp"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0"),
        ({"tools": [{"type": "custom_20", "name": "f"}]}, "tools.0"),
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
    assert ("max_tokens", MISSING_FIELD) in faults({"model": "m", "messages": LEAST["messages"]})
    assert faults(LEAST, CountRequest) == [("max_tokens", UNKNOWN_FIELD)]


def test_what_the_sdks_own_blocks_have_besides_their_content_is_taken():
    assistant = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
        {"type": "text", "text": "a", "citations": None},
        {"type": "text", "text": "a", "citations": []},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}, "caller": None, "toolset_name": None},
        {"type": "tool_use", "id": "toolu_2", "name": "f", "input": {}, "caller": {"type": "direct"}},
    ]
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "5m", "scope": "global"}}
    messages = [{"role": "assistant", "content": assistant}, {"role": "user", "content": [marked]}]
    body = MessagesRequest.model_validate(LEAST | {"messages": messages, "system": [marked], "tools": [TOOL]})
    assert [block.type for block in body.messages[0].content if not isinstance(block, str)] == [
        "thinking", "text", "text", "tool_use", "tool_use",
    ]  # fmt: skip


# of the SDK's MessageCreateParams, beta ones too, what says nothing to this server
SAYS_NOTHING: dict[str, Any] = {
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "betas": ["context-1m-2025-08-07"],
    "container": {"id": None, "skills": []},
    "context_management": {"edits": []},
    "diagnostics": {"previous_message_id": None},
    "fallback_credit_token": {"token": "fct_1", "mode": "best_effort"},
    "fallbacks": [{"model": "another", "speed": "standard"}],
    "inference_geo": "us",
    "mcp_servers": [],
    "output_config": {"task_budget": {"type": "tokens", "total": 20000}},
    "service_tier": "standard_only",
    "speed": "standard",
    "stop_sequences": [],
    "system": [],
    "thinking": {"type": "adaptive", "display": "updates", "block_binding": {"prefix_mismatch_behavior": "drop_block"}},
    "tools": [],
    "tool_choice": {"type": "auto"},
}


@pytest.mark.parametrize("field", SAYS_NOTHING)
def test_what_the_sdk_sends_and_says_nothing_here_is_taken(field: str):
    MessagesRequest.model_validate(LEAST | {field: SAYS_NOTHING[field]})
    MessagesRequest.model_validate(LEAST | {field: None})


@pytest.mark.parametrize("value", ["c", [], {}, {"id": None}])
def test_a_container_is_nothing_only_where_it_is_empty(value: Any):
    if value == "c":
        assert faults(LEAST | {"container": value}) == [("container", "no code is run here; leave it out")]
    else:
        assert MessagesRequest.model_validate(LEAST | {"container": value}).container is None


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "web_fetch_20260318", "name": "web_fetch", "citations": {"enabled": True}},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "computer_20251124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "code_execution_20260521", "name": "code_execution"},
        {"type": "advisor_20260301", "name": "advisor", "model": "another"},
        {"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"},
        {"type": "computer_toolset_20260801", "configs": {"zoom": {"enabled": False}}},
        {"type": "mcp_toolset", "mcp_server_name": "a"},
    ],
)
def test_tools_that_anthropic_defines_are_known(tool: dict[str, Any]):
    body = MessagesRequest.model_validate(LEAST | {"tools": [TOOL, tool]})
    assert [type(each) for each in body.tools or ()] == [MessageTool, HostedTool]

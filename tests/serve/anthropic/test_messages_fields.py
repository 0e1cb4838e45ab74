"""Every field of every body of the Messages routes does what it says: two requests whose answers differ by it, its
refusal by name, or, where the field is a label, that the schema calls it so and the answer is the same.

A field that is added to these schemas fails here until it has a row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import asking
import pytest
from serving import Server

from atom.serve.anthropic import message_schema, schema
from atom.serve.openai.schema import Body, CacheRetention

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK: dict[str, Any] = {"model": "talker", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
GREEDY = ASK | {"temperature": 0}
QUIET = {"thinking": {"type": "disabled"}}
COUNTED = {name: ASK[name] for name in ("model", "messages")}
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"enum": ["cat", "dog"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
OTHER = TOOL | {"name": "other"}
TEXT = {"type": "text", "text": "Hello"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "cat"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "an animal"}
FORCED = (
    GREEDY | QUIET | {"max_tokens": 200, "tools": [TOOL, OTHER], "tool_choice": {"type": "tool", "name": "look_up"}}
)

SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "cats"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": "a page"}
DIRECT = {"caller": {"type": "direct"}}
SERVERS = {"mcp_servers": [{"type": "url", "name": "a", "url": "https://a.example/mcp"}]}

CLEARED = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}

Row = Callable[[Server], None]


def differs(one: dict[str, Any], other: dict[str, Any], path: str = MESSAGES) -> Row:
    """Both are served, and what they say is not the same."""

    def check(server: Server) -> None:
        assert essence(server, one, path) != essence(server, other, path)

    return check


def is_label(
    model: type[Body], field: str, word: str, one: dict[str, Any], other: dict[str, Any], path: str = MESSAGES
) -> Row:
    """The schema says that nothing comes of it, and nothing does."""

    def check(server: Server) -> None:
        assert word in str(model.model_fields[field].description)
        assert essence(server, one, path) == essence(server, other, path)

    return check


def refuses(body: dict[str, Any], *texts: str, status: int = 400, path: str = MESSAGES) -> Row:
    """It is refused by name, where the field leaves no other choice."""

    def check(server: Server) -> None:
        answer = asking.post(server, path, body)
        assert answer.status == status, answer.body
        assert all(text in answer.error["message"] for text in texts), answer.error

    return check


def both(*rows: Row) -> Row:
    def check(server: Server) -> None:
        for row in rows:
            row(server)

    return check


def has_test(name: str, file: str = "test_messages.py") -> Row:
    """It has a test of its own."""

    def check(_: Server) -> None:
        assert f"def {name}(" in (Path(__file__).parent / file).read_text()

    return check


def essence(server: Server, body: dict[str, Any], path: str = MESSAGES) -> Any:
    """What an answer says but for the ids that it makes up, and for what was cached of its prompt."""
    answer = asking.post(server, path, body)
    assert answer.status == 200, answer.body
    essential: dict[str, Any] = answer.body
    essential.pop("id", None)
    if usage := essential.get("usage"):
        usage["input_tokens"] += usage.pop("cache_read_input_tokens") + usage.pop("cache_creation_input_tokens")
        del usage["cache_creation"]
    for block in essential.get("content", ()):
        block.pop("id", None)
    return essential


def user(*blocks: Any) -> dict[str, Any]:
    return GREEDY | {"messages": [{"role": "user", "content": list(blocks)}]}


def said(*blocks: Any) -> dict[str, Any]:
    """A conversation in which the assistant has said these."""
    return GREEDY | {"messages": [*ASK["messages"], {"role": "assistant", "content": list(blocks)}, *ASK["messages"]]}


def called(call: Any = CALL, result: Any = RESULT) -> dict[str, Any]:
    """A conversation with a call and its result."""
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return GREEDY | {"messages": [*ASK["messages"], *turns]}


def tools(tool: dict[str, Any]) -> dict[str, Any]:
    return GREEDY | {"tools": [tool]}


def marked(wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> Row:
    """Marks of Anthropic's cache are known, and nothing else in their place."""
    return both(
        lambda server: essence(server, wrap({"cache_control": {"type": "ephemeral", "ttl": "5m"}})) and None,
        refuses(wrap({"cache_control": {"type": "persistent"}}), "cache_control.type"),
        has_test("test_cached_tokens_of_the_prompt_are_counted_apart", "test_messages_app.py"),
    )


def formed(schema: Any, **changes: Any) -> dict[str, Any]:
    """An answer of a JSON schema."""
    return GREEDY | {"output_config": {"format": {"type": "json_schema", "schema": schema} | changes}}


def says(body: dict[str, Any], text: str) -> Row:
    def check(server: Server) -> None:
        assert essence(server, body)["content"] == [{"type": "text", "text": text}]

    return check


def forgetful(**edit: Any) -> dict[str, Any]:
    """A request of Claude Code's, which clears thoughts."""
    return GREEDY | {"context_management": {"edits": [{"type": "clear_thinking_20251015"} | edit]}}


def asked(path: str, base: dict[str, Any]) -> dict[str, Row]:
    """The fields that answering and counting share."""
    return {
        "model": refuses(base | {"model": "nobody"}, "nobody", status=404, path=path),
        "messages": differs(base, base | {"messages": [{"role": "user", "content": "Bye bye"}]}, path),
        "system": differs(base, base | {"system": "Be brief."}, path),
        "tools": differs(base, base | {"tools": [TOOL]}, path),
        "tool_choice": differs(
            base | {"tools": [TOOL]}, base | {"tools": [TOOL], "tool_choice": {"type": "none"}}, path
        ),
        "thinking": differs(base, base | {"thinking": {"type": "disabled"}}, path),
        "output_config": refuses(base | {"output_config": {"effort": "huge"}}, "output_config.effort", path=path),
        "context_management": refuses(base | CLEARED, "clear_tool_uses_20250919 is not done here", path=path),
        "cache_control": refuses(base | {"cache_control": {"type": "persistent"}}, "cache_control.type", path=path),
        "speed": both(
            is_label(schema.CountRequest, "speed", "a label", base, base | {"speed": "standard"}, path),
            refuses(base | {"speed": "fast"}, "speed: fast is not served: all requests have one speed", path=path),
        ),
        "mcp_servers": refuses(base | SERVERS, "mcp_servers: no MCP server is called from here", path=path),
        **{
            name: is_label(schema.CountRequest, name, "a label", base, base | {name: value}, path)
            for name, value in (("billing_policy", {"type": "billing_policy"}), ("betas", ["context-1m-2025-08-07"]))
        },
    }


PICTURE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
ROWS: dict[type[Body], dict[str, Row]] = {
    schema.CountRequest: asked(COUNT, COUNTED),
    schema.MessagesRequest: asked(MESSAGES, GREEDY)
    | {
        "max_tokens": differs(GREEDY, GREEDY | {"max_tokens": 7}),
        "stop_sequences": has_test("test_the_stop_sequence_that_was_met_is_named"),
        "stream": has_test("test_a_stream_adds_up_to_the_answer"),
        "temperature": differs(GREEDY, GREEDY | {"temperature": 50}),
        "top_p": differs(ASK | {"temperature": 50}, ASK | {"temperature": 50, "top_p": 1e-9}),
        "top_k": differs(ASK | {"temperature": 50}, ASK | {"temperature": 50, "top_k": 1}),
        "metadata": has_test("test_the_user_goes_to_the_log"),
        "cache_control": marked(lambda mark: GREEDY | mark),
        "cache_retention": both(
            lambda server: essence(server, GREEDY | {"cache_retention": {"seconds": 5, "priority": 3}}) and None,
            refuses(GREEDY | {"cache_retention": {"seconds": 0}}, "cache_retention.seconds"),
        ),
        "taps": both(
            has_test("test_responses_and_messages_have_what_they_tap", "../test_tap_fields.py"),
            refuses(GREEDY | {"taps": {"model.layers.0": "last"}}, "taps"),
        ),
        "steer": both(
            has_test("test_responses_and_messages_have_what_they_tap", "../test_tap_fields.py"),
            refuses(GREEDY | {"steer": {"calm": 1}}, "steer"),
        ),
        "explain": has_test("test_the_message_that_was_changed_is_named", "test_claude_code_session.py"),
        "service_tier": is_label(
            schema.MessagesRequest,
            "service_tier",
            "a label",
            GREEDY | {"service_tier": "auto"},
            GREEDY | {"service_tier": "standard_only"},
        ),
        "inference_geo": is_label(
            schema.MessagesRequest, "inference_geo", "a label", GREEDY, GREEDY | {"inference_geo": "us"}
        ),
        "container": refuses(GREEDY | {"container": "container_1"}, "container: no code is run here"),
        "thread": refuses(GREEDY | {"thread": {"type": "create"}}, "thread: conversations are not kept here"),
        "diagnostics": is_label(
            schema.MessagesRequest,
            "diagnostics",
            "a label",
            GREEDY,
            GREEDY | {"diagnostics": {"previous_message_id": "msg_1"}},
        ),
        "fallbacks": both(
            is_label(schema.MessagesRequest, "fallbacks", "a hint", GREEDY, GREEDY | {"fallbacks": "default"}),
            is_label(schema.MessagesRequest, "fallbacks", "a hint", GREEDY, GREEDY | {"fallbacks": [{"model": "a"}]}),
        ),
        "fallback_credit_token": is_label(
            schema.MessagesRequest, "fallback_credit_token", "a label", GREEDY, GREEDY | {"fallback_credit_token": "f"}
        ),
    },
    schema.OutputConfig: {
        "effort": has_test("test_effort_is_the_templates_variable", "test_messages_app.py"),
        "format": says(QUIET | formed({"const": 17}), "17"),
        "task_budget": is_label(
            schema.OutputConfig,
            "task_budget",
            "a hint",
            GREEDY,
            GREEDY | {"output_config": {"task_budget": {"type": "tokens", "total": 20000}}},
        ),
    },
    schema.JSONFormat: {
        "type": refuses(formed({}, type="xml"), "output_config.format.type"),
        "schema_": both(
            says(QUIET | formed({"const": "a"}), '"a"'),
            refuses(formed({"type": "objct"}), "output_config.format.schema: ", "objct"),
        ),
    },
    schema.ContextManagement: {
        "edits": both(
            refuses(GREEDY | CLEARED, "context_management.edits.0: clear_tool_uses_20250919 is not done here"),
            lambda server: essence(server, GREEDY | {"context_management": {"edits": []}}) and None,
        )
    },
    schema.ClearThinking: {
        "type": refuses(forgetful(type="compact_20260112"), "compact_20260112 is not done here"),
        "keep": is_label(
            schema.ClearThinking,
            "keep",
            "a hint",
            forgetful(keep="all"),
            forgetful(keep={"type": "thinking_turns", "value": 1}),
        ),
    },
    message_schema.CacheControl: {
        "type": refuses(GREEDY | {"cache_control": {"type": "persistent"}}, "cache_control.type"),
        "ttl": both(
            has_test("test_the_figures_of_a_session_add_up_turn_by_turn", "test_claude_code_session.py"),
            refuses(GREEDY | {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ),
        "scope": is_label(
            message_schema.CacheControl,
            "scope",
            "a hint",
            GREEDY | {"cache_control": {"type": "ephemeral"}},
            GREEDY | {"cache_control": {"type": "ephemeral", "scope": "global"}},
        ),
    },
    message_schema.ImageBlock: {  # what they do is in test_images.py: this model reads no images
        "type": refuses(user(PICTURE), "image blocks are not supported here"),
        "source": refuses(user(PICTURE | {"source": {"type": "file", "file_id": "a"}}), "file sources of images"),
        "cache_control": refuses(user(PICTURE | {"cache_control": {"type": "persistent"}}), "cache_control.type"),
    },
    message_schema.Base64Source: {
        name: refuses(user(PICTURE | {"source": PICTURE["source"] | {name: 1}}), "messages.0.content.0")
        for name in ("type", "media_type", "data")
    },
    message_schema.URLSource: {
        name: refuses(user(PICTURE | {"source": {"type": "url", "url": "data:,", name: 1}}), "messages.0.content.0")
        for name in ("type", "url")
    },
    message_schema.TextBlock: {
        "type": refuses(user(TEXT | {"type": "video"}), "video blocks are not supported here"),
        "text": differs(user(TEXT), user(TEXT | {"text": "Bye"})),
        "cache_control": marked(lambda mark: user(TEXT | mark)),
        "citations": both(
            is_label(message_schema.TextBlock, "citations", "a label", user(TEXT), user(TEXT | {"citations": []})),
            is_label(
                message_schema.TextBlock, "citations", "a label", said(TEXT), said(TEXT | {"citations": [{"url": "u"}]})
            ),
        ),
    },
    message_schema.ThinkingBlock: {
        "type": refuses(said(THOUGHT | {"type": "musing"}), "musing blocks are not supported"),
        "thinking": differs(said(THOUGHT), said(THOUGHT | {"thinking": "I doubt it."})),
        "signature": is_label(
            message_schema.ThinkingBlock,
            "signature",
            "not checked",
            said(THOUGHT),
            said(THOUGHT | {"signature": "forged"}),
        ),
    },
    message_schema.ToolUseBlock: {
        "type": refuses(said(CALL | {"type": "computer_use"}), "computer_use blocks are not supported"),
        "id": refuses(called(CALL | {"id": "toolu_2"}), "no tool_use before it has this id"),
        "name": differs(called(), called(CALL | {"name": "other"})),
        "input": differs(called(), called(CALL | {"input": {"word": "dog"}})),
        "cache_control": marked(lambda mark: called(CALL | mark)),
        "caller": is_label(message_schema.ToolUseBlock, "caller", "a label", called(), called(CALL | DIRECT)),
        "toolset_name": is_label(
            message_schema.ToolUseBlock, "toolset_name", "a label", called(), called(CALL | {"toolset_name": "all"})
        ),
    },
    message_schema.ToolResultBlock: {
        "type": refuses(called(CALL, RESULT | {"type": "mcp_tool_result"}), "does not go with role=user"),
        "tool_use_id": refuses(called(CALL, RESULT | {"tool_use_id": "toolu_2"}), "no tool_use before it has this id"),
        "content": differs(called(), called(CALL, RESULT | {"content": "nothing"})),
        "is_error": differs(called(), called(CALL, RESULT | {"is_error": True})),
        "cache_control": marked(lambda mark: called(CALL, RESULT | mark)),
        "toolset_name": is_label(
            message_schema.ToolResultBlock,
            "toolset_name",
            "a label",
            called(),
            called(CALL, RESULT | {"toolset_name": "all"}),
        ),
    },
    message_schema.SilentBlock: {
        "type": lambda server: essence(server, said(TEXT, {"type": "redacted_thinking", "data": "EmwK"})) and None,
    },
    message_schema.ServerCallBlock: {
        "type": differs(said(SEARCH, FOUND, TEXT), said(TEXT)),
        "id": refuses(said(SEARCH | {"id": "srvtoolu_2"}, FOUND), "no tool_use before it has this id"),
        "name": differs(said(SEARCH, FOUND, TEXT), said(SEARCH | {"name": "web_fetch"}, FOUND, TEXT)),
        "input": differs(said(SEARCH, FOUND, TEXT), said(SEARCH | {"input": {"query": "dogs"}}, FOUND, TEXT)),
        "cache_control": marked(lambda mark: said(SEARCH | mark, FOUND, TEXT)),
        **{
            field: is_label(
                message_schema.ServerCallBlock, field, "a label", said(SEARCH, FOUND), said(SEARCH | value, FOUND)
            )
            for field, value in (("caller", DIRECT), ("server_name", {"server_name": "a"}))
        },
    },
    message_schema.ServerResultBlock: {
        "type": refuses(said(SEARCH, FOUND | {"type": "found"}), "found blocks are not supported"),
        "tool_use_id": refuses(said(SEARCH, FOUND | {"tool_use_id": "a"}), "no tool_use before it has this id"),
        "content": differs(said(SEARCH, FOUND, TEXT), said(SEARCH, FOUND | {"content": []}, TEXT)),
        "is_error": differs(said(SEARCH, FOUND, TEXT), said(SEARCH, FOUND | {"is_error": True}, TEXT)),
        "cache_control": marked(lambda mark: said(SEARCH, FOUND | mark, TEXT)),
        "caller": is_label(
            message_schema.ServerResultBlock, "caller", "a label", said(SEARCH, FOUND), said(SEARCH, FOUND | DIRECT)
        ),
    },
    message_schema.MessageConfig: {
        "effort": is_label(
            message_schema.MessageConfig,
            "effort",
            "a hint",
            GREEDY,
            GREEDY | {"messages": [ASK["messages"][0] | {"output_config": {"effort": "low"}}]},
        ),
    },
    message_schema.Message: {
        "role": differs(
            GREEDY | {"messages": [{"role": "system", "content": "Hello"}, *ASK["messages"]]},
            GREEDY | {"messages": [{"role": "user", "content": "Hello"}, *ASK["messages"]]},
        ),
        "content": differs(GREEDY, user(TEXT | {"text": "Bye"})),
        "clear_at": has_test("test_a_reminder_for_one_turn_is_not_read_after_it", "test_prompt.py"),
        "output_config": refuses(
            GREEDY | {"messages": [ASK["messages"][0] | {"output_config": {"format": {}}}]}, "output_config.format"
        ),
    },
    schema.MessageTool: {
        "type": refuses(
            GREEDY | {"tools": [{"type": "function", "function": {"name": "look_up"}}]},
            "tools.0: function tools are not supported here; give a name and an input_schema, without a type",
        ),
        "name": differs(tools(TOOL), tools(OTHER)),
        "description": differs(tools(TOOL), tools(TOOL | {"description": "Finds a word."})),
        "input_schema": differs(FORCED, FORCED | {"tools": [TOOL | {"input_schema": {"type": "object"}}]}),
        "cache_control": marked(lambda mark: tools(TOOL | mark)),
        "input_examples": both(
            has_test("test_examples_of_an_input_stand_in_its_schema", "test_messages_app.py"),
            lambda server: essence(server, FORCED | {"tools": [TOOL | {"input_examples": [{"word": "dog"}]}]}) and None,
        ),
        **{
            field: is_label(schema.MessageTool, field, word, FORCED, FORCED | {"tools": [TOOL | {field: True}, OTHER]})
            for field, word in (("strict", "a label"), ("eager_input_streaming", "a hint"), ("defer_loading", "a hint"))
        },
        "allowed_callers": is_label(
            schema.MessageTool,
            "allowed_callers",
            "a label",
            FORCED,
            FORCED | {"tools": [TOOL | {"allowed_callers": ["direct"]}, OTHER]},
        ),
    },
    schema.HostedTool: {
        "type": has_test("test_a_tool_of_anthropics_own_is_left_out_and_logged_once", "test_messages_app.py"),
        "name": has_test("test_a_tool_of_anthropics_own_cannot_be_forced", "test_messages_app.py"),
    },
    schema.FreeChoice: {
        "type": differs(
            tools(TOOL) | {"tool_choice": {"type": "auto"}}, tools(TOOL) | {"tool_choice": {"type": "any"}}
        ),
        "disable_parallel_tool_use": has_test(
            "test_of_several_calls_the_first_is_returned_where_one_is_asked_for", "test_messages_app.py"
        ),
    },
    schema.OneTool: {
        "type": refuses(FORCED | {"tool_choice": {"type": "function", "name": "look_up"}}, "tool_choice"),
        "name": both(
            differs(FORCED, FORCED | {"tool_choice": {"type": "tool", "name": "other"}}),
            refuses(FORCED | {"tool_choice": {"type": "tool", "name": "nothing"}}, "there is no function nothing"),
        ),
        "disable_parallel_tool_use": is_label(
            schema.OneTool,
            "disable_parallel_tool_use",
            "whatever it says",
            FORCED,
            FORCED | {"tool_choice": FORCED["tool_choice"] | {"disable_parallel_tool_use": True}},
        ),
    },
    schema.NoTool: {"type": differs(tools(TOOL), tools(TOOL) | {"tool_choice": {"type": "none"}})},
    schema.Thinking: {
        "type": differs(GREEDY | {"thinking": {"type": "enabled"}}, GREEDY | {"thinking": {"type": "disabled"}}),
        "budget_tokens": both(
            has_test("test_a_budget_limits_thinking_that_is_enabled", "test_messages_app.py"),
            refuses(GREEDY | {"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
        ),
        "display": has_test("test_thinking_that_is_omitted_leaves_an_empty_block", "test_messages_app.py"),
        "block_binding": is_label(
            schema.Thinking,
            "block_binding",
            "a label",
            GREEDY | {"thinking": {"type": "enabled"}},
            GREEDY | {"thinking": {"type": "enabled", "block_binding": {}}},
        ),
    },
    schema.Metadata: {"user_id": has_test("test_the_user_goes_to_the_log")},
}


BODIES = {
    name: each
    for module in (schema, message_schema)
    for name, each in vars(module).items()
    if isinstance(each, type) and issubclass(each, Body) and each not in (Body, CacheRetention)
}


@pytest.mark.parametrize("name", [f"{model.__name__}.{field}" for model, rows in ROWS.items() for field in rows])
def test_a_field_has_its_effect(name: str, server: Server):
    model, field = name.split(".")
    ROWS[BODIES[model]][field](server)


def test_every_field_of_every_body_has_a_row():
    assert {name: set(each.model_fields) for name, each in BODIES.items()} == {
        each.__name__: set(rows) for each, rows in ROWS.items()
    }

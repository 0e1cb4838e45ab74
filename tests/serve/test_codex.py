"""What Codex CLI 0.171 sends to /v1/responses, made anew and small, and histories that it brings from other servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripted
from openai.types.responses import Response
from scripted import Said

from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config
from atom.config.load import load
from atom.serve.content import IMAGE
from atom.serve.context import Context
from atom.serve.openai.chat import parsers_of
from atom.serve.openai.responses import as_chat
from atom.serve.openai.responses_schema import ResponsesRequest

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
EXEC: dict[str, Any] = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [EXEC | {"name": "spawn_agent"}],
}
PATCH_TOOL: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}
SEARCH = {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]}
ASKED: dict[str, Any] = {"type": "message", "id": "msg_2", "role": "user", "content": "fix the test"}
FIRST: dict[str, Any] = {
    "model": "talker",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are a coding agent."}],
        },
        ASKED,
    ],
    "tools": [EXEC, AGENTS, {"type": "tool_search", "execution": "client", "parameters": {}}, PATCH_TOOL, SEARCH],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "text": {"verbosity": "low"},
    "client_metadata": {"turn_id": "01a2", "x-codex-turn-metadata": json.dumps({"workspaces": "w" * 2000})},
}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,aaaa", "detail": "high"}
CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'


@pytest.fixture(scope="module")
def config(talker: Path) -> Config:
    return load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]"])


@pytest.fixture(scope="module")
def prompt_of(config: Config, talker: Path) -> Callable[..., str]:
    """The prompt that a body becomes."""
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None

    def ask(body: dict[str, Any], path: str = RESPONSES) -> str:
        answer, seen = scripted.post(config, Said(["Hi"]), body, path)
        assert answer.status_code == 200, answer.text
        return tokenizer.decode(seen[0].prompt, skip_special_tokens=False)

    return ask


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    """The chat that asks for the same, with the two tools that a model is shown."""
    function = {key: EXEC[key] for key in ("name", "description", "parameters")}
    spawn = function | {"name": "multi_agent_v1__spawn_agent", "description": "Sub-agents.\n\nRuns a command."}
    return {"messages": list(messages), "tools": [{"type": "function", "function": each} for each in (function, spawn)]}


def test_the_first_request_is_that_of_a_chat_with_its_functions(config: Config, prompt_of: Callable[..., str]):
    system = {"role": "developer", "content": "You are a coding agent."}
    assert prompt_of(FIRST) == prompt_of(chat(system, {"role": "user", "content": "fix the test"}), CHAT)
    answer, _ = scripted.post(config, Said([CALL[:30], CALL[30:]]), FIRST, RESPONSES)
    assert '"name":"exec_command"' in answer.text and "event: response.completed" in answer.text
    whole = scripted.post(config, Said([CALL]), FIRST | {"stream": False}, RESPONSES)[0].json()
    (call,) = Response.model_validate(whole).output
    assert call.type == "function_call" and (call.name, call.arguments) == ("exec_command", '{"cmd": "ls"}')
    assert whole["tools"] == [EXEC, AGENTS], "those that the model was shown"


def test_a_kind_of_tool_that_is_left_out_is_logged_once(config: Config, caplog: pytest.LogCaptureFixture):
    def ask_twice(context: Context) -> None:
        for _ in range(2):
            parsers_of(context, as_chat(ResponsesRequest.model_validate(FIRST)))

    scripted.post(config, Said(["Hi"]), FIRST, RESPONSES, before=ask_twice)
    left_out = [each for each in caplog.messages if "left out of prompts" in each]
    assert [each.split()[4] for each in left_out] == ["custom", "tool_search", "web_search"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("required", "no custom or web_search is called here; leave tool_choice out, or send a function"),
        ({"type": "web_search"}, "web_search choices are not supported here"),
        ({"type": "custom", "name": "apply_patch"}, "custom choices are not supported here"),
        ({"type": "function", "name": "spawn_agent"}, "there is no function spawn_agent in tools"),
        ({"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}, "no custom or web_search is called here"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp"}]},
            "there is no function mcp in tools",
        ),
    ],
    ids=["required", "web_search", "custom", "function", "allowed_tools", "namespace"],
)
def test_a_choice_that_forces_what_is_left_out_is_refused_by_name(config: Config, choice: Any, message: str):
    is_of_none = choice == "required" or ("mode" in choice and choice["tools"] == [SEARCH])
    tools = [PATCH_TOOL, SEARCH] if is_of_none else [EXEC, AGENTS, SEARCH]
    answer, seen = scripted.post(
        config, Said(["Hi"]), FIRST | {"stream": False, "tools": tools, "tool_choice": choice}, RESPONSES
    )
    assert (answer.status_code, answer.json()["error"]["param"], seen) == (400, "tool_choice", [])
    assert message in answer.json()["error"]["message"]


SPAWN = '<tool_call>\n{"name": "multi_agent_v1__spawn_agent", "arguments": {"cmd": "ls"}}\n</tool_call>'


def test_a_call_of_a_namespace_is_named_as_codex_takes_it(config: Config):
    """Codex 0.171 refuses the flat name: "unsupported call"."""
    whole = scripted.post(config, Said([SPAWN, CALL]), FIRST | {"stream": False}, RESPONSES)[0].json()
    first, second = Response.model_validate(whole).output
    assert first.type == second.type == "function_call"
    assert (first.name, first.namespace, first.arguments) == ("spawn_agent", "multi_agent_v1", '{"cmd": "ls"}')
    assert (second.name, second.namespace) == ("exec_command", None) and "namespace" not in whole["output"][1]
    streamed, _ = scripted.post(config, Said([SPAWN[:40], SPAWN[40:] + CALL]), FIRST, RESPONSES)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line[:5] == "data:"]
    named = [(each["item"]["name"], each["item"].get("namespace")) for each in events if "item" in each]
    assert named == [("spawn_agent", "multi_agent_v1")] * 2 + [("exec_command", None)] * 2, "added and done"
    last = Response.model_validate(events[-1]["response"]).output
    assert [(each.name, each.namespace) for each in last if each.type == "function_call"] == named[::2]


def test_an_allowed_namespace_is_all_its_functions(prompt_of: Callable[..., str]):
    tools = [EXEC, AGENTS | {"tools": [EXEC, EXEC | {"name": "close_agent"}, PATCH_TOOL]}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "multi_agent_v1"}]}
    assert prompt_of(FIRST | {"tools": tools, "tool_choice": choice}) == prompt_of(FIRST | {"tools": tools[1:]})
    prompt = prompt_of(FIRST | {"tools": tools[1:]})
    assert "multi_agent_v1__exec_command" in prompt and "multi_agent_v1__close_agent" in prompt
    assert prompt.count("Sub-agents.") == 1 and "apply_patch" not in prompt


def test_a_choice_of_what_is_left_out_and_a_function_is_that_of_the_function(prompt_of: Callable[..., str]):
    allowed = [{"type": "function", "name": "exec_command"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    assert prompt_of(FIRST | {"tool_choice": choice}) == prompt_of(FIRST | {"tools": [EXEC]})
    nothing = choice | {"tools": [{"type": "web_search"}]}
    assert prompt_of(FIRST | {"tool_choice": nothing}) == prompt_of(FIRST | {"tools": []})


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": [SEARCH]}], ids=["absent", "empty", "left out"])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_choice_that_forces_nothing_needs_no_tools(prompt_of: Callable[..., str], choice: str, tools: dict[str, Any]):
    assert prompt_of({"input": "Hi", "tool_choice": choice} | tools) == prompt_of({"input": "Hi"})


def test_a_history_is_that_of_a_chat(prompt_of: Callable[..., str]):
    items = [
        ASKED,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}], "content": None,
         "encrypted_content": "gAAAA"},
        {"type": "function_call", "id": "fc_1", "name": "spawn_agent", "namespace": "multi_agent_v1",
         "arguments": '{"cmd": "ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1",
         "output": [{"type": "input_text", "text": "one"}, PICTURE]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Edit."}],
         "encrypted_content": None},
        {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "call_2", "name": "apply_patch",
         "input": 'say "é"\n'},
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_2", "output": "Done."},
        {"type": "message", "id": "msg_3", "role": "assistant", "status": "completed",
         "content": [{"type": "refusal", "refusal": "No more."}]},
        ASKED,
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAA"},  # of a turn that was stopped
        ASKED,
    ]  # fmt: skip
    user = {"role": "user", "content": "fix the test"}
    spawned = {"name": "multi_agent_v1__spawn_agent", "arguments": '{"cmd": "ls"}'}
    patched = {"name": "apply_patch", "arguments": json.dumps({"input": 'say "é"\n'})}
    messages: list[dict[str, Any]] = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": spawned}]},
        {"role": "tool", "tool_call_id": "call_1", "content": f"one\n{IMAGE}"},
        {"role": "assistant", "content": "", "reasoning_content": "Edit.",
         "tool_calls": [{"id": "call_2", "type": "function", "function": patched}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "Done."},
        {"role": "assistant", "content": "No more."},
        user,
        user,
    ]  # fmt: skip
    prompt = prompt_of(FIRST | {"input": items})
    assert prompt == prompt_of(chat(*messages), CHAT)
    assert "gAAAA" not in prompt and "base64" not in prompt


SAID = "[The following images are tool output]"
MOVED: dict[str, dict[str, Any]] = {  # a tool's image in a message of the user after its result, as litellm 1.110 puts it
    CHAT: {
        "messages": [
            {"role": "user", "content": "fix the test"},
            {"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "name": "shot", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [
                {"type": "text", "text": SAID},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]},
        ],
    },
    RESPONSES: {
        "input": [
            ASKED,
            {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SAID}, PICTURE]},
        ],
    },
    "/v1/messages": {
        "model": "talker",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "fix the test"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "shot", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a"}]},
            {"role": "user", "content": [
                {"type": "text", "text": SAID},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", MOVED)
def test_an_image_that_a_client_moves_from_a_result_to_the_user_is_a_text(prompt_of: Callable[..., str], path: str):
    told = "\n".join([SAID, IMAGE])
    assert f"<|im_start|>tool\na<|im_end|>\n<|im_start|>user\n{told}<|im_end|>\n" in prompt_of(MOVED[path], path)


@pytest.mark.parametrize("path", MOVED)
def test_an_image_of_the_users_own_is_refused(config: Config, path: str):
    name = "input" if path == RESPONSES else "messages"
    *before, own = MOVED[path][name]
    for messages in ([own], [*before, {"role": "assistant", "content": "b"}, own]):
        answer, seen = scripted.post(config, Said(["Hi"]), MOVED[path] | {name: messages}, path)
        assert (answer.status_code, seen) == (400, [])
        assert "blocks are not supported here" in answer.json()["error"]["message"]

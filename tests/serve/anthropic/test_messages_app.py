"""The Messages routes over an engine whose part the test plays: every event, every error, every prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted
from scripted import Said, Script

from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config
from atom.config.load import load
from atom.serve.auth.tenants import read_keys
from atom.serve.context import Context
from atom.serve.engine.frames import Message
from atom.serve.engine.protocol import Failed, Finish, Output, Outputs, Refused, Submit

ASK: dict[str, Any] = {"model": "talker", "max_tokens": 24, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}, "exact": {"type": "boolean"}}},
}
NOTHING = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
Asker = Callable[..., tuple[httpx.Response, list[Submit]]]


@pytest.fixture(scope="module")
def configure(talker: Path) -> Callable[..., Config]:
    @cache
    def load_talker(*overrides: str) -> Config:
        return load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]", *overrides])

    return load_talker


@pytest.fixture
def ask(configure: Callable[..., Config]) -> Asker:
    def post(
        script: Script, body: dict[str, Any], *overrides: str, path: str = "/v1/messages", **options: Any
    ) -> tuple[httpx.Response, list[Submit]]:
        return scripted.post(configure(*overrides), script, body, path, **options)

    return post


def read_events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    found = [text.split("\n") for text in response.text.split("\n\n")[:-1]]
    return [(name.removeprefix("event: "), json.loads(body.removeprefix("data: "))) for name, body in found]


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat", "exact": true}}\n</tool_call>'
THOUGHT = Said(["<think>", "\nHm", ".\n</think>\n", "\nOne", " moment.\n", CALL[:55], CALL[55:]])
HI = Said(["Hi"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_default_of_min_tokens_is_cut_to_what_an_answer_may_have(ask: Asker, path: str):
    overrides = ("sampling.min_tokens=90", "serve.max_model_len=100")
    _, (short,) = ask(Said(["a"]), ASK, *overrides, path=path)
    assert (short.params.max_tokens, short.params.min_tokens) == (24, 24)
    _, (long,) = ask(Said(["a"]), ASK | {"max_tokens": 1000}, *overrides, path=path)
    room = 100 - len(long.prompt)
    assert room < 90 and (long.params.max_tokens, long.params.min_tokens) == (room, room)


def test_thinking_text_and_calls_are_blocks(ask: Asker):
    response, seen = ask(THOUGHT, {**ASK, "tools": [TOOL]})
    body = response.json()
    assert body.pop("id").startswith("msg_") and body["content"][2].pop("id").startswith("toolu_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "talker",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "name": "look_up", "input": {"word": "cat", "exact": True}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(seen[0].prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation": NOTHING,
            "output_tokens": 7,
        },
    }


def test_a_stream_has_anthropics_events_in_their_order(ask: Asker):
    response, seen = ask(THOUGHT, {**ASK, "tools": [TOOL], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    events = read_events(response)
    assert all(name == body["type"] for name, body in events)
    bodies = [body for _, body in events]
    assert bodies[0]["message"].pop("id").startswith("msg_")
    assert bodies[9]["content_block"].pop("id").startswith("toolu_")
    usage = {"input_tokens": len(seen[0].prompt), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    usage |= {"cache_creation": NOTHING}
    assert bodies == [
        {"type": "message_start", "message": {"type": "message", "role": "assistant", "model": "talker", "content": [],
                                              "stop_reason": None, "stop_sequence": None,
                                              "usage": {**usage, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "One"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": " moment."}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "name": "look_up", "input": {}}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": '{"word": "'}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": 'cat", "exact": true}'}},
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
         "usage": {**usage, "output_tokens": 7}},
        {"type": "message_stop"},
    ]  # fmt: skip


@pytest.mark.parametrize(("display", "shown"), [("omitted", ""), ("summarized", "Hm."), (None, "Hm.")])
def test_thinking_that_is_omitted_leaves_an_empty_block(display: str | None, shown: str, ask: Asker):
    body = {**ASK, "thinking": {"type": "adaptive", "display": display}}
    said = Said(["<think>", "\nHm", ".\n</think>\n", "\nSo."])
    thought = {"type": "thinking", "thinking": shown, "signature": ""}
    assert ask(said, body)[0].json()["content"] == [thought, {"type": "text", "text": "So."}]
    events = [event for _, event in read_events(ask(said, {**body, "stream": True})[0])]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    assert "".join(event["delta"].get("thinking", "") for event in events if "delta" in event) == shown


LEVELS = "{% for m in messages %}{{ m.content }}{% endfor %}Reasoning: {{ reasoning_effort or 'high' }}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_always_thinks_does_not_show_it_where_thinking_is_disabled(stream: bool, ask: Asker, talker: Path):
    """Claude Code 2.1 disables thinking for titles and sub-agents."""
    body = {**ASK, "thinking": {"type": "disabled"}, "stream": stream}
    response, seen = ask(Said(["<think>", "\nHm", ".\n</think>\n", "\nSo."]), body, before=use_template(LEVELS))
    assert response.status_code == 200
    assert prompt_of(seen, talker) == "HelloReasoning: low"
    if stream:
        blocks = [
            event["content_block"] for _, event in read_events(response) if event["type"] == "content_block_start"
        ]
        assert blocks == [{"type": "text", "text": ""}]
    else:
        assert response.json()["content"] == [{"type": "text", "text": "So."}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "reason", "stop"),
    [
        (Said(["So."]), "end_turn", None),
        (Said(["So."], "max_tokens"), "max_tokens", None),
        (Said(["So."], "repetition"), "max_tokens", None),
        (Said(["So"], "stop_sequence", "."), "stop_sequence", "."),
        (Said(["So"], "stop_7"), "end_turn", None),
        (Said([CALL]), "tool_use", None),
        (Said([CALL], "max_tokens"), "max_tokens", None),
        (Said([CALL[:55]], "max_tokens"), "max_tokens", None),
        (Said([CALL[:55]]), "end_turn", None),
    ],
)
def test_the_reason_of_the_end_is_in_anthropics_words(
    said: Said, reason: str, stop: str | None, streams: bool, ask: Asker
):
    response, _ = ask(said, {**ASK, "tools": [TOOL], "stream": streams, "stop_sequences": ["."]})
    end = read_events(response)[-2][1]["delta"] if streams else response.json()
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, stop)


def test_of_several_calls_the_first_is_returned_where_one_is_asked_for(ask: Asker):
    for choice, num_calls in (({"type": "auto", "disable_parallel_tool_use": True}, 1), ({"type": "auto"}, 2)):
        body = {**ASK, "tools": [TOOL], "tool_choice": choice}
        assert len(ask(Said([CALL, CALL]), body)[0].json()["content"]) == num_calls
        events = read_events(ask(Said([CALL, CALL]), {**body, "stream": True})[0])
        assert [name for name, _ in events].count("content_block_start") == num_calls


def test_cached_tokens_of_the_prompt_are_counted_apart(ask: Asker):
    """They are there with and without cache_control: what can be cached is."""
    block = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    marked = {**ASK, "messages": [{"role": "user", "content": [block]}], "cache_control": {"type": "ephemeral"}}
    for body in (ASK, marked):
        response, seen = ask(HI._replace(num_cached=16), body)
        usage = response.json()["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(seen[0].prompt) - 16, 16)
        events = read_events(ask(HI._replace(num_cached=16), {**body, "stream": True})[0])
        assert events[0][1]["message"]["usage"] == usage | {"output_tokens": 0}
        assert events[-2][1]["usage"] == usage


def prompt_of(seen: list[Submit], talker: Path) -> str:
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None
    return tokenizer.decode(seen[0].prompt, skip_special_tokens=False)


def test_a_conversation_is_rendered_with_its_calls_and_results(ask: Asker, talker: Path):
    call = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "cat"}}
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "none", "is_error": True},
                                     {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    _, seen = ask(HI, {**ASK, "messages": messages, "system": [{"type": "text", "text": "Be brief."}]})
    assert prompt_of(seen, talker) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n"
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nError: none<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_come_to_the_template_as_it_knows_them(ask: Asker, talker: Path):
    _, seen = ask(HI, {**ASK, "tools": [TOOL]})
    system = prompt_of(seen, talker).removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
    function = {"name": "look_up", "description": "Looks a word up.", "parameters": TOOL["input_schema"]}
    assert json.loads(system) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("thinking", "end"),
    [
        (None, "<|im_start|>assistant\n"),
        ({"type": "enabled"}, "<|im_start|>assistant\n"),
        ({"type": "adaptive"}, "<|im_start|>assistant\n"),
        ({"type": "disabled"}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_the_templates_switch(thinking: Any, end: str, ask: Asker, talker: Path):
    _, seen = ask(HI, {**ASK, "thinking": thinking})
    assert prompt_of(seen, talker).endswith("Hello<|im_end|>\n" + end)


def use_template(template: str) -> Callable[[Context], None]:
    def change(context: Context) -> None:
        assert context.tokenizer is not None
        context.tokenizer = context.tokenizer.with_template(template)

    return change


OPENED = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


def test_thinking_that_the_template_opens_is_a_block_without_its_marker(ask: Asker):
    response, _ = ask(Said(["Hm.", "</think>", "Hi"]), ASK, before=use_template(OPENED))
    assert response.json()["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Hi"},
    ]


EFFORTFUL = "{{ messages[0].content }}{% if reasoning_effort %} at effort {{ reasoning_effort }}{% endif %}"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_effort_is_the_templates_variable(path: str, ask: Asker, talker: Path):
    body = {**ASK, "output_config": {"effort": "low"}}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
        response, _ = ask(HI, body, path=path, before=use_template(EFFORTFUL))
        assert response.json() == {"input_tokens": len("Hello at effort low")}
        return
    _, seen = ask(HI, body, before=use_template(EFFORTFUL))
    assert prompt_of(seen, talker) == "Hello at effort low"
    _, (plain,) = ask(HI, body)
    assert plain.prompt == ask(HI, ASK)[1][0].prompt, "a template that reads no effort gets none"


def test_a_format_constrains_the_answer_after_its_thinking(ask: Asker):
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    _, (submit,) = ask(HI, {**ASK, "output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert submit.params.structured_outputs == {"json": schema}
    assert submit.params.reasoning == {"begin": "<think>", "end": "</think>"}
    _, (submit,) = ask(HI, {**ASK, "tools": [TOOL], "tool_choice": {"type": "any"},
                            "output_config": {"format": {"type": "json_schema", "schema": schema}}})  # fmt: skip
    assert submit.params.structured_outputs["json"]["type"] == "array", "a forced call takes precedence"


def test_the_engines_refusal_of_a_schema_names_its_field(ask: Asker):
    def refuse(submit: Submit) -> list[Message]:
        return [Refused(submit.id, "structured_outputs: Invalid type: objct")]

    wrong = {"format": {"type": "json_schema", "schema": {"type": "objct"}}}
    response, _ = ask(refuse, {**ASK, "output_config": wrong})
    assert response.json()["error"]["message"] == "output_config.format.schema: Invalid type: objct"
    response, _ = ask(refuse, {**ASK, "tools": [TOOL], "tool_choice": {"type": "any"}})
    assert response.json()["error"]["message"] == "tools: Invalid type: objct"


def test_examples_of_an_input_stand_in_its_schema(ask: Asker, talker: Path):
    examples = [{"word": "cat", "exact": True}, {"word": "dog", "exact": False}]
    _, seen = ask(HI, {**ASK, "tools": [{**TOOL, "input_examples": examples, "strict": True}]})
    system = json.loads(prompt_of(seen, talker).removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0])
    assert system[0]["function"]["parameters"] == {**TOOL["input_schema"], "examples": examples}


def test_a_model_that_does_not_think_may_be_asked_to_as_far_as_it_is_of_use(ask: Asker):
    response, _ = ask(HI, {**ASK, "thinking": {"type": "adaptive"}}, "model.reasoning=null")
    assert response.json()["content"] == [{"type": "text", "text": "Hi"}]


# what Claude Code sends besides the conversation
CLAUDE_CODE: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "tools": [{**TOOL, "eager_input_streaming": True, "strict": True}],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "user_1_account__session_2"},
    "service_tier": "auto",
    "inference_geo": "us",
    "temperature": 1,
    "stream": True,
}


def test_a_request_of_claude_code_is_served(ask: Asker):
    response, (submit,) = ask(HI, {**ASK, **CLAUDE_CODE})
    assert response.status_code == 200 and read_events(response)[-1][0] == "message_stop"
    plain = {name: value for name, value in CLAUDE_CODE.items() if name in ("system", "temperature")}
    _, (same,) = ask(HI, {**ASK, **plain, "tools": [TOOL]})
    assert submit.prompt == same.prompt
    assert submit.params == replace(same.params, thinking_token_budget=31999)


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, 1024),
        ({"type": "enabled", "budget_tokens": 0}, 0),
        ({"type": "enabled"}, None),
        ({"type": "adaptive", "budget_tokens": 1024}, None),
        ({"type": "disabled", "budget_tokens": 1024}, None),
        (None, None),
    ],
)
def test_a_budget_limits_thinking_that_is_enabled(thinking: Any, budget: int | None, ask: Asker):
    _, (submit,) = ask(HI, {**ASK, "thinking": thinking})
    assert submit.params.thinking_token_budget == budget


SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
HOSTED: list[dict[str, Any]] = [
    SEARCH,
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": "a"},
    {"type": "singing_20990101", "name": "sing"},
    {"type": "dancing_20990101", "name": "dance"},
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_tool_of_anthropics_own_is_left_out_and_logged_once(
    path: str, ask: Asker, talker: Path, caplog: pytest.LogCaptureFixture
):
    asked = {name: value for name, value in ASK.items() if name != "max_tokens" or path == "/v1/messages"}
    with caplog.at_level("WARNING", "atom.serve"):
        response, seen = ask(HI, {**asked, "tools": [HOSTED[0], TOOL, *HOSTED]}, path=path)
    plain, same = ask(HI, {**asked, "tools": [TOOL]}, path=path)
    assert response.status_code == plain.status_code == 200
    assert [each.prompt for each in seen] == [each.prompt for each in same]
    assert response.json().get("input_tokens") == plain.json().get("input_tokens")
    lines = [record.message for record in caplog.records if "left out" in record.message]
    assert [line.split()[4] for line in lines] == ["bash", "mcp_toolset", "unknown", "web_search"]


def test_where_only_anthropics_tools_are_given_the_model_reads_none(ask: Asker):
    _, (seen,) = ask(HI, {**ASK, "tools": HOSTED, "tool_choice": {"type": "auto"}})
    _, (same,) = ask(HI, ASK)
    assert (seen.prompt, seen.params) == (same.prompt, same.params)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("tools", "choice"), [([TOOL, SEARCH], {"type": "tool", "name": "web_search"}), ([SEARCH], {"type": "any"})]
)
def test_a_tool_of_anthropics_own_cannot_be_forced(path: str, tools: Any, choice: dict[str, Any], ask: Asker):
    asked = {name: value for name, value in ASK.items() if name != "max_tokens" or path == "/v1/messages"}
    response, seen = ask(HI, {**asked, "tools": tools, "tool_choice": choice}, path=path)
    assert (response.status_code, seen) == (400, [])
    assert response.json()["error"]["message"] == (
        "tool_choice forces a call, but no web_search is called here; "
        "leave tool_choice out, or send a function, which the client runs"
    )


def test_any_choice_is_among_the_tools_that_the_client_runs(ask: Asker):
    _, (submit,) = ask(HI, {**ASK, "tools": [SEARCH, TOOL], "tool_choice": {"type": "any"}})
    _, (same,) = ask(HI, {**ASK, "tools": [TOOL], "tool_choice": {"type": "any"}})
    assert submit.params == same.params


@pytest.mark.parametrize("kind", ["auto", "none"])
@pytest.mark.parametrize("tools", [None, []])
def test_a_choice_that_forces_nothing_needs_no_tools(kind: str, tools: Any, ask: Asker):
    response, (submit,) = ask(HI, {**ASK, "tools": tools, "tool_choice": {"type": kind}})
    assert response.status_code == 200 and submit.prompt == ask(HI, ASK)[1][0].prompt


# what Claude Code 2.1 sends once it has read a picture and a PDF, made anew and short
PICTURE = {"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo=", "media_type": "image/png"}}
PAGES = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
READ: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Look at both."}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.png"}},
        {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "a.pdf"}},
    ]},
    {"role": "user", "content": [
        {"tool_use_id": "toolu_1", "type": "tool_result", "content": [PICTURE]},
        {"tool_use_id": "toolu_2", "type": "tool_result", "content": "PDF file read: a.pdf (326 bytes)"},
        PAGES | {"cache_control": {"type": "ephemeral"}},
    ]},
]  # fmt: skip


def test_what_claude_code_reads_of_pictures_and_pdfs_does_not_end_its_session(ask: Asker, talker: Path):
    response, seen = ask(HI, {**ASK, **CLAUDE_CODE, "messages": READ})
    assert response.status_code == 200
    assert prompt_of(seen, talker).endswith(
        "<|im_start|>tool\n[image: not shown to this model]<|im_end|>\n"
        "<|im_start|>tool\nPDF file read: a.pdf (326 bytes)<|im_end|>\n"
        "<|im_start|>user\n[document: not shown to this model]<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    counted, _ = ask(HI, {"model": "talker", "messages": READ}, path="/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": len(ask(HI, {**ASK, "messages": READ})[1][0].prompt)}


@pytest.mark.parametrize(
    ("body", "overrides", "message"),
    [
        ({"thinking": {"type": "disabled"}, "messages": [*ASK["messages"], {"role": "assistant", "content": "b"}]}, [],
         "an answer of this model begins with its thinking, not with a given text; end with a message of the user"),
        ({"thinking": {"type": "enabled"}}, ["model.reasoning=null"],
         "this model does not think; leave thinking out or send type=disabled"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, [],
         "an answer of this model begins with its thinking, not with a given text; "
         'end with a message of the user, or send thinking={"type": "disabled"}'),
        ({"tools": [TOOL]}, ["serve.http.tool_calls=none"],
         "calls of tools are not read here (serve.http.tool_calls=none); force one with tool_choice"),
    ],
)  # fmt: skip
def test_what_this_model_cannot_do_is_refused(body: Any, overrides: list[str], message: str, ask: Asker):
    response, seen = ask(HI, {**ASK, **body}, *overrides, before=use_template(OPENED))
    assert (response.status_code, seen) == (400, [])
    assert response.json()["error"] == {"type": "invalid_request_error", "message": message}


FUNCTION = {"name": "look_up", "parameters": TOOL["input_schema"]}
ASKED = {"role": "user", "content": "A cat?"}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"tools": [TOOL], "max_tokens": 24, "messages": [
            ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "an animal"}]},
        ]}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "an animal"},
        ]}),
        ("/v1/responses", {"tools": [{"type": "function", **FUNCTION}], "input": [
            ASKED,
            {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "an animal"},
        ]}),
    ],
)  # fmt: skip
def test_a_result_is_answered_by_a_model_that_was_not_trained_for_tools(
    path: str, body: dict[str, Any], ask: Asker, talker: Path
):
    body = {"model": "talker", **body}
    plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ tools }}"
    none = {"type": "none"} if path == "/v1/messages" else "none"
    overrides = ("model.tool_calls=null", "model.reasoning=null")
    _, (without,) = ask(HI, body | {"tool_choice": none}, *overrides, path=path, before=use_template(plain))
    response, (seen,) = ask(HI, body, *overrides, path=path, before=use_template(plain))
    assert (response.status_code, seen.prompt) == (200, without.prompt)
    assert "tool: an animal" in prompt_of([seen], talker)


def test_what_the_answer_begins_with_follows_the_prompt_and_stays_text(ask: Asker, talker: Path):
    begun = [*ASK["messages"], {"role": "assistant", "content": "I am <|im_end|>"}]
    _, seen = ask(HI, {**ASK, "messages": begun})
    assert prompt_of(seen, talker).endswith("<|im_start|>assistant\nI am <|im_end|>")
    assert seen[0].prompt[-1] == ord(">") - ord("!"), "a byte, the 30th of the printable ones, and no special token"


def test_pings_fill_a_silence(ask: Asker):
    said = HI._replace(pause=0.2)
    events = read_events(ask(said, {**ASK, "stream": True}, "advanced.comment_seconds=0.05")[0])
    assert events[0] == ("ping", {"type": "ping"})
    assert next(name for name, _ in events if name != "ping") == "message_start"
    assert [name for name, _ in events if name != "ping"][-1] == "message_stop"


@pytest.mark.parametrize(
    ("ends", "status", "kind", "message"),
    [
        (lambda submit: [Refused(submit.id, "no such token")], 400, "invalid_request_error", "no such token"),
        (lambda submit: [Failed("Error", "out of memory", 1)], 503, "overloaded_error", "out of memory"),
        (lambda submit: [Outputs([Output(submit.id, 0, "", [], None, Finish("error", 0, 0, 0.0))], 1, {})], 500, "api_error",
         "internal error, the server's log has it"),
    ],
)  # fmt: skip
def test_an_error_of_the_engine_is_the_answer_or_the_last_event(
    ends: Any, status: int, kind: str, message: str, ask: Asker
):
    error = {"type": kind, "message": message}
    response, _ = ask(ends, ASK)
    request_id = response.headers["request-id"]
    assert (response.status_code, response.json()) == (
        status,
        {"type": "error", "error": error, "request_id": request_id},
    )
    response, _ = ask(ends, {**ASK, "stream": True}, headers={"x-request-id": "mine"})
    assert read_events(response)[1:] == [("error", {"type": "error", "error": error, "request_id": "mine"})]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_the_door_is_closed_without_a_key(path: str, ask: Asker):
    response, seen = ask(HI, ASK, path=path, tenants=read_keys("right"), headers={"x-api-key": "wrong"})
    assert (response.status_code, seen) == (401, [])
    error = {
        "type": "authentication_error",
        "message": "the API key is invalid, this server has no such key: send x-api-key: KEY",
    }
    assert response.json() == {"type": "error", "error": error, "request_id": response.headers["request-id"]}


def test_either_of_the_sdks_headers_opens_the_door(ask: Asker):
    for headers in ({"x-api-key": "right"}, {"authorization": "Bearer right"}):
        assert ask(HI, ASK, tenants=read_keys("right"), headers=headers)[0].status_code == 200


def test_a_full_queue_and_a_server_that_ends_are_errors(ask: Asker):
    def fill(context: Context) -> None:
        context.engines[0].client._num_waiting = {"": 1}

    response, _ = ask(HI, ASK, "serve.http.max_queue=1", before=fill)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) >= 1
    response, _ = ask(HI, ASK, before=lambda context: context.engines.drain())
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


def test_routes_that_do_not_exist_are_refused_in_anthropics_words_only_below_messages(ask: Asker):
    assert ask(HI, ASK, path="/v1/messages/batches")[0].json()["error"]["type"] == "not_found_error"
    assert ask(HI, ASK, path="/v1/messages_of_others")[0].json()["error"].keys() == {"message", "type", "param", "code"}

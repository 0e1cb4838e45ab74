"""What is wrong with a request is reported in OpenAI's words, by the name of the field, and the next one is served."""

from __future__ import annotations

import json
import re
from typing import Any

import asking
import pytest
import wire
from asking import CHAT, COMPLETIONS, Answer
from fastapi.exceptions import RequestValidationError
from library_words import MISSING_FIELD, UNKNOWN_FIELD, of_pydantic
from pydantic import ValidationError
from serving import Server

from atom.config import AdvancedConfig
from atom.serve.http.bodies import read_body
from atom.serve.http.body_faults import describe
from atom.serve.llama_cpp import ROUTES
from atom.serve.openai.responses_schema import ResponsesRequest
from atom.serve.openai.schema import ChatRequest, CompletionRequest

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def assert_is_openai(answer: Answer, status: int, kind: str, param: str | None = None, code: str | None = None) -> str:
    """The message of an error that has the shape that OpenAI's clients know."""
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json"), answer.body
    assert set(answer.body) == {"error"}
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert (answer.error["type"], answer.error["param"], answer.error["code"]) == (kind, param, code)
    message: str = answer.error["message"]
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_route(server: Server, method: str):
    message = assert_is_openai(asking.send(server, method, "/v1/nothing"), 404, "not_found_error")
    assert f"{method} /v1/nothing" in message


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/completion", "POST /v1/completions"),
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("GET", "/props", "GET /v1/models or /server_info"),
    ],
)
def test_a_route_of_llama_cpp_or_ollama_names_ours(server: Server, method: str, path: str, instead: str):
    message = assert_is_openai(asking.send(server, method, path), 404, "not_found_error")
    assert message == f"there is no {method} {path} here; write {instead}"


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/v1/messages", "/v1/messages"),
        ("GET", "//v1/models", "/v1/models"),
        ("GET", "/v1//models", "/v1/models"),
        ("GET", "//v1/v1/models", "/v1/models"),
        ("POST", "/v1//v1/completions", "/v1/completions"),
    ],
)
def test_a_base_url_with_too_much_is_distinguished_from_an_unknown_route(
    server: Server, method: str, path: str, meant: str
):
    message = assert_is_openai(asking.send(server, method, path), 404, "not_found_error")
    hint = f"write {meant}: the base URL has /v1 once, and no slash after it"
    assert message == f"there is no {method} {path} here; {hint}"


def test_the_routes_that_are_named_exist(server: Server):
    served = asking.get(server, "/openapi.json").body["paths"]
    named = {path for routes in ROUTES.values() for path in re.findall(r"/\S+", routes)}
    assert named <= set(served)


def test_a_wrong_method(server: Server):
    answer = asking.get(server, COMPLETIONS)
    assert "use POST" in assert_is_openai(answer, 405, "invalid_request_error")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("number", [1 << 31, 10**50, -(10**50)], ids=["2^31", "10^50", "-10^50"])
@pytest.mark.parametrize(
    ("path", "names"),
    [
        (CHAT, "max_tokens max_completion_tokens top_logprobs"),
        (COMPLETIONS, "max_tokens logprobs"),
        *[(path, "n best_of top_k min_tokens prompt_logprobs truncate_prompt_tokens") for path in (CHAT, COMPLETIONS)],
        *[(path, "priority temperature top_p min_p repetition_penalty") for path in (CHAT, COMPLETIONS)],
        *[(path, "presence_penalty frequency_penalty") for path in (CHAT, COMPLETIONS)],
        ("/v1/messages", "max_tokens top_k temperature top_p"),
        ("/v1/responses", "max_output_tokens top_logprobs top_k"),
    ],
)
def test_a_number_that_no_engine_holds_is_refused_by_name(server: Server, path: str, names: str, number: int):
    whole = {"prompt": "Hello"} if path == COMPLETIONS else {"model": "talker", "max_tokens": 1} | HELLO
    whole = {"input": "Hello"} if path == "/v1/responses" else whole
    for name in names.split():
        answer = asking.post(server, path, whole | {name: number})
        assert answer.status == 400 and name in answer.error["message"], answer.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"seed": 10**50}),
        (CHAT, HELLO | {"stop_token_ids": [10**50]}),
        (CHAT, HELLO | {"logit_bias": {"1": 10**50}}),
        (CHAT, HELLO | {"logit_bias": {"9" * 50: 1}}),
        (CHAT, HELLO | {"chat_template_kwargs": {"thinking": 10**50}}),
        (CHAT, HELLO | {"chat_template_kwargs": {"thinking": 1e50}}),
        (COMPLETIONS, {"prompt": [10**50]}),
        ("/tokenize", HELLO | {"chat_template_kwargs": {"thinking": 10**50}}),
        ("/detokenize", {"tokens": [10**50]}),
        (
            "/v1/messages",
            HELLO | {"model": "talker", "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": 10**50}},
        ),
    ],
)
def test_a_number_inside_that_no_engine_holds_is_refused(server: Server, path: str, body: dict[str, Any]):
    assert asking.post(server, path, body).status == 400


BAD_BODIES = {
    "nothing": (b"", "Content-Type: application/json"),
    "half an object": (b'{"prompt": ', "at character 11"),
    "a list": (b"[]", "no JSON object"),
    "null": (b"null", "no JSON object"),
    "two objects": (b"{}{}", "at character 2"),
    "no UTF-8": (b'{"prompt": "\xff"}', "utf-8"),
    "10,000 lists": (b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "recursion"),
    "5,000 digits": (b'{"seed":' + b"9" * 5_000 + b"}", "digits"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_no_json_object(server: Server, path: str, name: str):
    data, message = BAD_BODIES[name]
    answer = asking.send(server, "POST", path, data)
    assert message in assert_is_openai(answer, 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("text/plain", "not text/plain"),
        ("application/x-www-form-urlencoded", "not application/x-www-form-urlencoded"),
        (None, "which is missing"),
    ],
)
def test_a_body_that_is_not_called_json(server: Server, kind: str | None, hint: str):
    headers = {} if kind is None else {"content-type": kind}
    answer = asking.send(server, "POST", COMPLETIONS, b'{"prompt": "Hello"}', headers)
    message = assert_is_openai(answer, 400, "invalid_request_error")
    assert message == f"send JSON with the header Content-Type: application/json, {hint}"


def calling(parameters: Any, choice: Any = "required") -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    return HELLO | {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


BAD_FIELDS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETIONS, {}, "prompt", MISSING_FIELD),
    (COMPLETIONS, {"prompt": None}, "prompt", f"{of_pydantic(str, None)} or "),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "0 prompts"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "prompt.1"),
    (COMPLETIONS, {"prompt": [264]}, "prompt", "0 to 263"),
    (COMPLETIONS, {"prompt": "a", "maxTokens": 1}, "maxTokens", "maxTokens: "),
    (COMPLETIONS, {"prompt": "a", "x" * 100_000: 1}, "x" * 199 + "…", UNKNOWN_FIELD),
    (COMPLETIONS, {"prompt": "a"} | dict.fromkeys(map(str, range(200)), 1), None, "201 fields"),
    (COMPLETIONS, {"prompt": "a", "temperature": "0"}, "temperature", "temperature: "),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop", "16"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [264]}, "stop_token_ids", "0 to 263"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "logit_bias.5"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 3, "max_tokens": 2}, "min_tokens", "max_tokens=2"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x"),
    (COMPLETIONS, {"prompt": "a", "regex": "("}, "regex", "regex"),
    (COMPLETIONS, {"prompt": "a", "regex": "(", "stream": True}, "regex", "regex"),
    (COMPLETIONS, {"prompt": "a", "regex": "a" * 70_000}, "regex", "65536"),
    (COMPLETIONS, {"prompt": "a", "grammar": "start: x"}, "grammar", '"x"'),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": nested(101)}}, "structured_outputs", "100 levels"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"const": 10**30}}}, "structured_outputs", "64 bits"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"a": "\ud800"}}}, "structured_outputs", "surrogate"),
    (CHAT, {}, "messages", "missing"),
    (CHAT, {"messages": []}, "messages", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "no content"),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "messages", "messages.0.role"),
    (CHAT, HELLO | {"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
    (CHAT, HELLO | {"tool_choice": "required"}, "tool_choice", "tools"),
    (CHAT, calling(nested(101)), "tools", "tools.0.function.parameters"),
    (CHAT, calling({"type": "array"}), "tools", "object"),
    (CHAT, calling({"type": "object", "properties": {"a": {"type": "nothing"}}}), "tools", "nothing"),
    (CHAT, calling({}, {"type": "function", "function": {"name": "g"}}), "tool_choice", "no function g"),
    (CHAT, HELLO | {"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs", "unicode"),
    (CHAT, HELLO | {"chat_template_kwargs": {"messages": "a"}}, "chat_template_kwargs", "enable_thinking"),
    (CHAT, HELLO | {"user": "\ud800"}, "user", "unicode"),
]


@pytest.mark.parametrize(("path", "body", "param", "hint"), BAD_FIELDS)
def test_a_field_that_is_wrong(server: Server, path: str, body: dict[str, Any], param: str, hint: str):
    answer = asking.post(server, path, body)
    message = assert_is_openai(answer, 400, "invalid_request_error", param)
    assert hint in message
    assert len(message) < 1000


def test_the_arguments_of_a_call_in_the_messages_may_be_any_text(server: Server):
    for arguments in ("[1]", "{", json.dumps(nested(101))):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        answer = asking.post(server, CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1})
        assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_model_that_is_not_served(server: Server, path: str):
    asked = HELLO if path == CHAT else {"prompt": "Hello"}
    answer = asking.post(server, path, asked | {"model": "\ud800"})
    assert "talker" in assert_is_openai(answer, 404, "not_found_error", "model", "model_not_found")


def test_after_all_that_the_server_generates(server: Server):
    asking.assert_generates(server)


def fault(model: type[Any], body: Any) -> tuple[str | None, str]:
    """The error for a body that does not fit, as FastAPI hands it on."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    faults = [each | {"loc": ("body", *each["loc"])} for each in caught.value.errors()]
    return describe(RequestValidationError(faults, body=body))


def test_a_fault_is_named_without_the_alternatives_of_a_union():
    param, message = fault(ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]})
    assert (param, message.split("; ")[-1]) == ("messages", f"messages.0.content.0.text: {of_pydantic(str, 1)}")
    assert fault(CompletionRequest, {"prompt": "a", "stop": 1}) == (
        "stop",
        f"stop: {of_pydantic(str, 1)} or {of_pydantic(list[str], 1)}",
    )
    assert fault(CompletionRequest, {"prompt": "a", "x y": 1}) == ("x y", f"x y: {UNKNOWN_FIELD}")


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("max_token", " (did you mean max_tokens?)"),
        ("n_predict", " (did you mean max_tokens?)"),
        ("guided_json", ', take structured_outputs: {"json": …}'),
        ("guided_choice", ', take structured_outputs: {"choice": …}'),
        ("chat_template", "; a template is code, and comes from the server's command line: serve.http.chat_template"),
        ("use_beam_search", "; there is no beam search; n draws several answers"),
        ("guided_decoding_backend", "; llguidance is the one library for grammars; leave it out"),
        ("colour", ""),
    ],
)
def test_a_field_that_is_not_known_is_distinguished_from_those_that_are(field: str, hint: str):
    body = json.dumps({"prompt": "a", field: 1, "stream_options": {"max_token": 1}}).encode()
    with pytest.raises(RequestValidationError) as caught:
        read_body(body, "application/json", CompletionRequest, AdvancedConfig())
    _, message = describe(caught.value)
    inner = f"stream_options.max_token: {UNKNOWN_FIELD}"
    assert sorted(message.split("; ")) == sorted([*f"{field}: {UNKNOWN_FIELD}{hint}".split("; "), inner])


def test_a_field_that_is_null_counts_as_left_out_whatever_its_name():
    body = CompletionRequest.model_validate({"prompt": "a", "colour": None, "stream_options": {"max_token": None}})
    assert body == CompletionRequest.model_validate({"prompt": "a", "stream_options": {}})


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (ChatRequest, {"functions": [{"name": "f"}]},
         'functions: this is not supported here; send tools, as in [{"type": "function", "function": {"name": "f"}}]'),
        (ChatRequest, {"function_call": "auto"},
         "function_call: this is not supported here; send tool_choice, with tools"),
        (ChatRequest, {"audio": {"format": "wav", "voice": "ash"}},
         "audio: answers are only text here; leave it out"),
        (ChatRequest, {"modalities": ["text", "audio"]},
         'modalities: answers are only text here; send ["text"], or leave it out'),
        (ChatRequest, {"web_search_options": {}},
         "web_search_options: nothing is searched here; send a tool that searches, which the client runs"),
        (ChatRequest, {"tools": [{"type": "tool", "function": {"name": "f"}}]},
         "tools.0: tool tools are not supported here; send tools of the type function, which the client runs"),
        (ResponsesRequest, {"tools": [{"type": "functions"}]},
         "tools.0: functions tools are not supported here; send tools of the type function, which the client runs"),
        (ResponsesRequest, {"truncation": "auto"},
         "truncation: nothing is left out of a conversation here; send disabled, and fewer items"),
        (ResponsesRequest, {"background": True},
         "background: nothing is stored here to be fetched later; send false, and wait"),
        (ResponsesRequest, {"prompt": {"id": "pmpt_1"}},
         "prompt: no prompt is stored here; send instructions and input"),
        (ResponsesRequest, {"input": [{"type": "item_reference", "id": "msg_1"}]},
         "input.0: no item is stored here to be referred to; send the items themselves, and store: false"),
        (ChatRequest, {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
         "messages.0.function_call: send tool_calls"),
        (ChatRequest, {"tool_choice": {"type": "custom", "custom": {"name": "f"}}},
         "tool_choice: custom choices are not supported here (supported: none, auto, required, function, allowed_tools)"),
        (ResponsesRequest, {"tool_choice": {"type": "web_search_preview"}},
         "tool_choice: web_search_preview choices are not supported here "
         "(supported: none, auto, required, function, allowed_tools)"),
        (ResponsesRequest, {"text": {"format": {"type": "grammar", "definition": "a"}}},
         "text.format: grammar formats are not supported here (supported: text, json_object, json_schema)"),
        (CompletionRequest, {"suffix": "b"},
         "suffix: nothing is written in front of a given text here; leave it out"),
        (ChatRequest, {"max_tool_calls": 3}, "max_tool_calls: no built-in tool is run here; leave it out"),
        (CompletionRequest, {"functions": []}, f"functions: {UNKNOWN_FIELD}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_refused_of_openais_fields_says_what_to_send(model: type[Any], more: dict[str, Any], message: str):
    smallest = {CompletionRequest: {"prompt": "a"}, ResponsesRequest: {"input": "a"}, ChatRequest: HELLO}[model]
    with pytest.raises(RequestValidationError) as caught:
        read_body(json.dumps(smallest | more).encode(), "application/json", model, AdvancedConfig())
    assert describe(caught.value) == (next(iter(more)), message)


def test_sleep_is_refused_without_its_setting(server: Server):
    for path in ("/sleep", "/wake_up"):
        answer = wire.ask(server.url, "POST", path)
        assert answer.status == 400
        assert "set serve.enable_sleep_mode=true" in answer.json["error"]["message"]
    assert wire.ask(server.url, "GET", "/is_sleeping").json == {"is_sleeping": False}

"""Anthropic's own SDK against a real server."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from typing import Annotated, Any, Literal

import anthropic
import pydantic
import pytest
import serving
import wire
from library_words import of_pydantic
from serving import Server

ASK: dict[str, Any] = {"model": "talker", "max_tokens": 24, "messages": [{"role": "user", "content": "Hello"}]}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # which the SDK's newer versions have no argument for
QUIET = {"thinking": {"type": "disabled"}}
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"enum": ["cat", "dog"]}, "exact": {"type": "boolean"}},
        "required": ["word", "exact"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def words(message: Any) -> str:
    """The text of an answer that is nothing else."""
    assert {block.type for block in message.content} <= {"text"}
    return "".join(block.text for block in message.content)


def num_prompt_tokens(usage: anthropic.types.Usage) -> int:
    """Those that the prefix cache had are counted apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_max_tokens_that_no_engine_holds_are_refused(client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**ASK | {"max_tokens": 10**50}, timeout=60)


def test_an_answer_is_that_of_the_chat_route(client: anthropic.Anthropic, server: Server):
    message = client.messages.create(**ASK, **QUIET, **GREEDY, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]
    same = {
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    chat = post(f"{server.url}/v1/chat/completions", same)
    assert words(message) == chat["choices"][0]["message"]["content"]
    assert (message.role, message.type, message.model) == ("assistant", "message", "talker")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert (num_prompt_tokens(usage), usage.output_tokens) == (chat["usage"]["prompt_tokens"], 24)
    assert usage.cache_creation_input_tokens == 0
    assert message.id.startswith("msg_")
    assert message._request_id is not None and message._request_id.startswith("req-")


def test_a_stream_adds_up_to_the_answer(client: anthropic.Anthropic):
    whole = client.messages.create(**ASK, **GREEDY)
    with client.messages.stream(**ASK, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == words(message) == words(whole)
    assert len(pieces) > 10, "it came in pieces"
    assert num_prompt_tokens(message.usage) == num_prompt_tokens(whole.usage)
    assert message.usage.output_tokens == 24
    assert message.stop_reason == "max_tokens"


def test_the_stop_sequence_that_was_met_is_named(client: anthropic.Anthropic):
    whole = words(client.messages.create(**ASK, **GREEDY))
    at = next(place for place in range(4, 20) if "\N{REPLACEMENT CHARACTER}" not in whole[place : place + 3])
    stop = whole[at : at + 3]
    expected = (whole[: whole.index(stop)], "stop_sequence", stop)
    message = client.messages.create(**ASK, **GREEDY, stop_sequences=["never met", stop])
    assert (words(message), message.stop_reason, message.stop_sequence) == expected
    with client.messages.stream(**ASK, **GREEDY, stop_sequences=["never met", stop]) as stream:
        message = stream.get_final_message()
    assert (words(message), message.stop_reason, message.stop_sequence) == expected


class Known(pydantic.BaseModel):
    exact: bool


def test_a_schema_is_parsed_to_its_class(client: anthropic.Anthropic):
    message = client.messages.parse(**{**ASK, "max_tokens": 400}, **QUIET, output_format=Known)
    assert isinstance(message.parsed_output, Known) and message.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "look_up"}, {"type": "any"}])
def test_a_forced_call_holds_to_its_schema_and_its_result_goes_back(
    client: anthropic.Anthropic, choice: dict[str, Any]
):
    single = {**choice, "disable_parallel_tool_use": True}
    ask = {**ASK, **QUIET, "max_tokens": 400, "tools": [TOOL], "tool_choice": single}
    message = client.messages.create(**ask)
    (call,) = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "look_up", "tool_use")
    assert call.id.startswith("toolu_")
    assert call.input["word"] in ("cat", "dog") and isinstance(call.input["exact"], bool) and len(call.input) == 2
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "an animal"}
    talk = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    asked = client.messages.count_tokens(model="talker", messages=ASK["messages"])
    usage = client.messages.create(**{**ASK, "messages": talk}).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > asked.input_tokens


def test_a_forced_call_is_streamed_as_pieces_of_its_input(client: anthropic.Anthropic):
    choice = {"type": "tool", "name": "look_up"}
    with client.messages.stream(**{**ASK, **QUIET, "max_tokens": 200}, tools=[TOOL], tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use" and call.input == json.loads("".join(pieces))
    assert len(pieces) > 3, "it came in pieces"
    assert message.stop_reason == "tool_use"


def test_the_tokens_of_a_prompt_are_counted_without_an_answer(client: anthropic.Anthropic):
    same: dict[str, Any] = {"system": "Be brief.", "tools": [TOOL], **QUIET}
    counted = client.messages.count_tokens(model="talker", messages=ASK["messages"], **same)
    assert counted.input_tokens == num_prompt_tokens(client.messages.create(**ASK, **same).usage)
    fewer = client.messages.count_tokens(model="talker", messages=ASK["messages"])
    assert fewer.input_tokens < counted.input_tokens


def test_an_answer_can_be_begun_for_the_model(client: anthropic.Anthropic, server: Server):
    begun = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    rest = client.messages.create(**{**ASK, "messages": begun}, **QUIET, **GREEDY)
    chat = {"messages": ASK["messages"], "chat_template_kwargs": {"enable_thinking": False}}
    texts = (chat, {"prompt": "It is", "add_special_tokens": False})
    prompt = [token for text in texts for token in post(f"{server.url}/tokenize", text)["tokens"]]
    same = post(f"{server.url}/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0})
    assert words(rest) == same["choices"][0]["text"]
    assert num_prompt_tokens(rest.usage) == len(prompt)


def test_the_sdks_tool_runner_sends_all_messages_in_each_turn(client: anthropic.Anthropic):
    """It first asks for a thread, and would else send only what is new since the last answer."""
    seen: list[str] = []

    @anthropic.beta_tool
    def look_up(word: Literal["cat", "dog"]) -> str:
        """Looks a word up."""
        seen.append(word)
        return "an animal"

    single: Any = {"type": "any", "disable_parallel_tool_use": True}
    messages: Any = ASK["messages"]
    asked: Any = {"model": "talker", "max_tokens": 400, "messages": messages, "tool_choice": single, **QUIET}
    answers = list(client.beta.messages.tool_runner(**asked, tools=[look_up], max_iterations=3))
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 3
    sizes = [answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) for answer in answers]
    assert sizes[0] < sizes[1] < sizes[2], "with all calls and results so far"
    assert len(seen) >= 2


def test_a_thread_is_refused_so_that_the_sdk_can_do_without(server: Server):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = wire.ask(server.url, "POST", "/v1/messages", ASK | {"thread": thread})
        assert answer.status == 400
        assert answer.json["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_the_user_goes_to_the_log(server: Server, client: anthropic.Anthropic):
    client.messages.create(**ASK, metadata={"user_id": "user-of-the-log"})
    serving.wait_for_line(server, "user-of-the-log")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"model": "gpt"}, anthropic.NotFoundError, "the model 'gpt' is not served here (served: talker)"),
        ({"max_tokens": 0}, anthropic.BadRequestError, f"max_tokens: {of_pydantic(Annotated[int, pydantic.Field(ge=1)], 0)}"),
        ({"extra_body": {"mcp_servers": [{"type": "url", "name": "a", "url": "https://a.example"}]}},
         anthropic.BadRequestError,
         "mcp_servers: no MCP server is called from here; send its tools as tools, which the client runs"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
         anthropic.BadRequestError, "messages.0.content.0: image blocks are not supported here "
                                    "(supported: text, thinking, tool_use, tool_result)"),
        ({"stop_sequences": ["a"] * 17}, anthropic.BadRequestError, "stop_sequences has more than 16 strings"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, anthropic.BadRequestError,
         "tool_choice: there is no function g in tools (known: look_up)"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}],
          "tool_choice": {"type": "tool", "name": "web_search"}}, anthropic.BadRequestError,
         "tool_choice forces a call, but no web_search is called here; "
         "leave tool_choice out, or send a function, which the client runs"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}}, anthropic.BadRequestError,
         "a forced tool call has no room for thinking; disable it or send tool_choice auto"),
    ],
)  # fmt: skip
def test_the_sdk_knows_what_went_wrong(
    change: dict[str, Any], kind: type[anthropic.APIStatusError], message: str, client: anthropic.Anthropic
):
    with pytest.raises(kind) as raised:
        client.messages.create(**ASK | change)
    error = raised.value
    name = "not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error"
    assert error.body == {"type": "error", "error": {"type": name, "message": message}, "request_id": error.request_id}
    assert str(error.request_id).startswith("req-")


def test_a_prompt_too_long_is_refused_in_anthropics_words(client: anthropic.Anthropic):
    messages: Any = [{"role": "user", "content": "a" * 9000}]
    counted = client.messages.count_tokens(model="talker", messages=messages).input_tokens
    assert counted > 9000
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {counted} tokens > 8191 maximum"):
        client.messages.create(**{**ASK, "messages": messages})


def test_a_body_too_large_is_refused_in_anthropics_words_too(server: Server):
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", server.url).groups()  # type: ignore[union-attr]
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    error = {"type": "request_too_large", "message": "the body is larger than this server takes (serve.http.max_body)"}
    request_id = re.search(rb"\r\nx-request-id: (req-\w+)", head)
    assert request_id is not None
    assert json.loads(body) == {"type": "error", "error": error, "request_id": request_id[1].decode()}


def test_a_body_as_large_as_anthropics_api_takes_is_served(client: anthropic.Anthropic):
    """32 MB, which agents reach by the pictures in their histories."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 31_998_000}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"name": "a"}}
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture]}]},
    ]
    assert client.messages.count_tokens(model="talker", messages=messages).input_tokens > 0

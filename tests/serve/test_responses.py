"""The Responses API: OpenAI's own SDK against a real server, and every event over an engine that a test plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import scripted
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_output_text import Logprob
from scripted import Said
from serving import Server

from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config
from atom.config.load import load
from atom.runtime.types import Logprobs
from atom.serve.engine.frames import Message
from atom.serve.engine.protocol import Finish, Output, Outputs, Submit

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "talker", "input": "Hello", "temperature": 0, "max_output_tokens": 16}
# no space in JSON, of which a model without sense would write pages
TERSE: dict[str, Any] = {"extra_body": {"logit_bias": dict.fromkeys(("197", "198", "201", "220", "259"), -100)}}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"enum": ["cat", "dog"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call>'
SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
THOUGHT = Said(["<think>", "\nHm", ".\n</think>\n", "\nOne", " moment.\n", CALL[:45], CALL[45:]])


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_response_is_the_answer_to_the_same_chat(client: openai.OpenAI, server: Server):
    response = client.responses.create(**ASK)
    chat = client.chat.completions.create(
        model="talker", messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=16
    )
    assert response.output_text == chat.choices[0].message.content != ""
    assert (response.object, response.status, response.model) == ("response", "incomplete", "talker")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.usage.output_tokens, response.usage.total_tokens) == (16, chat.usage.total_tokens)
    assert response.id.startswith("resp_")


def test_a_stream_makes_the_same_response(client: openai.OpenAI):
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert len(deltas) > 3, "it came in pieces"
    ending: Any = ASK | TERSE | {"max_output_tokens": 2000, "text_format": Animal}
    with client.responses.stream(**ending) as stream:  # which insists on an answer that is complete
        final = stream.get_final_response()
    assert final.output_text == client.responses.parse(**ending).output_text


def test_a_schema_is_parsed_to_its_class(client: openai.OpenAI):
    response = client.responses.parse(**ASK | TERSE | {"max_output_tokens": 2000, "text_format": Animal})
    assert isinstance(response.output_parsed, Animal) and response.status == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}], ids=["required", "named"])
def test_a_forced_call_and_its_result_go_back(client: openai.OpenAI, choice: Any):
    asked = ASK | TERSE | {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 2000}
    asked |= {"parallel_tool_calls": False}
    response = client.responses.create(**asked)
    (call,) = response.output
    assert call.type == "function_call" and call.name == "look_up"
    assert json.loads(call.arguments)["word"] in ("cat", "dog")
    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and "".join(pieces) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "an animal"}
    history: Any = [{"role": "user", "content": "Hello"}, *response.output, result]
    again = client.responses.create(**ASK | {"input": history, "tools": [TOOL]})
    assert again.usage is not None and response.usage is not None
    assert again.usage.input_tokens > response.usage.input_tokens + len('{"word":"cat"}an animal')


def test_the_tokens_of_a_prompt_are_counted_ahead(client: openai.OpenAI):
    asked: Any = {"model": "talker", "input": [{"role": "user", "content": "Hello"}], "instructions": "Speak."}
    for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}):
        counted = client.responses.input_tokens.count(**asked | more)
        response = client.responses.create(**asked | more, max_output_tokens=1)
        assert response.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        client.responses.input_tokens.count(**asked, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="org/other"):
        client.responses.input_tokens.count(**asked | {"model": "org/other"})


def test_what_would_need_a_stored_response_is_refused_by_name(client: openai.OpenAI):
    for field, value in (("previous_response_id", "resp_1"), ("background", True), ("conversation", "conv_1")):
        with pytest.raises(openai.BadRequestError, match=field) as refused:
            client.responses.create(**ASK, **{field: value})
        assert refused.value.param == field
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        client.responses.create(**ASK, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="input_image blocks are not supported here"):
        image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
        client.responses.create(**ASK | {"input": image})
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        with pytest.raises(openai.BadRequestError, match=r"input\.0: no item is stored.* store: false"):
            client.responses.create(**ASK | {"input": [reference]})
    with pytest.raises(openai.BadRequestError, match=r"tools\.0: functions tools are not supported here"):
        client.responses.create(**ASK, tools=[{"type": "functions"}])
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_store_and_labels_change_nothing(client: openai.OpenAI):
    more: dict[str, Any] = {"metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "user": "somebody"}
    more |= {
        "truncation": "disabled",
        "max_tool_calls": 1,
        "safety_identifier": "somebody",
        "prompt_cache_key": "mine",
        "prompt_cache_options": {"mode": "implicit"},
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    plain = client.responses.create(**ASK)
    for store in (True, False):
        response = client.responses.create(**ASK, store=store, **more)
        assert response.output_text == plain.output_text and response.metadata == {"a": "b"}
        assert (response.safety_identifier, response.prompt_cache_key, response.max_tool_calls) == (
            "somebody",
            "mine",
            1,
        )
        assert (response.background, response.completed_at) == (False, None), "it was cut off"
    whole = client.responses.create(**ASK, extra_body={"structured_outputs": {"regex": "a"}} | TERSE["extra_body"])
    assert whole.status == "completed" and whole.completed_at is not None and whole.completed_at >= whole.created_at


def test_an_error_of_the_sampling_has_its_status(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(**ASK | {"temperature": -1})
    wrong: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASK, text=wrong, stream=stream)
        assert refused.value.param == "text"


def scores(response: Response) -> list[dict[str, Any]]:
    """The log probabilities of the one message, which are all that their type has."""
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    made = [each.model_dump() for each in message.content[0].logprobs or ()]
    assert [Logprob.model_validate(each).model_dump() for each in made] == made
    return made


@pytest.mark.parametrize(
    "more",
    [{}, {"structured_outputs": {"regex": "é漢🙂!"}} | TERSE["extra_body"]],
    ids=["as it comes", "characters of several tokens"],
)
def test_log_probabilities_are_those_of_the_same_chat(client: openai.OpenAI, more: dict[str, Any]):
    asked: Any = ASK | SCORED | {"max_output_tokens": 40, "extra_body": more}
    response = client.responses.create(**asked)
    chat = client.chat.completions.create(
        model="talker", messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=40,
        logprobs=True, top_logprobs=2, extra_body=more,
    ).choices[0]  # fmt: skip
    assert chat.logprobs is not None and chat.logprobs.content is not None
    shown = [each.model_dump() for each in chat.logprobs.content if not each.token.startswith("<|")]
    assert scores(response) == shown and response.top_logprobs == 2
    made = bytes(byte for each in scores(response) for byte in each["bytes"])
    assert made.decode(errors="replace") == response.output_text == chat.message.content
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    for delta in deltas:
        made = bytes(byte for each in delta.logprobs for byte in each.model_dump()["bytes"])
        assert made.decode(errors="replace") == delta.delta, "each has its own tokens"
    assert [each.model_dump() for delta in deltas for each in delta.logprobs] == shown
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [each.model_dump() for each in done.logprobs] == shown
    assert scores(events[-1].response) == shown  # type: ignore[union-attr]


def test_log_probabilities_come_where_they_are_asked_for(client: openai.OpenAI):
    assert client.responses.create(**ASK).top_logprobs == 0
    assert scores(client.responses.create(**ASK)) == []
    chosen = scores(client.responses.create(**ASK, include=SCORED["include"]))
    assert len(chosen) == 16 and not any(each["top_logprobs"] for each in chosen)
    for more, fault in (
        ({"top_logprobs": 2}, 'top_logprobs needs include=\\["message.output_text.logprobs"\\]'),
        (SCORED | {"top_logprobs": 21}, "top_logprobs=21 is more than 20"),
    ):
        with pytest.raises(openai.BadRequestError, match=fault) as refused:
            client.responses.create(**ASK | more)
        assert refused.value.param == "top_logprobs"


@pytest.fixture(scope="module")
def configure(talker: Path) -> Callable[..., Config]:
    @cache
    def load_talker(*overrides: str) -> Config:
        return load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]", *overrides])

    return load_talker


def test_reasoning_text_and_a_call_are_items(configure: Callable[..., Config]):
    answer, _ = scripted.post(configure(), THOUGHT, ASK | {"tools": [TOOL]}, PATH)
    response = Response.model_validate(answer.json())
    thought, message, call = response.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "Hm."
    assert message.type == "message" and message.content[0].type == "output_text"
    assert message.content[0].text == "One moment."
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("look_up", {"word": "cat"})
    assert response.status == "completed" and {item.status for item in response.output} == {"completed"}


def test_the_tools_that_a_choice_allows_are_those_of_a_chat(configure: Callable[..., Config], talker: Path):
    other = TOOL | {"name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    body = {"input": "Hello", "tools": [TOOL, other], "tool_choice": choice}
    answer, (seen,) = scripted.post(
        configure(), Said(['[{"name": "other", "arguments": {"word": "dog"}}]']), body, PATH
    )
    (call,) = answer.json()["output"]
    assert (call["name"], answer.json()["tool_choice"]) == ("other", choice)
    _, (plain,) = scripted.post(configure(), Said(["[]"]), body | {"tools": [other], "tool_choice": "required"}, PATH)
    assert (seen.prompt, seen.params) == (plain.prompt, plain.params)
    missing = body | {"tool_choice": choice | {"tools": [{"type": "function", "name": "third"}]}}
    error = scripted.post(configure(), Said(["Hi"]), missing, PATH)[0].json()["error"]
    assert error["message"] == "tool_choice: there is no function third in tools (known: look_up, other)"


def read_events(text: str) -> list[dict[str, Any]]:
    found = [each.split("\n") for each in text.split("\n\n")[:-1]]
    events = [json.loads(body.removeprefix("data: ")) for _, body in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [each["type"] for each in events]
    return events


def test_every_event_of_a_stream(configure: Callable[..., Config]):
    answer, _ = scripted.post(configure(), THOUGHT, ASK | {"tools": [TOOL], "stream": True}, PATH)
    events = read_events(answer.text)
    adapter = pydantic.TypeAdapter[Any](ResponseStreamEvent)
    for each in events:
        adapter.validate_python(each)
    kinds = [each["type"].removeprefix("response.") for each in events]
    kinds = [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1] or not kind.endswith(".delta")]
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", *(each.format("reasoning_text") for each in text), "output_item.done",
        "output_item.added", *(each.format("output_text") for each in text), "output_item.done",
        "output_item.added", *call, "output_item.done",
        "completed",
    ]  # fmt: skip
    items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == items
    whole = scripted.post(configure(), THOUGHT, ASK | {"tools": [TOOL]}, PATH)[0].json()["output"]
    ids = ("id", "call_id")
    assert [{key: item[key] for key in item if key not in ids} for item in items] == [
        {key: item[key] for key in item if key not in ids} for item in whole
    ]


def test_log_probabilities_are_only_of_the_text(configure: Callable[..., Config], talker: Path):
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None
    parts = ["<think>", "Hm", "</think>\n", "\nOne", " moment.", f"\n{CALL}"]  # as the model writes them
    tokens = [tokenizer.encode(part) for part in parts]
    asked: list[Submit] = []

    def play(submit: Submit) -> list[Message]:
        asked.append(submit)
        outputs, at = [], 0
        for part, ids in zip(parts, tokens, strict=True):
            logprobs = [Logprobs(id, -1.0 - at - index, 1, [(id, -0.5)]) for index, id in enumerate(ids)]
            outputs.append(Output(submit.id, 0, part, ids, logprobs))
            at += len(ids)
        outputs[-1].finish = Finish("eos", at, 0, 0.0, None)
        return [Outputs([each], 1, {}) for each in outputs]

    body = ASK | SCORED | {"tools": [TOOL], "top_logprobs": 1}
    whole = Response.model_validate(scripted.post(configure(), play, body, PATH)[0].json())
    events = read_events(scripted.post(configure(), play, body | {"stream": True}, PATH)[0].text)
    assert [submit.params.logprobs for submit in asked] == [1, 1]
    num_before = sum(map(len, tokens[:3])) + 1  # and the line end after the reasoning
    for thought, message, call in (whole.output, Response.model_validate(events[-1]["response"]).output):
        assert (thought.type, call.type) == ("reasoning", "function_call")
        assert "logprobs" not in thought.model_dump()["content"][0]
        assert message.type == "message" and message.content[0].type == "output_text"
        made = [each.model_dump() for each in message.content[0].logprobs or ()]
        assert bytes(byte for each in made for byte in each["bytes"]) == b"One moment."
        assert [each["logprob"] for each in made] == [-1.0 - num_before - index for index in range(len(made))]
        assert made[0]["top_logprobs"] == [{"token": "O", "logprob": -0.5, "bytes": [79]}]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [(each["delta"], [token["token"] for token in each["logprobs"]]) for each in deltas] == [
        ("One", list("One")),
        (" moment.", list(" moment.")),
    ]


def test_an_answer_without_text_has_no_log_probabilities(configure: Callable[..., Config]):
    def end(submit: Submit) -> list[Message]:
        finish = Finish("eos", 1, 0, 0.0, None)
        return [Outputs([Output(submit.id, 0, "", [1], [Logprobs(1, -0.5, 1, [])], finish)], 1, {})]

    for stream in (False, True):
        answer, _ = scripted.post(configure(), end, ASK | SCORED | {"stream": stream}, PATH)
        response = read_events(answer.text)[-1]["response"] if stream else answer.json()
        assert (response["status"], response["output"]) == ("completed", [])


@pytest.mark.parametrize(("keeps", "text", "counted"), [(False, "a\ufffd", 2), (True, "a\ufffdb", 3)])
def test_a_stop_token_that_is_left_out_has_no_log_probability(
    configure: Callable[..., Config], talker: Path, keeps: bool, text: str, counted: int
):
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None
    ids = [*tokenizer.encode("a漢")[:2], *tokenizer.encode("b")]
    assert len(ids) == 3 and tokenizer.decode(ids) == "a\ufffdb", "the last one ends half a character"

    def end(submit: Submit) -> list[Message]:
        logprobs = [Logprobs(id, -1.0 - index, 1, []) for index, id in enumerate(ids)]
        finish = Finish(f"stop_{ids[-1]}", 3, 0, 0.0, None)
        return [Outputs([Output(submit.id, 0, text, ids, logprobs, finish)], 1, {})]

    body = ASK | SCORED | {"stop_token_ids": ids[-1:], "include_stop_str_in_output": keeps}
    response = Response.model_validate(scripted.post(configure(), end, body, PATH)[0].json())
    assert [each["logprob"] for each in scores(response)] == [-1.0, -2.0, -3.0][:counted]


def test_an_error_within_a_stream_is_an_event_that_the_sdk_raises(configure: Callable[..., Config]):
    def fail(submit: Submit) -> list[Message]:
        finish = Finish("error", 1, 0, 0.0, None, "RequestError: it is too complex")
        outputs = [Output(submit.id, 0, "One", [1]), Output(submit.id, 0, "", [], None, finish)]
        return [Outputs([each], 1, {}) for each in outputs]

    answer, _ = scripted.post(configure(), fail, ASK | {"stream": True}, PATH)
    *events, last = read_events(answer.text)
    assert pydantic.TypeAdapter[Any](ResponseStreamEvent).validate_python(last).message == "it is too complex"
    error = {"message": "it is too complex", "type": "invalid_request_error", "param": None, "code": None}
    assert last == {
        "type": "error", "sequence_number": len(events), "message": "it is too complex", "param": None, "code": None,
        "error": error,
    }  # fmt: skip
    stored = httpx.Response(200, content=answer.content, headers={"content-type": "text/event-stream"})
    http = httpx.Client(transport=httpx.MockTransport(lambda _: stored))
    with openai.OpenAI(base_url="http://atom/v1", api_key="none", http_client=http) as client:
        events_of = client.responses.create(**ASK, stream=True)
        with pytest.raises(openai.APIError, match="it is too complex"):
            list(events_of)


def test_an_answer_that_is_cut_off_is_incomplete(configure: Callable[..., Config]):
    said = Said(["One", " moment", CALL[:55]], "max_tokens")
    answer, _ = scripted.post(configure(), said, ASK | {"tools": [TOOL], "stream": True}, PATH)
    last = read_events(answer.text)[-1]
    whole = scripted.post(configure(), said, ASK | {"tools": [TOOL]}, PATH)[0].json()
    assert (last["type"], whole["status"]) == ("response.incomplete", "incomplete")
    for message, call in (last["response"]["output"], whole["output"]):
        assert (message["type"], message["content"][0]["text"]) == ("message", "One moment")
        assert (call["type"], call["arguments"], call["status"]) == ("function_call", '{"word": "', "incomplete")


@pytest.mark.parametrize("reason", ["abort", "repetition"])
def test_an_answer_that_something_else_ends_is_incomplete(configure: Callable[..., Config], reason: str):
    for stream in (False, True):
        answer, _ = scripted.post(configure(), Said(["One"], reason), ASK | {"stream": stream}, PATH)
        response = read_events(answer.text)[-1]["response"] if stream else answer.json()
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert response["completed_at"] is None and response["output"][0]["status"] == "incomplete"


def test_a_conversation_is_that_of_a_chat(configure: Callable[..., Config], talker: Path):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A cat?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look_up", "arguments": '{"word": "cat"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "an animal"},
    ]  # fmt: skip
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "cat"}'}}
    messages = [
        {"role": "system", "content": "Speak.\n\nBe brief."},
        {"role": "user", "content": "A cat?"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "an animal"},
    ]
    tool = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}
    body = {"input": items, "instructions": "Speak.", "tools": [TOOL]}
    _, (ours,) = scripted.post(configure(), Said(["Hi"]), body, PATH)
    _, (chats,) = scripted.post(
        configure(), Said(["Hi"]), {"messages": messages, "tools": [tool]}, "/v1/chat/completions"
    )
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None
    assert tokenizer.decode(ours.prompt) == tokenizer.decode(chats.prompt)
    assert ours.params == chats.params


SAMPLING: dict[str, Any] = {
    "top_k": 5, "min_p": 0.1, "min_tokens": 2, "seed": 7, "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "presence_penalty": 0.5, "frequency_penalty": 0.4,
    "repetition_penalty": 1.2, "logit_bias": {"7": 2}, "bad_words": ["dog"], "allowed_token_ids": [7, 9],
}  # fmt: skip


@pytest.mark.parametrize("more", [SAMPLING, {"structured_outputs": {"regex": "a+"}}], ids=["sampling", "constraint"])
def test_vllms_fields_are_those_of_a_chat(configure: Callable[..., Config], more: dict[str, Any]):
    _, (ours,) = scripted.post(configure(), Said(["Hi"]), {"input": "Hello"} | more, PATH)
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    _, (chats,) = scripted.post(configure(), Said(["Hi"]), chat | more, "/v1/chat/completions")
    _, (plain,) = scripted.post(configure(), Said(["Hi"]), {"input": "Hello"}, PATH)
    assert ours.params == chats.params
    changed = {"stop_strings" if name == "stop" else name for name in more}
    assert all(getattr(ours.params, name) != getattr(plain.params, name) for name in changed)


def test_vllms_fields_reach_the_engine(client: openai.OpenAI):
    response = client.responses.create(
        **ASK, extra_body={"structured_outputs": {"regex": "a{3}"}, "request_id": "mine"}
    )
    assert (response.id, response.output_text) == ("resp_mine", "aaa")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, extra_body={"structured_outputs": {"regex": "a{3"}})
    assert refused.value.param == "structured_outputs"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, extra_body={"chat_template_kwargs": {"chat_template": "x"}})
    assert refused.value.param == "chat_template_kwargs"

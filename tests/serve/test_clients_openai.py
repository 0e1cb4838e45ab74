"""OpenAI's own SDK, unchanged, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import asking
import openai
import pydantic
import pytest
from serving import Server, Start

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
TALK: dict[str, Any] = {"model": "talker", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
PROMPT: dict[str, Any] = {"model": "talker", "prompt": "Hello", "temperature": 0, "max_tokens": 16}
# no space in JSON, of which a model without sense would write pages, and no thinking, which it would not end
TERSE: dict[str, Any] = {"logit_bias": dict.fromkeys(("197", "198", "201", "220", "259"), -100), "max_tokens": 200}


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_tame: bool


TOOL = openai.pydantic_function_tool(Animal, name="note_animal", description="Notes an animal.")
NAMED: Any = {"type": "function", "function": {"name": "note_animal"}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_models_are_listed(client: openai.OpenAI, talker: Path):
    (model,) = client.models.list()
    assert (model.id, model.to_dict()["root"]) == ("talker", str(talker))
    assert client.models.retrieve("talker").owned_by == "atom"
    with pytest.raises(openai.NotFoundError, match="org/other"):
        client.models.retrieve("org/other")


def test_a_chat_answers_as_the_completion_of_its_prompt(client: openai.OpenAI, server: Server):
    answer = client.chat.completions.create(**TALK)
    prompt = asking.post(server, "/tokenize", {"messages": MESSAGES}).body["tokens"]
    completion = client.completions.create(**PROMPT | {"prompt": prompt})
    assert answer.choices[0].message.content == completion.choices[0].text
    assert (answer.object, completion.object) == ("chat.completion", "text_completion")
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-") and completion.id.startswith("cmpl-")
    for usage in (answer.usage, completion.usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 16, len(prompt) + 16)
    assert answer._request_id is not None


def test_a_chat_is_streamed(client: openai.OpenAI):
    whole = client.chat.completions.create(**TALK).choices[0].message.content
    *chunks, last = client.chat.completions.create(**TALK, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 16
    assert {chunk.model for chunk in (*chunks, last)} == {"talker"}


def test_labels_and_hints_are_taken_and_change_nothing(client: openai.OpenAI):
    answer = client.chat.completions.create(
        **TALK,
        store=True,
        metadata={"team": "a"},
        service_tier="priority",
        safety_identifier="somebody",
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        user="somebody",
        verbosity="low",
        modalities=["text"],
        prediction={"type": "content", "content": [{"type": "text", "text": "Hello"}]},
        parallel_tool_calls=False,
        reasoning_effort="low",
    )
    plain = client.chat.completions.create(**TALK)
    assert answer.choices == plain.choices
    options: Any = {"include_usage": True, "include_obfuscation": True}
    chunks = list(client.chat.completions.create(**TALK, stream=True, stream_options=options))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.chat.completions.create(**TALK, modalities=["text", "audio"])


@pytest.fixture(scope="module")
def other_client(start_server: Start) -> Iterator[openai.OpenAI]:
    """Of a server with a prefix cache, a small context and no limit of its own."""
    server = start_server("serve.enable_prefix_caching=true", "serve.max_model_len=192", "sampling.max_tokens=null")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_cache_key_shares_the_cache_that_a_salt_parts(other_client: openai.OpenAI):
    asked: Any = TALK | {"messages": [{"role": "user", "content": "Hello" * 20}]}

    def num_cached(**more: Any) -> int:
        usage = other_client.chat.completions.create(**asked, **more).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert num_cached(prompt_cache_key="a") == 0
    assert num_cached(prompt_cache_key="b") > 0
    assert num_cached(prompt_cache_key="b", extra_body={"cache_salt": "a"}) == 0


def test_without_max_tokens_a_chat_fills_the_context_and_a_completion_has_16(other_client: openai.OpenAI):
    ongoing: dict[str, Any] = {"model": "talker", "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = other_client.chat.completions.create(messages=MESSAGES, **ongoing)
    completion = other_client.completions.create(prompt="Hello", **ongoing)
    assert (chat.choices[0].finish_reason, completion.choices[0].finish_reason) == ("length", "length")
    assert chat.usage is not None and chat.usage.total_tokens == 192
    assert completion.usage is not None and completion.usage.completion_tokens == 16


def test_a_completion_is_streamed(client: openai.OpenAI):
    whole = client.completions.create(**PROMPT).choices[0].text
    chunks = list(client.completions.create(**PROMPT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.model for chunk in chunks} == {"talker"}


def test_several_answers_with_log_probabilities(client: openai.OpenAI):
    asked = TALK | {"temperature": 1, "seed": 5}
    answer = client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 16
        for token in choice.logprobs.content:
            first, second = token.top_logprobs
            assert first.logprob >= second.logprob and first.logprob >= token.logprob
            assert token.bytes


def test_a_schema_is_parsed_to_its_class(client: openai.OpenAI):
    asked = TALK | TERSE | {"response_format": Animal}
    message = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(message.parsed, Animal)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert (streamed.parsed, streamed.content) == (message.parsed, message.content)


def test_json_object_is_an_object(client: openai.OpenAI):
    closing = {"92": 30}  # a closing brace, wherever one may stand
    asked = TALK | TERSE | {"response_format": {"type": "json_object"}, "logit_bias": TERSE["logit_bias"] | closing}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_parsed_and_streamed(client: openai.OpenAI, choice: Any):
    asked = TALK | TERSE | {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.parse(**asked).choices[0]
    assert answer.message.content is None and answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.id and call.function.name == "note_animal"
    assert isinstance(call.function.parsed_arguments, Animal)
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert len(deltas) > 3, "it came in pieces"
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert answer.finish_reason == streamed.finish_reason == "tool_calls"


def test_a_call_and_its_result_go_back_to_the_model(client: openai.OpenAI):
    asked = TALK | TERSE | {"tools": [TOOL], "tool_choice": "required"}
    message = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noted"}
    first = client.chat.completions.create(**TALK, tools=[TOOL])
    for form in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        answer = client.chat.completions.create(**TALK | {"messages": [*MESSAGES, form, result]}, tools=[TOOL])
        assert answer.usage is not None and first.usage is not None
        assert answer.usage.prompt_tokens > first.usage.prompt_tokens + len(message.tool_calls[0].function.arguments)


def test_an_image_in_a_tools_result_is_read_as_a_text_that_says_so(client: openai.OpenAI):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    said = {"type": "text", "text": "[image: not shown to this model]"}
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked: list[Any] = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answers = [
        client.chat.completions.create(
            **TALK | {"messages": [*asked, {"role": "tool", "tool_call_id": "call-1", "content": [part]}]}
        )
        for part in (image, said)
    ]
    assert answers[0].choices == answers[1].choices
    assert len({answer.usage.prompt_tokens for answer in answers if answer.usage}) == 1
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.0: image_url blocks are not supported"):
        client.chat.completions.create(**TALK | {"messages": [{"role": "user", "content": [image]}]})


def test_what_is_wrong_raises_the_error_of_its_status(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(**TALK | {"temperature": -1})
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="nobody") as missing:
        client.chat.completions.create(**TALK | {"model": "nobody"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="regex"):
        client.chat.completions.create(**TALK, extra_body={"regex": "("}, stream=True)


def test_a_full_queue_raises_a_rate_limit(client: openai.OpenAI, server: Server):
    many = PROMPT | {"prompt": [[1]] * 1024, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**many, stream=True) as stream:
        next(iter(stream))  # half of them run
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**many)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    asking.assert_generates(server)

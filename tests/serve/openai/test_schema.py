from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionCustomToolParam
from openai.types.responses import ToolParam

from atom.serve.anthropic import schema as messages_schema
from atom.serve.openai import schema
from atom.serve.openai.responses_schema import ResponsesRequest
from atom.serve.openai.schema import ChatRequest, CompletionRequest, find_fault


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [None, True, "é🙂", [], {}, {"a": [1, 2.5, None]}, nested(99), 2**64 - 1, -(2**63), {"": {"b": ""}}]
)
def test_json_that_can_be_written_again(value: Any):
    assert find_fault(value) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("\ud800", "surrogate"),
        ({"a": ["é\udfff"]}, "surrogate"),
        ({"\udc00": 1}, "surrogate"),
        (float("nan"), "finite"),
        ([float("-inf")], "finite"),
        (2**64, "64 bits"),
        ({"a": -(2**63) - 1}, "64 bits"),
        (nested(100), "100 levels"),
    ],
)
def test_json_that_cannot(value: Any, reason: str):
    assert reason in (find_fault(value) or "")


def test_json_that_no_stack_would_hold_cannot():
    assert "100 levels" in (find_fault(nested(100_000)) or "")


BODIES = [schema.ChatRequest, schema.CompletionRequest, schema.TokenizeRequest, schema.DetokenizeRequest]


@pytest.mark.parametrize("body", [*BODIES, messages_schema.MessagesRequest, messages_schema.CountRequest])
def test_every_number_of_every_body_has_limits_that_the_engine_holds(body: type[pydantic.BaseModel]):
    found = list(numbers(body.model_json_schema()))
    for name, value in found:
        low = value.get("minimum", value.get("exclusiveMinimum"))
        high = value.get("maximum", value.get("exclusiveMaximum"))
        largest = 1 << (63 if name == "seed" else 31)
        assert low is not None and high is not None and -largest <= low < high <= largest, name
        assert "maximum" not in value or high < largest, name
    assert found or body is messages_schema.CountRequest


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of numbers, with the name of the field that they are of."""
    if isinstance(value, dict) and value.get("type") in ("integer", "number"):
        yield name, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from numbers(inner, name if key in ("anyOf", "items", "additionalProperties") else key)
    for inner in value if isinstance(value, list) else ():
        yield from numbers(inner, name)


MANY = 100_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [True] * MANY}),
        (CompletionRequest, {"prompt": [[True]] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", **{f"field{place}": 1 for place in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatRequest, {"tools": [1] * MANY}),
    ],
)
def test_of_a_million_faults_a_few_are_reported(model: type[pydantic.BaseModel], body: dict[str, Any]):
    with pytest.raises(pydantic.ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() < 10


def test_every_tool_that_the_sdk_knows_is_a_function_or_left_out():
    kinds = {
        kind
        for tool in (*get_args(ToolParam), ChatCompletionCustomToolParam)
        for kind in get_args(get_type_hints(tool)["type"])
    }
    assert kinds == {"function", *schema.LEFT_OUT}


def test_an_item_of_a_tool_that_is_left_out_is_not_kept():
    body = ResponsesRequest.model_validate(
        {"input": "Hi", "tools": [{"type": "mcp", "server_label": "n", "tools": [1]}]}
    )
    assert body.model_dump()["tools"] == [{"type": "mcp"}]


class Animal(pydantic.BaseModel):
    kind: str


CALLS = {
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "Animal", "arguments": '{"kind": "cat"}'}}]
}
SAID = '{"kind": "cat"}'
ITEMS: list[dict[str, Any]] = [
    {"id": "rs_1", "type": "reasoning", "status": "completed", "summary": [],
     "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
     "content": [{"type": "output_text", "text": SAID, "annotations": [], "logprobs": []}]},
    {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "c", "name": "Animal", "arguments": SAID},
]  # fmt: skip


def sdk_requests(answer: dict[str, Any], sent: list[dict[str, Any]]) -> openai.OpenAI:
    """OpenAI's SDK before a server that always gives this answer. sent: takes the bodies"""

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=answer)

    transport = httpx.MockTransport(respond)
    return openai.OpenAI(base_url="http://atom/v1", api_key="none", http_client=httpx.Client(transport=transport))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("form", [lambda it: it, lambda it: it.model_dump(), lambda it: it.to_dict()])
@pytest.mark.parametrize("fields", [{"content": SAID}, {"content": None} | CALLS], ids=["text", "call"])
def test_a_parsed_answer_of_a_chat_is_taken_back_as_the_sdk_sends_it(
    fields: dict[str, Any], form: Callable[[Any], Any]
):
    message = {"role": "assistant", "refusal": None, "reasoning_content": "Hm.", **fields}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    sent: list[dict[str, Any]] = []
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    client, asked = sdk_requests(answer, sent), [{"role": "user", "content": "Hi"}]
    known: Any = {"model": "m", "response_format": Animal, "tools": [openai.pydantic_function_tool(Animal)]}
    parsed = client.chat.completions.parse(messages=asked, **known).choices[0].message
    client.chat.completions.parse(messages=[*asked, form(parsed)], **known)
    assert "parsed" in json.dumps(sent[1]["messages"]), "it has more than an answer"
    read = ChatRequest.model_validate(sent[1]).messages
    assert read is not None and (read[1].content, read[1].reasoning_content) == (fields["content"], "Hm.")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("form", [lambda it: it, lambda it: it.model_dump(), lambda it: it.to_dict()])
def test_parsed_items_are_taken_back_as_the_sdk_sends_them(form: Callable[[Any], Any]):
    sent: list[dict[str, Any]] = []
    answer = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m"}
    answer |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "output": ITEMS}
    client = sdk_requests(answer, sent)
    response = client.responses.parse(model="m", input="Hi", text_format=Animal)
    client.responses.parse(model="m", input=[form(item) for item in response.output], text_format=Animal)
    read = ResponsesRequest.model_validate(sent[1]).input
    assert [type(item).__name__ for item in read] == ["Reasoning", "Message", "FunctionCall"]

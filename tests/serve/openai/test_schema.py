from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

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
        most = 1 << (63 if name == "seed" else 31)
        assert low is not None and high is not None and -most <= low < high <= most, name
        assert "maximum" not in value or high < most, name
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
    body = ResponsesRequest.model_validate({"input": "Hi", "tools": [{"type": "namespace", "name": "n", "tools": [1]}]})
    assert body.model_dump()["tools"] == [{"type": "namespace"}]

from __future__ import annotations

from typing import Any

import pydantic
import pytest

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
def test_a_million_faults_are_told_as_a_few(model: type[pydantic.BaseModel], body: dict[str, Any]):
    with pytest.raises(pydantic.ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() < 10

"""A chat's answer over an engine whose part the test plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scripted
from scripted import Said

from atom.config.load import load

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def config(talker: Path) -> Any:
    return load([f"checkpoint={talker}", "job=serve"])


def test_reasoning_has_both_of_its_names(config: Any):
    """vLLM answers reasoning since 0.33, where it was reasoning_content before."""
    said = Said(["<think>", "\nHm", ", so.\n", "</think>\n", "Hi"])
    response, _ = scripted.post(config, said, ASK, "/v1/chat/completions")
    message = response.json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm, so."
    assert message["content"] == "Hi"
    response, _ = scripted.post(config, said, ASK | {"stream": True}, "/v1/chat/completions")
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm, so."
    assert [delta.get("reasoning") for delta in deltas] == [delta.get("reasoning_content") for delta in deltas]


def test_reasoning_goes_back_under_either_name_or_both(config: Any):
    def prompt(**thought: str) -> list[int]:
        said = {"role": "assistant", "content": "Hi", **thought}
        body = {"messages": [*ASK["messages"], said, *ASK["messages"]]}
        _, (submit,) = scripted.post(config, Said(["Hi"]), body, "/v1/chat/completions")
        return list(submit.prompt)

    both = prompt(reasoning="Hm.", reasoning_content="Hm.")
    assert prompt(reasoning="Hm.") == prompt(reasoning_content="Hm.") == both != prompt()


def test_a_message_without_reasoning_has_neither_name(config: Any):
    response, _ = scripted.post(config, Said(["Hi"]), ASK, "/v1/chat/completions")
    assert set(response.json()["choices"][0]["message"]) == {"role", "content", "refusal"}

"""A session as Claude Code has it, made by hand: Anthropic's SDK, system blocks, 20 tools, results, counted tokens."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import CacheCreation, Usage
from serving import Server

BLOCK = 16
HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
SYSTEM: list[dict[str, Any]] = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0"},
    {"type": "text", "text": "You are a coding agent, and the user's command line is yours.", "cache_control": HOUR},
    {"type": "text", "text": "Be brief. Run the tests. Read before you write. " * 8, "cache_control": HOUR},
]
TOOLS: list[dict[str, Any]] = [
    {
        "name": f"Tool{number}",
        "description": f"Does what number {number} does.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for number in range(20)
]
STEPS = [
    ("I read it.", "Tool3", {"path": "add.py"}, "def add(a, b):\n    return a - b\n" * 3),
    ("Now the test.", "Tool4", {"path": "test_add.py"}, [{"type": "text", "text": "assert add(1, 2) == 3\n" * 4}]),
    ("", "Tool5", {"path": "add.py"}, "1 line changed"),
    ("It passes.", "Tool6", {"path": "."}, "4 passed in 0.1 s\n" * 5),
]


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def mark_last(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with cache_control in the last block of the last one, as in each request of Claude Code."""
    *earlier, last = messages
    *blocks, block = last["content"]
    return [*earlier, last | {"content": [*blocks, block | {"cache_control": MINUTES}]}]


def ask(client: anthropic.Anthropic, messages: list[dict[str, Any]], *, streams: bool) -> anthropic.types.Message:
    body: dict[str, Any] = {
        "model": "talker",
        "system": SYSTEM,
        "tools": TOOLS,
        "messages": mark_last(messages),
        "thinking": {"type": "disabled"},
    }
    counted = client.messages.count_tokens(**body).input_tokens
    more = {"max_tokens": 4, "metadata": {"user_id": "user_1"}, "extra_body": {"temperature": 0, "explain": True}}
    if streams:
        with client.messages.stream(**body, **more) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**body, **more)
    usage = message.usage
    assert Usage.model_validate(usage.model_dump()) == usage
    assert CacheCreation.model_validate(usage.cache_creation.model_dump()) == usage.cache_creation
    parts = usage.cache_creation.ephemeral_5m_input_tokens + usage.cache_creation.ephemeral_1h_input_tokens
    assert parts == usage.cache_creation_input_tokens
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == counted
    return message


def test_the_figures_of_a_session_add_up_turn_by_turn(client: anthropic.Anthropic):
    messages = [
        user(
            {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
            {"type": "text", "text": "Mend the test that fails."},
        )
    ]
    first = ask(client, messages, streams=True)
    usage = first.usage
    others = usage.cache_read_input_tokens  # other tests may have asked this server, by the same template
    assert others < 10 * BLOCK and first.prefix_hit["reason"] in ("not_computed", "different_token")
    system = client.messages.count_tokens(
        model="talker", system=SYSTEM, tools=TOOLS, messages=[user({"type": "text", "text": "a"})]
    ).input_tokens
    ttls = usage.cache_creation
    assert abs(others + ttls.ephemeral_1h_input_tokens - system) < 2 * BLOCK, "system prompt and tools"
    assert 0 < ttls.ephemeral_5m_input_tokens < usage.input_tokens + 10 * BLOCK
    written = others + usage.cache_creation_input_tokens
    for number, (text, tool, argument, result) in enumerate(STEPS):
        said = [{"type": "text", "text": text}] if text else []
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": tool, "input": argument}
        messages += [
            {"role": "assistant", "content": [*said, call]},
            user({"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result}),
        ]
        message = ask(client, messages, streams=number % 2 == 0)
        usage = message.usage
        assert written <= usage.cache_read_input_tokens < written + 2 * BLOCK, "all that was written is read"
        assert usage.cache_creation.ephemeral_1h_input_tokens == 0
        assert usage.cache_creation_input_tokens > 0 and usage.input_tokens < 4 * BLOCK
        assert message.prefix_hit["cached_tokens"] == usage.cache_read_input_tokens
        written = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    again = ask(client, messages, streams=False)
    assert again.prefix_hit["reason"] == "end_of_prompt" and again.usage.cache_creation_input_tokens == 0


def test_the_message_that_was_changed_is_named(client: anthropic.Anthropic):
    texts = ["How are you today?", "Fine.", "Then count to ten, and stop at seven."]
    roles = ["user", "assistant", "user"]

    def conversation(*texts: str) -> list[dict[str, Any]]:
        content = [[{"type": "text", "text": text}] for text in texts]
        return [{"role": role, "content": each} for role, each in zip(roles, content, strict=True)]

    ask(client, conversation(*texts), streams=False)
    hit = ask(client, conversation(texts[0], texts[1], "Then sing to ten, and stop at seven."), streams=True).prefix_hit
    assert (hit["reason"], hit["part"]) == ("different_token", "messages.2.content.0")
    assert (hit["token"]["text"], hit["engine"]) == ("s", 0) and "earlier_token" not in hit, (
        "it may be of another client"
    )
    assert hit["cached_tokens"] <= hit["index"] < hit["cached_tokens"] + BLOCK
    changed = [*SYSTEM[:2], SYSTEM[2] | {"text": "Be brief. Run no test."}]
    ask_plainly: dict[str, Any] = {"model": "talker", "max_tokens": 1, "messages": conversation(*texts)}
    more = {"thinking": {"type": "disabled"}, "extra_body": {"explain": True}}
    message = client.messages.create(**ask_plainly, system=changed, tools=TOOLS, **more)
    assert (message.prefix_hit["reason"], message.prefix_hit["part"]) == ("different_token", "system.2")
    plain = client.messages.create(**ask_plainly)
    assert not hasattr(plain, "prefix_hit") and plain.usage.cache_creation_input_tokens == 0

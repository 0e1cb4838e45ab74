"""Budgets of reasoning over HTTP: OpenAI's and Anthropic's own SDKs against a server whose model thinks until it is ended.

It answers with the letter a, whatever it is asked, and its template opens the reasoning with a marker and a line end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import scripted
import serving
from serving import Server, Start

from atom.config import Config
from atom.config.load import load
from atom.serve.engine.frames import Message
from atom.serve.engine.protocol import Refused, Submit

HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "talker", "messages": HELLO, "max_tokens": 12}
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"enum": ["cat", "dog"]}},
    "required": ["word"],
    "additionalProperties": False,
}
# four tokens: the template's line end, and three letters; then </think>
BUDGETS: list[dict[str, Any]] = [
    {"thinking_token_budget": 4},
    {"thinking_budget": 4},
    {"reasoning": {"max_tokens": 4}},
]


@pytest.fixture(scope="module")
def thinker(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    template = tmp_path_factory.mktemp("thinking") / "template.jinja"
    opened = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    template.write_text(serving.TEMPLATE.partition("{% if add_generation_prompt %}")[0] + opened)
    return start_server(f"serve.http.chat_template={template}", "sampling.logit_bias={64: 100}")


@pytest.fixture(scope="module")
def client(thinker: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda each: next(iter(each)))
def test_a_chat_thinks_for_as_many_tokens_and_then_answers(client: openai.OpenAI, budget: dict[str, Any]):
    made: Any = client.chat.completions.create(**CHAT, n=2, logprobs=True, extra_body=budget)
    for choice in made.choices:
        assert (choice.message.reasoning, choice.message.content) == ("aaa", "a" * 8)
        assert [each.token for each in choice.logprobs.content] == [*"aaa", "</think>", *"aaaaaaaa"]
        assert all(each.logprob <= 0 for each in choice.logprobs.content)
        assert choice.logprobs.content[3].logprob < choice.logprobs.content[2].logprob, "of the model, as it is"
    events: Any = client.chat.completions.create(**CHAT, stream=True, extra_body=budget)
    deltas = [event.choices[0].delta for event in events]
    assert "".join(getattr(each, "reasoning", None) or "" for each in deltas) == "aaa"
    assert "".join(each.content or "" for each in deltas) == "a" * 8


def test_no_budget_and_none_that_is_left_are_the_extremes(client: openai.OpenAI):
    def said(**body: Any) -> tuple[str | None, str | None]:
        message: Any = client.chat.completions.create(**CHAT, extra_body=body).choices[0].message
        return getattr(message, "reasoning", None), message.content

    assert said() == said(thinking_budget=-1) == said(thinking_budget=None) == ("a" * 12, "")
    assert said(thinking_budget=0) == said(thinking_budget=1) == (None, "a" * 11), "the line end is a token"
    assert said(thinking_budget=4, stop=["aaaa"]) == ("aaa", ""), "the text of an answer, not of its reasoning"
    assert said(thinking_budget=4, min_tokens=12) == ("aaa", "a" * 8)


def test_a_completion_counts_what_its_prompt_has_thought(client: openai.OpenAI):
    def text(prompt: str, budget: int) -> str:
        made = client.completions.create(
            model="talker", prompt=prompt, max_tokens=6, extra_body={"thinking_token_budget": budget}
        )
        return made.choices[0].text

    assert text("Hi <think>bb", 4) == "aa</think>aaa" and text("Hi", 0) == "a" * 6


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda each: next(iter(each)))
def test_a_response_thinks_for_as_many_tokens(client: openai.OpenAI, budget: dict[str, Any]):
    asked: dict[str, Any] = {"model": "talker", "input": "Hello", "max_output_tokens": 12, "extra_body": budget}
    made: Any = client.responses.create(**asked)
    thought, message = made.output
    assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "aaa", "a" * 8)
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == "a" * 8


def test_constraints_and_forced_calls_follow_the_reasoning(client: openai.OpenAI):
    asked = {**CHAT, "max_tokens": 200, "extra_body": {"thinking_budget": 4}}
    for format in ({"type": "json_schema", "json_schema": {"name": "it", "schema": TOOL}}, None):
        tools = {"tools": [{"type": "function", "function": {"name": "look_up", "parameters": TOOL}}]}
        more: Any = {"response_format": format} if format else {**tools, "tool_choice": "required"}
        message: Any = client.chat.completions.create(**asked, **more).choices[0].message
        written = message.content if format else message.tool_calls[0].function.arguments
        assert message.reasoning == "aaa" and json.loads(written)["word"] in ("cat", "dog")


@pytest.mark.parametrize("budget", [1024, 4])
def test_anthropics_thinking_has_its_budget(thinker: Server, budget: int):
    client = anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": "talker", "max_tokens": 12, "messages": HELLO}
    asked["thinking"] = {"type": "enabled", "budget_tokens": budget}
    expected = [("thinking", "aaa"), ("text", "a" * 8)] if budget == 4 else [("thinking", "a" * 12)]
    made: Any = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed: Any = stream.get_final_message()
    for message in (made, streamed):
        assert [(block.type, getattr(block, block.type)) for block in message.content] == expected


@pytest.fixture(scope="module")
def config(talker: Path) -> Config:
    return load([f"checkpoint={talker}", "serve.http.served_model_name=[talker]"])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "Hello", "thinking_token_budget": 4}, "thinking_token_budget"),
        ("/v1/chat/completions", {"messages": HELLO, "thinking_budget": 4, "stream": True}, "thinking_budget"),
        ("/v1/chat/completions", {"messages": HELLO, "reasoning": {"max_tokens": 4}}, "reasoning.max_tokens"),
        ("/v1/responses", {"input": "Hello", "reasoning": {"max_tokens": 4}, "stream": True}, "reasoning.max_tokens"),
    ],
)
def test_what_the_engine_refuses_is_named_as_the_request_names_it(
    config: Config, path: str, body: dict[str, Any], field: str
):
    fault = "nothing marks where this model's reasoning ends; leave it out"

    def refuse(submit: Submit) -> list[Message]:
        assert submit.params.thinking_token_budget == 4
        return [Refused(submit.id, f"thinking_token_budget: {fault}")]

    response, _ = scripted.post(config, refuse, body, path)
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, f"{field}: {fault}")
    assert error["param"] == field.partition(".")[0]

"""Whatever atom has answered it accepts back: an answer cut off anywhere, whole and streamed, on all three APIs."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted
from pydantic_core import from_json
from scripted import Said
from serve import agent_bodies
from serve.agent_bodies import CLAUDE_CODE, CODEX, seen
from serve.output.test_tool_formats import WRITTEN

from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config
from atom.config.load import load
from atom.serve.app import create_app
from atom.serve.context import Context
from atom.serve.engine.protocol import Submit
from atom.serve.engine.replicas import Replicas
from atom.serve.ops.metrics import Metrics

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "string"}},
}
STRIDE = 5  # characters between two cuts on one API: an odd number, so that every other answer is streamed

SHOW = """{% for m in messages %}{{ m.role }}: {{ m.content }} {% for c in m.tool_calls or [] %}
{{ c.function.name }}{% for key, value in c.function.arguments.items() %} {{ key }}={{ value }} {% endfor %}{% endfor %}
{{ eos_token }}{% endfor %}"""
STRICT = """{% set ns = namespace(n=0) %}{% for m in messages %}
{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first') }}{% endif %}
{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('One call') }}{% endif %}
{% for id in (m.tool_calls or []) | map(attribute='id') | list + [m.tool_call_id or '123456789'] %}
{% if id | length != 9 %}{{ raise_exception('Ids have 9 characters') }}{% endif %}{% endfor %}
{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"""
NO_TOOLS = "{% for m in messages if m.role == 'tool' or m.tool_calls %}{{ raise_exception('No tools') }}{% endfor %}"
TEMPLATES = [SHOW, STRICT + SHOW, NO_TOOLS + SHOW]


class Player:
    """A server of one format, whose engine says what `text` is, and clients of each API."""

    def __init__(self, http: httpx.AsyncClient, context: Context) -> None:
        self.http, self.context, self.plain = http, context, context.need_tokenizer()
        self.text, self.prompts = "", list[Submit]()

    def speak(self, submit: Submit) -> list[Any]:
        pieces = [self.text[start : start + 3] for start in range(0, len(self.text), 3)] or [""]
        return scripted.answers(Said(pieces, "max_tokens"), submit)

    async def ask(self, path: str, history: list[Any], *, is_streamed: bool) -> list[Any]:
        """The answer in the form in which a client sends it back."""
        body = make_body(path, history) | {"stream": is_streamed}
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, (path, self.text, response.text, history)
        return READERS[path](response, is_streamed)


@asynccontextmanager
async def playing(config: Config) -> AsyncIterator[Player]:
    ours, theirs = socket.socketpair()
    engines = Replicas(config)
    context = Context(config, engines, Metrics(engines))
    assert config.checkpoint is not None
    context.tokenizer = load_tokenizer(Path(config.checkpoint))
    context.has_tokenizer.set()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(context, ())), base_url="http://atom"
    ) as http:
        player = Player(http, context)
        engine = asyncio.create_task(scripted.play(theirs, player.speak, player.prompts))
        await engines[0].client.connect(ours)
        await engines[0].client.ready.wait()
        yield player
        engines[0].client.close("the test is over")
        await engine
        context.close()


def make_body(path: str, history: list[Any]) -> dict[str, Any]:
    functions = [{"name": name, "description": "Does it.", "parameters": SCHEMA} for name in ("get_weather", "f")]
    if path == CHAT:
        return {"messages": history, "tools": [{"type": "function", "function": each} for each in functions]}
    if path == RESPONSES:
        return {"input": history, "tools": [{"type": "function", **each} for each in functions]}
    tools = [{"name": each["name"], "input_schema": SCHEMA} for each in functions]
    return {"model": "talker", "max_tokens": 99, "messages": history, "tools": tools}


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_chat(response: httpx.Response, is_streamed: bool) -> list[Any]:
    if not is_streamed:
        return [response.json()["choices"][0]["message"]]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in (event["choices"][0]["delta"] for event in events(response) if event["choices"]):
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            known = message.setdefault("tool_calls", [])
            if call["index"] == len(known):
                known.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            for name, text in call["function"].items():
                known[call["index"]]["function"][name] += text
    return [message]


def read_responses(response: httpx.Response, is_streamed: bool) -> list[Any]:
    output: list[Any] = (events(response)[-1]["response"] if is_streamed else response.json())["output"]
    return output


def read_messages(response: httpx.Response, is_streamed: bool) -> list[Any]:
    """As Anthropic's SDK reads a stream."""
    if not is_streamed:
        return [{"role": "assistant", "content": response.json()["content"]}]
    blocks, texts = list[dict[str, Any]](), list[str]()
    for event in events(response):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            texts[-1] += text
    for block, text in zip(blocks, texts, strict=True):
        match block["type"]:
            case "tool_use":
                block["input"] = from_json(text or "{}", allow_partial=True)
            case kind:
                block[kind] = text
    return [{"role": "assistant", "content": blocks}]


READERS: dict[str, Callable[[httpx.Response, bool], list[Any]]] = {
    CHAT: read_chat,
    RESPONSES: read_responses,
    MESSAGES: read_messages,
}


def user(path: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": text} | ({"type": "message"} if path == RESPONSES else {})


def results(path: str, answer: list[Any]) -> list[Any]:
    """A result for each call of an answer."""
    if path == CHAT:
        ids = [call["id"] for call in answer[0].get("tool_calls", ())]
        return [{"role": "tool", "tool_call_id": id, "content": "rain"} for id in ids]
    if path == RESPONSES:
        ids = [item["call_id"] for item in answer if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": id, "output": "rain"} for id in ids]
    ids = [block["id"] for block in answer[0]["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": "rain"} for id in ids]
    return [{"role": "user", "content": blocks}] if blocks else []


@pytest.fixture(scope="module")
def configure(talker: Path) -> Callable[..., Config]:
    return lambda *overrides: load(
        [f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]", *overrides]
    )


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_cut_off_anywhere_is_accepted_back(configure: Callable[..., Config], name: str):
    cuts = len(spoken(name))
    asked = [(index, cut, cut % 2 == 1) for index in range(3) for cut in (0, *range(index * 2, cuts, STRIDE), cuts)]
    assert asyncio.run(send_back(configure(f"serve.http.tool_calls={name}"), spoken(name), asked)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_cut_off_at_any_character_is_accepted_back(configure: Callable[..., Config], name: str):
    cuts = range(len(spoken(name)) + 1)
    asked = [(index, cut, is_streamed) for index in range(3) for cut in cuts for is_streamed in (False, True)]
    config = configure(f"serve.http.tool_calls={name}", "serve.http.max_queue=100000")  # this engine reports no waiting
    assert asyncio.run(send_back(config, spoken(name), asked)) >= 3


def spoken(name: str) -> str:
    """An answer with calls in a format."""
    begins = name in ("harmony", "pythonic")  # such calls begin an answer
    return WRITTEN[name] if begins else f"<think>\nHm.\n</think>\n\nI look.\n{WRITTEN[name]}"


async def send_back(config: Config, text: str, asked: Iterable[tuple[int, int, bool]]) -> int:
    """Send answers back, each by itself, with results of its calls, and with the user's next message.

    asked: the API, where the answer is cut off, and whether it is streamed
    returns: how many answers have calls
    """
    num_calls = 0
    async with playing(config) as player:
        for index, cut, is_streamed in asked:
            path = (CHAT, RESPONSES, MESSAGES)[index]
            player.context.tokenizer = player.plain.with_template(TEMPLATES[(cut + index) % len(TEMPLATES)])
            first = [user(path, "Hi")]
            player.text = text[:cut]
            answer = await player.ask(path, first, is_streamed=is_streamed)
            found = results(path, answer)
            num_calls += bool(found)
            player.text = "Yes."
            for more in (found, [], [*found, user(path, "Well?")]):
                history = [*first, *answer, *more, user(path, "Go on.")]
                await player.ask(path, history, is_streamed=False)
    return num_calls


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("path", "body"), [(CHAT, agent_bodies.CHAT), (RESPONSES, CODEX), (MESSAGES, CLAUDE_CODE)])
def test_the_model_sees_all_that_an_agent_sends(
    configure: Callable[..., Config], path: str, body: dict[str, Any], template: str
):
    async def run() -> str:
        async with playing(configure("serve.http.tool_calls=tagged_json")) as player:
            player.context.tokenizer = player.plain.with_template(template)
            response = await player.http.post(path, json=body)
            assert response.status_code == 200, response.text
            return player.plain.decode(player.prompts[0].prompt)

    assert seen(body) - seen(asyncio.run(run())) == set()

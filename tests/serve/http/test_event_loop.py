"""What clients send, however large and odd: the event loop of the HTTP process serves all others meanwhile."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import wire
from serving import Server, Start

MAX_BODY = 32 << 20
MAX_HOLD = 0.1  # seconds, and on a slow machine half of what it takes to read a list of YARDSTICK bytes as JSON
YARDSTICK = 8 << 20
TRIES = 12
MAX_VALUES, MAX_ITEMS = 1_000_000, 100_000
CONTEXT = 1 << 17  # tokens
MAX_TEXT = 13 * CONTEXT - 100  # characters: the longest token has 13


class Watched(NamedTuple):
    server: Server
    holds: Path


@pytest.fixture(scope="module")
def watched(start_server: Start, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("long")
    checkpoint, holds = shutil.copytree(talker, folder / "talker"), folder / "holds"
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return Watched(start_server(f"checkpoint={checkpoint}", stub={"holds": str(holds), "step_seconds": 0.001}), holds)


def fill(head: str, item: str, tail: str, max_items: int = 1 << 30) -> bytes:
    """A body with as many items as it can hold."""
    num = min((MAX_BODY - len(head) - len(tail)) // (len(item.encode()) + 1), max_items)
    return (head + ",".join([item] * num) + tail).encode()


def text(head: str, item: str, tail: str, size: int = MAX_BODY) -> bytes:
    """A body with a text that is as long as it can be."""
    return (head + item * ((size - len(head) - len(tail)) // len(item.encode())) + tail).encode()


COMPLETION, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
USER = '{"messages":[{"role":"user","content":"a"}],'
SCORED = '{"input":"a","include":["message.output_text.logprobs"],"top_logprobs":20,'
ASKED = '{"model":"talker","max_tokens":1,"messages":['
TOOL = USER + '"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{'
PROPERTY = '"%d":{"type":"string"}'
CALL = '{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\\"a\\":['


def numbered(head: str, item: str, tail: str, count: int) -> bytes:
    return (head + ",".join(item % number for number in range(count)) + tail).encode()


# description -> the route, the body, the status
BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "ids, too many": (COMPLETION, lambda: fill('{"prompt":[', "1", "]}"), 400),
    "ids, as many as can be": (COMPLETION, lambda: fill('{"prompt":[', "1", "]}", MAX_VALUES - 9), 400),
    "ids of many prompts": (COMPLETION, lambda: fill('{"max_tokens":1,"prompt":[', str([97] * 900), "]}", 1000), 200),
    "ids with echo": (
        COMPLETION,
        lambda: fill('{"max_tokens":1,"echo":true,"prompt":[', str([97] * 900), "]}", 1000),
        200,
    ),
    "lists, too many": (COMPLETION, lambda: fill('{"prompt":[', "[]", "]}"), 400),
    "lists, as many as can be": (COMPLETION, lambda: fill('{"prompt":[', "[1]", "]}", MAX_ITEMS - 9), 400),
    "texts, too many": (COMPLETION, lambda: fill('{"prompt":[', '""', "]}"), 400),
    "texts, as many as can be": (COMPLETION, lambda: fill('{"prompt":[', '"a"', "]}", MAX_ITEMS - 9), 400),
    "1,024 prompts of 4,000 characters, echoed": (
        COMPLETION,
        lambda: fill('{"max_tokens":1,"echo":true,"prompt":[', json.dumps("word, " * 666), "]}", 1024),
        200,
    ),
    "1,024 prompts with a schema each": (
        COMPLETION,
        lambda: numbered(
            '{"prompt":[' + ",".join(['"a"'] * 1024) + '],"structured_outputs":{"json":{"properties":{',
            PROPERTY,
            "}}}}",
            20_000,
        ),
        400,
    ),
    "1,024 prompts with stop strings each": (
        COMPLETION,
        lambda: text('{"prompt":[' + ",".join(['"a"'] * 1024) + '],"stop":["', "a", '"]}'),
        400,
    ),
    "a prompt of one line": (COMPLETION, lambda: text('{"prompt":"', "a", '"}'), 400),
    "a prompt of escapes": (COMPLETION, lambda: text('{"prompt":"', "\\u00e9", '"}'), 400),
    "a prompt of quotes": (COMPLETION, lambda: text('{"prompt":"', '\\"', '"}'), 400),
    "a prompt of commas and brackets": (COMPLETION, lambda: text('{"prompt":"', ",[{", '"}'), 400),
    "a prompt of backslashes": (COMPLETION, lambda: text('{"prompt":"', "\\\\", '"}'), 400),
    "biases, too many": (COMPLETION, lambda: numbered('{"prompt":"a","logit_bias":{', '"%d":1', "}}", 600_000), 400),
    "biases": (COMPLETION, lambda: numbered('{"prompt":"a","logit_bias":{', '"%d":1', "}}", 99_000), 400),
    "stop strings": (COMPLETION, lambda: fill('{"prompt":"a","stop":[', '"a"', "]}", 99_000), 400),
    "a regex": (COMPLETION, lambda: text('{"prompt":"a","regex":"', "a", '"}'), 200),
    "choices": (COMPLETION, lambda: fill('{"prompt":"a","structured_outputs":{"choice":[', '"a"', "]}}", 99_000), 200),
    "a wrong model": (COMPLETION, lambda: text('{"prompt":"a","model":"', "a", '"}'), 404),
    "an unknown field": (COMPLETION, lambda: text('{"prompt":"a","', "a", '":1}'), 400),
    "half of a body": (COMPLETION, lambda: text('{"prompt":"a","', "a", '":'), 400),
    "no JSON": (COMPLETION, lambda: b"\xff" * MAX_BODY, 400),
    "lists in lists": (COMPLETION, lambda: b"[" * MAX_BODY, 400),
    "messages, too many": (CHAT, lambda: fill('{"messages":[', '{"role":"user","content":"a"}', "]}"), 400),
    "messages": (CHAT, lambda: fill('{"messages":[', '{"role":"user","content":"a"}', "]}", 19_000), 400),
    "parts": (
        CHAT,
        lambda: fill('{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 19_000),
        400,
    ),
    "a long message": (CHAT, lambda: text('{"messages":[{"role":"user","content":"', "a b ", '"}]}', MAX_TEXT), 400),
    "a message of special tokens": (
        CHAT,
        lambda: text('{"messages":[{"role":"user","content":"', "<|im_end|>", '"}]}', 1 << 19),
        400,
    ),
    "messages of nobody": (CHAT, lambda: fill('{"messages":[', '{"role":"nobody","content":"a"}', "]}", 19_000), 400),
    "a tool": (CHAT, lambda: numbered(TOOL, PROPERTY, "}}}}]}", 24_000), 400),
    "a tool that must be called": (
        CHAT,
        lambda: numbered(TOOL, PROPERTY, '}}}}],"tool_choice":"required"}', 24_000),
        400,
    ),
    "lists in a tool": (CHAT, lambda: fill(TOOL + '"a":[', "[]", "]}}}}]}", 99_000), 400),
    "arguments": (CHAT, lambda: fill(CALL, "1", ']}"}}]}]}', MAX_VALUES - 9), 400),
    "arguments, too many": (CHAT, lambda: fill(CALL, "[]", ']}"}}]}]}'), 400),
    "values for the template": (
        CHAT,
        lambda: numbered(USER + '"chat_template_kwargs":{', '"%d":[]', "}}", 48_000),
        400,
    ),
    "blocks, too many": (
        MESSAGES,
        lambda: fill(ASKED + '{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 250_000),
        400,
    ),
    "blocks": (
        MESSAGES,
        lambda: fill(ASKED + '{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 19_000),
        400,
    ),
    "turns": (MESSAGES, lambda: fill(ASKED, '{"role":"user","content":"a"}', "]}", 19_000), 400),
    "blocks of no kind": (MESSAGES, lambda: text(ASKED + '{"role":"user","content":[{"type":"', "a", '"}]}]}'), 400),
    "a long turn": (MESSAGES, lambda: text(ASKED + '{"role":"user","content":"', "a b ", '"}]}'), 400),
    "blocks to count": (
        COUNT,
        lambda: fill(
            '{"model":"talker","messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 19_000
        ),
        200,
    ),
    "a text to encode": (TOKENIZE, lambda: text('{"prompt":"', "a b ", '"}', MAX_TEXT), 400),
    "a chat to encode": (
        TOKENIZE,
        lambda: text('{"messages":[{"role":"user","content":"', "a b ", '"}]}', 1 << 19),
        200,
    ),
    "log probabilities of a prompt": (
        COMPLETION,
        lambda: fill('{"max_tokens":1,"prompt_logprobs":20,"prompt":[', "97", "]}", 8192),
        200,
    ),
    "log probabilities of a chat": (
        CHAT,
        lambda: text('{"prompt_logprobs":20,"max_tokens":1,"messages":[{"role":"user","content":"', "a", '"}]}', 8192),
        200,
    ),
    "log probabilities of answers": (
        COMPLETION,
        lambda: b'{"prompt":"a","max_tokens":500,"n":16,"logprobs":20}',
        200,
    ),
    "log probabilities in a stream": (
        CHAT,
        lambda: (USER + '"max_tokens":200,"n":16,"logprobs":true,"top_logprobs":20,"stream":true}').encode(),
        200,
    ),
    "log probabilities of a response": (RESPONSES, lambda: (SCORED + '"max_output_tokens":3000}').encode(), 200),
    "log probabilities in a response's stream": (
        RESPONSES,
        lambda: (SCORED + '"max_output_tokens":3000,"stream":true}').encode(),
        200,
    ),
    "items to count": (
        RESPONSES + "/input_tokens",
        lambda: fill('{"input":[', '{"role":"user","content":"a"}', "]}", 19_000),
        200,
    ),
    "ids to decode, too many": (DETOKENIZE, lambda: fill('{"tokens":[', "1", "]}"), 400),
    "ids to decode": (DETOKENIZE, lambda: fill('{"tokens":[', "97", "]}", CONTEXT), 200),
}


def max_hold() -> float:
    """Seconds that the loop may be held on this machine, as busy as it is now."""
    body, start = "[" + "1," * (YARDSTICK // 2 - 1) + "1]", time.process_time()
    json.loads(body)
    return max(MAX_HOLD, (time.process_time() - start) / 2)


def longest_hold(watched: Watched, data: bytes) -> tuple[wire.Answer, float]:
    """The answer, and how long the loop was held at most meanwhile."""
    before = watched.holds.stat().st_size if watched.holds.exists() else 0
    answer = wire.exchange(watched.server.url, data)
    wire.ask(watched.server.url, "GET", "/health")  # the loop has gone round since
    with watched.holds.open() as file:
        file.seek(before)
        return answer, max(map(float, file), default=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BODIES)
def test_every_body_is_answered(watched: Watched, name: str):
    path, make, status = BODIES[name]
    body = make()
    assert len(body) <= MAX_BODY
    answer = wire.exchange(watched.server.url, wire.request("POST", path, body))
    assert answer.status == status, answer.body[:500]
    assert wire.ask(watched.server.url, "GET", "/health").status == 200


@pytest.mark.slow  # seconds on a clock
@pytest.mark.parametrize("name", BODIES)
def test_no_body_holds_the_event_loop(watched: Watched, name: str):
    path, make, status = BODIES[name]
    data, holds = wire.request("POST", path, make()), []
    for _ in range(TRIES):  # another process may have slowed this one down
        answer, held = longest_hold(watched, data)
        assert answer.status == status, answer.body[:500]
        holds.append(held)
        if held < MAX_HOLD or held < max_hold():
            return
    raise AssertionError(f"{holds} s")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/health", "/ready", "/metrics", "/version", "/v1/models",
                                  "/v1/models/" + "a" * 60_000, "/start_profile", "/stop_profile", "/" + "%41" * 20_000,
                                  "/health?" + "a=b&" * 15_000])  # fmt: skip
def test_no_other_route_holds_the_event_loop(watched: Watched, method: str, path: str):
    body = None if method == "GET" else b"[" * MAX_BODY
    _, held = longest_hold(watched, wire.request(method, path, body))
    assert held < max_hold()

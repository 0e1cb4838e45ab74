"""Prompts of megabytes, which are refused, or cut, before they are tokenized."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import wire
from serving import Server, Start

MAX_BODY = 8 << 20
TEXT = "a few words, " * (MAX_BODY // 13 - 20)  # a token is a byte


@pytest.fixture(scope="module")
def small(start_server: Start) -> Server:
    limits = (f"max_body={MAX_BODY}", "max_input_length=1000")
    return start_server(*(f"serve.http.{each}" for each in limits), stub={})


def computed(server: Server) -> float:
    """The seconds that the thread of its event loop has computed, however busy the machine is."""
    pid = server.process.pid
    user, system = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def ask_and_watch(server: Server, path: str, body: dict[str, Any]) -> tuple[wire.Answer, float]:
    """The answer, and the longest time that the event loop computed before it answered /health meanwhile."""
    data, answers, seconds = wire.request("POST", path, body), [], [0.0]
    asking = threading.Thread(target=lambda: answers.append(wire.exchange(server.url, data)))
    asking.start()
    while asking.is_alive():
        start = computed(server)
        assert wire.ask(server.url, "GET", "/health").status == 200
        seconds.append(computed(server) - start)
        time.sleep(0.01)
    return answers[0], max(seconds)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": TEXT}]}),
        ("/v1/messages", {"model": "talker", "max_tokens": 1, "messages": [{"role": "user", "content": TEXT}]}),
        ("/tokenize", {"prompt": TEXT}),
    ],
)
def test_a_prompt_of_megabytes_is_refused_and_keeps_nobody_waiting(small: Server, path: str, body: dict[str, Any]):
    answer, seconds = ask_and_watch(small, path, body)
    # the longest token is <|endoftext|>, of 13 characters
    assert answer.status == 400 and "1000 tokens of at most 13" in answer.json["error"]["message"]
    assert "the prompt is too long: " in answer.json["error"]["message"]
    assert seconds < 0.5


def test_of_a_prompt_of_megabytes_the_last_tokens_count(small: Server):
    body = {"prompt": TEXT + "the end", "truncate_prompt_tokens": 7, "max_tokens": 1, "echo": True}
    answer, seconds = ask_and_watch(small, "/v1/completions", body)
    assert answer.json["choices"][0]["text"] == "the end" + "word "
    assert answer.json["usage"]["prompt_tokens"] == 7
    assert seconds < 0.5
    chat = {"messages": [{"role": "user", "content": TEXT}], "truncate_prompt_tokens": 7, "max_tokens": 1}
    answer, seconds = ask_and_watch(small, "/v1/chat/completions", chat)
    assert answer.json["usage"]["prompt_tokens"] == 7
    assert seconds < 0.5


def test_a_prompt_whose_tokens_may_be_long_enough_is_counted(small: Server):
    assert (
        wire.ask(small.url, "POST", "/v1/completions", {"prompt": "<|endoftext|>" * 1000, "max_tokens": 1}).json[
            "usage"
        ]["prompt_tokens"]
        == 1000
    )
    refused = wire.ask(small.url, "POST", "/v1/completions", {"prompt": "x" * 1001})
    assert refused.status == 400 and "the prompt has 1001 tokens" in refused.json["error"]["message"]

"""Prompts that are too long: those of megabytes are refused, or cut, before they are tokenized."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import scripted
import wire
from scripted import Said
from serving import Server, Start

from atom.config.load import load

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


LONG = {"prompt": [1] * 200, "max_tokens": 1}
ROOM = "However, the prompt has 200 tokens, and it may have"


@pytest.mark.parametrize(
    ("path", "body", "options", "message"),
    [
        ("/v1/completions", LONG, ["serve.max_model_len=100"], f"100 tokens. {ROOM} 99 (serve.max_model_len=100)"),
        ("/v1/completions", LONG, ["serve.http.max_total_tokens=100"],
         f"100 tokens. {ROOM} 99 (serve.http.max_total_tokens=100)"),
        ("/v1/completions", LONG, ["serve.http.max_input_length=50"],
         f"8192 tokens. {ROOM} 50 (serve.http.max_input_length=50)"),
        ("/v1/completions", LONG, ["serve.http.max_input_length=50", "serve.http.max_total_tokens=100"],
         f"100 tokens. {ROOM} 50 (serve.http.max_input_length=50)"),
        ("/v1/completions", LONG, ["serve.http.max_input_length=300", "serve.http.max_total_tokens=100"],
         f"100 tokens. {ROOM} 99 (serve.http.max_total_tokens=100)"),
        ("/v1/completions", {"prompt": [1] * 8192}, [],
         "8192 tokens. However, the prompt has 8192 tokens, and it may have 8191"),
        ("/v1/completions", {"prompt": "a" * 2000}, ["serve.max_model_len=100"],
         "100 tokens. However, the prompt is too long: it has 2000 characters, and it may have "
         "99 tokens of at most 13 characters each (serve.max_model_len=100)"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 2000}]}, ["serve.max_model_len=100"],
         "100 tokens. However, the prompt is too long: it has 2000 characters, and it may have "
         "99 tokens of at most 13 characters each (serve.max_model_len=100)"),
        ("/v1/responses", {"input": "a" * 200}, ["serve.max_model_len=100"],
         "100 tokens. However, the prompt has 219 tokens, and it may have 99 (serve.max_model_len=100)"),
    ],
)  # fmt: skip
def test_a_long_prompt_is_refused_in_openais_words_with_the_option_that_was_set(
    talker: Path, path: str, body: dict[str, Any], options: list[str], message: str
):
    config = load([f"checkpoint={talker}", "serve.http.served_model_name=[talker]", *options])
    response, seen = scripted.post(config, Said(["a"]), body, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], seen) == (400, "context_length_exceeded", [])
    assert error["message"] == f"This model's maximum context length is {message}; shorten it"


def test_a_long_input_is_refused_in_openais_words(talker: Path):
    pooled = ["serve.pooler_config.pooling_type=LAST", "serve.http.max_total_tokens=100"]
    config = load([f"checkpoint={talker}", "serve.http.served_model_name=[talker]", *pooled])
    response, _ = scripted.post(config, Said(["a"]), {"input": [1] * 200}, "/v1/embeddings")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert error["message"] == (
        "This model's maximum context length is 100 tokens. However, an input has 200 tokens, and it may have 100 "
        "(serve.http.max_total_tokens=100); shorten it or set truncate_prompt_tokens"
    )

"""Sleep mode over HTTP: an operator puts the engine to sleep and wakes it up, and requests wait meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import wire

KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": tiny.prompt(11), "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one engine", "two"])
def server(request: Any, checkpoints: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("ops: {key: secret, admin: true}\napp: {key: apps}\n")
    started = serving.start(
        checkpoints("llama"), tmp_path_factory.mktemp("server"), "serve.enable_sleep_mode=true", f"serve.http.api_keys=@{keys}",
        f"parallel.replicas={request.param}",
    )  # fmt: skip
    wire.wait_until(lambda: are_ready(started.url))  # each of two engines
    yield started.url
    started.process.kill()
    started.process.wait()


def are_ready(server: str) -> bool:
    health = wire.ask(server, "GET", "/health").json
    return all(each["state"] == "ready" for each in health.get("engines", [health]))


def ask(server: str, method: str, path: str, body: Any = None) -> wire.Answer:
    return wire.ask(server, method, path, body, KEY)


def complete(server: str, answers: list[Any]) -> None:
    answers.append(ask(server, "POST", "/v1/completions", BODY).json["choices"][0]["token_ids"])


def is_sleeping(server: str) -> bool:
    answer = ask(server, "GET", "/is_sleeping")
    assert answer.status == 200
    return bool(answer.json["is_sleeping"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("query", ["", "?level=2", "?level=1&mode=keep"])
def test_requests_wait_until_it_is_woken_up(query: str, server: str):
    answers: list[Any] = []
    complete(server, answers)
    assert not is_sleeping(server)
    assert ask(server, "POST", f"/sleep{query}").status == 200
    assert is_sleeping(server) and ask(server, "GET", "/health").status == 200
    late = threading.Thread(target=complete, args=(server, answers))
    late.start()
    late.join(0.5)
    assert late.is_alive() and len(answers) == 1
    assert ask(server, "POST", "/wake_up?tags=weights").json == {"is_sleeping": True}
    assert ask(server, "POST", "/wake_up?tags=kv_cache").json == {"is_sleeping": False}
    late.join(wire.SECONDS)
    assert answers[1:] == answers[:1] and not is_sleeping(server)


def test_a_stream_that_runs_ends_with_abort(server: str):
    body = {**BODY, "max_tokens": 200, "ignore_eos": True}
    with closing(wire.Stream(server, body, **KEY)) as stream:
        (first,) = stream.read_events(1)
        assert ask(server, "POST", "/sleep").status == 200
        last = [each for each in stream.read_events() if isinstance(each, dict) and each["choices"]][-1]
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "abort"
    assert ask(server, "POST", "/wake_up").status == 200


def test_prefixes_are_forgotten_at_an_operators_word(server: str):
    prompt = tiny.prompt(50, seed=3)

    def num_cached() -> int:
        answer = ask(server, "POST", "/v1/completions", {**BODY, "prompt": prompt})
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached(), num_cached()] == [0, 48]
    assert ask(server, "POST", "/reset_prefix_cache").status == 200
    assert [num_cached(), num_cached()] == [0, 48]


def test_only_an_operator_may_and_only_what_there_is(server: str):
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        assert wire.ask(server, "POST", path).status == 401
        assert wire.ask(server, "POST", path, headers={"x-api-key": "apps"}).status == 403
    for path, field in (("/sleep?level=3", "level"), ("/sleep?mode=later", "mode"), ("/wake_up?tags=graphs", "tags.0")):
        refused = ask(server, "POST", path)
        assert (refused.status, refused.json["error"]["param"]) == (400, field.partition(".")[0])
        assert refused.json["error"]["message"].startswith(f"{field}: ")
    assert not is_sleeping(server)


@pytest.fixture
def breaking(checkpoints: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., str]]:
    started: list[serving.Server] = []

    def start(breaks: list[str], replicas: int) -> str:
        overrides = ("serve.enable_sleep_mode=true", f"parallel.replicas={replicas}")
        started.append(serving.start(checkpoints("llama"), tmp_path, *overrides, stub={"breaks": breaks}))
        wire.wait_until(lambda: are_ready(started[-1].url))
        return started[-1].url

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_an_engine_that_fell_asleep_half_way_is_said_to_sleep(breaking: Callable[..., str]):
    server, answers = breaking(["_drop_kv", "_take_kv"], 1), list[Any]()
    complete(server, answers)
    failed = ask(server, "POST", "/sleep")
    assert (failed.status, failed.json["error"]["type"]) == (500, "server_error")
    assert is_sleeping(server), "requests wait"
    assert ask(server, "GET", "/health").json == {"status": "ok", "state": "ready", "is_sleeping": True}
    late = threading.Thread(target=complete, args=(server, answers))
    late.start()
    late.join(0.5)
    assert late.is_alive()
    assert ask(server, "POST", "/wake_up").status == 500 and is_sleeping(server), "it has its weights, and no KV"
    assert ask(server, "POST", "/wake_up?tags=kv_cache").json == {"is_sleeping": False}
    late.join(wire.SECONDS)
    assert answers[1:] == answers[:1] and not is_sleeping(server)
    assert "is_sleeping" not in ask(server, "GET", "/health").json


def test_a_request_goes_to_the_engine_that_is_awake(breaking: Callable[..., str]):
    server = breaking(["_take_kv"], 2)
    assert ask(server, "POST", "/sleep").status == 200 and is_sleeping(server)
    assert ask(server, "POST", "/wake_up").status == 500
    first, second = ask(server, "GET", "/health").json["engines"]
    assert first["is_sleeping"] and "is_sleeping" not in second, "the other is awake by the time of the answer"
    answers: list[Any] = []
    for _ in range(4):
        complete(server, answers)
    assert len(answers) == 4 and is_sleeping(server)
    assert ask(server, "POST", "/wake_up").json == {"is_sleeping": False}

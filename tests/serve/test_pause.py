"""Pauses and aborts over HTTP: an operator stops the engines, ends requests, names weights; others wait meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import wire
from serving import Start

KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": tiny.prompt(11), "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "return_weight_versions": True}  # fmt: skip
SHORT = BODY | {"max_tokens": 8}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one engine", "two"])
def server(request: Any, checkpoints: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("ops: {key: secret, admin: true}\napp: {key: apps}\n")
    started = serving.start(
        checkpoints("llama"), tmp_path_factory.mktemp("server"), f"serve.http.api_keys=@{keys}",
        f"parallel.replicas={request.param}", "serve.enable_prefix_caching=true", "serve.block_size=4",
    )  # fmt: skip
    wire.wait_until(lambda: are_ready(started.url))
    yield started.url
    started.process.kill()
    started.process.wait()


def engines_of(server: str) -> list[dict[str, Any]]:
    health = wire.ask(server, "GET", "/health").json
    return list(health.get("engines", [health]))


def are_ready(server: str) -> bool:
    return all(each["state"] == "ready" for each in engines_of(server))


def ask(server: str, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
    answer = wire.ask(server, method, path, body, KEY)
    assert answer.status == status, answer.body
    return answer.json


def complete(server: str, answers: list[Any], body: dict[str, Any]) -> None:
    answers.append(ask(server, "POST", "/v1/completions", body)["choices"][0])


def begin(server: str, body: dict[str, Any], answers: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=complete, args=(server, answers, body))
    thread.start()
    return thread


def total(server: str, name: str) -> float:
    """A metric, over all engines."""
    return sum(value for key, value in wire.metrics(server, KEY).items() if key.partition("{")[0] == name)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_what_runs_is_ended_or_finished_or_kept_and_what_comes_waits(mode: str, server: str):
    expected: list[Any] = []
    complete(server, expected, BODY)
    assert ask(server, "GET", "/is_paused") == {"is_paused": False}
    num_engines, late = len(engines_of(server)), list[Any]()
    with closing(wire.Stream(server, BODY, **KEY)) as stream:
        events = stream.read_events(1)
        assert ask(server, "POST", f"/pause?mode={mode}&clear_cache=false") == {"status": "paused"}
        assert ask(server, "GET", "/is_paused") == {"is_paused": True}
        assert all(each["is_paused"] for each in engines_of(server))
        assert total(server, "atom:engine_paused") == num_engines
        waiting = begin(server, SHORT, late)
        wire.wait_until(lambda: total(server, "atom:num_requests_waiting") == 1)
        wire.wait_until(lambda: total(server, "atom:num_requests_running") == (mode == "keep"))
        if mode != "keep":
            events += stream.read_events()
        assert not late
        assert ask(server, "POST", "/resume") == {"status": "resumed"}
        events += stream.read_events() if mode == "keep" else []
    waiting.join(wire.SECONDS)
    assert late[0]["token_ids"] == expected[0]["token_ids"][:8]
    assert not any("is_paused" in each for each in engines_of(server)) and not total(server, "atom:engine_paused")
    choices = [each["choices"][0] for each in events if isinstance(each, dict)]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert tokens == expected[0]["token_ids"][: len(tokens)]
    assert choices[-1]["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert len(tokens) < 200 if mode == "abort" else len(tokens) == 200
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": len(tokens)}]
    assert not any("weight_versions" in each for each in choices[:-1])


@pytest.mark.parametrize("clear_cache", [True, False])
def test_prefixes_are_forgotten_unless_they_are_to_be_kept(clear_cache: bool, server: str):
    prompt = tiny.prompt(50, seed=3 + clear_cache)

    def num_cached() -> int:
        answer = ask(server, "POST", "/v1/completions", SHORT | {"prompt": prompt})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached(), num_cached()] == [0, 48]
    ask(server, "POST", f"/pause?mode=wait&clear_cache={str(clear_cache).lower()}")
    ask(server, "POST", "/resume")
    assert num_cached() == (0 if clear_cache else 48)


def test_the_old_name_of_a_mode_waits_for_what_runs(server: str):
    with closing(wire.Stream(server, BODY, **KEY)) as stream:
        events = stream.read_events(1)
        ask(server, "POST", "/pause?wait_for_inflight_requests=true")
        events += stream.read_events()
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    ask(server, "POST", "/resume")


def test_requests_are_aborted_by_their_ids_or_all(server: str):
    named = [BODY | {"request_id": name, "n": 2} for name in ("a", "b", "c")]
    with closing(wire.Stream(server, named[0], **KEY)) as first:
        first.read_events(2)
        kept, aborted = list[Any](), list[Any]()
        ask(server, "POST", "/pause?mode=keep&clear_cache=false")  # so that they are there when they are aborted
        others = [begin(server, named[1], kept), begin(server, named[2], aborted)]
        wire.wait_until(lambda: total(server, "atom:num_requests_waiting") == 4)
        answer = ask(server, "POST", "/abort_requests", {"request_ids": ["cmpl-a", "cmpl-c", "cmpl-nobodys"]})
        assert answer == {"status": "aborted", "aborted": 2}
        ends = [each["choices"][0] for each in first.read_events() if isinstance(each, dict)]
        assert [each["finish_reason"] for each in ends if each["finish_reason"]] == ["abort"] * 2
        others[1].join(wire.SECONDS)
        assert (aborted[0]["finish_reason"], aborted[0]["token_ids"]) == ("abort", [])
        assert aborted[0]["weight_versions"] == []
        ask(server, "POST", "/resume")
        others[0].join(wire.SECONDS)
    assert kept[0]["finish_reason"] == "length"
    ask(server, "POST", "/pause?mode=keep")
    late = begin(server, SHORT, ended := [])
    wire.wait_until(lambda: total(server, "atom:num_requests_waiting") == 1)
    assert ask(server, "POST", "/abort_requests", {})["aborted"] == 1
    late.join(wire.SECONDS)
    assert ended[0]["finish_reason"] == "abort"
    assert ask(server, "POST", "/abort_requests", {"request_ids": []})["aborted"] == 0
    ask(server, "POST", "/resume")


def test_answers_say_which_weights_have_sampled_their_tokens(server: str):
    assert ask(server, "GET", "/weight_info") == {"weight_version": "default"}
    with closing(wire.Stream(server, BODY, **KEY)) as stream:
        events = stream.read_events(1)
        ask(server, "POST", "/pause?mode=keep")
        answer = ask(server, "POST", "/update_weight_version", {"new_version": "step-1"})
        assert answer == {"success": True, "new_version": "step-1"}
        ask(server, "POST", "/resume")
        events += stream.read_events()
    first, second = [each for each in events if isinstance(each, dict)][-1]["choices"][0]["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("default", 0, "step-1")
    assert (second["start"], second["end"]) == (first["end"], 200) and first["end"] > 0
    assert ask(server, "GET", "/weight_info") == {"weight_version": "step-1"}
    named = {key for key in wire.metrics(server, KEY) if key.startswith("atom:weight_version_info")}
    assert len(named) == len(engines_of(server)) and all('version="step-1"' in each for each in named)
    ask(server, "POST", "/update_weight_version", {"new_version": "default"})


def test_only_an_operator_may_and_only_what_there_is(server: str):
    for path in ("/pause", "/resume", "/abort_requests", "/update_weight_version"):
        assert wire.ask(server, "POST", path, {}).status == 401
        assert wire.ask(server, "POST", path, {}, headers={"x-api-key": "apps"}).status == 403
    for path in ("/is_paused", "/weight_info", "/get_world_size"):
        assert wire.ask(server, "GET", path, headers={"x-api-key": "apps"}).status == 403
    refused = ask(server, "POST", "/pause?mode=later", status=400)["error"]
    assert refused["param"] == "mode" and refused["message"].startswith("mode: ")
    assert ask(server, "POST", "/update_weight_version", {}, status=400)["error"]["param"] == "new_version"
    assert ask(server, "POST", "/abort_requests", {"ids": ["a"]}, status=400)["error"]["param"] == "ids"
    assert ask(server, "GET", "/is_paused") == {"is_paused": False}
    assert ask(server, "GET", "/get_world_size")["world_size"] == len(engines_of(server))
    assert ask(server, "GET", "/get_world_size?include_dp=false") == {"world_size": 1}


def test_a_signal_ends_a_paused_server_without_waiting_for_what_cannot_end(start_server: Start):
    server = start_server("serve.http.drain_seconds=10000", stub={"step_seconds": 0.01})
    with closing(wire.Stream(server.url, {"prompt": [0], "max_tokens": 8000})) as stream:
        stream.read_events(1)
        assert wire.ask(server.url, "POST", "/pause?mode=keep").status == 200
        server.process.send_signal(signal.SIGINT)
        *_, last = stream.read_events()
    assert last["error"]["message"] == "the server ends before this request has been answered"
    assert server.process.wait(wire.SECONDS) == 130


def test_an_engine_that_is_started_again_is_paused_as_the_others_are(start_server: Start):
    server = start_server("parallel.replicas=2", stub={"pause_seconds": 0.05})
    wire.wait_until(lambda: are_ready(server.url))
    assert wire.ask(server.url, "POST", "/update_weight_version", {"new_version": "7"}).status == 200
    assert wire.ask(server.url, "POST", "/pause?mode=keep").status == 200
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    wire.wait_until(lambda: sum(each["restarts"] for each in engines_of(server.url)) == 1 and are_ready(server.url))
    assert [each["is_paused"] for each in engines_of(server.url)] == [True, True]
    answers: list[Any] = []
    late = [begin(server.url, {"prompt": [0], "max_tokens": 4}, answers) for _ in range(4)]
    wire.wait_until(lambda: total(server.url, "atom:num_requests_waiting") == 4)
    assert not answers
    assert wire.ask(server.url, "POST", "/resume").status == 200
    for each in late:
        each.join(wire.SECONDS)
    assert len(answers) == 4
    named = {key for key in wire.metrics(server.url) if key.startswith("atom:weight_version_info")}
    assert len(named) == 2 and all('version="7"' in each for each in named)

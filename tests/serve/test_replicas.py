"""Several engines of one server: real processes and HTTP; most engines are stubs whose tokens name the replica."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serving
import wire
from serving import Server, Start

pytestmark = pytest.mark.early

STUB = {"names": True, "caches": True, "profiles": True, "pause_seconds": 0.2}
DP2 = ("parallel=dp2", "serve.enable_prefix_caching=true")
ENDLESS = {"prompt": [0, 9], "max_tokens": 8000}


def pin(number: object) -> dict[str, str]:
    return {"X-data-parallel-rank": str(number)}


def ask(server: Server, body: dict[str, Any], **headers: str) -> tuple[int, int]:
    """The replica that answered, and how many tokens of the prompt it had cached."""
    answer = wire.ask(server.url, "POST", "/v1/completions", {"max_tokens": 2, **body}, headers)
    assert answer.status == 200, answer.body
    numbers = set(answer.json["choices"][0]["text"].split())
    (number,) = numbers
    return int(number), answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def engines(server: Server) -> list[int]:
    """The engines' processes, by the replica's number at the first start."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return sorted(map(int, children.split()))


def states(server: Server) -> list[str]:
    return [each["state"] for each in wire.ask(server.url, "GET", "/health").json["engines"]]


def are_ready(server: Server) -> bool:
    return states(server) == ["ready", "ready"]


def by_engine(server: Server, name: str) -> list[float]:
    metrics = wire.metrics(server.url)
    return [metrics[f'atom:{name}{{engine="{number}"}}'] for number in (0, 1)]


def stream(server: Server, number: int, **body: Any) -> wire.Stream:
    """A stream of a replica that has begun."""
    begun = wire.Stream(server.url, ENDLESS | body, **pin(number))
    (first,) = begun.read_events(1)
    assert first["choices"][0]["text"] == f"{number} "
    return begun


@pytest.fixture(scope="module")
def pair(start_server: Start) -> Server:
    """Two replicas, for tests that harm neither."""
    server = start_server(*DP2, stub=STUB | {"prints": ["said past Python"]})
    wire.wait_until(lambda: are_ready(server))
    return server


@pytest.fixture
def start_pair(start_server: Start) -> Iterator[Callable[..., Server]]:
    """Starts two replicas that a test may harm."""
    started: list[Server] = []

    def start(*overrides: str, **stub: Any) -> Server:
        started.append(start_server(*DP2, *overrides, stub=STUB | {"step_seconds": 0.02} | stub))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()


def test_metrics_and_health_are_of_each_replica(pair: Server):
    """The first test of these engines, which have run no step yet."""
    assert by_engine(pair, "engine_steps_total") == [0, 0]
    ask(pair, {"prompt": [0], "max_tokens": 5}, **pin(1))
    wire.wait_until(lambda: by_engine(pair, "engine_steps_total")[1] >= 5)
    assert by_engine(pair, "engine_steps_total")[0] == 0
    wire.wait_until(lambda: by_engine(pair, "kv_cache_blocks") == [100_000, 100_000])  # each reports its own
    assert (by_engine(pair, "engine_up"), by_engine(pair, "engine_restarts_total")) == ([1, 1], [0, 0])
    each = [{"engine": number, "state": "ready", "restarts": 0} for number in (0, 1)]
    assert wire.ask(pair.url, "GET", "/health").json == {"status": "ok", "state": "ready", "engines": each}


def test_prompts_that_begin_alike_go_where_their_beginning_is_cached(pair: Server):
    shared, other = [11] * 64, [12] * 64
    first, none = ask(pair, {"prompt": [*shared, 1]})
    second, _ = ask(pair, {"prompt": [*other, 1]})
    assert {first, second} == {0, 1} and none == 0  # equal loads take turns
    for place in range(4):
        assert ask(pair, {"prompt": [*shared, place, 7]}) == (first, 64)
        assert ask(pair, {"prompt": [*other, place, 7]}) == (second, 64)
    answered = [*shared, 1, *[7] * 40]  # the stub's answers are of token 7
    ask(pair, {"prompt": [*shared, 1], "max_tokens": 40})
    assert ask(pair, {"prompt": [*answered, *range(30, 100)]})[0] == first  # a turn further
    assert ask(pair, {"prompt": [*shared, *range(30, 100)]}, **pin(1 - first)) == (1 - first, 0)  # and nowhere else


def test_sequences_that_share_nothing_are_spread(pair: Server):
    streams = []
    for place in range(6):
        streams.append(wire.Stream(pair.url, ENDLESS | {"prompt": [50 + place] * 40}))
        streams[-1].read_events(1)  # so that it runs: a replica with one that waits gets fewer
    wire.wait_until(lambda: by_engine(pair, "num_requests_running") == [3, 3])
    for each in streams:
        each.close()
    wire.wait_until(lambda: by_engine(pair, "num_requests_running") == [0, 0])


def test_a_header_pins_a_request_to_a_replica(pair: Server):
    for number in (0, 1, 1, 0):
        assert ask(pair, {"prompt": [13] * 40}, **pin(number))[0] == number
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for path, body in (("/v1/chat/completions", chat), ("/v1/messages", chat | {"model": "talker"})):
        for number in (1, 0):
            assert f'"{number} "' in wire.ask(pair.url, "POST", path, body, pin(number)).body.decode()
    wire.wait_until(lambda: {each.get("engine") for each in serving.log_entries(pair, message="request")} >= {0, 1})


@pytest.mark.parametrize("number", ["2", "-1", "x", "", "1.0", "1" * 5000, "\u00b2"])
def test_a_header_that_names_no_replica_is_400(pair: Server, number: str):
    headers = pin(number.encode("utf-8").decode("latin-1"))
    answer = wire.ask(pair.url, "POST", "/v1/completions", {"prompt": [0]}, headers)
    assert answer.status == 400 and "X-data-parallel-rank: " in answer.json["error"]["message"]
    assert "(known: 0 to 1)" in answer.json["error"]["message"]


def test_one_replica_has_a_number_too(server: Server):
    for number, status in ((0, 200), (1, 400)):
        body = {"prompt": [0], "max_tokens": 1}
        assert wire.ask(server.url, "POST", "/v1/completions", body, pin(number)).status == status
    assert "engines" not in wire.ask(server.url, "GET", "/health").json
    assert wire.metrics(server.url)["atom:engine_up"] == 1


def test_the_profilers_of_all_replicas_start_and_stop(pair: Server):
    assert wire.ask(pair.url, "POST", "/stop_profile").status == 400
    assert wire.ask(pair.url, "POST", "/start_profile").json == {"status": "started"}
    assert wire.ask(pair.url, "POST", "/start_profile").status == 400
    traces = ["trace of 0", "trace of 1"]
    stopped = {"status": "stopped", "trace": traces[0], "traces": traces}
    assert wire.ask(pair.url, "POST", "/stop_profile").json == stopped


def test_what_an_engine_prints_bears_its_name(pair: Server):
    for number in (0, 1):
        serving.wait_for_entry(pair, message="said past Python", process=f"engine {number}")


def test_a_replica_that_is_killed_ends_only_its_streams_and_comes_back(start_pair: Callable[..., Server]):
    server = start_pair()
    wire.wait_until(lambda: are_ready(server))
    own, other = stream(server, 0), stream(server, 1, max_tokens=150)
    waiting = wire.Stream(server.url, ENDLESS | {"stream": False}, **pin(0))
    wire.wait_until(lambda: by_engine(server, "num_requests_running") == [2, 1])
    os.kill(engines(server)[0], signal.SIGKILL)
    *_, last = own.read_events()
    assert last["error"]["code"] == "unavailable" and last["error"]["type"] == "server_error"
    assert wire.read_answer(waiting.file).status == 503
    health = wire.ask(server.url, "GET", "/health")
    assert health.status == 200 and health.json["state"] == "ready"
    assert {ask(server, {"prompt": [20 + place]})[0] for place in range(3)} == {1}
    pinned = wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0]}, pin(0))
    assert pinned.status == 503 and pinned.json["error"]["message"].startswith("engine 0 is ")
    events = other.read_events()
    assert events[-1] == "[DONE]" and len(events) + 1 == 150 + 1  # and not a token less
    wire.wait_until(lambda: are_ready(server))
    assert ask(server, {"prompt": [0]}, **pin(0))[0] == 0
    assert by_engine(server, "engine_restarts_total") == [1, 0]
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 0
    messages = [entry["message"] for entry in serving.log_entries(server)]
    assert "engine 0 is dead; it is started again in 0.2 s" in messages and "engine 0 serves again" in messages


@pytest.mark.slow
def test_a_replica_that_fails_at_every_start_stays_dead(start_pair: Callable[..., Server]):
    server = start_pair(broken=[1])
    wire.wait_until(lambda: "stays_dead" in wire.ask(server.url, "GET", "/health").json["engines"][1])
    health = wire.ask(server.url, "GET", "/health")
    dead = {"engine": 1, "state": "dead", "restarts": 2, "stays_dead": True}
    assert health.status == 200 and health.json["engines"][1] == dead
    assert by_engine(server, "engine_up") == [1, 0]
    assert {ask(server, {"prompt": [20 + place]})[0] for place in range(3)} == {0}
    entry = json.loads(serving.wait_for_line(server, "stays dead"))
    assert entry["message"].startswith("engine 1 has not come to serve in 3 starts in a row")
    assert "the KV pool needs 9 GiB" in entry["reason"]
    assert len(engines(server)) == 1
    os.kill(engines(server)[0], signal.SIGKILL)  # the last one
    assert server.process.wait(wire.SECONDS) == 1
    assert "all engines are dead" in [entry["message"] for entry in serving.log_entries(server)]


@pytest.mark.slow
def test_a_server_whose_replicas_all_die_ends_with_1(start_pair: Callable[..., Server]):
    server = start_pair(pause_seconds=10)  # none is back before the last is missed
    wire.wait_until(lambda: are_ready(server))
    streams = [stream(server, number) for number in (0, 1)]
    for engine in engines(server):
        os.kill(engine, signal.SIGKILL)
    for each in streams:
        *_, last = each.read_events()
        assert last["error"]["code"] == "unavailable"
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json["state"] == "dead")
    assert wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0]}).status == 503
    left = engines(server)
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 1
    assert not any(Path(f"/proc/{engine}").exists() for engine in left)


def test_replicas_that_all_fail_to_load_are_one_line_and_an_exit_code(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, *DP2, stub=STUB | {"broken": [0, 1]})
    assert server.process.wait(wire.SECONDS) == 2
    assert server.log.read_text().count("CapacityError: the KV pool needs 9 GiB") == 1


def test_a_drain_waits_for_all_replicas_and_outlives_one(start_pair: Callable[..., Server]):
    server = start_pair()
    wire.wait_until(lambda: are_ready(server))
    dies, ends = stream(server, 0), stream(server, 1, max_tokens=60)
    server.process.terminate()
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json["state"] == "draining")
    assert wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0]}, pin(1)).status == 503
    os.kill(engines(server)[0], signal.SIGKILL)
    *_, last = dies.read_events()
    assert last["error"]["code"] == "unavailable"
    assert ends.read_events()[-1] == "[DONE]"
    assert server.process.wait(wire.SECONDS) == 0


@pytest.mark.slow
def test_ctrl_c_twice_ends_all_replicas_at_once(start_pair: Callable[..., Server]):
    server = start_pair("serve.http.drain_seconds=10000", step_seconds=1.0)
    wire.wait_until(lambda: are_ready(server))
    streams = [stream(server, number) for number in (0, 1)]
    left = engines(server)
    server.process.send_signal(signal.SIGINT)
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json["state"] == "draining")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(wire.SECONDS) == 130
    for each in streams:
        each.close()
    assert not any(Path(f"/proc/{engine}").exists() for engine in left)


def test_no_replica_is_left_where_the_http_process_is_killed(start_pair: Callable[..., Server]):
    server = start_pair()
    wire.wait_until(lambda: are_ready(server))
    left = engines(server)
    assert len(left) == 2
    server.process.kill()
    server.process.wait()
    wire.wait_until(lambda: not any(Path(f"/proc/{engine}").exists() for engine in left))


def test_a_full_queue_sends_a_request_to_the_replica_with_room(start_pair: Callable[..., Server]):
    server = start_pair("serve.http.max_queue=1", max_running=1)
    wire.wait_until(lambda: are_ready(server))
    body = ENDLESS | {"prompt": [14] * 40}  # alike, so that all would go to one
    streams = []
    for waiting in ([0, 0], [1, 0], [1, 0], [1, 1]):  # replica 0 runs one, 0 has one wait, 1 runs one, 1 has one wait
        streams.append(wire.Stream(server.url, body))
        wire.wait_until(lambda expected=waiting: by_engine(server, "num_requests_waiting") == expected)  # type: ignore[misc]
    refused = wire.ask(server.url, "POST", "/v1/completions", body)
    assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
    for each in streams:
        each.close()


@pytest.mark.slow
def test_real_engines_give_the_tokens_of_one(server: Server, start_server: Start):
    replicas = start_server(*DP2)
    wire.wait_until(lambda: are_ready(replicas))
    body = {"prompt": "Once upon a time there was a fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answers = [wire.ask(server.url, "POST", "/v1/completions", body).json["choices"][0]["text"]]
    for number in (0, 1):
        answer = wire.ask(replicas.url, "POST", "/v1/completions", body, pin(number)).json
        answers.append(answer["choices"][0]["text"])
        assert answer["usage"]["completion_tokens"] == 24
    assert len(set(answers)) == 1
    again = wire.ask(replicas.url, "POST", "/v1/completions", body | {"prompt": body["prompt"] + "!"}).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32  # two blocks of bytes
    drawn = [
        wire.ask(replicas.url, "POST", "/v1/completions", body | {"temperature": 1.0}, pin(number)).json
        for number in (0, 1)
    ]
    assert len({each["choices"][0]["text"] for each in drawn}) == 2  # each draws tokens of its own
    seeded = [
        wire.ask(replicas.url, "POST", "/v1/completions", body | {"temperature": 1.0, "seed": 5}, pin(number)).json
        for number in (0, 1)
    ]
    assert len({each["choices"][0]["text"] for each in seeded}) == 1

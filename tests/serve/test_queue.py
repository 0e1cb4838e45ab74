from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import wire
from serving import Server, Start

ENDLESS: dict[str, Any] = {"prompt": [0] * 32, "max_tokens": 8000}


def running_and_waiting(server: Server) -> tuple[float, float]:
    metrics = wire.metrics(server.url)
    return metrics["atom:num_requests_running"], metrics["atom:num_requests_waiting"]


def assert_all_is_free(server: Server) -> None:
    def is_free() -> bool:
        metrics = wire.metrics(server.url)
        return running_and_waiting(server) == (0, 0) and metrics["atom:kv_cache_blocks_used"] == 0

    wire.wait_until(is_free)  # a step, and the heartbeat that reports it


@pytest.fixture(scope="module")
def narrow(start_server: Start) -> Server:
    """Room for one sequence that runs and three that wait."""
    limits = (
        "max_queue=3",
        "max_input_length=40",
        "max_total_tokens=100",
        "max_stop_sequences=2",
        "max_top_n_tokens=3",
    )
    return start_server(*(f"serve.http.{each}" for each in limits), "serve.http.best_of=2", stub={"max_running": 1})


def test_a_full_queue_is_429_with_the_time_to_come_back(narrow: Server):
    body = ENDLESS | {"max_tokens": 60}
    assert wire.ask(narrow.url, "POST", "/v1/completions", body).status == 200
    first = wire.Stream(narrow.url, body)
    first.read_events(1)
    waiting = [wire.Stream(narrow.url, body | {"stream": False}) for _ in range(3)]
    wire.wait_until(lambda: running_and_waiting(narrow)[1] == 3)
    refused = wire.ask(narrow.url, "POST", "/v1/completions", body)
    assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json["error"]["type"] == "rate_limit_error" and refused.json["error"]["code"] == "queue_full"
    streamed = wire.ask(
        narrow.url,
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4},
    )
    assert streamed.status == 429
    assert wire.metrics(narrow.url)['atom:admission_rejections_total{reason="max_num_queued_reqs"}'] == 2
    assert first.read_events()[-1] == "[DONE]"
    assert [wire.read_answer(each.file).status for each in waiting] == [200] * 3
    assert wire.ask(narrow.url, "POST", "/v1/completions", body).status == 200
    assert_all_is_free(narrow)


def test_what_a_long_step_is_about_does_not_wait(start_server: Start, tmp_path: Path):
    gate = tmp_path / "gate"
    server = start_server("serve.http.max_queue=1", stub={"gate": str(gate)})
    body = {"prompt": [0], "max_tokens": 1, "stream": False}
    first = wire.Stream(server.url, body)
    wire.wait_until(lambda: running_and_waiting(server) == (1, 0))
    second = wire.Stream(server.url, body)  # there is room for it while the first step runs
    wire.wait_until(lambda: running_and_waiting(server) == (1, 1))
    assert wire.ask(server.url, "POST", "/v1/completions", body).status == 429
    gate.touch()
    assert [wire.read_answer(each.file).status for each in (first, second)] == [200] * 2


def test_a_queue_that_everybody_leaves_at_once_has_room_again(narrow: Server):
    body = {"prompt": [0], "max_tokens": 90}
    for _ in range(2):
        streams = [wire.Stream(narrow.url, body)]
        streams[0].read_events(1)
        streams += [wire.Stream(narrow.url, body) for _ in range(3)]
        wire.wait_until(lambda: running_and_waiting(narrow) == (1, 3))
        for stream in reversed(streams):
            stream.close()
        assert_all_is_free(narrow)
    assert wire.ask(narrow.url, "POST", "/v1/completions", body).status == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": [0] * 41}, "prompt", "may have 40"),
        ({"prompt": [0], "stop": ["a", "b", "c"]}, "stop", "more than 2 strings"),
        ({"prompt": [0], "logprobs": 4}, "logprobs", "more than 3"),
        ({"prompt": [0], "prompt_logprobs": 4}, "prompt_logprobs", "more than 3"),
        ({"prompt": [0], "best_of": 3}, "best_of", "more than the 2 answers"),
        ({"prompt": [0], "n": 3}, "n", "more than the 2 answers"),
        ({"prompt": [[0]] * 2, "n": 2}, None, "at most 3 may wait"),
    ],
)
def test_what_is_beyond_a_limit_is_400(narrow: Server, body: dict[str, Any], param: str | None, message: str):
    answer = wire.ask(narrow.url, "POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param and message in answer.json["error"]["message"]


def test_an_answer_ends_where_the_total_of_tokens_does(narrow: Server):
    answer = wire.ask(narrow.url, "POST", "/v1/completions", {"prompt": [0] * 40, "max_tokens": 99}).json
    assert answer["usage"]["total_tokens"] == 100 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"stream": False, "n": 3}]
)
@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
def test_a_client_that_leaves_frees_its_blocks(roomy: Server, body: dict[str, Any], moment: str):
    url = roomy.url
    blocking = [wire.Stream(url, ENDLESS) for _ in range(3)] if moment == "queued" else []
    num = body.get("n", 1)
    if blocking:
        wire.wait_until(lambda: running_and_waiting(roomy) == (3, 0))
    leaving = wire.Stream(url, ENDLESS | body)
    if moment == "queued":
        wire.wait_until(lambda: running_and_waiting(roomy) == (3, num))
    else:
        wire.wait_until(lambda: running_and_waiting(roomy) == (num, 0))
    if moment == "decode":
        tokens = wire.metrics(url)["atom:generation_tokens_total"]
        wire.wait_until(lambda: wire.metrics(url)["atom:generation_tokens_total"] > tokens)
    leaving.close()
    wire.wait_until(lambda: running_and_waiting(roomy) == (len(blocking), 0))
    for stream in blocking:
        stream.close()
    assert_all_is_free(roomy)


@pytest.fixture(scope="module")
def roomy(start_server: Start) -> Server:
    return start_server(stub={"max_running": 3, "prefill_seconds": 0.5})


def test_the_real_engine_frees_blocks_when_clients_leave(server: Server):
    before = wire.metrics(server.url)
    body = {"prompt": [0] * 512, "max_tokens": 7000, "ignore_eos": True}
    streams = [wire.Stream(server.url, body | {"n": n}) for n in (1, 3)]
    streams[0].read_events(2)
    wire.wait_until(lambda: wire.metrics(server.url)["atom:kv_cache_blocks_used"] > 0)
    for stream in streams:
        stream.close()
    assert_all_is_free(server)
    ended = wire.metrics(server.url)
    assert ended["atom:engine_steps_total"] > before["atom:engine_steps_total"]
    steps = ended["atom:engine_steps_total"]
    time.sleep(1.2)  # two heartbeats
    assert wire.metrics(server.url)["atom:engine_steps_total"] == steps  # nothing runs on for nobody

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import wire
from serving import Server, Start

from atom.serve.metrics import Histogram


@pytest.fixture(scope="module")
def counted(start_server: Start) -> Server:
    return start_server(stub={"step_seconds": 0.005})


BODY: dict[str, Any] = {"prompt": [0, 9, 9, 9], "max_tokens": 6}


def test_counts_after_known_requests_are_exact(counted: Server):
    before = wire.metrics(counted.url)
    for _ in range(3):
        assert wire.ask(counted.url, "POST", "/v1/completions", BODY | {"n": 2}).status == 200
    assert wire.Stream(counted.url, BODY).read_events()[-1] == "[DONE]"
    assert wire.ask(counted.url, "POST", "/v1/completions", BODY | {"temperature": -1}).status == 400
    assert wire.ask(counted.url, "GET", "/nowhere/at/all").status == 404

    def check() -> bool:  # what the log tells of a stream comes just after its end
        after = wire.metrics(counted.url)
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        expected = {
            "atom:prompt_tokens_total": 16,  # a prompt counts once, whatever n
            "atom:generation_tokens_total": 42,
            'atom:request_success_total{finished_reason="max_tokens"}': 7,
            'atom:http_requests_total{path="/v1/completions",status="200"}': 4,
            'atom:http_requests_total{path="/v1/completions",status="400"}': 1,
            'atom:http_requests_total{path="other",status="404"}': 1,
            "atom:time_to_first_token_seconds_count": 7,
            "atom:inter_token_latency_seconds_count": 35,
            "atom:request_time_per_output_token_seconds_count": 7,
            "atom:e2e_request_latency_seconds_count": 7,
            "atom:request_queue_time_seconds_count": 7,
            'atom:e2e_request_latency_seconds_bucket{le="+Inf"}': 7,
            "atom:num_requests_running": 0,
            "atom:num_requests_waiting": 0,
        }
        # the engine's own come with its next heartbeat
        return {name: grown.get(name) for name in expected} == expected and grown["atom:engine_steps_total"] > 0

    wire.wait_until(check, 5)
    after = wire.metrics(counted.url)
    # 5 ms between tokens, on a machine that may be slow but is never fast
    seconds = after["atom:inter_token_latency_seconds_sum"] - before.get("atom:inter_token_latency_seconds_sum", 0)
    assert 0.1 < seconds < 30


def test_gauges_follow_what_runs(start_server: Start):
    server = start_server(stub={"step_seconds": 0.01, "max_running": 2})
    streams = [wire.Stream(server.url, {"prompt": [0] * 32, "max_tokens": 4000}) for _ in range(5)]
    wire.wait_until(lambda: wire.metrics(server.url)["atom:num_requests_running"] == 2)
    wire.wait_until(lambda: wire.metrics(server.url)["atom:num_requests_waiting"] == 3)
    told = wire.metrics(server.url)
    assert told["atom:kv_cache_blocks"] == 100_000  # as the stub has
    assert told["atom:kv_cache_blocks_used"] >= 2 * 3
    assert told["atom:kv_cache_usage_perc"] == told["atom:kv_cache_blocks_used"] / 100_000
    assert told["process_resident_memory_bytes"] > 1 << 20 and told["process_open_fds"] > 5
    for stream in streams:
        stream.close()
    wire.wait_until(lambda: not wire.metrics(server.url)["atom:kv_cache_blocks_used"], 5)


def test_names_and_types_are_in_vllms_style(counted: Server):
    text = wire.ask(counted.url, "GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text.body.decode(), re.MULTILINE))
    expected = {
        "atom:num_requests_running": "gauge",
        "atom:num_requests_waiting": "gauge",
        "atom:kv_cache_usage_perc": "gauge",
        "atom:num_preemptions_total": "counter",
        "atom:prefix_cache_queries_total": "counter",
        "atom:prefix_cache_hits_total": "counter",
        "atom:prompt_tokens_total": "counter",
        "atom:generation_tokens_total": "counter",
        "atom:request_success_total": "counter",
        "atom:time_to_first_token_seconds": "histogram",
        "atom:inter_token_latency_seconds": "histogram",
        "atom:request_time_per_output_token_seconds": "histogram",
        "atom:e2e_request_latency_seconds": "histogram",
        "atom:request_queue_time_seconds": "histogram",
    }
    assert {name: types.get(name) for name in expected} == expected


def test_labels_do_not_grow_with_what_clients_invent(counted: Server):
    for place in range(50):
        wire.ask(counted.url, "GET", f"/no/{place}")
        wire.ask(counted.url, "POST", "/v1/completions", BODY | {"model": f"m{place}", "user": f"u{place}"})
    text = wire.ask(counted.url, "GET", "/metrics").body.decode()
    assert len(re.findall(r"^atom:http_requests_total", text, re.MULTILINE)) < 12
    assert "/no/" not in text and "u7" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_line_of_json_with_its_id_and_usage(counted: Server, stream: bool):
    name = f"log-{stream}"
    headers = {"x-request-id": name}
    data = wire.request("POST", "/v1/completions", BODY | {"stream": stream, "user": "someone"}, headers)
    assert wire.exchange(counted.url, data).status == 200

    def lines() -> list[Any]:
        found = (json.loads(line) for line in counted.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in found if line.get("request_id") == name]

    wire.wait_until(lines, 5)
    (line,) = lines()
    assert (line["message"], line["level"], line["method"]) == ("request", "info", "POST")
    assert (line["path"], line["status"], line["user"]) == ("/v1/completions", 200, "someone")
    assert 0 < line["usage"]["ttft_s"] <= line["usage"]["latency_s"] <= line["seconds"] < 30
    assert line["usage"]["prompt_tokens"] == 4 and line["usage"]["completion_tokens"] == 6
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_a_histograms_buckets_are_cumulative_and_hold_their_bound():
    histogram = Histogram("name", "about", (0.1, 1, 5))
    for value in (0.05, 0.1, 0.5, 1.0, 1.5, 100.0):
        histogram.observe(value)
    (family,) = histogram.collect()
    told = [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples]
    assert told == [
        ("name_bucket", "0.1", 2.0),
        ("name_bucket", "1.0", 4.0),
        ("name_bucket", "5.0", 5.0),
        ("name_bucket", "+Inf", 6.0),
        ("name_count", None, 6.0),
        ("name_sum", None, pytest.approx(103.15)),
    ]

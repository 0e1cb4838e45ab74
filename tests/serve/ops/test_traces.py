"""The spans that a server sends to a collector, which is this process's own and reads OTLP with OpenTelemetry's types."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
import serving
import wire
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serving import Server, Start

from atom.errors import ConfigError
from atom.serve.ops.traces import Traces, traces_url

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of the W3C's example
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=opaque"}
SECRET = "a word that nobody else may read"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
KEY = "a-key-of-the-app"
KEYS = {"x-api-key": KEY}


class Posted(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def request(self) -> ExportTraceServiceRequest:
        return ExportTraceServiceRequest.FromString(self.body)


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector that takes OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        self.posted: list[Posted] = []
        super().__init__(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for each in self.posted
            for of_resource in each.request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        return values(self.posted[0].request.resource_spans[0].resource)

    def wait_for_span(self) -> Span:
        wire.wait_until(lambda: self.spans)
        (span,) = self.spans
        return span


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posted.append(
            Posted(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        )
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def values(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def request_entry(server: Server, span: Span) -> dict[str, Any]:
    """The entry of a span's request in the log."""
    return serving.wait_for_entry(server, message="request", id=values(span)["gen_ai.request.id"])


@pytest.fixture(scope="module")
def only_collector() -> Iterator[Collector]:
    with pytest.MonkeyPatch.context() as patch, Collector() as running:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def collector(only_collector: Collector) -> Collector:
    only_collector.posted.clear()
    return only_collector


@pytest.fixture(scope="module")
def server(only_collector: Collector, start_server: Start) -> Server:
    """One for all tests that do not harm it, nor change its environment."""
    return start_server(
        f"serve.http.otlp_traces_endpoint={only_collector.url}",
        f"serve.http.api_keys={KEY}",
        "serve.pooler_config.pooling_type=LAST",
        "serve.max_model_len=100000",
        "model.max_position=100000",
        stub={"step_seconds": 0.02},
    )


def test_a_chat_has_one_span_below_its_callers(collector: Collector, server: Server):
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "n": 2, "top_p": 0.5}
    before, start = wire.metrics(server.url, KEYS), time.time_ns()
    answer = wire.ask(server.url, "POST", CHAT, body | {"temperature": 0.75}, KEYS | CALLER)
    seconds = (time.time_ns() - start) / 1e9
    assert answer.status == 200
    span, samples = collector.wait_for_span(), wire.metrics(server.url, KEYS)
    assert (span.name, span.kind, span.status.code) == ("llm_request", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=opaque")
    assert start < span.start_time_unix_nano < span.end_time_unix_nano
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(
        request_entry(server, span)["seconds"], abs=1e-6
    )
    found = values(span)
    attributes = {name: found.pop(name) for name in [*found] if not name.startswith("gen_ai.latency.")}
    assert attributes == {
        "gen_ai.response.model": "talker",
        "gen_ai.request.id": answer.json["id"],
        "gen_ai.request.temperature": 0.75,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": answer.json["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 10,
    }
    times = {name.removeprefix("gen_ai.latency."): value for name, value in found.items()}
    assert round(times.pop("time_to_first_token"), 6) == answer.json["usage"]["ttft_s"]
    sums = {
        "e2e": "e2e_request_latency",
        "time_in_queue": "request_queue_time",
        "time_in_model_prefill": "request_prefill_time",
        "time_in_model_decode": "request_decode_time",
        "time_in_model_inference": "request_inference_time",
    }
    assert set(times) == set(sums)
    for name, metric in sums.items():
        total = samples[f"atom:{metric}_seconds_sum"] - before[f"atom:{metric}_seconds_sum"]
        assert total / 2 - 1e-6 <= times[name] <= total + 1e-6, "the longer one of two sequences"
    assert 0 < times["time_in_model_inference"] < times["e2e"] < seconds
    (posted,) = collector.posted
    assert posted.path == "/v1/traces" and posted.headers["content-type"] == "application/x-protobuf"
    assert not [word for word in (SECRET, KEY, "word ") if word.encode() in posted.body]
    assert collector.resource["service.name"] == "atom"


def test_a_stream_whose_client_leaves_has_an_aborted_span(collector: Collector, server: Server):
    stream = wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 8000}, **KEYS, **CALLER)
    stream.read_events(3)
    stream.close()
    span = collector.wait_for_span()
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "aborted")
    assert span.parent_span_id.hex() == PARENT
    found = values(span)
    assert 3 <= found["gen_ai.usage.completion_tokens"] < 8000 and found["gen_ai.usage.prompt_tokens"] == 2
    assert 0 < found["gen_ai.latency.time_to_first_token"] < wire.SECONDS
    assert "gen_ai.latency.e2e" not in found, "it has not ended"


def test_an_answer_in_one_piece_whose_client_leaves_has_one_too(collector: Collector, server: Server):
    with wire.connect(server.url) as connection:
        connection.sendall(wire.request("POST", COMPLETIONS, {"prompt": [0, 9], "max_tokens": 8000}, KEYS))
        wire.wait_until(lambda: wire.metrics(server.url, KEYS)["atom:num_requests_running"])
    span = collector.wait_for_span()
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "aborted")
    assert span.parent_span_id == b"" and any(span.trace_id), "a request without a caller begins a trace"


@pytest.mark.parametrize(
    ("prompt", "status"),
    [([1], 500), ([6], 500), ([0] * 8193, 400)],  # see stub_engine.py
    ids=["its step raises", "it cannot be prepared", "the engine refuses it"],
)
def test_a_request_that_fails_says_so_and_not_why(collector: Collector, server: Server, prompt: list[int], status: int):
    body = {"prompt": prompt, "max_tokens": 2}
    assert wire.ask(server.url, "POST", COMPLETIONS, body, KEYS | CALLER).status == status
    span = collector.wait_for_span()
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "failed")
    assert span.trace_id.hex() == TRACE and not span.events
    assert request_entry(server, span)["error"].encode() not in collector.posted[0].body


def test_a_stream_fails_with_its_engine(collector: Collector, start_server: Start):
    server = start_server(f"serve.http.otlp_traces_endpoint={collector.url}", stub={})
    first = wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 8000}, **CALLER)
    first.read_events(1)
    wire.ask(server.url, "POST", COMPLETIONS, {"prompt": [5], "max_tokens": 2})  # the engine exits
    assert "error" in first.read_events()[-1]
    wire.wait_until(lambda: len(collector.spans) == 2)
    assert {span.status.message for span in collector.spans} == {"failed"}
    server.process.kill()


def test_what_reaches_no_engine_has_no_span(collector: Collector, server: Server):
    short = {"prompt": [0], "max_tokens": 1}
    assert wire.ask(server.url, "POST", COMPLETIONS, short | {"model": "other"}, KEYS).status == 404
    assert wire.ask(server.url, "POST", COMPLETIONS, short).status == 401
    assert wire.ask(server.url, "POST", "/tokenize", {"prompt": "a"}, KEYS).status == 200
    last = wire.ask(server.url, "POST", COMPLETIONS, short, KEYS)
    assert values(collector.wait_for_span())["gen_ai.request.id"] == last.json["id"]


def test_an_embedding_has_no_sampling_parameters(collector: Collector, server: Server):
    body = {"input": [[0, 9], [0, 9, 9]]}
    assert wire.ask(server.url, "POST", EMBEDDINGS, body, KEYS).status == 200
    found = values(collector.wait_for_span())
    assert [name for name in found if name.startswith("gen_ai.request.")] == ["gen_ai.request.id"]
    assert found["gen_ai.usage.prompt_tokens"] == 5


@pytest.mark.parametrize("parent", ["", "00-nothing-01", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_parent_that_is_none_begins_a_trace(collector: Collector, server: Server, parent: str):
    body = {"prompt": [0], "max_tokens": 1}
    assert wire.ask(server.url, "POST", COMPLETIONS, body, KEYS | {"traceparent": parent}).status == 200
    span = collector.wait_for_span()
    assert span.parent_span_id == b"" and any(span.trace_id)


def test_a_caller_that_is_not_sampled_is_not_followed(collector: Collector, server: Server):
    for flags in ("00", "01"):
        headers = KEYS | {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        last = wire.ask(server.url, "POST", COMPLETIONS, {"prompt": [0], "max_tokens": 1}, headers)
        assert last.status == 200
    assert values(collector.wait_for_span())["gen_ai.request.id"] == last.json["id"]


def test_the_environments_variables_count_and_spans_that_wait_are_sent_at_the_end(
    collector: Collector, start_server: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    server = start_server(f"serve.http.otlp_traces_endpoint={collector.url}/of/mine", stub={})
    for _ in range(3):
        assert wire.ask(server.url, "POST", COMPLETIONS, {"prompt": [0], "max_tokens": 1}).status == 200
    assert not collector.posted
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 0
    collector.posted[0] = posted = collector.posted[0]._replace(body=gzip.decompress(collector.posted[0].body))
    assert posted.path == "/of/mine" and posted.headers["authorization"] == "Basic abc"
    assert collector.resource["service.name"] == "mine"
    assert collector.resource["deployment.environment.name"] == "test"
    assert len(collector.spans) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_collector_that_is_dead_or_silent_delays_no_answer_and_no_end(
    start_server: Start, monkeypatch: pytest.MonkeyPatch, is_silent: bool
):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10000")  # seconds that it is waited for, by who waits
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # connections to it are refused
        if is_silent:
            held.listen()
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        server = start_server(f"serve.http.otlp_traces_endpoint={url}", stub={})
        for _ in range(3):
            assert wire.ask(server.url, "POST", COMPLETIONS, {"prompt": [0], "max_tokens": 1}).status == 200
            time.sleep(0.1)  # the first span is being sent
        server.process.terminate()
        assert server.process.wait(wire.SECONDS) == 0
    if not is_silent:
        assert "while exporting span" in server.log.read_text()


def test_nothing_of_opentelemetrys_sdk_is_imported_without_an_endpoint():
    program = (
        "import sys, atom.serve.server, atom.serve.ops.traces as t; assert t.open_traces(None) is None;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_without_its_packages_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [*sys.modules, "opentelemetry.sdk"]:
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint=http://c:4318: .*; pip install 'atom-run\[otel\]'"):
        Traces("http://c:4318")


@pytest.mark.parametrize(
    "endpoint", ["grpc://localhost:4317", "localhost:4318", "http://", "http://[::1", "http://a:b"]
)
def test_an_endpoint_that_is_not_of_http_is_refused(endpoint: str):
    with pytest.raises(ConfigError, match=r"write http://HOST:4318/v1/traces"):
        Traces(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces?a=b", "https://c/otlp/v1/traces?a=b"),
    ],
)
def test_spans_are_posted_to_otlps_path_where_none_is_given(endpoint: str, url: str):
    assert traces_url(endpoint) == url


def test_a_variable_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")  # less than a batch
    with pytest.raises(ConfigError, match="traces cannot be sent: "):
        Traces("http://c:4318")

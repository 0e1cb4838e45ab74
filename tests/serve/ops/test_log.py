"""What a server writes on stderr, line by line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import serving
import wire
from serving import Server

from atom.serve.ops import log

RAISES = {"prompt": [1], "max_tokens": 2}  # the step raises: see stub_engine.py
Run = Callable[..., list[str]]


@pytest.fixture
def lines_of(talker: Path, tmp_path: Path) -> Run:
    """What a server writes that serves, refuses, fails, and ends."""

    def run(*overrides: str, **stub: Any) -> list[str]:
        server = serving.launch(talker, tmp_path, *overrides, stub=stub)
        try:
            url = serving.wait_for_url(server)
            for path, body in (
                ("/v1/completions", {"prompt": [0], "max_tokens": 1}),
                ("/v1/completions", {"prompt": [0], "max_tokens": 1, "model": "other"}),
                ("/v1/messages", {"model": "talker", "max_tokens": 0, "messages": []}),
                ("/v1/completions", RAISES),
            ):
                wire.ask(url, "POST", path, body, {"x-request-id": f"id-{path}"})
            wire.exchange(url, b"NO HTTP\r\n\r\n")
            server.process.terminate()
            server.process.wait(wire.SECONDS)
        finally:
            server.process.kill()
        return server.log.read_text().splitlines()

    return run


def test_every_line_is_json_and_what_is_refused_has_its_message(lines_of: Run):
    lines = [json.loads(line) for line in lines_of(prints=["a word of C", "atom-run: a word of ours"])]
    assert all(list(line)[:3] == ["time", "level", "message"] for line in lines)
    errors = {line["status"]: line["error"] for line in lines if line.get("status", 200) >= 400}
    assert errors[404] == "the model 'other' is not served here (served: talker)"
    assert errors[400] == "this is not a valid HTTP request"
    refused = [line["error"] for line in lines if line.get("path") == "/v1/messages"]
    assert len(refused) == 1 and "max_tokens: " in refused[0]
    said = {line["message"]: line for line in lines}
    assert (said["a word of C"]["level"], said["a word of C"]["process"]) == ("warning", "engine")
    assert (said["a word of ours"]["level"], said["a word of ours"]["process"]) == ("info", "engine")
    assert "ArithmeticError: a fault" in said["a step failed"]["traceback"]
    assert "loading nothing" in said and any(message.startswith("loading nothing: done in ") for message in said)
    assert {"draining", "ended"} <= set(said)


def test_the_first_line_says_what_starts_where(talker: Path, tmp_path: Path):
    server = serving.start(talker, tmp_path, stub={"load_seconds": 0.1})
    server.process.kill()
    server.process.wait()
    first = json.loads(serving.log_lines(server)[0])
    assert (first["level"], first["message"], first["checkpoint"]) == ("info", "starting", str(talker))
    assert (first["version"], first["pid"]) == (version("atom-run"), server.process.pid)
    assert f"http://127.0.0.1:{first['port']}" == server.url


def test_a_log_of_text_has_no_json(lines_of: Run):
    lines = lines_of("serve.http.log=text", prints=["a word of C"])
    assert not any(line.startswith("{") for line in lines)
    (served,) = (line for line in lines if "status=200" in line)
    pattern = r'\d{4}-\S+ info request request_id="id-/v1/completions" method="POST" path="/v1/completions" status=200 seconds=\S+ .*'
    assert re.fullmatch(pattern, served)
    assert any(line.endswith("error=\"the model 'other' is not served here (served: talker)\"") for line in lines)
    assert "a word of C" in lines and "ArithmeticError: a fault" in lines


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "level"), [("json", "warning"), ("text", "error")])
def test_a_level_leaves_out_the_lines_below_it_and_no_error(talker: Path, tmp_path: Path, kind: str, level: str):
    port = serving.free_port()
    chosen = (f"serve.http.port={port}", f"serve.http.log_level={level}", f"serve.http.log={kind}")
    server = serving.launch(talker, tmp_path, *chosen, stub={"prints": ["a word of C", "atom-run: a word of ours"]})
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return wire.ask(url, "GET", "/health").status == 200
        except OSError:  # it does not listen yet
            return False

    try:
        wire.wait_until(is_ready, serving.START_SECONDS)
        assert wire.ask(url, "POST", "/v1/completions", {"prompt": [0], "max_tokens": 1}).status == 200
        wire.ask(url, "POST", "/v1/completions", RAISES)
        server.process.terminate()
        server.process.wait(wire.SECONDS)
    finally:
        server.process.kill()
    text = server.log.read_text()
    assert "a word of C" in text and "a step failed" in text and "ArithmeticError: a fault" in text
    assert "a word of ours" not in text and "status=200" not in text and '"level":"info"' not in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("override", "message"), [("serve.http.api_keys=@/no/such/file", "/no/such/file"),
                                                ("serve.http.host=192.0.2.1", "choose another serve.http.host")])  # fmt: skip
def test_why_a_server_does_not_start_is_a_line_of_its_log(talker: Path, tmp_path: Path, override: str, message: str):
    server = serving.launch(talker, tmp_path, override, stub={})
    assert server.process.wait(wire.SECONDS) == 2
    (line,) = map(json.loads, server.log.read_text().splitlines())
    assert line["level"] == "error" and line["message"].startswith("ConfigError: ") and message in line["message"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "kind"), [("a full disk", "json"), ("a closed pipe", "text")])
def test_a_log_that_takes_nothing_costs_no_request(talker: Path, tmp_path: Path, place: str, kind: str):
    reader, writer = os.pipe()
    os.close(reader)
    port = serving.free_port()
    url, options = f"http://127.0.0.1:{port}", (f"serve.http.port={port}", f"serve.http.log={kind}")
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as broken:
        stderr = full if place == "a full disk" else broken
        server = serving.launch(talker, tmp_path, *options, stub={"prints": ["a word of C"]}, stderr=stderr)
    try:
        wire.wait_until(lambda: is_ready(url), serving.START_SECONDS)
        for body, status in (({"prompt": [0], "max_tokens": 2}, 200), (RAISES, 500), ({"prompt": [0]}, 200)):
            assert wire.ask(url, "POST", "/v1/completions", body).status == status
        server.process.terminate()
        assert server.process.wait(wire.SECONDS) == 0
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe for a few lines: its ends to read and to write."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    for end in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_log_that_nobody_reads_holds_up_no_request(talker: Path, tmp_path: Path, pipe: tuple[int, int]):
    reader, writer = pipe
    port = serving.free_port()
    url, num_requests = f"http://127.0.0.1:{port}", 150
    stub = {"max_log": 8192, "step_seconds": 0.001}
    server = serving.launch(talker, tmp_path, f"serve.http.port={port}", stub=stub, stderr=writer)
    os.close(writer)
    try:
        wire.wait_until(lambda: is_ready(url), serving.START_SECONDS)
        for number in range(num_requests):
            body, headers = {"prompt": [0], "max_tokens": 1}, {"x-request-id": f"id-{number}"}
            assert wire.ask(url, "POST", "/v1/completions", body, headers).status == 200
        assert is_ready(url)
        metrics = wire.ask(url, "GET", "/metrics").body.decode()
        with ThreadPoolExecutor(1) as pool, open(reader, "rb", closefd=False) as file:
            reading = pool.submit(file.read)
            server.process.terminate()
            assert server.process.wait(wire.SECONDS) == 0
            lines = [json.loads(line) for line in reading.result(wire.SECONDS).splitlines()]
    finally:
        server.process.kill()
    written = [int(line["request_id"][3:]) for line in lines if line.get("path") == "/v1/completions"]
    dropped = [int(found[1]) for line in lines if (found := re.match(r"(\d+) lines were dropped", line["message"]))]
    assert 0 < len(written) < num_requests and written == sorted(written)
    assert len(written) + sum(dropped) == num_requests
    assert f"atom:log_lines_dropped_total {sum(dropped)}.0" in metrics
    assert lines[-1]["message"] == "ended"


def test_a_log_that_nobody_reads_holds_up_no_end(talker: Path, tmp_path: Path, pipe: tuple[int, int]):
    port = serving.free_port()
    server = serving.launch(talker, tmp_path, f"serve.http.port={port}", stub={"max_log": 8192}, stderr=pipe[1])
    try:
        wire.wait_until(lambda: is_ready(f"http://127.0.0.1:{port}"), serving.START_SECONDS)
        for _ in range(30):  # of which 4096 bytes have no room
            wire.ask(f"http://127.0.0.1:{port}", "POST", "/v1/completions", {"prompt": [0], "max_tokens": 1})
        server.process.terminate()
        assert server.process.wait(wire.SECONDS) == 0
    finally:
        server.process.kill()


def test_an_answer_whose_client_leaves_is_aborted_in_the_log_and_in_metrics(talker: Path, tmp_path: Path):
    server = serving.start(talker, tmp_path, stub={"step_seconds": 0.02})
    name = 'atom:request_success_total{finished_reason="abort"}'
    body = {"prompt": [0], "max_tokens": 5000, "n": 2}
    try:
        for number, stream in enumerate((True, False)):
            with wire.connect(server.url) as connection, connection.makefile("rb") as file:
                headers = {"x-request-id": f"leaves-{number}"}
                connection.sendall(wire.request("POST", "/v1/completions", body | {"stream": stream}, headers))
                if stream:
                    wire.read_head(file)
                    assert wire.read_chunk(file)
                wire.wait_until(lambda: wire.metrics(server.url)["atom:num_requests_running"] == 2)
            line = serving.wait_for_entry(server, request_id=f"leaves-{number}")
            assert line["finish_reasons"] == ["abort", "abort"] and "error" not in line
            assert line["usage"]["prompt_tokens"] == 1
            assert wire.metrics(server.url)[name] == 2 * (number + 1)
    finally:
        server.process.kill()


def is_ready(url: str) -> bool:
    try:
        return wire.ask(url, "GET", "/health").status == 200
    except OSError:
        return False


def log_of(talker: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    server = serving.launch(talker, folder, *overrides, stub={})
    serving.wait_for_line(server, " at http://")
    server.process.kill()
    server.process.wait()
    return serving.log_entries(server)


def warnings_of(log: list[dict[str, Any]]) -> list[str]:
    return [line["message"] for line in log if line["level"] == "warning"]


def test_an_open_door_is_one_warning(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("ATOM_API_KEYS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    lines = log_of(talker, tmp_path, "serve.http.host=0.0.0.0")
    assert lines[0]["message"] == "starting", "before the warning"
    (line,) = warnings_of(lines)
    assert re.match(
        r"whoever reaches port \d+ may use this server, as it has no API keys: set serve.http.api_keys", line
    )
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert warnings_of(log_of(talker, tmp_path, "serve.http.host=0.0.0.0")) == []


def test_lines_that_a_process_printed_are_logged_by_their_origin(caplog: pytest.LogCaptureFixture):
    entry = '{"time":"2026-01-01T00:00:00","level":"info","message":"mine"}'
    with caplog.at_level(logging.INFO):
        for line in ("\n", "atom-run: ours\n", "theirs \n", entry + "\n", entry[:-1] + "\n", "x" * 5000):
            log.relay(line)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "ours"),
        ("WARNING", "theirs"),
        ("INFO", entry),
        ("WARNING", entry[:-1]),
        ("WARNING", "x" * 1000),
    ]
    assert log.is_entry(entry) and not log.is_entry(entry + "}") and not log.is_entry('{"a":1}')


def test_what_is_printed_to_stderr_meanwhile_is_logged_by_lines(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO), log.capture():
        print("half a", end=" ", file=sys.stderr)
        assert not caplog.records
        print("line\nand another", file=sys.stderr)
    assert [record.getMessage() for record in caplog.records] == ["half a line", "and another"]


LONG = "a" * 1_000_000
ASKED = {"model": "talker", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}


def calling(**function: Any) -> dict[str, Any]:
    return ASKED | {"tools": [{"type": "function", "function": {"name": "f"} | function}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "model": LONG}),
        ("/v1/chat/completions", ASKED | {"model": LONG}),
        ("/v1/messages", ASKED | {"model": LONG}),
        ("/v1/messages/count_tokens", {"model": LONG, "messages": ASKED["messages"]}),
        ("/tokenize", {"prompt": "a", "model": LONG}),
        ("/detokenize", {"tokens": [1], "model": LONG}),
        ("/v1/completions", {"prompt": "a", LONG: 1}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {LONG[:1000]: 1}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"type": LONG}}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": LONG}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"$ref": LONG}}}),
        ("/v1/completions", {"prompt": "a", "regex": "(" + LONG[:60_000]}),
        ("/v1/completions", {"prompt": "a", "grammar": "start: " + LONG[:60_000]}),
        ("/v1/chat/completions", ASKED | {"chat_template_kwargs": {LONG[:1000]: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG, "text": "a"}]}]}),
        ("/v1/chat/completions", ASKED | {"tool_choice": LONG}),
        ("/v1/chat/completions", ASKED | {"response_format": {"type": LONG}}),
        ("/v1/chat/completions", calling(name=LONG)),
        ("/v1/chat/completions", calling(parameters={"type": LONG})),
        ("/v1/messages", ASKED | {LONG: 1}),
        ("/v1/messages", ASKED | {"messages": [{"role": LONG, "content": "a"}]}),
        ("/v1/messages", ASKED | {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("/v1/messages", ASKED | {"tool_choice": {"type": LONG}}),
        ("/v1/messages", ASKED | {"thinking": {"type": LONG}}),
        ("/v1/" + LONG[:50_000], {}),
        ("/v1/models/" + LONG[:50_000], None),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_a_client_sent_is_cut_in_its_error_and_in_the_log(server: Server, path: str, body: Any):
    answer = wire.ask(server.url, "GET" if body is None else "POST", path, body)
    assert 400 <= answer.status < 500
    message = answer.json["error"]["message"]
    assert "a" * 201 not in message and len(message) <= 1000 and len(answer.body) < 2500
    line = serving.wait_for_line(server, answer.headers["x-request-id"])
    assert json.loads(line)["error"] == message
    assert not any("a" * 201 in each for each in serving.log_lines(server))


def test_a_page_s_origin_is_cut(server: Server):
    answer = wire.ask(server.url, "POST", "/tokenize", {}, {"origin": "http://" + LONG[:50_000]})
    assert answer.status == 403 and "a" * 201 not in answer.json["error"]["message"]

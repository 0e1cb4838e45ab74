"""What is too large or too slow, over raw sockets."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time

import pytest
import serving
import uvicorn
import uvloop
import wire
from serving import Server, Start
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from atom.config.load import load
from atom.serve.http.protocol import limited_protocol
from atom.serve.ops.server_metrics import ServerMetrics


@pytest.fixture(scope="module")
def strict(start_server: Start) -> Server:
    http = ("serve.http.max_body=10000", "serve.http.drain_seconds=0")
    limits = ("max_header=2048", "read_seconds=0.7", "write_seconds=0.7")
    return start_server(*http, *(f"advanced.{limit}" for limit in limits), stub={"step_seconds": 0.0005})


def answer_to(server: Server, *parts: bytes) -> wire.Answer:
    """The answer to bytes that come in parts, the last one never."""
    with wire.connect(server.url) as connection, connection.makefile("rb") as file:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        answer = wire.read_answer(file)
        assert file.read() == b"", "the connection stays open"
        return answer


def assert_refused(answer: wire.Answer, status: int, message: str) -> None:
    assert answer.status == status
    assert answer.headers["connection"] == "close" and answer.headers["content-type"] == "application/json"
    assert answer.json["error"]["message"] == message
    assert re.fullmatch(r"req-[0-9a-f]{32}", answer.headers["x-request-id"])


def test_a_body_whose_content_length_is_too_large_is_refused_before_it_is_sent(strict: Server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10001\r\n\r\n"
    assert_refused(answer_to(strict, head), 413, "the body is larger than this server takes (serve.http.max_body)")


def test_a_body_that_is_too_large_is_refused_though_it_is_sent_whole(strict: Server):
    data = wire.request("POST", "/v1/completions", b" " * 3_000_000)  # a server that closed at once would reset this
    assert_refused(answer_to(strict, data), 413, "the body is larger than this server takes (serve.http.max_body)")


def test_a_chunked_body_is_refused_once_it_is_too_large(strict: Server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (4000, b" " * 4000)
    assert_refused(
        answer_to(strict, head, chunk, chunk, chunk),
        413,
        "the body is larger than this server takes (serve.http.max_body)",
    )


def test_a_body_of_the_largest_size_is_taken(strict: Server):
    body = b'{"prompt": [0], "max_tokens": 1}'
    assert wire.ask(strict.url, "POST", "/v1/completions", body.ljust(10000)).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % place for place in range(500)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nx-long: " + b"y" * 3000,  # and it never ends
        b"GET /" + b"a" * 3000,
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 2100 + b"\r\n\r\n",
    ],
)
def test_a_head_that_is_too_large_is_refused(strict: Server, head: bytes):
    assert_refused(answer_to(strict, head), 431, "the headers are larger than this server takes (advanced.max_header)")


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"GET /health HTT"],
        [b"GET /health HTTP/1.1\r\n", *[b"x: y\r\n"] * 5],
        [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n", b"{", b'"'],
    ],
)
def test_a_request_that_comes_too_slowly_is_refused(strict: Server, parts: list[bytes]):
    start = time.monotonic()
    assert_refused(answer_to(strict, *parts), 408, "the request did not arrive in time")
    assert time.monotonic() - start > 0.6


def test_a_pipelined_request_whose_body_never_comes_is_refused(strict: Server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    with wire.connect(strict.url) as connection, connection.makefile("rb") as file:
        connection.settimeout(wire.SECONDS)
        connection.sendall(wire.request("GET", "/health") + head)
        assert wire.read_answer(file).status == 200
        assert_refused(wire.read_answer(file), 408, "the request did not arrive in time")
        assert file.read() == b"", "the connection stays open"


def test_a_drip_of_headers_does_not_move_the_deadline(strict: Server):
    with wire.connect(strict.url) as connection, connection.makefile("rb") as file:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        start = time.monotonic()
        connection.setblocking(False)
        while time.monotonic() - start < wire.SECONDS:
            try:
                if connection.recv(1, socket.MSG_PEEK):
                    break
            except BlockingIOError:
                connection.send(b"x: y\r\n")
            time.sleep(0.05)
        connection.settimeout(wire.SECONDS)
        assert wire.read_answer(file).status == 408
        assert time.monotonic() - start > 0.6


def test_what_is_no_http_is_refused(strict: Server):
    assert_refused(answer_to(strict, b"\x16\x03\x01 hello\r\n\r\n"), 400, "this is not a valid HTTP request")


CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        CHUNKED + b"content-length: 5\r\n",
        b"content-length: 5\r\n" + CHUNKED,
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: +5\r\n",
        b"content-length: 5\r\nx: a\r\n b\r\n",
        b"content-length: 5\r\nx: a\rb: c\r\n",
    ],
)
def test_what_a_proxy_may_read_otherwise_is_refused(strict: Server, fields: bytes):
    data = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n5\r\nhello\r\n0\r\n\r\n"
    assert_refused(answer_to(strict, data), 400, "this is not a valid HTTP request")


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"host"])
def test_a_second_key_or_host_is_refused(strict: Server, name: bytes):
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    assert answer_to(strict, head + b"authorization: Bearer a\r\nx-api-key: a\r\n\r\n").status == 200
    twice = head + b"Authorization: Bearer a\r\nX-Api-Key: a\r\n" + name + b": b\r\n\r\n"
    message = f"this is not a valid HTTP request: it has more than one {name.decode()} header"
    assert_refused(answer_to(strict, twice), 400, message)


def test_http_1_1_without_host_is_refused(strict: Server):
    for path in (b"/v1/models", b"/health"):
        answer = answer_to(strict, b"GET " + path + b" HTTP/1.1\r\n\r\n")
        assert_refused(answer, 400, "this is not a valid HTTP request: HTTP/1.1 needs a Host header")
    assert answer_to(strict, b"GET /health HTTP/1.0\r\n\r\n").status == 200, "1.0 has none"


def test_an_upgrade_is_ignored_and_its_body_read(strict: Server):
    """Java's HttpClient asks for HTTP/2 in this way with each request, unless it is configured otherwise."""
    fields = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    data = wire.request("POST", "/v1/completions", {"prompt": [0, 9], "max_tokens": 2}, fields)
    with wire.connect(strict.url) as connection, connection.makefile("rb") as file:
        for _ in range(2):
            connection.sendall(data)
            answer = wire.read_answer(file)
            assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2


def test_a_connection_that_is_kept_has_time_again(strict: Server):
    with wire.connect(strict.url) as connection, connection.makefile("rb") as file:
        for _ in range(3):
            connection.sendall(wire.request("GET", "/health"))
            assert wire.read_answer(file).status == 200
            time.sleep(0.5)


def test_refusals_at_anthropics_paths_have_its_body(strict: Server):
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: 10001\r\n\r\n"
    answer = answer_to(strict, head)
    assert answer.json["error"]["type"] == "request_too_large" and answer.json["request_id"] == "mine"
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"


def test_a_refusal_is_counted_and_logged_with_its_path_and_id(strict: Server):
    name = 'atom:http_requests_total{path="other",status="413"}'
    before = wire.metrics(strict.url).get(name, 0)
    head = b"POST /v1/completions?a=b HTTP/1.1\r\nhost: x\r\nx-request-id: seen\r\ncontent-length: 10001\r\n\r\n"
    assert answer_to(strict, head).headers["x-request-id"] == "seen"
    assert wire.metrics(strict.url)[name] == before + 1
    line = serving.wait_for_entry(strict, request_id="seen")
    assert (line["path"], line["status"], line["level"]) == ("/v1/completions", 413, "warning")


def test_a_request_that_lies_unread_while_the_server_computes_has_arrived_in_time():
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await Response("served")(scope, receive, send)

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        served = load(["advanced.read_seconds=0.3", f"serve.http.max_body={32 << 20}"])
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        protocol = limited_protocol(served, ServerMetrics())
        state = {"config": config, "server_state": ServerState(), "app_state": {}}
        server = await loop.create_server(lambda: protocol(**state), "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as connection:
            await asyncio.sleep(0.1)
            connection.settimeout(wire.SECONDS)
            sending = threading.Thread(target=connection.sendall, args=(wire.request("POST", "/", b" " * (16 << 20)),))
            sending.start()
            time.sleep(0.6)  # as where another body of many megabytes is parsed
            await asyncio.to_thread(sending.join)
            connection.setblocking(False)
            answer = await asyncio.wait_for(loop.sock_recv(connection, 1000), wire.SECONDS)
        server.close()
        return answer

    assert uvloop.run(main()).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_does_not_read_is_cut_off_and_its_blocks_are_free(strict: Server):
    with wire.connect(strict.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": [0], "max_tokens": 8000, "n": 16, "stream": True}
        connection.sendall(wire.request("POST", "/v1/completions", body))
        wire.wait_until(lambda: wire.metrics(strict.url)["atom:num_requests_running"] == 16)
        wire.wait_until(lambda: wire.metrics(strict.url)["atom:kv_cache_blocks_used"] == 0, 20)
    ended = wire.metrics(strict.url)
    assert ended["atom:num_requests_running"] == 0
    assert ended["atom:generation_tokens_total"] < 16 * 8000


def test_the_server_serves_after_all_that(strict: Server):
    assert wire.ask(strict.url, "POST", "/v1/completions", {"prompt": [0], "max_tokens": 1}).status == 200

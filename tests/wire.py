"""Raw HTTP over a socket, for tests of what no client library would send or leave undone.

status, headers, body = wire.ask(server, "GET", "/health")
stream = wire.Stream(server, {"prompt": [0], "max_tokens": 100})
stream.read_events(3)
stream.close()
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

SECONDS = 120.0  # that a test waits for anything, also on a busy machine


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connect(url: str, seconds: float = SECONDS) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), seconds)


def request(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a request; a body that is not bytes goes as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "test", "content-length": str(len(data)), "content-type": "application/json", **(headers or {})}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return head.encode() + b"\r\n" + data


def read_head(file: Any) -> tuple[int, dict[str, str]]:
    line = file.readline()
    assert line, "the server closed the connection"
    headers = {}
    while (field := file.readline().strip()) != b"":
        name, _, value = field.decode().partition(":")
        headers[name.lower()] = value.strip()
    return int(line.split()[1]), headers


def read_answer(file: Any, *, has_body: bool = True) -> Answer:
    """The next answer on a connection, whole; the one to a HEAD has no body."""
    status, headers = read_head(file)
    if not has_body:
        return Answer(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, b"".join(iter(lambda: read_chunk(file), b"")))
    return Answer(status, headers, file.read(int(headers.get("content-length", 0))))


def read_chunk(file: Any) -> bytes:
    """The next chunk, b"" at the end. ConnectionError if the connection ends before."""
    line = file.readline()
    if not line:
        raise ConnectionError("the stream broke off")
    data = file.read(int(line, 16))
    file.readline()
    return data


def exchange(url: str, data: bytes) -> Answer:
    with connect(url) as connection, connection.makefile("rb") as file:
        connection.sendall(data)
        return read_answer(file, has_body=not data.startswith(b"HEAD "))


def ask(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    return exchange(url, request(method, path, body, headers))


def metrics(url: str, headers: dict[str, str] | None = None) -> dict[str, float]:
    """The samples of /metrics by name and labels; model_name is left out of these."""
    text = re.sub(r',?model_name="[^"]*"', "", ask(url, "GET", "/metrics", headers=headers).body.decode())
    lines = text.replace("{,", "{").replace("{}", "").splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def wait_until(is_true: Callable[[], Any], seconds: float = SECONDS) -> float:
    """The seconds that passed until a condition held."""
    start = time.monotonic()
    while not is_true():
        assert time.monotonic() - start < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start


class Stream:
    """A completion that is streamed over a connection of its own."""

    def __init__(self, url: str, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> None:
        self.connection = connect(url)
        self.file = self.connection.makefile("rb")
        self.connection.sendall(request("POST", path, {"stream": True, **body}, headers))
        self.status = 0

    def read_events(self, num: int | None = None) -> list[Any]:
        """So many events, or all that come; the JSON of each, or the text that is none."""
        if not self.status:
            self.status, self.headers = read_head(self.file)
            assert self.status == 200, (self.status, self.file.read(int(self.headers["content-length"])))
        events: list[Any] = []
        while num is None or len(events) < num:
            chunk = read_chunk(self.file)
            if not chunk:
                break
            data = chunk.decode().removeprefix("data: ").strip()
            events.append(json.loads(data) if data.startswith("{") else data)
        return events

    def close(self) -> None:
        self.file.close()
        self.connection.close()

"""What tests ask a real server over HTTP, byte by byte, without a client of anybody's.

answer = asking.post(server, "/v1/completions", {"prompt": "Hello"})
answer.status, answer.body["choices"][0]["text"]
chunks = asking.stream(server, "/v1/completions", {"prompt": "Hello"})
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from serving import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
SECONDS = 120.0


class Answer(NamedTuple):
    status: int
    body: Any  # decoded where it is JSON
    headers: dict[str, str]

    @property
    def choices(self) -> Any:
        return self.body["choices"]

    @property
    def text(self) -> str:
        first = self.choices[0]
        return str(first["text"] if "text" in first else first["message"]["content"])

    @property
    def usage(self) -> Any:
        return self.body["usage"]

    @property
    def error(self) -> Any:
        return self.body["error"]


def send(
    server: Server, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=SECONDS)
    try:
        connection.request(method, path, data, headers if headers is not None else JSON)
        response = connection.getresponse()
        raw, named = response.read(), {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()
    is_json = named.get("content-type", "") == "application/json"
    return Answer(response.status, json.loads(raw) if is_json and raw else raw.decode(), named)


def post(server: Server, path: str, body: Any) -> Answer:
    return send(server, "POST", path, json.dumps(body).encode())


def get(server: Server, path: str) -> Answer:
    return send(server, "GET", path)


def stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    answer = post(server, path, body | {"stream": True})
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in answer.body.split("\n\n") if event.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@contextmanager
def begin(server: Server, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A stream that has begun, whose client leaves after the block."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=SECONDS)
    connection.request("POST", path, json.dumps(body | {"stream": True}), JSON)
    response = connection.getresponse()
    try:
        assert response.status == 200, response.read()
        response.readline()
        yield
    finally:
        response.close()
        connection.close()


def num_waiting(server: Server) -> int:
    found = re.search(r"^\S*num_requests_waiting\S* (\S+)$", get(server, "/metrics").body, re.MULTILINE)
    assert found is not None, "there is no such metric"
    return int(float(found[1]))


def assert_generates(server: Server) -> None:
    """The server still does what it is for."""
    body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    answer = post(server, COMPLETIONS, body)
    assert answer.status == 200, answer.body
    assert answer.usage["completion_tokens"] == 4

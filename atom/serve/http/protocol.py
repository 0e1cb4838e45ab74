"""uvicorn's protocol with limits on the size and time of requests.

A request that is too large or too slow is refused before the app sees it.

    uvicorn.Config(app, http=limited_protocol(config, metrics))

An Upgrade is ignored, as HTTP allows, by renaming its header: the parser would take no body with it, and Java's client
asks for HTTP/2 so with each request. (It is not found where it begins a packet.) A second Host or key is refused: a
proxy may have looked at the other. So is HTTP/1.1 without Host (RFC 9112, 3.2).

431 for a head of more than max_header bytes, 413 for a body of more than max_body, 408 for a request that has not
arrived after read_seconds. A client that reads nothing for write_seconds is disconnected. Starlette has no such limits,
and a middleware would see neither the head arrive nor the response leave.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from http import HTTPStatus

from msgspec import json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atom.config import AdvancedConfig, Config, HTTPConfig
from atom.serve.http.errors import body_at, error_body, is_anthropic, shown
from atom.serve.http.middleware import strip_root
from atom.serve.ids import request_id_headers, request_id_of
from atom.serve.ops.server_metrics import ServerMetrics

LOG = logging.getLogger("atom.http")
LINGER_SECONDS = 2.0  # in which a refused client may go on sending: closing at once would lose the response
MAX_LATE = 0.1  # seconds that a timer may fire late
SINGLE_HEADERS = (b"host", b"authorization", b"x-api-key")
UPGRADE = re.compile(rb"(?i)(?<=\n)(?=upgrade[ \t]*:)")
INVALID = "this is not a valid HTTP request"
MESSAGES = {
    HTTPStatus.BAD_REQUEST: INVALID,
    HTTPStatus.REQUEST_TIMEOUT: "the request did not arrive in time",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is larger than this server takes (serve.http.max_body)",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the headers are larger than this server takes (advanced.max_header)",
}


class _ParsingStopped(Exception):
    """Stops the parser at a limit."""


class LimitedProtocol(HttpToolsProtocol):
    http: HTTPConfig
    limits: AdvancedConfig
    metrics: ServerMetrics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.url = b""  # no URL yet
        self._refusal_status = HTTPStatus.BAD_REQUEST  # the status that a parser error is answered with
        self._refusal_message: str | None = None  # None: that of its status
        self._is_in_head, self._num_header_bytes, self._num_body_bytes = True, 0, 0
        self._is_in_body = False
        self._is_refused = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None  # disconnects a client that does not read
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_read_timer()
        super().data_received(data if self._is_in_body else without_upgrade(data))
        if self._is_in_head and not self._is_refused:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self.limits.max_header:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def pause_writing(self) -> None:
        """The transport's write buffer is full."""
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_body_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_header_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header:
            self._fail_parsing(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        counts = Counter(name for name, _ in self.headers)
        if not counts[b"host"] and self.parser.get_http_version() == "1.1":
            self._fail_parsing(HTTPStatus.BAD_REQUEST, f"{INVALID}: HTTP/1.1 needs a Host header")
        for name in SINGLE_HEADERS:
            if counts[name] > 1:
                self._fail_parsing(HTTPStatus.BAD_REQUEST, f"{INVALID}: it has more than one {name.decode()} header")
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.http.max_body:
            self._fail_parsing(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self.http.max_body:
            self._fail_parsing(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._stop_read_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_next = bool(self.pipeline)
        super().on_response_complete()
        if is_next and not self.pipeline and self._is_in_body and self._read_timer is None:
            self._start_read_timer()  # its head was pipelined, and was not read any further until now

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for every error of the parser."""
        self._refuse(self._refusal_status, self._refusal_message)

    def _fail_parsing(self, status: HTTPStatus, message: str | None = None) -> None:
        self._refusal_status, self._refusal_message = status, message
        raise _ParsingStopped

    def _refuse(self, status: HTTPStatus, message: str | None = None) -> None:
        """Send an error response, unless a response has started, and close the connection."""
        self._is_refused = True
        self._stop_read_timer()
        path = strip_root(self.url.partition(b"?")[0].decode("latin-1"), self.http.root_path)
        request_id = request_id_of(dict(self.headers or ()))
        fields = {"request_id": request_id, "path": shown(path), "status": int(status), "client": self.client}
        fields["error"] = message = message or MESSAGES[status]
        LOG.warning("refused a request: %d", status, extra={"fields": fields})
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the app's response is not sent
            cycle.message_event.set()
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
        else:
            self.metrics.http.labels("other", str(int(status))).inc()  # it reached no route
            body = json.encode(body_at(path, status, error_body(status, message), request_id))
            head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\n"
            for name in request_id_headers(is_anthropic=is_anthropic(path)):
                head += f"{name}: {request_id}\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            if self.transport.can_write_eof():  # TLS has none
                self.transport.write_eof()
            self._write_timer = self._write_timer or self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _start_read_timer(self) -> None:
        """Start the timer for the request to arrive."""
        self._read_timer = self.loop.call_later(self.limits.read_seconds, self._time_out)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _start_write_timer(self) -> None:
        """Start the timer for the client to read its response."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _time_out(self) -> None:
        assert self._read_timer is not None, "it has just passed"
        late = self.loop.time() - self._read_timer.when()
        self._read_timer = None
        if late > MAX_LATE:  # our own work kept us from reading data that may have arrived
            self._read_timer = self.loop.call_later(late, self._time_out)
        elif not self._is_refused and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)


def without_upgrade(data: bytes) -> bytes:
    """The beginning of a request, or of its rest, with the header Upgrade renamed to X-Upgrade."""
    head, end, body = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"x-", head) + end + body


def limited_protocol(config: Config, metrics: ServerMetrics) -> type[LimitedProtocol]:
    """Make the protocol class for the limits of a configuration; it counts refused requests in `metrics`."""
    fields = {"http": config.serve.http, "limits": config.advanced, "metrics": metrics}
    return type("LimitedProtocol", (LimitedProtocol,), fields)

"""uvicorn's protocol with limits on the size and time of requests.

What is too large or too slow is refused before anything else sees it.

    uvicorn.Config(app, http=limited_protocol(config.serve.http, metrics))

431 for a head of more than max_header bytes, 413 for a body of more than max_body, 408 for a request that has not
arrived after read_seconds. A client that does not take what it was sent for write_seconds is cut off. Starlette has no
such limits, and a middleware would see neither the head arrive nor the answer leave.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from msgspec import json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atom.config import HTTPConfig
from atom.serve.errors import body_at, error_body, is_anthropic, shown
from atom.serve.ids import new_id
from atom.serve.metrics import Metrics
from atom.serve.middleware import REQUEST_ID

LOG = logging.getLogger("atom.http")
LINGER_SECONDS = 2.0  # for a refused client to go on sending: to close at once would lose the answer
MAX_LATE = 0.1  # seconds
MESSAGES = {
    HTTPStatus.BAD_REQUEST: "this is no valid HTTP request",
    HTTPStatus.REQUEST_TIMEOUT: "the request did not arrive in time",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is larger than this server takes",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the headers are larger than this server takes",
}


class _Refused(Exception):
    """Stops the parser."""


class LimitedProtocol(HttpToolsProtocol):
    limits: HTTPConfig
    metrics: Metrics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.url = b""  # no URL yet
        self._refusal = HTTPStatus.BAD_REQUEST  # the status of an error of the parser
        self._is_in_head, self._num_head, self._num_body = True, 0, 0
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None  # fires when a client has been too slow to read
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_come()
        self._has_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()
        super().data_received(data)
        if self._is_in_head and not self._is_refused:
            self._num_head += len(data)
            if self._num_head > self.limits.max_header:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def pause_writing(self) -> None:
        """The transport's write buffer is full."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_body = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_head = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header:
            self._stop(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.limits.max_body:
            self._stop(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if self._num_body > self.limits.max_body:
            self._stop(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_come()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for every error of the parser."""
        self._refuse(self._refusal)

    def _stop(self, status: HTTPStatus) -> None:
        self._refusal = status
        raise _Refused

    def _refuse(self, status: HTTPStatus) -> None:
        """Send the refusal, unless an answer has begun, and close."""
        self._is_refused = True
        self._has_come()
        path = self.url.partition(b"?")[0].decode("latin-1")
        given = dict(self.headers or ()).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else new_id("req")
        told = {"request_id": request_id, "path": shown(path), "status": int(status), "client": self.client}
        told["error"] = MESSAGES[status]
        LOG.warning("refused a request: %d", status, extra={"told": told})
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the app's answer is not sent
            cycle.message_event.set()
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
        else:
            self.metrics.http.labels("other", str(int(status))).inc()  # it reached no route
            body = json.encode(body_at(path, status, error_body(status, MESSAGES[status]), request_id))
            head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\n"
            for name in ("x-request-id", "request-id") if is_anthropic(path) else ("x-request-id",):
                head += f"{name}: {request_id}\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            self.transport.write_eof()
            self._stuck = self._stuck or self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _expect(self) -> None:
        """Start the timer for a request to arrive."""
        self._deadline = self.loop.call_later(self.limits.read_seconds, self._give_up)

    def _has_come(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch_reader(self) -> None:
        """Start the timer for the client to read."""
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def _has_read(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _give_up(self) -> None:
        assert self._deadline is not None, "it has just passed"
        late = self.loop.time() - self._deadline.when()
        self._deadline = None
        if late > MAX_LATE:  # our own work kept us from reading data that may have arrived
            self._deadline = self.loop.call_later(late, self._give_up)
        elif not self._is_refused and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)


def limited_protocol(limits: HTTPConfig, metrics: Metrics) -> type[LimitedProtocol]:
    """Make the protocol class for the limits of a configuration; it counts refusals."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "metrics": metrics})

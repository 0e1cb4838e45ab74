"""Stream server-sent events, one for each token.

Every token takes this path, so it is kept short.

    return EventStream(events(stream), leave=lambda: client.abort(stream))

`events` yields the bytes of whole events, and b"" after comment_seconds of silence. The stream ends when the client
disconnects; `leave` is called however it ends. `atom.serve.http.protocol` disconnects a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b"\n\n"  # nothing to a parser; vLLM's benchmark loses the rest of a stream to a comment
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")


def event(body: object, name: str | None = None) -> bytes:
    """One event with a JSON body."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(body))


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._events, self._leave = events, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect):
                # skip the frameworks' wrappers around the guard's `send`, which cost a tenth of a token's time
                await until_gone(receive, self._send_all(scope.get("state", {}).get("send", send)))
        finally:
            self._leave()

    async def _send_all(self, send: Send) -> None:
        async for data in self._events:
            await send({"type": "http.response.body", "body": data or KEEP_ALIVE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Await some work. If the client disconnects, cancel it and raise ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_end(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()


async def wait_for_end(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return

"""Stream an answer whose model is being woken up.

    return WakingStream(request, waking, answer, report, silence=15.0)

Its head comes first, so that clients and proxies wait, as that of a stream whose first token is long in coming
(`atom.serve.http.response`): after comment_seconds, from when on an error is an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from atom.serve.http.errors import body_at, is_anthropic, status_of
from atom.serve.http.sse import KEEP_ALIVE, STREAM_HEADERS, EventStream, event, until_gone


class WakingStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        waking: asyncio.Task[None],
        answer: Callable[[], Awaitable[Response]],
        report: Callable[[Exception], dict[str, Any]],
        silence: float,
    ) -> None:
        """
        waking: ends once the model is awake
        answer: makes the response then
        report: makes the body of an error
        silence: seconds after which something is sent
        """
        self.status_code = 200
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._request, self._waking, self._answer = request, waking, answer
        self._report, self._silence = report, silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await until_gone(receive, self._wait(send))
        except ClientDisconnect:
            self._waking.cancel()
            return
        try:
            await self._waking
            response = await self._answer()
        except ClientDisconnect:
            return
        except Exception as error:
            return await send_last(send, self._describe(error))

        async def send_rest(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        if not isinstance(response, EventStream):
            return await send_last(send, b"data: %s\n\n" % bytes(response.body))
        await response(scope, receive, send_rest)

    async def _wait(self, send: Send) -> None:
        while not (await asyncio.wait((self._waking,), timeout=self._silence))[0]:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    def _describe(self, error: Exception) -> bytes:
        """The event of an error."""
        state, path = self._request.state, self._request.scope["path"]
        body = self._report(error)
        state.log["error"] = body["error"]["message"]
        body = body_at(path, status_of(error), body, state.request_id)
        return event(body, "error" if is_anthropic(path) else None)


async def send_last(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": False})

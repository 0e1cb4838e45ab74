from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from atom.serve.http.sse import EventStream, event

SCOPE: dict[str, Any] = {"type": "http"}


def serve(events: AsyncIterator[bytes], leaves_after: float | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """What a stream sends, and the times that it called `leave`."""
    sent: list[dict[str, Any]] = []
    left: list[str] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600 if leaves_after is None else leaves_after)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        await EventStream(events, lambda: left.append("left"))(SCOPE, receive, send)
        await asyncio.sleep(0.01)  # for what was cancelled to end
        assert len(asyncio.all_tasks()) == 1, "a task is left"

    asyncio.run(main())
    return sent, left


def test_each_event_is_sent_by_itself_and_silence_as_empty_lines():
    async def events() -> AsyncIterator[bytes]:
        yield event({"a": 1})
        yield b""
        yield event({"b": "ü"}, "ping")

    sent, left = serve(events())
    assert [message["body"] for message in sent[1:]] == [
        b'data: {"a":1}\n\n',
        b"\n\n",
        'event: ping\ndata: {"b":"ü"}\n\n'.encode(),
        b"",
    ]
    stripped = [
        message["body"].strip() for message in sent[1:]
    ]  # as vLLM's benchmark does, before it joins what it read
    assert [each.split(b":")[0] for each in stripped if each] == [b"data", b"event"]
    assert [message.get("more_body") for message in sent[1:]] == [True, True, True, False]
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert left == ["left"]


def test_a_client_that_leaves_ends_the_events():
    ended: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.01)
        finally:
            ended.append("ended")

    sent, left = serve(events(), leaves_after=0.05)
    assert left == ["left"] and ended == ["ended"] and 1 < len(sent) < 20


def test_a_fault_of_the_events_comes_out_and_leaves():
    left: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"data: x\n\n"
        raise KeyError("a fault")

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async def send(message: Any) -> None:
        pass

    with pytest.raises(KeyError):
        asyncio.run(EventStream(events(), lambda: left.append("left"))(SCOPE, receive, send))
    assert left == ["left"]

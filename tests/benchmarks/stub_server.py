"""A server for tests, on a thread of its own: what it answers is a coroutine, what it was asked is kept.

async def answer(asked, reply):
    await reply.start()
    await reply.send(b'data: {"choices": [{"text": "a"}]}\\n\\n')
    await reply.end()

with serving(answer) as stub:
    stub.url, stub.asked[0].path, stub.asked[0].json()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Reply:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def start(self, content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def whole(self, status: int, body: bytes) -> None:
        self.writer.write(b"HTTP/1.1 %d Told\r\ncontent-type: application/json\r\n" % status)
        self.writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await self.writer.drain()

    def cut(self) -> None:
        """Close the connection in the middle of the answer."""
        self.writer.close()


Answer = Callable[[Asked, Reply], Awaitable[None]]


@dataclass
class Stub:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)

    def of(self, method: str, path: str = "") -> list[Asked]:
        return [each for each in self.asked if each.method == method and path in each.path]


@contextlib.contextmanager
def serving(answer: Answer, *, version: bytes | None = None, health: Answer | None = None) -> Iterator[Stub]:
    """Posts are answered by `answer`, /health by `health`; GET with 404, or with the body `version`."""
    stub, loop, ready = Stub(), asyncio.new_event_loop(), threading.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked, reply = Asked(method, path, headers, body), Reply(writer)
                stub.asked.append(asked)
                if path == "/health" and health is not None:
                    await health(asked, reply)
                elif method == "GET":
                    await (reply.whole(404, b"") if version is None else reply.whole(200, version))
                else:
                    await answer(asked, reply)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        stub.url = "http://127.0.0.1:{}".format(*server.sockets[0].getsockname()[1:])
        ready.set()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.create_task(run())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def sse(*values: Any) -> bytes:
    return b"".join(
        b"data: %s\n\n" % (each if isinstance(each, bytes) else json.dumps(each).encode()) for each in values
    )


def completion_events(
    texts: Sequence[str],
    *,
    prompt_tokens: int | None = 3,
    cached_tokens: int | None = None,
    chat: bool = False,
    token_ids: Sequence[int] = (),
) -> list[bytes]:
    """The events of an OpenAI server: a token each, then the end; with usage unless prompt_tokens is None."""

    def choice(text: str, reason: str | None, *ids: int) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": reason, **said} | ({"token_ids": ids} if token_ids else {})]}

    events = [sse(choice(text, None, *token_ids[at : at + 1])) for at, text in enumerate(texts)]
    events.append(sse(choice("", "length")))
    if chat:
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        events.insert(0, sse(role))
    if prompt_tokens is not None:
        details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts), "prompt_tokens_details": details}
        events.append(sse({"choices": [], "usage": usage}))
    return [*events, sse(b"[DONE]")]


def answering(events: Sequence[bytes]) -> Answer:
    """Answers every request with these events, sent one by one."""

    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.start()
        for event in events:
            await reply.send(event)
        await reply.end()

    return answer


def obeying() -> Answer:
    """Answers completions with as many tokens as were asked for, and counts the words or ids of the prompt.

    Other posts are answered with 200.
    """

    async def answer(asked: Asked, reply: Reply) -> None:
        if "completions" not in asked.path:
            return await reply.whole(200, b"{}")
        wanted, prompt = asked.json()["max_tokens"], asked.json()["prompt"]
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        await answering(completion_events([" a"] * wanted, prompt_tokens=num_prompt))(asked, reply)

    return answer

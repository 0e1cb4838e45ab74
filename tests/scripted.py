"""The app over an engine whose part a test plays: what the engine says is in the test, and what it was asked comes out.

    response, seen = scripted.post(config, Said(["Hel", "lo"]), {"prompt": "Hi"}, path="/v1/completions")
    response.json(), seen[0].params.temperature

Both sides of the socket between HTTP and engine are real, but for the process at its other end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config
from atom.serve.app import create_app
from atom.serve.auth.tenants import Tenant
from atom.serve.context import Context
from atom.serve.engine.frames import Message, encode
from atom.serve.engine.protocol import Abort, Admitted, End, Finish, Output, Outputs, Ready, Submit, to_engine
from atom.serve.engine.replicas import Replicas
from atom.serve.ops.metrics import Metrics


class Said(NamedTuple):
    """What the engine gives to a request: pieces of text, one token each, then the end."""

    pieces: list[str]
    reason: str = "eos"
    stop: str | None = None
    num_cached: int = 0
    pause: float = 0.0  # seconds before each


Script = Said | Callable[[Submit], list[Message]]


def post(
    config: Config,
    script: Script,
    body: dict[str, Any],
    path: str,
    *,
    tenants: Sequence[Tenant] = (),
    headers: dict[str, str] | None = None,
    before: Callable[[Context], object] = lambda context: None,
) -> tuple[httpx.Response, list[Submit]]:
    """The app's answer to a request, all of it, and what the engine was asked. before: changes what it reads from."""

    async def run() -> tuple[httpx.Response, list[Submit]]:
        ours, theirs = socket.socketpair()
        engines, seen = Replicas(config), list[Submit]()
        engine = engines[0].client
        context = Context(config, engines, Metrics(engines))
        assert config.checkpoint is not None
        context.tokenizer = load_tokenizer(Path(config.checkpoint))
        context.has_tokenizer.set()
        playing = asyncio.create_task(play(theirs, script, seen))
        await engine.connect(ours)
        await engine.ready.wait()
        before(context)
        await asyncio.sleep(0)  # tasks that it made begin
        transport = httpx.ASGITransport(create_app(context, tenants))
        async with httpx.AsyncClient(transport=transport, base_url="http://atom") as http:
            response = await http.post(path, json=body, headers=headers)
        engine.close("the test is over")
        await playing
        context.close()
        return response, seen

    return asyncio.run(run())


def decode(config: Config, tokens: list[int]) -> str:
    """The text of a prompt that the engine was sent."""
    assert config.checkpoint is not None
    tokenizer = load_tokenizer(Path(config.checkpoint))
    assert tokenizer is not None
    return tokenizer.decode(tokens, skip_special_tokens=False)


async def play(connection: socket.socket, script: Script, seen: list[Submit]) -> None:
    """The engine, until it is to end."""
    reader, writer = await asyncio.open_connection(sock=connection)
    frames = to_engine()
    writer.write(encode(Ready(100)))
    while not reader.at_eof():
        for message in frames.feed(await reader.read(1 << 16)):
            if isinstance(message, Submit):
                seen.append(message)
                for answer in answers(script, message):
                    await asyncio.sleep(script.pause if isinstance(script, Said) else 0)
                    writer.write(encode(answer))
            elif isinstance(message, End):
                writer.close()
                return
            else:
                assert isinstance(message, Abort)


def answers(script: Script, submit: Submit) -> list[Message]:
    if not isinstance(script, Said):
        return script(submit)
    *pieces, last = script.pieces
    finish = Finish(script.reason, len(script.pieces), script.num_cached, 0.0, script.stop)
    outputs = [*(Output(submit.id, 0, piece, [1]) for piece in pieces), Output(submit.id, 0, last, [1], None, finish)]
    outputs[0].admitted = Admitted(script.num_cached)
    return [Outputs([each], 1, {}) for each in outputs]

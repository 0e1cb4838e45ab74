"""Run a batch: engines, a route for each line, its answer written.

    code = run_batch(config, Path("in.jsonl"), results, answered=set())

The routes are the server's (`atom.serve.app`), called in this process: the same checks, the same bodies. Max_inflight
lines are under way at a time, and no more of the file is read. Ctrl-C and SIGTERM drop those under way, so what is
written stays whole. The lines of an engine that dies are sent to another; with no other, the batch ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from atom.checkpoint import RichProgress
from atom.checkpoint.progress import Task
from atom.config import Config
from atom.errors import ConfigError, EngineDeadError, RequestError
from atom.process.gc_utils import settle
from atom.sampling_params import INT32
from atom.serve.app import create_app
from atom.serve.batch.lines import BatchFault, BatchRequest, read_lines
from atom.serve.batch.results import Response, Results
from atom.serve.context import Context, read_template
from atom.serve.engine.client import EngineState
from atom.serve.engine.events import wait_for_any
from atom.serve.engine.process import WORKER
from atom.serve.engine.replicas import Replicas
from atom.serve.loading import open_tokenizer
from atom.serve.ops import log
from atom.serve.ops.metrics import Metrics
from atom.serve.server import END_SECONDS, POLL_SECONDS, TICK_SECONDS, find_loop

MIN_INFLIGHT = 1024  # lines, so that a scheduler has a choice
PREPARE_SECONDS = 3600.0  # of a line: hundreds wait for a thread at a time
TOO_MANY, RETRY_SECONDS = 429, 1.0
UNAVAILABLE = 503  # the engine has died, or loads
MAX_SENDS = 2  # of a line whose engine dies, as it may be the cause


def run_batch(
    config: Config, file: Path, results: Results, answered: set[str], worker: tuple[str, ...] = WORKER
) -> int:
    """Answer the lines of a file; the exit code: 0, 2 if lines failed, 130 after Ctrl-C, 143 after SIGTERM.

    ConfigError if the file cannot be read; AtomError if no engine loads, or none is left.

    answered: custom_ids that are left out; see `read_lines`
    worker: the command of an engine's process
    """
    http = replace(config.serve.http, max_queue=INT32)  # max_inflight bounds the queue
    config = replace(config, serve=replace(config.serve, http=http))
    try:
        num_lines = count_lines(file) - len(answered)
        opened = file.open("rb")
    except OSError as error:
        raise ConfigError(f"prompts=@{file}: {error.strerror}") from None
    with opened:
        found = read_lines(opened, answered, http.max_body)
        first = next(found, None)
        if first is None:
            return 0  # and no model is loaded
        lines = itertools.chain([first], found)

        log.configure("text", "info")
        logging.getLogger("atom.access").setLevel(logging.WARNING)  # no line for each request
        with asyncio.Runner(loop_factory=find_loop()) as runner:
            return runner.run(Batch(config, lines, num_lines, results, worker).run())


def count_lines(file: Path) -> int:
    with file.open("rb") as opened:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: opened.read(1 << 20), b""))


class Batch:
    def __init__(
        self,
        config: Config,
        lines: Iterator[BatchRequest | BatchFault],
        num_lines: int,
        results: Results,
        worker: tuple[str, ...],
    ) -> None:
        """num_lines: about as many, for a bar"""
        self._template = read_template(config)
        self._engines = Replicas(config, worker)
        self._context = Context(config, self._engines, Metrics(self._engines), PREPARE_SECONDS)
        self._app = create_app(self._context, tenants=[])
        self._lines, self._num_lines, self._results = lines, num_lines, results
        room = 2 * config.serve.max_num_seqs * config.parallel.replicas
        self._max_inflight = config.job.max_inflight or max(room, MIN_INFLIGHT)
        self._signals: list[int] = []
        self._ended = asyncio.Event()  # by a signal, or a fault
        self._fault: Exception | None = None

    async def run(self) -> int:
        """Answer all lines; the exit code, as of `run_batch`."""
        loop, engines = asyncio.get_running_loop(), self._engines
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle_signal, number)
        answering = asyncio.create_task(self._answer_all())
        try:
            await engines.start()
            open_tokenizer(self._context, self._template, self._fail)
            watching = asyncio.create_task(self._watch())
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            is_whole = answering.done()
        finally:
            answering.cancel()
            await asyncio.wait((answering,))
            reason, is_loaded = engines.reason, engines.ready.is_set()
            engine_end = await self._end()
        if is_whole:
            answering.result()  # raises what has gone wrong, as a full disk
        if self._fault is not None:
            raise self._fault
        if not is_whole and not self._signals:
            raise EngineDeadError(reason) if is_loaded else engines.load_error(engine_end)
        if self._signals:
            return 128 + self._signals[0]
        return RequestError.exit_code if self._results.num_failed else 0

    async def _watch(self) -> None:
        """Watch the engines; return when no line can be answered any more."""
        while not self._ended.is_set() and self._engines.state is not EngineState.DEAD:
            await wait_for_any(TICK_SECONDS, self._ended, self._engines.dead)
            self._engines.check()

    async def _end(self) -> str:
        """Have the engines end, and wait for that; how they ended."""
        self._engines.close("the batch ends")
        self._context.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + END_SECONDS
        while not self._engines.has_ended() and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        return await self._engines.end()

    def _handle_signal(self, number: int) -> None:
        self._signals.append(number)
        self._ended.set()

    def _fail(self, error: Exception) -> None:
        self._fault = error
        self._ended.set()

    async def _answer_all(self) -> None:
        await self._context.has_tokenizer.wait()
        await self._wait_for_engine()
        settle()
        with RichProgress().task("answering", max(self._num_lines, 1), in_bytes=False) as task:
            senders = [asyncio.create_task(self._answer_lines(task)) for _ in range(self._max_inflight)]
            try:
                await asyncio.gather(*senders)
            finally:
                for each in senders:
                    each.cancel()

    async def _answer_lines(self, task: Task) -> None:
        """Answer one line after the other, as others of these tasks do."""
        for each in self._lines:
            if isinstance(each, BatchFault):
                self._results.refuse(each)
                await asyncio.sleep(0)  # a file of nothing else is read too
            else:
                self._results.write(each, await self._answer(each))
            task.advance(1)

    async def _answer(self, request: BatchRequest) -> Response:
        num_sends = 0
        while True:
            await self._wait_for_engine()
            response = await post(self._app, request.url, request.body)
            if response.status == TOO_MANY:  # other lines tap as many hidden states as may run: until some end
                await asyncio.sleep(RETRY_SECONDS)
                continue
            num_sends += 1
            if response.status != UNAVAILABLE or num_sends == MAX_SENDS:
                return response

    async def _wait_for_engine(self) -> None:
        """Wait until an engine serves. If all are dead, that is for ever: `run` ends."""
        await self._engines.ready.wait()
        while self._engines.state is not EngineState.READY:
            await asyncio.sleep(POLL_SECONDS)


async def post(app: ASGIApp, path: str, body: bytes) -> Response:
    """Post a JSON body to a route of an ASGI app."""
    sent, status, headers, parts = False, 0, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # nobody leaves
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")], "client": None, "server": None}
    await app(scope, receive, send)
    return Response(status, headers[b"x-request-id"].decode(), b"".join(parts))

"""Benchmark the client of atom.benchmarks against a stub server.

Shown are tokens/s, CPU share and timing error.

The stub emits as an engine does, a token for every stream at each step, which is the hardest for a client: the events
of a step arrive all at once. The client is what `python -m atom.benchmarks.benchmark_serving` sends and reads with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy

from atom.benchmarks.backend_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput
from atom.benchmarks.client import allow_connections, open_session, run_loop, untracked_past
from atom.benchmarks.traffic import send_all
from atom.measurement.metrics import RequestFuncOutput

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"stub","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":0}}\n\ndata: [DONE]\n\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Stream(asyncio.Protocol):
    """A connection; it answers a GET with 404 and joins `streams` at each POST that has come whole."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams, self.received, self.left, self.wanted = streams, b"", 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, gap, body = self.received.partition(b"\r\n\r\n")
        if head.startswith(b"GET") and gap:
            self.received = body
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif gap and body.endswith(b"}"):
            self.received = b""
            self.left = self.wanted = json.loads(body)["max_tokens"]
            self.transport.write(HEAD)
            self.streams.append(self)

    def emit(self) -> bool:
        """Send the next token; whether there are more."""
        self.left -= 1
        if self.left > 0:
            self.transport.write(chunk(EVENT))
            return True
        self.transport.write(chunk(EVENT) + chunk(LAST % self.wanted) + b"0\r\n\r\n")
        return False


async def serve(listener: socket.socket, step: float) -> None:
    """Emit a token for each stream every `step` seconds."""
    streams: list[Stream] = []
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Stream(streams), sock=listener, backlog=4096)
    due = loop.time()
    while True:
        due = max(due + step, loop.time() - 1)  # catches up after a pause, but not for ever
        await asyncio.sleep(max(0.0, due - loop.time()))
        streams[:] = [each for each in streams if each.emit()]


async def run_client(url: str, streams: int, tokens: int) -> dict[str, float]:
    """Read all streams as the benchmark does; the time and the client's share of a CPU."""
    requests = [RequestFuncInput("once upon a", f"{url}/v1/completions", 3, tokens, "stub")] * streams
    allow_connections(streams)
    async with open_session() as session:

        async def send(request: RequestFuncInput) -> RequestFuncOutput:
            return await ASYNC_REQUEST_FUNCS["vllm"](request, session)

        await send(replace(requests[0], output_len=2))  # wait until the stub serves
        with untracked_past():
            cpu = time.process_time()
            outputs, seconds = await send_all([[each] for each in requests], send, [0.0] * streams)
            cpu = time.process_time() - cpu
    assert all(each.success and each.output_tokens == tokens for each in outputs), outputs[0].error
    gaps = numpy.asarray([each.itl for each in outputs]) * 1000
    assert gaps.shape == (streams, tokens - 1), gaps.shape
    return {
        "tokens_per_s": streams * tokens / seconds,
        "client_cpu_share": cpu / seconds,
        "client_us_per_token": cpu / (streams * tokens) * 1e6,
        "mean_itl_ms": float(gaps.mean()),
        "p99_itl_ms": float(numpy.percentile(gaps, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20000.0, help="tokens a second of all streams")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)  # the descriptor of a socket that listens
    options = parser.parse_args()
    step = options.streams / options.rate
    cores = sorted(os.sched_getaffinity(0))
    if options.serve is not None:
        run_loop(serve(socket.socket(fileno=options.serve), step))
        return
    if len(cores) < 2:
        sys.exit("bench-client needs two cores")
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    command = [sys.executable, __file__, "--serve", str(listener.fileno()), "--streams", str(options.streams)]
    server = subprocess.Popen([*command, "--rate", str(options.rate)], pass_fds=[listener.fileno()])
    try:
        os.sched_setaffinity(server.pid, {cores[0]})
        os.sched_setaffinity(0, {cores[1]})
        url = "http://{}:{}".format(*listener.getsockname())
        result = {"asked_tokens_per_s": options.rate, "asked_itl_ms": step * 1000}
        result |= run_loop(run_client(url, options.streams, round(options.seconds / step)))
    finally:
        server.kill()
        server.wait()
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<24}{value:.3f}")


if __name__ == "__main__":
    main()

"""Benchmark the HTTP process under load.

It has a core of its own; the client and the engine, a stub but for `cpu`, share another.

throughput   tokens/s that 256 streams get, of an engine that emits more than that
latency      from the stub's emission to the client's receipt, 64 streams of 50 tokens/s
cpu          user and system time of the HTTP process for each streamed token, 16 streams of SmolLM2
queue        resident memory of the HTTP process in and after waves of 10,000 requests that wait at once and then leave
aborts       its descriptors and tasks after 1,000 streams whose client left

Each is measured `--runs` times and the best is shown with all: other work on the machine only makes it worse.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import uvloop

STUB = Path(__file__).parents[1] / "tests" / "serve" / "stub_engine.py"
START_SECONDS = 180
TEXT = re.compile(rb'"text":"([0-9.]+) "')
LIMITS = {  # name -> (the limit, whether less is better, unit)
    "throughput": (25_000.0, False, "tokens/s"),
    "latency": (5.0, True, "ms, p99"),
    "cpu": (60.0, True, "µs a token"),
    "queue": (8.0, True, "MiB grown"),
    "aborts": (2.0, True, "descriptors and tasks grown"),
}


class Server(NamedTuple):
    port: int
    pid: int

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "#" not in name}

    def cpu_seconds(self) -> float:
        """User and system seconds of all its threads."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class Client(asyncio.Protocol):
    """One connection with one request; received data is timed and not parsed."""

    def __init__(self, request: bytes, has_clock: bool, marker: bytes) -> None:
        self.request, self.has_clock, self.marker = request, has_clock, marker
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_events, self.first, self.last, self.status = 0, 0.0, 0.0, 0
        self.delays: list[tuple[float, float]] = []  # time of emission, seconds until receipt

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.status:
            self.status = int(data[9:12])
        if num := data.count(self.marker):
            self.first = self.first or now
            self.last = now
            self.num_events += num
            if self.has_clock:
                self.delays += [(sent, now - sent) for sent in map(float, TEXT.findall(data))]
        if b"[DONE]" in data or self.status != 200:
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def completion(tokens: int) -> bytes:
    body = {"prompt": [0] * 8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return request_bytes("/v1/completions", body)


async def connect(server: Server, num: int, request: bytes, *, has_clock: bool = False, marker: bytes) -> list[Client]:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(num):
        _, client = await loop.create_connection(lambda: Client(request, has_clock, marker), "127.0.0.1", server.port)
        clients.append(client)
    return clients


async def stream(server: Server, num: int, tokens: int, **options: Any) -> list[Client]:
    """Run so many streams at once; their ended clients."""
    request = options.pop("request", None) or completion(tokens)
    clients = await connect(server, num, request, marker=options.pop("marker", b'"text":"'), **options)
    await asyncio.gather(*(client.ended for client in clients))
    for client in clients:
        assert client.num_events == tokens, f"{client.num_events} events of {tokens}, status {client.status}"
        client.transport.abort()
    return clients


@contextlib.contextmanager
def serve(overrides: list[str], stub: dict[str, Any] | None) -> Iterator[Server]:
    """Run a server whose HTTP process has the first core to itself."""
    start = [str(STUB), json.dumps(stub)] if stub is not None else ["-m", "atom.cli", "job=serve"]
    fields = ["serve.http.host=127.0.0.1", "serve.http.port=0", *overrides]
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, *start, *fields],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # two threads on one core would wait long for each other
        )
        try:
            end = time.monotonic() + START_SECONDS
            while not (found := re.search(r" at http://127\.0\.0\.1:(\d+) ", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"the server did not start: {Path(log.name).read_text()}")
                time.sleep(0.1)
            pin(process.pid, {cores[0]})
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                pin(int(child), {cores[1]} if stub is not None else set(cores[1:]))
            os.sched_setaffinity(0, {cores[1]})
            yield Server(int(found[1]), process.pid)
        finally:
            os.sched_setaffinity(0, cores)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            process.wait()


def pin(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


def measure_throughput(seconds: float) -> dict[str, float]:
    num, asked = 256, 40_000.0
    tokens = round(seconds * asked / num)
    with serve([], {"step_seconds": num / asked}) as server:
        uvloop.run(stream(server, 8, 200))
        cpu, start = server.cpu_seconds(), time.monotonic()
        clients = uvloop.run(stream(server, num, tokens))
        cpu, seconds = server.cpu_seconds() - cpu, time.monotonic() - start
    rate = num * tokens / seconds
    return {
        "value": rate,
        "asked": asked,
        "cpu_us_a_token": cpu / (num * tokens) * 1e6,
        "events": len(clients) * tokens,
    }


def measure_latency(seconds: float) -> dict[str, float]:
    with serve([], {"step_seconds": 0.02, "clock": True}) as server:
        uvloop.run(stream(server, 8, 50))
        clients = uvloop.run(stream(server, 64, round(seconds * 50), has_clock=True))
    begun = max(client.first for client in clients) + 0.2  # the last of them: before it, requests are taken in
    delays = numpy.asarray([delay for client in clients for sent, delay in client.delays if sent > begun]) * 1000
    percentiles = dict(zip(("p50_ms", "value", "p999_ms"), numpy.percentile(delays, (50, 99, 99.9)), strict=True))
    return {name: float(value) for name, value in percentiles.items()} | {"max_ms": float(delays.max())}


def measure_cpu(seconds: float) -> dict[str, float]:
    num, tokens = 16, 128
    body = {"messages": [{"role": "user", "content": "Count to a thousand."}], "max_tokens": tokens, "stream": True}
    request = request_bytes("/v1/chat/completions", body | {"ignore_eos": True})
    with serve(["level=1", "serve.kv_cache_memory=536870912"], None) as server:
        start = server.cpu_seconds()
        found = uvloop.run(streamed_chat(server, num, request))
        whole = server.cpu_seconds() - start
    return found | {"whole_us": whole / (num * tokens) * 1e6}


async def streamed_chat(server: Server, num: int, request: bytes) -> dict[str, float]:
    """CPU time per event after the last stream has begun, since the beginning of a stream is not a token's cost."""
    clients = await connect(server, num, request, marker=b'"delta":{"content":"')
    while not all(client.num_events for client in clients):
        await asyncio.sleep(0.02)
    cpu, start, early = server.cpu_seconds(), time.monotonic(), sum(client.num_events for client in clients)
    await asyncio.gather(*(client.ended for client in clients))
    cpu, seconds = server.cpu_seconds() - cpu, time.monotonic() - start
    assert all(client.status == 200 for client in clients)
    events = sum(client.num_events for client in clients) - early
    return {"value": cpu / events * 1e6, "events": events, "tokens_per_s": events / seconds}


def measure_queue(seconds: float) -> dict[str, float]:
    num, num_early, num_waves = 10_000, 2, 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    overrides = [f"serve.http.max_queue={num}", "advanced.read_seconds=120"]

    def resident(server: Server) -> float:
        return server.metrics()["process_resident_memory_bytes"] / (1 << 20)

    async def wave(server: Server) -> float:
        clients = await connect(server, num, completion(4), marker=b'"text":"')
        end = time.monotonic() + 60
        while await asyncio.to_thread(lambda: server.metrics()["atom:num_requests_waiting"]) < num - 1:
            assert time.monotonic() < end, "not all of the requests are waiting"
            await asyncio.sleep(0.2)
        full = await asyncio.to_thread(resident, server)
        for client in clients:
            client.transport.abort()
        while await asyncio.to_thread(lambda: server.metrics()["atom:num_requests_waiting"]) > 0:
            assert time.monotonic() < end, "the queue did not empty"
            await asyncio.sleep(0.2)
        return full

    sizes = []
    with serve(overrides, {"max_running": 1, "prefill_seconds": 1e9}) as server:
        for _ in range(num_waves):
            sizes.append(uvloop.run(wave(server)))
        after = resident(server)
    # the first waves grow the heap, which Python keeps; after them it must not grow
    grown = max(sizes[num_early:]) - max(sizes[:num_early])
    return {"value": grown, "after_mib": after} | {f"full_{place}_mib": each for place, each in enumerate(sizes, 1)}


def measure_aborts(seconds: float) -> dict[str, float]:
    async def leave(server: Server, num: int) -> None:
        for _ in range(num // 50):
            clients = await connect(server, 50, completion(100_000), marker=b'"text":"')
            while any(client.num_events < 2 for client in clients):
                await asyncio.sleep(0.01)
            for client in clients:
                client.transport.abort()

    def count(server: Server) -> float:
        end = time.monotonic() + 5
        while (metrics := server.metrics())["atom:kv_cache_blocks_used"] and time.monotonic() < end:
            time.sleep(0.1)
        assert not metrics["atom:kv_cache_blocks_used"], "blocks are held for clients that have left"
        return metrics["process_open_fds"] + metrics["atom:event_loop_tasks"]

    with serve([], {"step_seconds": 0.01}) as server:
        uvloop.run(leave(server, 100))
        before = count(server)
        uvloop.run(leave(server, 1000))
        return {"value": count(server) - before, "before": before}


MEASURES: dict[str, Callable[[float], dict[str, float]]] = {
    "throughput": measure_throughput,
    "latency": measure_latency,
    "cpu": measure_cpu,
    "queue": measure_queue,
    "aborts": measure_aborts,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MEASURES), help="some of these")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement of throughput or latency")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("bench-serve needs two cores")
    is_missed, results = False, {}
    for name in options.only.split(","):
        limit, is_upper, unit = LIMITS[name]
        runs = [MEASURES[name](options.seconds) for _ in range(options.runs)]
        best = (min if is_upper else max)(runs, key=lambda run: run["value"])
        holds = best["value"] <= limit if is_upper else best["value"] >= limit
        is_missed |= not holds
        results[name] = {"limit": limit, "holds": holds, "best": best, "runs": runs}
        if not options.json:
            values = ", ".join(f"{run['value']:.2f}" for run in runs)
            more = ", ".join(f"{key} {value:.2f}" for key, value in best.items() if key != "value")
            sign = "<=" if is_upper else ">="
            end = "" if holds else "  MISSED"
            print(f"{name:<12}{best['value']:>12.2f} {sign} {limit:g} {unit}{end}  [{values}; {more}]", flush=True)
    if options.json:
        print(json.dumps(results))
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())

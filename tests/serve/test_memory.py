"""Ten minutes of mixed load: after the first four no process of the server takes more memory."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import wire
from serving import Server, Start

NUM_CLIENTS = 25
WARM_UP, SECONDS, INTERVAL = 240, 600, 2.0  # in seconds; the warm-up is part of the ten minutes
NUM_SAMPLES = 30  # whose median counts, of a minute
TAKEN = {"engine": 320, "http": 48}  # MB that each may take from its start on
GROWN = {"engine": 16, "http": 4}  # MB that each may take after the warm-up
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices("etaoinshrdlu", k=chance.randrange(1, 8))) for _ in range(count))


def schema(chance: random.Random) -> dict[str, Any]:
    """One that nobody has asked for before."""
    types = {"integer": {}, "boolean": {}, "string": {"maxLength": 9}, "array": {"items": {"type": "integer"}}}
    names = [f"{words(chance, 1)}_{chance.random()}" for _ in range(chance.randrange(1, 9))]
    properties = {name: {"type": kind, **types[kind]} for name in names for kind in chance.choices(list(types))}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def make_request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request: one in seven has a long prompt, a third asks for an answer of a given form."""
    prompt = words(chance, chance.randrange(150, 300) if chance.random() < 0.15 else chance.randrange(1, 30))
    number = chance.random()
    body: dict[str, Any] = {"max_tokens": chance.randrange(4, 120), "messages": [{"role": "user", "content": prompt}]}
    sampling = {"temperature": chance.choice([0, 0.7, 1.0]), "seed": chance.randrange(1 << 30)}
    more: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {**body, **sampling}),
        (CHAT, {**body, **sampling, "stream": True}),
        (CHAT, {**body, "n": 3, "temperature": 1.0}),
        (CHAT, {**body, "logprobs": True, "top_logprobs": 20}),
        (CHAT, {**body, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {"5": 3}, "top_p": 0.9}),
        (CHAT, {**body, "structured_outputs": {"regex": f"{number}-[a-z]{{2,30}}"}}),
        (CHAT, {**body, "structured_outputs": {"grammar": f'start: "{number}" NUM+\nNUM: /[0-9]{{1,6}}/'}}),
        (CHAT, {**body, "structured_outputs": {"choice": [f"{number}{letter}" for letter in "abcd"]}}),
        (CHAT, {**body, "structured_outputs": {"json": schema(chance)}}),
        (TEXT, {"prompt": prompt, "max_tokens": 4, "prompt_logprobs": 5, **sampling}),
        (TEXT, {"prompt": prompt, "max_tokens": 200, "stream": True}),
        (MESSAGES, {**body, "model": "talker", "stream": True}),
    ]
    return chance.choice(more)


def ask_until(url: str, end: float, chance: random.Random, statuses: Counter[int | str]) -> None:
    """Requests one after the other; of one in five the client leaves before it is done."""
    while time.monotonic() < end:
        path, body = make_request(chance)
        num_chunks = chance.randrange(20) if chance.random() < 0.2 else 1 << 30
        with wire.connect(url, SECONDS) as connection, connection.makefile("rb") as file:
            connection.sendall(wire.request("POST", path, body))
            if num_chunks < 5:
                time.sleep(num_chunks / 20)
                statuses["left"] += 1
                continue
            status, headers = wire.read_head(file)
            statuses[status] += 1
            if "content-length" in headers:
                file.read(int(headers["content-length"]))
            else:
                while num_chunks and wire.read_chunk(file):
                    num_chunks -= 1


def resident(pid: int) -> float:
    """MB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def processes(server: Server) -> dict[str, int]:
    pid = server.process.pid
    (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {"http": pid, "engine": int(engine)}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_memory_stays_what_it_was_after_the_warm_up(start_server: Start, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("llguidance")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other work would have threads wait for each other
    server = start_server(f"serve.kv_cache_memory={4 << 30}")
    pids = processes(server)
    samples: dict[str, list[float]] = {name: [resident(pid)] for name, pid in pids.items()}
    statuses: Counter[int | str] = Counter()
    start = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [
            pool.submit(ask_until, server.url, start + SECONDS, random.Random(number), statuses)
            for number in range(NUM_CLIENTS)
        ]
        while time.monotonic() - start < SECONDS:
            time.sleep(INTERVAL)
            for name, pid in pids.items():
                samples[name].append(resident(pid))

    rounded = {name: [round(value) for value in found[::15]] for name, found in samples.items()}
    print(f"{dict(statuses)}, MB every half a minute: {rounded}")
    for client in clients:
        client.result()
    assert set(statuses) == {200, "left"} and statuses.total() > 500
    for name, found in samples.items():
        first = int(WARM_UP / INTERVAL)
        warm, last = statistics.median(found[first : first + NUM_SAMPLES]), statistics.median(found[-NUM_SAMPLES:])
        assert last - found[0] < TAKEN[name], (name, rounded)
        assert last - warm < GROWN[name], (name, rounded)

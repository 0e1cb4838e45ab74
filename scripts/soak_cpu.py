"""Soak an engine and a server on a CPU; check that nothing is lost.

    python scripts/soak_cpu.py 6 --seed 1

In turn, until the time is over: an engine in this process runs random requests with a pool that is too small for them,
in steps whose order follows only from the seed, and each is compared with the same request run by itself; and clients
send random requests to a server, many of which they leave. Between rounds both are idle, and what they hold is counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import serving  # noqa: E402
import wire  # noqa: E402

from atom import LLMEngine, SamplingParams  # noqa: E402
from atom.runtime.types import RequestOptions, Sequence  # noqa: E402

MIB = 1 << 20
NUM_ENGINE, NUM_SERVER, NUM_CLIENTS = 60, 120, 16  # requests of a round, and clients at a time
NUM_WARM = 3  # rounds in which caches fill
GROWTH = {"http": 8 * MIB, "engine": 24 * MIB}  # bytes that a process may take after the warm rounds
# a pool of 239 tokens for sequences of up to 160, and twice as much on the host
FIELDS: dict[str, Any] = {"dtype": "fp32", "level": 1, "max_num_seqs": 12, "max_num_batched_tokens": 48,
                          "max_model_len": 160, "block_size": 4, "num_kvcache_blocks": 60,
                          "swap_space": 368_640, "enable_prefix_caching": True}  # fmt: skip
OVERRIDES = [f"serve.{name}={value}" for name, value in FIELDS.items() if name not in ("dtype", "level")]
PREFIXES = [[(7 * at * at + 3 * at + seed) % 256 for at in range(60)] for seed in range(3)]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 10, "min_p": 0.02, "presence_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {7: 3.0}, "min_tokens": 5},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "prompt_logprobs": 0},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.0, "n": 3, "logprobs": 0},
    {"temperature": 1.0, "bad_words": ["e", "ab"]},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-f]{3,9}(-[0-9]+){1,3}"}},
    {"temperature": 1.0, "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    {"temperature": 1.0, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
]


class Request(NamedTuple):
    prompt: list[int]
    params: dict[str, Any]
    priority: int


def make_request(chance: random.Random) -> Request:
    """A request that fits into the pool by itself; a third begin as others do."""
    length = chance.choice([1, 3, 4, 5, 16, 17, chance.randint(1, 70)])
    shared = chance.choice(PREFIXES)[: chance.choice([0, 0, 13, 40])]
    params = {"max_tokens": chance.randint(1, 40), "seed": chance.getrandbits(40), **chance.choice(SAMPLING)}
    if chance.random() < 0.2:
        params["stop_token_ids"] = chance.sample(range(256), 4)
    params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    return Request(shared + [chance.randrange(256) for _ in range(length)], params, chance.choice([0, 0, 0, -1, 2]))


def soak_engine(engine: LLMEngine, chance: random.Random, num_requests: int) -> list[str]:
    """Run random requests with arrivals and aborts between steps; what is wrong afterwards."""
    running: dict[str, Request] = {}
    ended: list[tuple[Request, Sequence]] = []
    num_sequences = num_aborted = num_came = 0
    inner, before = engine._engine, Counter(engine.metrics.finish_reasons)
    while num_came < num_requests or not engine.is_finished():
        while num_came < num_requests and len(running) < 20 and chance.random() < 0.5:
            request = make_request(chance)
            params = SamplingParams(**request.params)
            sequences = inner.prepare(request.prompt, params, RequestOptions(priority=request.priority))
            running[inner.submit(sequences)] = request
            num_came, num_sequences = num_came + 1, num_sequences + params.n
        if running and chance.random() < 0.03:
            engine.abort(chance.choice(sorted(running)))
            num_aborted += 1
        for sequence in engine.step():
            ended.append((running[sequence.request_id], sequence))
        for id in [id for id in running if not inner.is_running(id)]:
            del running[id]
    faults = holds(engine)
    reasons = Counter(engine.metrics.finish_reasons) - before
    if len(ended) != num_sequences or reasons.total() != num_sequences:
        faults.append(f"{num_sequences} sequences came, {len(ended)} ended, and {dict(reasons)} are counted")
    if num_aborted and not reasons["abort"]:
        faults.append(f"{num_aborted} requests were aborted and none is counted")
    faults += [f"{reasons['error']} sequences failed"] if reasons["error"] else []
    for request, sequence in ended:
        if sequence.finish_reason not in ("abort", "error"):
            faults += compare_with_idle_engine(engine, request, sequence)
    return faults


def holds(engine: LLMEngine) -> list[str]:
    """What an idle engine still holds and should not."""
    scheduler = engine._engine.scheduler
    held = {pool.name: pool.num_blocks - 1 - pool.num_free for pool in scheduler.cache.pools}
    faults = [f"{count} blocks of {name} are not back" for name, count in held.items() if count]
    if slots := scheduler.num_slots - len(scheduler._slots):
        faults.append(f"{slots} slots are not back")
    return faults


def compare_with_idle_engine(engine: LLMEngine, request: Request, sequence: Sequence) -> list[str]:
    """Compare a sequence with the same request in an idle engine."""
    answers = engine.generate([request.prompt], SamplingParams(**request.params))
    expected = answers[sequence.index]["token_ids"]
    return [] if expected == sequence.output else [f"{sequence.id}, {request}: {sequence.output}, by itself {expected}"]


class Tally(NamedTuple):
    statuses: Counter[int | str]
    sums: Counter[str]  # of requests that were answered whole
    lock: threading.Lock


def soak_server(url: str, pid: int, chance: random.Random, num_requests: int, num_clients: int) -> list[str]:
    """Have clients send random requests, of which they leave many; what is wrong once all is still."""
    before, descriptors = wire.metrics(url), num_descriptors(pid)
    seeds = [chance.getrandbits(32) for _ in range(num_requests)]
    tally = Tally(Counter(), Counter(), threading.Lock())
    with ThreadPoolExecutor(num_clients) as pool:
        for answered in [pool.submit(ask, url, random.Random(seed), tally) for seed in seeds]:
            answered.result()
    faults: list[str] = []
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")
    try:
        wire.wait_until(lambda: not any(wire.metrics(url)[f"atom:{name}"] for name in names), 10)
        wire.wait_until(lambda: num_descriptors(pid) <= descriptors, 10)
    except AssertionError:
        state = {name: wire.metrics(url)[f"atom:{name}"] for name in names}
        faults.append(f"{state}, {num_descriptors(pid)} descriptors after {descriptors}: something is not back")
    after = wire.metrics(url)
    if after["atom:event_loop_tasks"] > before["atom:event_loop_tasks"]:
        faults.append(f"{after['atom:event_loop_tasks']} tasks after {before['atom:event_loop_tasks']}")
    for name, summed in tally.sums.items():
        if (counted := after[f"atom:{name}_total"] - before.get(f"atom:{name}_total", 0)) < summed:
            faults.append(f"{name}: {counted} are counted, and the answers have {summed}")
    if strange := tally.statuses.keys() - {200, "left"}:
        faults.append(f"statuses {dict(tally.statuses)}: {sorted(map(str, strange))} were not expected")
    return faults


def ask(url: str, chance: random.Random, tally: Tally) -> None:
    """Send a request, and read its answer whole, in part, or not at all."""
    prompt, params, priority = make_request(chance)
    body = {"prompt": prompt, "priority": priority, "stream": chance.random() < 0.6, **params}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
        body.pop("prompt_logprobs", None)
    data = wire.request("POST", "/v1/completions", body)
    way = chance.random()
    with wire.connect(url) as connection, connection.makefile("rb") as file:
        if way < 0.1:  # it leaves in the middle of its request
            connection.sendall(data[: chance.randrange(1, len(data))])
        elif way < 0.3:  # or without reading, at once or after a while
            connection.sendall(data)
            time.sleep(chance.choice([0, 0.05, 0.2]))
        else:
            connection.sendall(data)
            num_chunks = chance.randrange(6) if way < 0.4 else None
            status, headers = wire.read_head(file)
            texts = read_body(file, headers, num_chunks)
            if num_chunks is None or "content-length" in headers:
                count(tally, status, texts)
                return
    count(tally, "left", [])


def read_body(file: Any, headers: dict[str, str], num_chunks: int | None) -> list[bytes]:
    if "content-length" in headers:
        return [file.read(int(headers["content-length"]))]
    chunks: list[bytes] = []
    while (num_chunks is None or len(chunks) < num_chunks) and (chunk := wire.read_chunk(file)):
        chunks.append(chunk)
    return chunks


def count(tally: Tally, status: int | str, texts: SequenceOf[bytes]) -> None:
    bodies = [json.loads(text.removeprefix(b"data: ")) for text in texts if text.strip() != b"data: [DONE]"]
    usages = [body["usage"] for body in bodies if body.get("usage")]
    with tally.lock:
        tally.statuses[status] += 1
        for usage in usages[-1:] if status == 200 else ():
            tally.sums["prompt_tokens"] += usage["prompt_tokens"]
            tally.sums["generation_tokens"] += usage["completion_tokens"]


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance, end = random.Random(asked.seed), time.monotonic() + 60 * asked.minutes
    temporary = tempfile.TemporaryDirectory()  # removed at the end
    folder = Path(temporary.name)
    talker = serving.save_talker(folder / "talker")
    engine = LLMEngine(str(talker), **FIELDS, cache=str(folder / "cache"))
    server = serving.start(talker, folder, *OVERRIDES)
    pids = {"http": server.process.pid, "engine": serving.family(server)[0]}
    faults: list[str] = []
    seen: list[dict[str, int]] = []
    while time.monotonic() < end or len(seen) <= NUM_WARM:
        found = soak_engine(engine, chance, NUM_ENGINE)
        found += soak_server(server.url, pids["http"], chance, NUM_SERVER, NUM_CLIENTS)
        seen.append({name: resident_bytes(pid) for name, pid in pids.items()})
        sizes = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in seen[-1].items())
        print(f"round {len(seen)}: {sizes}", *found, sep="\nFAULT: ", flush=True)
        faults += found
    for name, limit in GROWTH.items():
        grown = seen[-1][name] - seen[NUM_WARM - 1][name]
        print(f"{name} has grown by {grown / MIB:.1f} MiB since round {NUM_WARM}")
        if grown > limit:
            faults.append(f"{name} has grown by {grown} bytes")
    stats = engine.metrics.scheduler
    events = {
        "preemptions": stats.num_preemptions,
        "chunks": stats.num_chunks,
        "prefix hits": stats.num_prefix_hit_tokens,
        "blocks loaded from the host": stats.num_loaded_blocks,
        "aborts": engine.metrics.finish_reasons["abort"],
    }
    print(events)
    faults += [f"there were no {name}" for name, num in events.items() if not num]
    engine.close()
    server.process.terminate()
    if (code := server.process.wait(60)) != 0:
        faults.append(f"the server ended with {code}")
    if "traceback" in (log := server.log.read_text()):
        faults.append(f"the server's log has a traceback: {log[log.index('traceback') - 300 :][:2000]}")
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

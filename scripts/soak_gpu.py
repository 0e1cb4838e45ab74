"""Soak an engine under load, and check that nothing leaks.

What it holds when it is idle again must not grow, and nobody's tokens depend on the others.

    python scripts/soak_gpu.py 6

Rounds of arrivals, aborts and stops, with more work than the pool holds; between them the engine runs empty, and its
blocks, slots and memory are counted, those of its other ranks too (--parallel tp2). Then requests of all rounds, a
sample, run by itself in an engine of one rank that waits for each step.

    python scripts/soak_gpu.py --replays 100000 --parallel tp4

This runs no engine. Ranks replay graphs with collectives of mixed sizes, one of them late at times; each number is held
against float64, and its bits against those of the other ranks (tests/gpu/replaying.py).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import tiny  # noqa: E402

from atom import LLMEngine, SamplingParams  # noqa: E402
from atom.runtime.types import Sequence  # noqa: E402

NUM_ROUNDS = 12
NUM_WARM = 3  # rounds in which caches fill
NUM_SAMPLE = 100
MAX_WAITING = 48  # requests that wait or run
MIB = 1 << 20
# since the warm rounds; 20: torch's large segment
GROWTH = {"device": 1 * MIB, "reserved": 20 * MIB, "host": 24 * MIB, "rank_device": 20 * MIB, "rank_host": 24 * MIB}
FIELDS: dict[str, Any] = {"dtype": "fp32", "max_num_seqs": 24, "max_num_batched_tokens": 96, "max_model_len": 200,
                          "block_size": 4, "num_kvcache_blocks": 130}  # fmt: skip

WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 10, "min_p": 0.02, "presence_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {7: 3.0}, "min_tokens": 5},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "prompt_logprobs": 0},
    {"temperature": 1.0, "n": 2},
]


class Held(NamedTuple):
    """The resources that an idle engine holds."""

    blocks: int
    slots: int
    device: int  # bytes of live tensors
    reserved: int  # bytes that torch has reserved on the device
    host: int  # bytes of this process
    rank_device: int  # bytes that are used of the GPUs of other ranks
    rank_host: int  # bytes of the processes of other ranks


def held_by(engine: LLMEngine) -> Held:
    gc.collect()
    ranks = rank_processes()
    groups = getattr(engine._engine.scheduler, "groups", [engine._engine.scheduler])
    blocks = sum(pool.num_blocks - 1 - pool.num_free for group in groups for pool in group.cache.pools)
    has_gpu = torch.cuda.is_available()
    memory = [torch.cuda.mem_get_info(1 + place) for place in range(len(ranks))] if has_gpu else []
    return Held(
        blocks,
        sum(group.num_slots - len(group._slots) for group in groups),
        torch.cuda.memory_allocated() if has_gpu else 0,
        torch.cuda.memory_reserved() if has_gpu else 0,
        resident_bytes(os.getpid()),
        sum(total - free for free, total in memory),
        sum(map(resident_bytes, ranks)),
    )


def rank_processes() -> list[int]:
    """The processes of ranks that this one has started."""
    children = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    return [pid for pid in children if b"RankLink" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_request(chance: random.Random) -> tuple[list[int], SamplingParams]:
    length = chance.choice([1, 3, 4, 5, 16, 17, chance.randint(1, 120)])
    shared = tiny.prompt(60, seed=chance.randrange(3))[: chance.choice([0, 0, 13, 40])]
    stops = chance.sample(range(101), 4) if chance.random() < 0.3 else None
    params = {"max_tokens": chance.randint(1, 80), "seed": chance.getrandbits(40), "stop_token_ids": stops}
    params |= chance.choice(WAYS)
    params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    return shared + [chance.randrange(101) for _ in range(length)], SamplingParams(**params)


class Sample:
    """A uniform sample of fixed size of all that are offered (Vitter 1985, algorithm R)."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.kept: list[Sequence] = []
        self._size, self._chance, self._num_offered = size, chance, 0

    def offer(self, sequence: Sequence) -> None:
        self._num_offered += 1
        if len(self.kept) < self._size:
            self.kept.append(sequence)
        elif (place := self._chance.randrange(self._num_offered)) < self._size:
            self.kept[place] = sequence


def run_round(engine: LLMEngine, seconds: float, chance: random.Random, sample: Sample) -> tuple[int, int]:
    """Run a load for some seconds and drain it; the numbers of sequences submitted and ended."""
    running: set[str] = set()
    num_came = num_ended = 0
    end = time.monotonic() + seconds
    while True:
        is_open = time.monotonic() < end
        while is_open and len(running) < MAX_WAITING and chance.random() < 0.4:
            prompt, params = make_request(chance)
            running |= set(engine.add_request([prompt], params))
            num_came += params.n
        if running and chance.random() < 0.02:
            engine.abort(chance.choice(sorted(running)))
        for sequence in engine.step():
            num_ended += 1
            running.discard(sequence.request_id)
            if sequence.finish_reason not in ("abort", "error"):
                sample.offer(sequence)
        if not is_open and engine.is_finished():
            return num_came, num_ended


def count_unequal_reruns(folder: Path, sample: list[Sequence], fields: dict[str, Any]) -> int:
    """Count the sequences that have other tokens when run by themselves, without run-ahead and prefix hits."""
    engine = LLMEngine(str(folder), **{**FIELDS, **fields})
    engine._engine.runner.run_ahead = engine._engine.scheduler._run_ahead = 0
    num_other = 0
    for sequence in sample:
        params = sequence.params
        answers = engine.generate([sequence.prompt], params)
        if answers[sequence.index]["token_ids"] != sequence.output:
            print(f"{sequence.id}, {params}: {sequence.output}, by itself {answers[sequence.index]['token_ids']}")
            num_other += 1
    engine.close()
    return num_other


def soak_collectives(num: int, count: int) -> int:
    """Replay so many graphs with collectives of so many ranks."""
    from gpu.replaying import replay_among

    if torch.cuda.device_count() < num:
        print(f"FAULT: {num} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
        return 1
    since = time.monotonic()

    def report(turn: int) -> None:
        if turn % max(count // 1000 * 100, 200) == 0:
            print(f"{turn} of {count} replays, {time.monotonic() - since:.0f} s", flush=True)

    found = replay_among(num, count, report)
    faults = [f"rank {rank} has {each.wrong} wrong numbers" for rank, each in enumerate(found) if each.wrong]
    faults += ["ranks have other bits"] if len({each.checksum for each in found}) > 1 else []
    late = ", ".join(str(each.num_late) for each in found)
    print(f"{count} replays among {num} ranks in {time.monotonic() - since:.0f} s; held up: {late} times, by rank")
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=6.0)
    parser.add_argument("--variant", default="qwen3", help="of tests/tiny.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parallel", help="of several ranks, as in tp2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replays", type=int, help="of graphs with collectives of the ranks of --parallel (tp2)")
    asked = parser.parse_args()
    if asked.replays is not None:
        return soak_collectives(int((asked.parallel or "tp2").removeprefix("tp")), asked.replays)
    chance = random.Random(asked.seed)
    temporary = tempfile.TemporaryDirectory()  # removed at the end
    folder = tiny.save(asked.variant, Path(temporary.name))
    fields = {"device": asked.device, "level": None if asked.device == "cuda" else 1}
    divided = {"parallel": asked.parallel} if asked.parallel else {}
    engine = LLMEngine(str(folder), **{**FIELDS, **fields, **divided, "enable_prefix_caching": True})
    faults: list[str] = []
    seen: list[Held] = []
    sample = Sample(NUM_SAMPLE, chance)
    for place in range(NUM_ROUNDS):
        num_came, num_ended = run_round(engine, 60 * asked.minutes / NUM_ROUNDS, chance, sample)
        held = held_by(engine)
        seen.append(held)
        print(f"round {place}: {num_came} came, {num_ended} ended; device {held.device / MIB:.2f} MiB of "
              f"{held.reserved / MIB:.0f} reserved, host {held.host / MIB:.0f} MiB, of other ranks "
              f"{held.rank_device / MIB:.0f} and {held.rank_host / MIB:.0f} MiB", flush=True)  # fmt: skip
        if num_came != num_ended:
            faults.append(f"round {place}: {num_came} came and {num_ended} ended")
        if held.blocks or held.slots:
            faults.append(f"round {place}: {held.blocks} blocks and {held.slots} slots are not back")
    stats, reasons = engine.metrics.scheduler, Counter[str]()
    for reason, count in engine.metrics.finish_reasons.items():
        reasons[reason.partition("_")[0]] += count
    print(stats, dict(reasons))
    engine.close()
    warm, last = seen[NUM_WARM], seen[-1]
    for name, limit in GROWTH.items():
        grown = getattr(last, name) - getattr(warm, name)
        print(f"{name} memory has grown by {grown / MIB:.2f} MiB since round {NUM_WARM}")
        if grown > limit:
            faults.append(f"{name} memory has grown by {grown} bytes")
    events = {
        "preemptions": stats.num_preemptions,
        "chunks": stats.num_chunks,
        "prefix hits": stats.num_prefix_hit_tokens,
        "stops": reasons["stop"],
        "aborts": reasons["abort"],
    }
    if asked.device == "cuda":
        events |= {"steps ahead": stats.num_ahead, "tokens thrown away": stats.num_overrun}
    faults += [f"there were no {name}" for name, count in events.items() if not count]
    faults += [f"{reasons['error']} requests failed"] if reasons["error"] else []
    num_other = count_unequal_reruns(folder, sample.kept, fields)
    print(f"{num_other} of {len(sample.kept)} have other tokens than by themselves")
    faults += [f"{num_other} requests have other tokens than by themselves"] if num_other else []
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure how long a GPU waits for the host before a decode step.

The time is taken on the GPU's own timeline.

Qwen3-0.6B's config with random weights and a tokenizer made here, the engine in a process of its own as under
`job=serve`. 64 clients ask again as soon as they have an answer: prompts of 16 to 256 tokens, top-p sampling, answers
that end by one of many eos tokens, by a string, by their length, or because the client leaves. torch's profiler traces
some stretches of that.

A step's first kernel is the one that makes its inputs, its last the one that draws its tokens. What counts is the time
between the last of one step and the first of the next in which nothing ran, if that next step has only decodes:
copies and what brings new requests to the GPU lie between the two and are taken off. `before others` is the part of it
up to the first of these, and `whole` all from the one kernel to the other. The profiler adds to the host's work, so the
time of a step is given without it too. With `--json` there is an object for each rank, by the name of the folder of its
traces.

With `--clock` nothing is traced, since the profiler makes the host of several ranks too slow. Kernels besides those of
the steps read the clock of the GPU, on each rank (`scripts/gap_clock.py`). Of what lies between two steps only the copy
of block tables is taken off, and `before others` is up to that. The floor is how far apart two readings are in two
graphs in a row, when the host is far ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import uvloop

from atom.compiler import mesh_of
from atom.config import Config
from atom.config.load import load
from atom.devices import find_device
from atom.jobs.profile.trace import ON_DEVICE, Event, read_event
from atom.sampling_params import SamplingParams
from atom.serve.engine.client import EngineClient, EngineState
from atom.serve.engine.process import WORKER, EngineProcess
from scripts.gap_stamps import Stamp

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tests" / "configs" / "qwen3_0.6b.json"
CLOCKED = f"import sys; sys.path[0] = {str(ROOT)!r}; from scripts.gap_clock import serve; serve()"
CLOCKED_WORKER = (sys.executable, "-c", CLOCKED)
CLOCK_FILES = "rank_*/steps.*.json"
FIRST, LAST, OF_PROMPTS = "_prepare", "_draw", "_prefill"  # kernels of a step; the last one only with prompts
NUM_ROWS = 64
MIN_STEPS = 1000  # of only decodes
MAX_MEDIAN, MAX_P99 = 20.0, 60.0  # µs
EVERY_EOS = 1000  # one of so many tokens is an eos
STOP = "zo"  # in one of 338 words
LOOK_SECONDS = 0.005  # between two polls of a client: it takes several tokens at once, to keep up with the engine
WARM_SECONDS = 2.0
REST_SECONDS = 0.5  # after a trace, for requests that arrived while it was written
WRITE_SECONDS = 30.0  # in which all ranks have written what their clocks said
TIMES = {
    "ms_a_step_without_profiler": "a step, before anything is recorded",
    "ms_a_step": "a step, while it is recorded",
    "ms_within_steps": "of that from its first kernel to its last",
}
REASONS = ("eos", "stop_sequence", "max_tokens", "abort")


class Step(NamedTuple):
    """A step after another one; times in µs."""

    start: float  # of its first kernel
    span: float  # from there to the end of its last one
    idle: float  # when nothing ran since the last kernel of the previous step
    before_others: float  # of it, before other activities between the two steps
    whole: float  # from the end of that kernel to the start, those activities included
    has_prompts: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a trace")
    parser.add_argument("--parallel", default="tp1", help="as in tp2; without --clock the first rank is traced")
    parser.add_argument("--clock", action="store_true", help="read each rank's clock in its steps, and trace nothing")
    parser.add_argument("--keep", help="a folder for the traces")
    parser.add_argument("--read", nargs="+", default=[], help="traces that are there: nothing is run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    traffic: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = list(map(Path, options.read))
        if not paths:
            if find_device() == "cpu":
                print("gap-gpu: torch finds no GPU", file=sys.stderr)
                return 2
            if options.clock and torch.version.hip:
                print("gap-gpu: --clock is for NVIDIA's GPUs", file=sys.stderr)
                return 2
            save_checkpoint(Path(folder), json.loads(CONFIG.read_text()))
            traces = str(Path(options.keep or folder).resolve())
            fields = [f"serve.torch_profiler_dir={traces}", f"parallel={options.parallel}"]
            config = load([f"checkpoint={folder}", "load_dummy=true", *fields])
            if options.clock and config.parallel.pipeline > 1:
                print("gap-gpu: --clock is for ranks that draw; of stages only the last does", file=sys.stderr)
                return 2
            paths, traffic = uvloop.run(trace_traffic(config, options.traces, options.seconds, options.clock))
        ranks = measure_ranks(paths)
    next(iter(ranks.values())).update(traffic)
    print(json.dumps(ranks) if options.json else "\n".join(line for each in ranks.items() for line in describe(*each)))
    missed = [f"{name}: {bound}" for name, summary in ranks.items() for bound in find_missed(summary)]
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return 1 if missed else 0


def save_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Save a config.json with many eos tokens, and a byte-level tokenizer: 256 bytes, then words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    size = config["vocab_size"]
    hf_config = {**config, "eos_token_id": list(range(EVERY_EOS - 1, size, EVERY_EOS))}
    (folder / "config.json").write_text(json.dumps(hf_config))
    letters = [chr(ord("a") + place) for place in range(26)]
    words = map("".join, itertools.product(letters, repeat=4))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{word}" for word in words)][:size]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


async def trace_traffic(
    config: Config, num_traces: int, seconds: float, has_clock: bool = False
) -> tuple[list[Path], dict[str, Any]]:
    """Trace an engine under load; the traces, and its finish reasons and step times without the profiler.

    has_clock: its ranks read their clocks, and the traces are what each has written of that
    """
    engine, client = EngineProcess(CLOCKED_WORKER if has_clock else WORKER), EngineClient(config)
    reasons: Counter[str] = Counter()
    earlier = {*Path(config.serve.torch_profiler_dir or ".").glob(CLOCK_FILES)}
    try:
        engine.configure(config)
        await client.connect(engine.connection)
        while not client.ready.is_set():
            if client.state is EngineState.DEAD:
                raise SystemExit(f"gap-gpu: {client.reason}")
            await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as group:
            rows = [
                group.create_task(ask(client, random.Random(row), config.model.vocab, reasons))
                for row in range(NUM_ROWS)
            ]
            await asyncio.sleep(WARM_SECONDS)
            step_ms = await time_steps(client, WARM_SECONDS)
            paths = []
            for _ in range(num_traces):
                await client.profile(starts=True)
                await asyncio.sleep(seconds)
                paths.append(Path(await client.profile(starts=False)))
                await asyncio.sleep(REST_SECONDS)
            if has_clock:
                paths = await find_written(paths, earlier, mesh_of(config).num_ranks)
            for row in rows:
                row.cancel()
    finally:
        client.close("it is over")
        engine.end()
    return paths, {"ended_by": dict(reasons), "ms_a_step_without_profiler": step_ms}


async def find_written(firsts: Sequence[Path], earlier: Set[Path], num_ranks: int) -> list[Path]:
    """Wait for the files that all ranks write. firsts: those of the first rank. earlier: what was there before"""
    async with asyncio.timeout(WRITE_SECONDS):
        while len(found := {*firsts[0].parents[1].glob(CLOCK_FILES)} - earlier) < num_ranks * len(firsts):
            await asyncio.sleep(LOOK_SECONDS)
    return sorted(found)


async def ask(client: EngineClient, chance: random.Random, vocab: int, reasons: Counter[str]) -> None:
    """Run one client: one request after the other."""
    for number in itertools.count():
        prompt = [chance.randrange(vocab) for _ in range(chance.randint(16, 256))]
        stops = [STOP] if chance.random() < 0.5 else None
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=chance.randint(100, 600), stop_strings=stops)
        num_left = chance.randint(1, 300) if chance.random() < 0.1 else params.max_tokens + 1  # until it leaves
        stream = client.submit([prompt], [params], id=f"{id(chance)}-{number}")
        while not stream.is_done:
            outputs = await stream.next()
            reasons.update(output.finish.reason for output in outputs if output.finish is not None)
            num_left -= sum(len(output.tokens) for output in outputs)
            if num_left <= 0 and not stream.is_done:
                client.abort(stream)
                reasons["abort"] += 1
                break
            await asyncio.sleep(LOOK_SECONDS)


async def time_steps(client: EngineClient, seconds: float) -> float:
    """Milliseconds per step, from the counts of two heartbeats."""

    async def next_beat() -> tuple[float, int]:
        before = client.stats
        while client.stats is before:
            await asyncio.sleep(LOOK_SECONDS)
        return asyncio.get_running_loop().time(), client.stats.scheduler.num_steps

    start, num_before = await next_beat()
    await asyncio.sleep(seconds)
    end, num_after = await next_beat()
    return (end - start) / (num_after - num_before) * 1e3


def read_trace(path: Path) -> dict[str, Any]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return json.load(file)  # type: ignore[no-any-return]


def read_steps(trace: Mapping[str, Any]) -> list[Step]:
    """The complete steps of a Chrome trace that follow another step that drew tokens."""
    events = [read_event(event) for event in trace["traceEvents"] if event.get("cat") in ON_DEVICE]
    steps: list[Step] = []
    first: Event | None = None  # of the step that has begun
    last: Event | None = None  # of the step before, where that drew tokens
    since: list[Event] = []  # what ran since its last kernel
    gap, has_prompts = None, False
    for event in sorted(events, key=lambda event: event.start):
        if event.name == FIRST:
            gap = measure_gap(last, since, event) if last is not None else None
            first, last, has_prompts = event, None, False
        elif event.name == OF_PROMPTS:
            has_prompts = True
        elif event.name == LAST:
            if first is not None and gap is not None:
                steps.append(Step(first.start, event.stop - first.start, *gap, has_prompts))
            first, last, since = None, event if first is not None else None, []
        elif last is not None:
            since.append(event)
    return steps


def read_stamps(stamps: Sequence[tuple[int, int]]) -> list[Step]:
    """The same steps, of the times in nanoseconds at which a GPU read its clock, and what it was about to do."""
    steps: list[Step] = []
    start: float | None = None  # of the step that has begun
    drawn: float | None = None  # when the step before had drawn its tokens, where it did
    tables: float | None = None  # when the copy of tables since began
    gap, copying, has_prompts = None, 0.0, False
    for now, kind in ((nanoseconds / 1e3, kind) for nanoseconds, kind in stamps):
        match Stamp(kind):
            case Stamp.TABLES:
                tables = now
            case Stamp.COPIED:
                copying = 0.0 if tables is None else now - tables
            case Stamp.DECODES | Stamp.PROMPTS:
                gap = None if drawn is None else (now - drawn - copying, (tables or now) - drawn, now - drawn)
                start, drawn, tables, copying, has_prompts = now, None, None, 0.0, kind == Stamp.PROMPTS
            case Stamp.DRAWN:
                if start is not None and gap is not None:
                    steps.append(Step(start, now - start, *gap, has_prompts))
                start, drawn, gap = None, now if start is not None else None, None
    return steps


def measure_gap(last: Event, between: Sequence[Event], first: Event) -> tuple[float, float, float]:
    """µs when nothing ran between two kernels, in all and up to the first activity; and from the one to the other."""
    end, waits = last.stop, []
    for event in (*between, first):
        waits.append(max(event.start - end, 0.0))
        end = max(end, event.stop)
    return sum(waits), waits[0], max(first.start - last.stop, 0.0)


def measure_ranks(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Summarize the traces of each rank, by the name of the folder that they are in."""
    ranks: dict[str, dict[str, Any]] = {}
    by_folder = attrgetter("parent.name")
    for name, files in itertools.groupby(sorted(paths, key=by_folder), by_folder):
        traces = [read_trace(path) for path in files]
        steps = [read_stamps(each["stamps"]) if "stamps" in each else read_steps(each) for each in traces]
        ranks[name] = measure(steps)
        if floors := [each["floor_us"] for each in traces if "floor_us" in each]:
            ranks[name]["floor_us"] = float(numpy.median(floors))
    return ranks


def measure(traced: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Summarize all traces: the steps, and the gaps before steps of only decodes, in µs."""
    steps = [step for trace in traced for step in trace]
    decodes = [step for step in steps if not step.has_prompts]
    summary: dict[str, Any] = {"num_steps": len(steps), "num_decode_steps": len(decodes), "gaps_us": {}}
    taken = [after.start - before.start for trace in traced for before, after in itertools.pairwise(trace)]
    if taken:
        summary["ms_a_step"] = float(numpy.mean(taken)) / 1e3
        summary["ms_within_steps"] = float(numpy.mean([step.span for step in steps])) / 1e3
    for name in ("idle", "before_others", "whole") if decodes else ():
        values = numpy.array([getattr(step, name) for step in decodes])
        percentiles = numpy.percentile(values, (50, 90, 99))
        summary["gaps_us"][name] = dict(zip(("median", "p90", "p99"), map(float, percentiles), strict=True))
        summary["gaps_us"][name]["max"] = float(values.max())
    return summary


def find_missed(summary: Mapping[str, Any]) -> list[str]:
    """The missed bounds, in words."""
    idle, reasons = summary["gaps_us"].get("idle", {}), summary.get("ended_by")
    bounds = {
        f"{MIN_STEPS} steps of only decodes are traced": summary["num_decode_steps"] >= MIN_STEPS,
        f"the median of the gaps is under {MAX_MEDIAN:g} µs": idle.get("median", MAX_MEDIAN) < MAX_MEDIAN,
        f"their p99 is under {MAX_P99:g} µs": idle.get("p99", MAX_P99) < MAX_P99,
        f"requests end by {', '.join(REASONS)}": reasons is None or all(reasons.get(each) for each in REASONS),
    }
    return [bound for bound, holds in bounds.items() if not holds]


def describe(name: str, summary: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: steps {summary['num_steps']:,}, of only decodes {summary['num_decode_steps']:,}"]
    for time, what in TIMES.items():
        if time in summary:
            lines.append(f"{what}: {summary[time]:.3f} ms")
    if "ended_by" in summary:
        lines.append("ended by " + ", ".join(f"{reason} {count}" for reason, count in summary["ended_by"].items()))
    for way, gaps in summary["gaps_us"].items():
        values = ", ".join(f"{each} {value:.1f}" for each, value in gaps.items())
        lines.append(f"gap before a step of decodes, µs, {way.replace('_', ' ')}: {values}")
    if "floor_us" in summary:
        lines.append(f"floor, µs: {summary['floor_us']:.1f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

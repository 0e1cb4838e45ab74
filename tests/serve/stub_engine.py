"""A server whose engine computes nothing: it emits tokens on schedule, and can fail on demand.

    python tests/serve/stub_engine.py '{"step_seconds": 0.02}' checkpoint=FOLDER serve.http.port=0

Only the engine is a stub: it runs in atom.serve.engine.worker, with the real protocol, HTTP server and processes. A
prompt may steer it: token 1 in front makes each step raise that this request is in, 2 computes in Python for 10 s, 3
for 10 s in C without the interpreter's lock, 4 lacks memory, 5 ends the process, 6 cannot be prepared, 7 sleeps with
the lock held, 8 computes with it held.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.checkpoint import Progress
from atom.errors import CapacityError, RequestError, WeightsIncompleteError
from atom.runtime.metrics import EngineStats, SchedulerStats
from atom.runtime.types import Logprobs, RequestOptions, RequestOutput, Sequence, StreamCallback
from atom.sampling_params import SamplingParams
from atom.serve.engine.frames import Start

if TYPE_CHECKING:
    from atom.runtime.engine import Engine  # which imports torch

BLOCK = 16  # tokens
NUM_BLOCKS = 100_000
LONG_SECONDS = 10.0  # of a step that takes long
PREPARE_SECONDS = 600.0  # in which a request has to be prepared, on a busy machine too
TICK_SECONDS = 0.005  # between two looks at the event loop
RAISES, IN_PYTHON, IN_C, NO_MEMORY, EXITS, UNPREPARED, SLEEPS_LOCKED, SPINS_LOCKED = range(
    1, 9
)  # the first token of a prompt


@dataclass
class Options:
    step_seconds: float = 0.01  # between two steps
    load_seconds: float = 0.0
    load_hangs: bool = False  # it sleeps then, with the interpreter's lock held
    prefill_seconds: float = 0.0  # from admission to the first token
    hold_seconds: float = 0.0  # for which a step holds the interpreter's lock, where a prompt has it do so
    max_running: int = 1 << 30  # sequences; more wait
    clock: bool = False  # the text of a token is the time when it was emitted, in seconds
    no_memory: bool = False  # to load
    has_child: bool = False  # it has started a process, as for compiling
    prints: list[str] = field(default_factory=list)  # lines to stderr, past all that Python knows
    names: bool = False  # the text of a token is the number of the replica
    caches: bool = False  # it reports prefix hits, as an engine that evicts nothing
    profiles: bool = False  # it has a profiler
    breaks_profiler: bool = False  # which fails in a way that nobody has foreseen
    broken: list[int] = field(default_factory=list)  # replicas that fail at every start
    gate: str | None = None  # a file: no step ends until it is there
    max_log: int = 4 << 20  # bytes of lines of the log that are not written yet
    pause_seconds: float = 1.0  # before the server starts a dead replica again
    dead_seconds: float = 5.0  # for which the server reports that its engines are dead
    holds: str | None = None  # a file: how long the HTTP process's event loop was held, a line for each time
    write_seconds: float | None = None  # no stub: a real engine that takes so long to write a block of KV to a file
    breaks: list[str] | None = None  # no stub: real engines, of which the first fails once in these steps of a sleep


@dataclass
class StubEngine:
    options: Options
    replica: int = 0
    is_profiling: bool = False
    is_sleeping: bool = False
    is_paused: bool = False
    is_updating: bool = False
    weight_version: str = "default"
    weights_fault: str = ""
    cached: set[tuple[int, ...]] = field(default_factory=set)  # beginnings of prompts, in whole blocks
    waiting: dict[str, Sequence] = field(default_factory=dict)  # by id
    running: dict[str, Sequence] = field(default_factory=dict)
    callbacks: dict[str, StreamCallback] = field(default_factory=dict)
    num_steps: int = 0
    due: float = 0.0  # when the next step is
    stepping: list[Sequence] = field(default_factory=list)  # what the last step was about

    @property
    def stopped_ranks(self) -> list[int]:
        return []

    @property
    def grammars(self) -> StubEngine:
        return self

    def try_open(self) -> None:
        """It has none."""

    def watch(self, callback: Callable[[Exception], object]) -> None:
        """It has no ranks that could die."""

    def close(self) -> None:
        """It has no ranks to end, and keeps nothing."""

    def stop_keeping(self) -> None:
        """It keeps nothing."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running) and not self.is_paused

    def prepare(
        self,
        prompt: list[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
    ) -> list[Sequence]:
        if prompt[0] == UNPREPARED:
            raise KeyError("a fault")
        if len(prompt) > 8192:
            raise RequestError("too long for the stub")
        return [
            Sequence(
                f"{request_id}-{index}",
                prompt,
                params,
                request_id=request_id,
                index=index,
                priority=options.priority,
                tenant=options.tenant,
                weight=options.weight,
            )
            for index in range(params.n)
        ]

    def submit(self, sequences: list[Sequence], callback: StreamCallback) -> None:
        if not self.has_work:
            self.due = time.perf_counter()
        self.callbacks[sequences[0].request_id] = callback
        self.waiting |= {each.id: each for each in sequences}

    def abort(self, request_id: str) -> None:
        self.callbacks.pop(request_id, None)
        index = 0
        while self.waiting.pop(id := f"{request_id}-{index}", None) or self.running.pop(id, None):
            index += 1

    def step(self, tell_plan: Callable[[], object]) -> None:
        while self.waiting and len(self.running) < self.options.max_running:
            sequence = self.waiting.pop(next(iter(self.waiting)))
            sequence.admitted_at = time.perf_counter()
            if self.options.caches:
                self._look_up(sequence)
            self.running[sequence.id] = sequence
        tell_plan()
        self.due = max(self.due + self.options.step_seconds, time.perf_counter() - 1)  # it catches up, but not for ever
        time.sleep(max(0.0, self.due - time.perf_counter()))
        while self.options.gate is not None and not Path(self.options.gate).exists():
            time.sleep(0.01)
        self.num_steps += 1
        self.stepping = list(self.running.values())
        now = time.perf_counter()
        for sequence in self.stepping:
            self._obey(sequence.prompt[0])
        text = f"{time.monotonic():.6f} " if self.options.clock else "word "
        text = f"{self.replica} " if self.options.names else text
        for sequence in self.stepping:
            assert sequence.admitted_at is not None
            if now - sequence.admitted_at >= self.options.prefill_seconds:
                self._emit(sequence, text)

    def _look_up(self, sequence: Sequence) -> None:
        beginnings = [tuple(sequence.prompt[:stop]) for stop in range(BLOCK, len(sequence.prompt), BLOCK)]
        sequence.num_cached = BLOCK * sum(each in self.cached for each in beginnings)
        self.cached |= set(beginnings)

    def _obey(self, token: int) -> None:
        if token == RAISES:
            raise ArithmeticError("a fault")
        if token == NO_MEMORY:
            raise CapacityError("no memory is left; lower serve.kv_cache_memory")
        if token == EXITS:
            os._exit(9)
        if token in (IN_PYTHON, IN_C) and self.num_steps > 1:
            end = time.monotonic() + LONG_SECONDS
            if token == IN_C:
                time.sleep(LONG_SECONDS)
            while time.monotonic() < end:
                pass
            self.stepping[0].prompt[0] = 0
        if token in (SLEEPS_LOCKED, SPINS_LOCKED) and self.num_steps > 1:
            self.stepping[0].prompt[0] = 0
            hold_lock(self.options.hold_seconds, spins=token == SPINS_LOCKED)

    def _emit(self, sequence: Sequence, text: str) -> None:
        sequence.output.append(7)
        params = sequence.params
        logprobs = [] if params.logprobs is None else [score(params.logprobs)]
        is_last = len(sequence.output) >= sequence.params.max_tokens
        if is_last:
            if params.prompt_logprobs is not None:
                sequence.prompt_logprobs = [None, *([score(params.prompt_logprobs)] * (len(sequence.prompt) - 1))]
            sequence.finish_reason, sequence.finished_at = "max_tokens", time.perf_counter()
            del self.running[sequence.id]
        reason = sequence.finish_reason
        output = RequestOutput(sequence.request_id, sequence.index, text, [7], reason, is_last, logprobs, sequence)
        self.callbacks[sequence.request_id](output)

    def end_failed(self) -> None:
        for sequence in self.stepping:
            sequence.finish_reason, sequence.finished_at = "error", time.perf_counter()
            output = RequestOutput(sequence.request_id, sequence.index, "", [], "error", True, [], sequence)
            self.callbacks[sequence.request_id](output)
            self.running.pop(sequence.id, None)

    def sleep(self, level: int, mode: str, on_step: object) -> None:
        raise RequestError("a stub cannot sleep")

    def wake_up(self, tags: list[str] | None) -> None:
        raise RequestError("a stub cannot sleep")

    def pause(self, mode: str, *, clear_cache: bool = True, on_step: object = None) -> None:
        """Keep all requests, whatever the mode."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def set_weight_version(self, version: str, on_step: object) -> None:
        self.weight_version = version

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Name the weights by the engine's first rank."""
        self.weight_version = f"rank {info['rank_offset']}"

    def start_weight_update(self, on_step: object) -> None:
        raise RequestError("a stub's weights have no parts")

    def finish_weight_update(self, version: str | None, *, keep_cache: bool) -> None:
        raise RequestError("a stub's weights have no parts")

    def update_weights(self, info: dict[str, Any], *, keep_cache: bool, on_step: object) -> None:
        """Fail half-way in the replicas whose numbers are among the names, and as a whole for the name `nobody`."""
        if info["names"][0] in ("nobody", f"not of {self.replica}"):
            raise RequestError(f"there is no tensor {info['names'][0]}")
        self.weights_fault = "an update has failed half-way" if str(self.replica) in info["names"] else ""
        if self.weights_fault:
            raise WeightsIncompleteError(self.weights_fault)

    def start_profile(self) -> None:
        if self.options.breaks_profiler:
            raise RuntimeError("a fault")
        if not self.options.profiles or self.is_profiling:
            raise RequestError("a stub has no profiler")
        self.is_profiling = True

    def stop_profile(self) -> str:
        if not self.is_profiling:
            raise RequestError("a stub has no profiler")
        self.is_profiling = False
        return f"trace of {self.replica}"

    @property
    def num_waiting(self) -> dict[str, int]:
        return Counter(each.tenant for each in list(self.waiting.values()))

    def stats(self) -> EngineStats:
        used = sum(-(-each.num_tokens // BLOCK) for each in list(self.running.values()))
        counts = {"num_running": len(self.running), "num_waiting": len(self.waiting)}
        counts |= {"num_blocks": NUM_BLOCKS, "num_blocks_used": used}
        return EngineStats(SchedulerStats(self.num_steps), **counts)


def score(num_top: int) -> Logprobs:
    return Logprobs(7, -1.0, 1, [(token, -1.0) for token in range(num_top)])


def hold_lock(seconds: float, *, spins: bool) -> None:
    """Let no other thread of this process run: in C, or computing in Python."""
    if not spins:
        ctypes.PyDLL(None).usleep(round(seconds * 1e6))
        return
    before, end = sys.getswitchinterval(), time.monotonic() + seconds
    sys.setswitchinterval(1000.0)
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(before)


async def watch_loop(path: str) -> None:
    """Write how long the loop stood still, in seconds: no longer than this process computed, as others compute too."""
    with Path(path).open("a") as file:
        while True:
            wall, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_SECONDS)
            held = min(time.perf_counter() - wall, time.process_time() - computed)
            if held > 2 * TICK_SECONDS:
                print(held, file=file, flush=True)


def open_stub(options: Options, progress: Progress, replica: int = 0) -> StubEngine:
    for line in options.prints:
        os.write(2, f"{line}\n".encode())
    if options.has_child:
        subprocess.Popen(["sleep", "1000"])
    if options.no_memory or replica in options.broken:
        raise CapacityError("the KV pool needs 9 GiB and 1 GiB is there; lower serve.kv_cache_memory")
    end = time.monotonic() + options.load_seconds
    with progress.task("loading nothing", 100) as task:
        task.advance(40)
        while time.monotonic() < end:
            time.sleep(min(0.05, options.load_seconds))
        if options.load_hangs:
            hold_lock(1000.0, spins=False)
    return StubEngine(options, replica)


def slow_down(write_seconds: float) -> None:
    """Have a real engine take so long to write a block to a file, and think that it computes a token in a second."""
    import atom.assemble.runner
    from atom.runtime.kv.files import Block, KVFiles
    from atom.runtime.types import SwapCosts

    atom.assemble.runner.measure_swap = lambda *_: SwapCosts(0.0, 0.0, 1.0)
    write = KVFiles._write

    def write_slowly(self: KVFiles, block: Block) -> None:
        time.sleep(write_seconds)
        write(self, block)

    KVFiles._write = write_slowly  # type: ignore[method-assign]


def break_once(name: str) -> None:
    """Have a method of a sleeper's raise when it is called first."""
    from atom.runtime.sleep import CPUSleeper

    method = getattr(CPUSleeper, name)

    def fail(self: CPUSleeper) -> None:
        setattr(CPUSleeper, name, method)
        raise RuntimeError("a fault")

    setattr(CPUSleeper, name, fail)


def open_breaking(names: list[str], start: Start, progress: Progress) -> Engine:
    from atom.serve.engine import worker

    for name in names if start.replica == 0 else ():
        break_once(name)
    return worker.open_real(start, progress)


def main() -> int:
    encoded, *rest = sys.argv[1:]
    options = Options(**json.loads(encoded))
    if rest[0] == "--engine":
        from atom.serve.engine import worker

        if options.write_seconds is not None:
            slow_down(options.write_seconds)
            return worker.main()
        if options.breaks is not None:
            return worker.main(functools.partial(open_breaking, options.breaks))
        return worker.main(lambda start, progress: open_stub(options, progress, start.replica))
    from atom.config.load import load, load_models  # which an engine's process does without
    from atom.jobs.report import report
    from atom.serve import context, server
    from atom.serve.engine import replica
    from atom.serve.ops import log

    config = load(rest)
    replica.PAUSE_SECONDS = options.pause_seconds
    log.MAX_WAITING = options.max_log
    context.TEMPLATE_SECONDS = PREPARE_SECONDS
    server.DEAD_SECONDS = options.dead_seconds

    async def serve() -> int:
        watching = asyncio.create_task(watch_loop(options.holds)) if options.holds else None  # noqa: F841 (it must stay)
        command, others = (sys.executable, str(Path(__file__)), encoded, "--engine"), load_models(config)[1:]
        return await server.Server(config, command, others=others).run()

    return report(lambda: server.run_loop(serve, config.serve.http))


if __name__ == "__main__":
    sys.exit(main())

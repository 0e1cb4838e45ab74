"""Ranks as threads of this process, in place of processes: they meet in memory for each collective.

with thread_ranks(monkeypatch):
    engine = LLMEngine(model=…, tensor_parallel_size=2)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest
from torch import Tensor

from atom import build
from atom.checkpoint import SilentProgress
from atom.compiler import mesh_of
from atom.config import Config
from atom.graph import ops
from atom.runtime.step_input import StepInput


class Meeting:
    """A collective in memory: each rank brings its tensor and waits for the others."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.brought = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks
        self.num_collectives = 0

    def meet(self, rank: int, x: Tensor, join: Callable[[Sequence[Any]], Tensor]) -> Tensor:
        self.brought[rank] = x
        self.barrier.wait()
        joined = join(self.brought)
        self.num_collectives += rank == 0
        self.barrier.wait()
        return joined


class ThreadCommunicator:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meet = partial(meeting.meet, rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._meet(x, ops.all_reduce)

    def all_gather(self, x: Tensor, *, size: int) -> Tensor:
        return self._meet(x, partial(ops.all_gather, size=size))

    def watch(self, check: object) -> None: ...


class ThreadRanks:
    def __init__(self, config: Config) -> None:
        num_ranks = mesh_of(config).num_ranks
        self.meeting, self.config = Meeting(num_ranks), config
        self.steps: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(1, num_ranks)]
        self.threads = [
            threading.Thread(target=self._run, args=(rank, steps), daemon=True)
            for rank, steps in enumerate(self.steps, 1)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int, steps: queue.SimpleQueue[bytes | None]) -> None:
        try:
            config, progress = self.config, SilentProgress()
            with ExitStack() as opened:
                checkpoint = build.open_checked(config, progress, opened)
                compiled = build.compile_with(config, progress, checkpoint)
                tensors = build.load_weights(compiled.graph, checkpoint, config, progress, rank)
            communicator = ThreadCommunicator(self.meeting, rank)
            runner, _ = build.open_runner(compiled, tensors, config, progress, communicator=communicator)
            while (step := steps.get()) is not None:
                runner.execute(msgspec.msgpack.decode(step, type=StepInput)).wait()
        except BaseException:
            self.meeting.barrier.abort()
            raise

    def tell(self, step: bytes) -> None:
        for steps in self.steps:
            steps.put(step)

    def wait(self) -> None: ...

    def watch(self, callback: object) -> None: ...

    def limit_silence(self, seconds: float) -> None: ...

    def await_fault(self, seconds: float) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def close(self) -> None:
        for steps, thread in zip(self.steps, self.threads, strict=True):
            steps.put(None)
            thread.join()


@pytest.fixture
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> list[ThreadRanks]:
    """Have engines of several ranks run them as threads; those that were made."""
    made: list[ThreadRanks] = []

    def start(config: Config, compiled: object, started: ExitStack) -> ThreadRanks | None:
        if mesh_of(config).num_ranks == 1:
            return None
        made.append(ThreadRanks(config))
        return made[-1]

    monkeypatch.setattr(build, "start_ranks", start)
    monkeypatch.setattr(build, "connect", lambda ranks, *_: ThreadCommunicator(ranks.meeting, 0))
    return made

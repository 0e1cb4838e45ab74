"""Ranks as threads of this process, in place of processes: they meet in memory for each collective.

with thread_ranks(monkeypatch):
    engine = LLMEngine(model=…, tensor_parallel_size=2)
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest
from torch import Tensor

from atom import assemble
from atom.assemble import engine
from atom.assemble.rank_process import Rank
from atom.checkpoint import SilentProgress
from atom.compiler import mesh_of
from atom.config import Config
from atom.graph import TORCH_DTYPES, Mesh, ops
from atom.runtime.kv.scales import KVScales, ScalePlan
from atom.runtime.profiler import Profiler


class Meeting:
    """A collective in memory: each rank brings its tensors and waits for the others."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.barrier, self.brought = threading.Barrier(mesh.num_ranks, timeout=60), [()] * mesh.num_ranks
        self.stages = [threading.Barrier(mesh.ranks_per_stage, timeout=60) for _ in range(mesh.pipeline)]
        pairs = itertools.product(range(mesh.num_ranks), repeat=2)
        self.sent: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {pair: queue.SimpleQueue() for pair in pairs}
        self.num_collectives = 0

    def meet(self, rank: int, op: ops.Op, *tensors: Tensor, axis: str, **attributes: Any) -> Any:
        peers = self.mesh.peers(rank, axis)
        self.num_collectives += rank == 0
        if op is ops.send:
            self.sent[rank, peers[attributes["to"]]].put(*tensors)
            return op(*tensors, axis=axis, **attributes)
        if op is ops.receive:
            sent = self.sent[peers[attributes["source"]], rank].get(timeout=60)
            assert sent.shape == (len(tensors[0]), *ops.row_shape(attributes["columns"]))
            assert sent.dtype == TORCH_DTYPES[attributes["dtype"]]
            return op(sent, axis=axis, **attributes)
        barrier = self.stages[self.mesh.stage(rank)]
        self.brought[rank] = tensors
        barrier.wait()
        met = zip(*(self.brought[peer] for peer in peers), strict=True)
        result = op(*met, axis=axis, **attributes)[peers.index(rank)]
        barrier.wait()
        return result

    def exchange(self, rank: int, own: bytes) -> list[bytes]:
        self.brought[rank] = own
        self.barrier.wait()
        every = [*self.brought]
        self.barrier.wait()
        return every


class ThreadCommunicator:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meet = partial(meeting.meet, rank)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._meet, ops.OPS[name])

    def watch(self, check: object) -> None: ...

    def abort(self) -> None: ...


class ThreadRanks:
    def __init__(self, config: Config) -> None:
        mesh = mesh_of(config)
        self.meeting, self.config = Meeting(mesh), config
        self.steps: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(1, mesh.num_ranks)]
        self.answers: dict[int, queue.SimpleQueue[bytes]] = {
            rank: queue.SimpleQueue() for rank in mesh.reporters(has_taps=bool(config.passes.taps))
        }
        self.refusals: list[queue.SimpleQueue[str]] = [queue.SimpleQueue() for _ in self.steps]
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
                checkpoint = assemble.open_checked(config, progress, opened)
                compiled = assemble.compile_with(config, progress, checkpoint, self.meeting.mesh.stage(rank))
                tensors = assemble.load_weights(compiled.graph, checkpoint, config, progress, rank)
            adapters = assemble.open_adapters(compiled.graph, tensors, config.serve, self.meeting.mesh, rank)
            described = assemble.describe_rank(compiled.graph, tensors, adapters, config.serve.block_size)
            described = self.meeting.exchange(rank, described)
            kinds_of = [stage.kinds for stage in assemble.compare_ranks(described, self.meeting.mesh)]
            plan = msgspec.msgpack.decode(self.meeting.exchange(rank, b"")[0], type=ScalePlan)
            communicator = ThreadCommunicator(self.meeting, rank)
            scales = KVScales(compiled.graph, tensors)
            measure = assemble.set_kv_scales(scales, plan, mesh_of(config), communicator)
            exchange = partial(self.meeting.exchange, rank)
            runner, _ = assemble.open_runner(
                compiled, tensors, config, progress, measure, communicator, kinds_of, exchange
            )
            assemble.gather_kv_scales(scales, exchange)
            self.refusals[rank - 1].put("")
            weights = assemble.open_rank_weights(compiled.graph, tensors, config, rank)
            own = Rank(runner, Profiler(None), adapters, weights, self.refusals[rank - 1].put)
            while (step := steps.get()) is not None:
                started = own.take(step)
                if rank in self.answers and started is not None:
                    self.answers[rank].put(msgspec.msgpack.encode(started.wait()))
        except BaseException:
            for barrier in (self.meeting.barrier, *self.meeting.stages):
                barrier.abort()
            raise

    def send(self, bodies: Sequence[bytes]) -> None:
        for steps, body in zip(self.steps, bodies, strict=True):
            steps.put(body)

    def receive(self, rank: int) -> bytes:
        return self.answers[rank].get(timeout=60)

    def exchange(self, own: bytes) -> list[bytes]:
        return self.meeting.exchange(0, own)

    def wait(self) -> list[str]:
        return list(filter(None, [refusals.get(timeout=60) for refusals in self.refusals]))

    def check(self) -> None: ...

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

    def start(config: Config, *_: object) -> ThreadRanks | None:
        if mesh_of(config).num_ranks == 1:
            return None
        made.append(ThreadRanks(config))
        return made[-1]

    monkeypatch.setattr(engine, "start_processes", lambda *_: [])
    monkeypatch.setattr(engine, "start_ranks", start)
    monkeypatch.setattr(engine, "connect", lambda ranks, *_: ThreadCommunicator(ranks.meeting, 0))
    return made

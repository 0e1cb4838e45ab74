"""Have ranks read their GPU's clock where steps begin and end.

    python -c "from scripts.gap_clock import serve; serve()" FD      # in place of python -m atom.serve.engine.worker FD

Kernels of one thread, in the CUDA graphs of the steps, write the times to a ring in the GPU's memory. The host launches
little more than otherwise, whereas torch's profiler slows down several ranks. What starts and stops the profiler starts
and stops a recording here, and each rank writes its own: `rank_0/steps.1716899120527.json` and so on.

On a CPU, where a step is over when the call that starts it returns, the host's clock is read.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from atom.kernels.triton.compile.jit import jit
from scripts.gap_stamps import Stamp

SIZE = 1 << 16  # times in the ring, of which a step takes four at most
NUM_FLOOR = 200  # graphs in a row
FLOOR_CYCLES = 50_000_000  # some 25 ms, in which the host launches these


@jit(do_not_specialize=["kind"])
def _stamp(ring, count, kind, SIZE: tl.constexpr):
    now = globaltimer()
    number = tl.load(count)
    place = ring + number % SIZE * 2
    tl.store(place, now)
    tl.store(place + 1, kind)
    tl.store(count, number + 1)


class StepClock:
    """The ring of a rank: i64[SIZE, 2], nanoseconds and a `Stamp`."""

    def open(self, device: torch.device) -> None:
        """Allocate the ring; on a GPU, capture the graph by which `measure_floor` measures."""
        self._ring = torch.zeros(SIZE, 2, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._first: torch.Tensor | None = None  # the count at `start`
        self._replay: Callable[[], object] = partial(self.stamp, Stamp.DRAWN)
        if not self._ring.is_cpu:
            self.stamp(Stamp.DRAWN)  # a first launch must not be in a graph
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.stamp(Stamp.DRAWN)
            self._replay = graph.replay

    @property
    def is_started(self) -> bool:
        return self._first is not None

    def stamp(self, kind: Stamp) -> None:
        """Write the time at which the GPU gets here."""
        if self._ring.is_cpu:
            self._ring[int(self._count) % SIZE] = torch.tensor([time.perf_counter_ns(), kind])
            self._count += 1
        else:
            _stamp[(1,)](self._ring, self._count, int(kind), SIZE=SIZE, num_warps=1)

    def start(self) -> None:
        """Start after the steps that were launched; the host does not wait."""
        self._first = self._count.clone()

    def stop(self) -> list[tuple[int, int]]:
        """The times since `start`, and what they are of; only the newest where the ring was too small."""
        assert self._first is not None, "it was started"
        first, end = int(self._first), int(self._count)
        self._first = None
        places = torch.arange(max(first, end - SIZE), end) % SIZE
        return [(now, kind) for now, kind in self._ring.cpu()[places].tolist()]

    def measure_floor(self) -> float:
        """The µs between two readings in two graphs in a row, which the host has launched long before."""
        self.start()
        if not self._ring.is_cpu:
            torch.cuda._sleep(FLOOR_CYCLES)
        for _ in range(NUM_FLOOR):
            self._replay()
        times = torch.tensor([now for now, _ in self.stop()])
        return float(times.diff().double().median()) / 1e3


def install() -> None:
    """Have the model and the profiler of this process, and of the ranks that it starts, use a clock.

    Comes before `atom.assemble` and `atom.assemble.rank_process` are imported, which take them from their modules.
    """
    from atom.runtime import profiler
    from atom.runtime.ranks import links as ranks
    from atom.runtime.step import model

    assert "atom.assemble" not in sys.modules, "it has the model and the profiler already"
    clock = StepClock()

    class ClockedModel(model.Model):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            clock.open(self.device)

        def decode(self, *args: Any) -> Any:
            clock.stamp(Stamp.DECODES)
            return super().decode(*args)

        def mix(self, *args: Any) -> Any:
            clock.stamp(Stamp.PROMPTS)
            return super().mix(*args)

        def extend_tables(self, *args: Any) -> None:
            clock.stamp(Stamp.TABLES)
            super().extend_tables(*args)
            clock.stamp(Stamp.COPIED)

        def sample(self, *args: Any, **options: Any) -> Any:
            drawn = super().sample(*args, **options)
            clock.stamp(Stamp.DRAWN)
            return drawn

    class ClockedProfiler(profiler.Profiler):
        @property
        def is_running(self) -> bool:
            return clock.is_started

        def start(self) -> None:
            clock.start()

        def stop(self) -> Path:
            assert self._folder is not None, "the script names one"
            stamps = clock.stop()
            body = json.dumps({"stamps": stamps, "floor_us": clock.measure_floor()})
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"steps.{time.time_ns()}.json"
            path.with_suffix(".part").write_text(body)
            return path.with_suffix(".part").rename(path)

    model.Model, profiler.Profiler = ClockedModel, ClockedProfiler
    installing = f"from {__name__} import install; install(); "
    ranks.RANK_ON_GPU = ranks.RANK_ON_GPU.replace(ranks.RANK, installing + ranks.RANK)
    ranks.RANK = installing + ranks.RANK


def serve() -> NoReturn:
    """Run the process of an engine whose ranks read their clocks; the last argument is its socket."""
    install()
    from atom.serve.engine.worker import import_engine, main

    sys.exit(main(prepare=import_engine))

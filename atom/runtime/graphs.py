"""Steps of a model as CUDA graphs: pure decodes by their number, small steps with prompts by their tokens.

    graphs = Graphs(model)
    graphs.compile(sizes, 16384)         # what these steps need of Triton, on all cores
    graphs.capture(sizes)
    step = graphs.decode(slots)          # padded up to the next size; None: too many
    step = graphs.mix(plan)

All graphs share one pool of memory and lay their results over each other: what a step gave is read before the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom.runtime.device_model import KINDS, DeviceModel
from atom.runtime.layout import Layout
from atom.runtime.types import Plan

PROMPT_TOKENS = (16, 32, 64, 128, 256, 512)  # of steps with prompts
PROMPT_ROWS = 65  # in them at most, one of padding included


@dataclass
class Step:
    """The rows of a step that sample: their slots i32[R], logits [R, V], and the captured ways to sample of them."""

    rows: Tensor
    logits: Tensor | None
    hidden: Tensor | None = None  # [T, H], of a step with prompts
    tails: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


@dataclass
class _Decodes:
    graph: torch.cuda.CUDAGraph
    step: Step
    slots: list[int] = field(default_factory=list)  # that its rows stand for now


@dataclass
class _Mixed:
    graph: torch.cuda.CUDAGraph
    packed: Tensor  # where the layout's numbers go
    step: Step


class Graphs:
    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._decodes: dict[int, _Decodes | None] = {}  # by their number, smallest first; None: not captured yet
        self._mixed: dict[Layout, _Mixed | None] = {}  # smallest first
        self._pool: Any = None
        self._stream: Any = None  # of all captures: memory of the pool is used again on one stream alone

    @property
    def sizes(self) -> list[int]:
        """The numbers of decodes for which there are graphs."""
        return list(self._decodes)

    def clear(self) -> None:
        self._decodes.clear()
        self._mixed.clear()
        self._pool = None

    def decode(self, slots: list[int]) -> Step | None:
        """Start the decodes of these slots; None where so many were not captured."""
        size = next((size for size in self._decodes if size >= len(slots)), None)
        if size is None:
            return None
        found = self._decodes[size] = self._decodes[size] or self._capture_decodes(size)
        if found.slots != slots:
            padding = [self._model.padding] * (len(found.step.rows) - len(slots))
            found.step.rows.copy_(self._model.send(np.array(slots + padding, np.int32)))
            found.slots = slots
        found.graph.replay()
        return found.step

    def mix(self, plan: Plan) -> Step | None:
        """Start a step with prompts; None where none of its size was captured."""
        asked = Layout.of(plan)
        layout = next((each for each in self._mixed if each.holds(asked)), None)
        if layout is None:
            return None
        found = self._mixed[layout] = self._mixed[layout] or self._capture_mixed(layout)
        found.packed.copy_(self._model.send(layout.pack(plan, self._model.padding)))
        found.graph.replay()
        return found.step

    def compile(self, sizes: Sequence[int], max_tokens: int) -> None:
        """Have Triton compile, on all cores, what steps of these numbers of decodes and of up to max_tokens need."""
        from atom.kernels.triton.driver import load_driver

        load_driver()
        slots, largest = self._model.slots.num_slots, max(sizes, default=1)
        place_of_padding = slots * self._model.tables.shape[2]
        longer = PROMPT_TOKENS[-1] + 1  # than what is captured: such steps may have kernels of their own
        shared: list[Callable[[], object]] = [
            lambda: self._rehearse_decodes(1),
            lambda: self.rehearse(min(PROMPT_TOKENS[-1], max_tokens), min(PROMPT_ROWS, slots, max_tokens)),
            lambda: self._model.extend_tables([place_of_padding], [0]),  # which is what stands there
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # Triton compiles without the interpreter's lock
            first = [pool.submit(rehearsal) for rehearsal in shared]
            launches = [launch for kind in KINDS[::-1] for launch in self._sampling_launches(kind)]
            alone: list[Future[Any]] = [pool.submit(launch) for launch in launches]
            for done in first:
                done.result()
            # what all steps share is there by now; kernels of decodes differ by the power of two that holds the rows
            alone.append(pool.submit(self.rehearse, min(longer, max_tokens), 1))
            powers = [1 << power for power in range(1, largest.bit_length()) if sizes]
            alone += [pool.submit(self._rehearse_decodes, size) for size in powers]
            for each in alone:
                each.result()

    @torch.inference_mode()
    def rehearse(self, num_tokens: int, num_rows: int) -> None:
        """A step of prompts, of padding alone: it takes the memory that such steps take."""
        model, layout = self._model, Layout(num_tokens, num_rows, num_rows)
        packed = model.send(layout.padding(model.padding))
        hidden, logits = model.mix(layout, packed, 0)
        del hidden
        assert logits is not None, "all rows sample"
        model.sample(layout.samples(packed)[0], logits.float(), KINDS[-1])

    @torch.inference_mode()
    def _rehearse_decodes(self, size: int) -> None:
        self._model.decode(self._model.send(np.full(size, self._model.padding, np.int32)))

    @torch.inference_mode()
    def _sampling_launches(self, kind: str) -> list[Callable[[], object]]:
        """Launches of the kernels that sample, those that take longest to compile first, on a row of padding."""
        from atom.kernels.triton.sampling import launches

        model = self._model
        rows = model.send(np.full(1, model.padding, np.int32))
        out = torch.empty(1, dtype=torch.int64, device=model.device)
        found: list[Callable[[], object]] = []
        for dtype in {model.logits_dtype, torch.float32}:
            logits = torch.zeros(1, model.slots.vocab, dtype=dtype, device=model.device)
            found += launches(logits, rows, model.slots, kind, out)[::-1]
        return found

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], is_lazy: bool = False) -> None:
        """Capture decodes of these numbers of rows, and steps with prompts; `compile` has been called with them.

        is_lazy: now only the largest of each, any other when it is first to run.
        """
        self.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        num_slots = self._model.slots.num_slots + 1
        counts = [(num, min(num + 1, num_slots, PROMPT_ROWS)) for num in PROMPT_TOKENS if sizes]
        self._decodes = dict.fromkeys(sorted(sizes))
        self._mixed = {Layout(num_tokens, num_rows, num_rows): None for num_tokens, num_rows in counts}
        # the smaller ones fit into the memory of the largest
        for size in list(self._decodes)[-1:] if is_lazy else list(self._decodes)[::-1]:
            self._decodes[size] = self._capture_decodes(size)
        for layout in list(self._mixed)[-1:] if is_lazy else list(self._mixed)[::-1]:
            self._mixed[layout] = self._capture_mixed(layout)

    @torch.inference_mode()
    def _capture_decodes(self, size: int) -> _Decodes:
        model = self._model
        self._rehearse_decodes(size)
        rows = torch.full((size,), model.padding, dtype=torch.int32, device=model.device)
        graph, logits = self._capture(lambda: model.decode(rows))
        return _Decodes(graph, self._step(rows, logits))

    @torch.inference_mode()
    def _capture_mixed(self, layout: Layout) -> _Mixed:
        model = self._model
        packed = torch.from_numpy(layout.padding(model.padding)).to(model.device)
        model.mix(layout, packed, 0)  # what a first launch makes for good shall not be a graph's
        graph, (hidden, logits) = self._capture(lambda: model.mix(layout, packed, 0))
        return _Mixed(graph, packed, self._step(layout.samples(packed)[0], logits, unowned(hidden)))

    def _step(self, rows: Tensor, logits: Tensor, hidden: Tensor | None = None) -> Step:
        """The step of a graph that has just been captured."""
        tails = {kind: self._capture(lambda kind=kind: self._model.sample(rows, logits, kind)) for kind in KINDS}  # type: ignore[misc]
        return Step(rows, unowned(logits), hidden, tails)

    def _capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of what a function starts on the device, and its results there."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph, result


def unowned(tensor: Tensor) -> Tensor:
    """The same memory without a hold on it, so that the next graph of the pool may lay its own over it."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())

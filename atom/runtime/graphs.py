"""Steps of a model as CUDA graphs: pure decodes by their number, small steps with prompts by their tokens.

    graphs = Graphs(model)
    graphs.compile(sizes, 16384)         # what steps of up to 16384 tokens need of Triton, on all cores
    graphs.capture(sizes)                # decodes of these numbers of rows, and small steps with prompts
    step = graphs.decode(slots)          # padded up to the next size; None: too many
    step = graphs.mix(plan)

All graphs share one pool of memory and lay their results over each other: what a step gave is read before the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom.runtime.device_model import KINDS, DeviceModel
from atom.runtime.layout import Layout
from atom.runtime.program import Hidden
from atom.runtime.types import Plan

PROMPT_TOKENS = (16, 32, 64, *range(128, 1025, 128))  # of steps with prompts
PROMPT_ROWS = 65  # in them at most, one of padding included
LONG = 4096  # tokens of a step than which longer ones have no kernels of their own


@dataclass
class Step:
    """The rows of a step that sample: their slots i32[R], logits [R, V], and the captured ways to sample of them."""

    rows: Tensor
    logits: Tensor | None
    hidden: Hidden | None = None  # of a step with prompts
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
        self._max_tokens = PROMPT_TOKENS[-1]  # of a step, as `compile` was told
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

    @torch.inference_mode()
    def compile(self, sizes: Sequence[int], max_tokens: int) -> None:
        """Have Triton compile, on all cores, what steps of up to max_tokens need, captured or not.

        sizes: those that `capture` is then called with
        """
        from atom.kernels.triton.ahead import compile_launches

        self._max_tokens = max_tokens
        model = self._model
        largest = max([*sizes, min(model.slots.num_slots, max_tokens)])
        # kernels of decodes differ by the power of two that holds the rows
        powers = {1 << power for power in range(largest.bit_length())}
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, compile_launches(pool):
            self._rehearse_mixed(Layout(min(max_tokens, LONG), 1, 1))  # what takes longest first: long prompts,
            self._sample_in_every_way()  # and sampling
            for layout in self._layouts():
                self._rehearse_mixed(layout)
            for size in sorted({*powers, largest}):
                self._rehearse_decodes(size)
            place_of_padding = model.padding * model.tables.shape[2]
            model.extend_tables([place_of_padding], [0])  # which is what stands there
        self._sample_in_every_way()  # launched: no kernel's first launch shall be a graph's

    def _layouts(self) -> list[Layout]:
        """Of the steps with prompts that are captured, smallest first; there is none of more tokens than can come."""
        most = min(self._max_tokens, PROMPT_TOKENS[-1])
        counts = [*(num for num in PROMPT_TOKENS if num < most), most]
        rows = [min(num + 1, self._model.slots.num_slots + 1, PROMPT_ROWS) for num in counts]
        return [Layout(num_tokens, num_rows, num_rows) for num_tokens, num_rows in zip(counts, rows, strict=True)]

    def _rehearse_decodes(self, size: int) -> None:
        self._model.decode(self._model.send(np.full(size, self._model.padding, np.int32)))

    def _rehearse_mixed(self, layout: Layout) -> None:
        self._model.mix(layout, self._model.send(layout.padding(self._model.padding)), 0)

    def _sample_in_every_way(self) -> None:
        """For a row of padding: with penalties, with what the host says, and as graphs do."""
        model = self._model
        rows = model.send(np.full(1, model.padding, np.int32))
        logits = torch.zeros(1, model.slots.vocab, dtype=model.logits_dtype, device=model.device)
        model.sample(rows, logits, KINDS[-1], penalties=True)
        for penalties in (True, False):
            model.sample(rows, logits.float(), KINDS[-1], penalties)
        for kind in KINDS[::-1]:
            model.sample(rows, logits, kind)
        first, total = torch.zeros(1, dtype=torch.int64, device=model.device), torch.zeros(1, device=model.device)
        model.score_drawn(logits, first, first, total, torch.zeros_like(total), first.int())

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], is_lazy: bool = False) -> None:
        """Capture decodes of these numbers of rows, and steps with prompts of up to the max_tokens of `compile`, which
        comes first.

        is_lazy: now only the largest of each, any other when it is first to run.
        """
        self.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._decodes = dict.fromkeys(sorted(sizes))
        self._mixed = dict.fromkeys(self._layouts() if sizes else ())
        # the smaller ones fit into the memory of the largest
        for size in list(self._decodes)[-1:] if is_lazy else list(self._decodes)[::-1]:
            self._decodes[size] = self._capture_decodes(size)
        for layout in list(self._mixed)[-1:] if is_lazy else list(self._mixed)[::-1]:
            self._mixed[layout] = self._capture_mixed(layout)

    @torch.inference_mode()
    def _capture_decodes(self, size: int) -> _Decodes:
        model = self._model
        self._rehearse_decodes(size)  # what a first launch makes for good shall not be a graph's
        rows = torch.full((size,), model.padding, dtype=torch.int32, device=model.device)
        graph, logits = self._capture(lambda: model.decode(rows))
        return _Decodes(graph, self._step(rows, logits))

    @torch.inference_mode()
    def _capture_mixed(self, layout: Layout) -> _Mixed:
        model = self._model
        self._rehearse_mixed(layout)
        packed = torch.from_numpy(layout.padding(model.padding)).to(model.device)
        graph, (hidden, logits) = self._capture(lambda: model.mix(layout, packed, 0))
        return _Mixed(graph, packed, self._step(layout.samples(packed)[0], logits, tuple(map(unowned, hidden))))

    def _step(self, rows: Tensor, logits: Tensor, hidden: Hidden | None = None) -> Step:
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
            except BaseException:
                with suppress(RuntimeError):  # a capture that failed says so again
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, result


def unowned(tensor: Tensor) -> Tensor:
    """The same memory without a hold on it, so that the next graph of the pool may lay its own over it."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())

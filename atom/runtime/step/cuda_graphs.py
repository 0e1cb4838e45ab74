"""Capture steps of a model as CUDA graphs, and replay them.

Pure decodes are captured by their number, steps with prompts by their tokens and decodes.

    graphs = Graphs(model)
    graphs.compile(sizes, 16384)         # kernels of steps of up to 16384 tokens, on all cores
    graphs.capture(sizes)                # decodes of these numbers of rows, and steps with prompts
    started = graphs.start(step)         # of a StepInput; None if its shape was not captured

The host takes as long to launch the kernels of a small step as those of a large one, and longer than a GPU takes to run
the small one. So steps with prompts are captured up to a size.

Decodes that share prefixes have other graphs, captured when they are first needed.

All graphs share one memory pool and overwrite each other's results: a step's results are read before the next step.
Stages of a pipeline that finish their steps later need only the shapes of these results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom.kernels import compile_launches
from atom.runtime.step.input import BatchShape, PackedRows, StepInput
from atom.runtime.step.model import Computed, Model
from atom.runtime.step.prefix_groups import packed_size
from atom.runtime.step.program import Hidden, score
from atom.sampling_params import SAMPLING_KINDS

PROMPT_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # of prompts in a step
PROMPT_ROWS = 65  # of prompts in a step, including one of padding: logits of all are computed and sampled
MIN_DECODES = 16  # in a step with prompts; then powers of two
MAX_FLOPS = 8e12  # of a step with prompts: a larger one runs longer than the host takes to launch its kernels
FREE_TOKENS = 256  # of a step with prompts, captured whatever it computes: reading the weights takes about as long
# tokens of a step: steps of more than SHORT share the kernels of a step of LONG, except kernels of experts, which
# differ by the rows of each expert
SHORT, LONG = 512, 4096


Drawn = tuple[Tensor, Tensor | None]  # tokens i64[draws, R], and the drafts of rows that have some


@dataclass
class Started:
    """The rows of a step that sample: their slots i32[R], logits [R, V], and the graphs that sample from these."""

    slots: Tensor
    logits: Tensor | None
    draft_logits: tuple[Tensor, ...] = ()  # [D, V] after the first drafts of the first rows, the second ones, …
    hidden: Hidden | None = None  # of a step with prompts
    max_accepted: Tensor | None = None  # i32[R], the drafts of each that may be accepted
    unscored: Hidden = ()  # what the head takes of these rows, if it has not run
    taps: Hidden = ()  # of each token, what the layers give that are tapped
    follow: Callable[[], object] = lambda: None  # runs what follows the sampling
    tails: dict[str, tuple[torch.cuda.CUDAGraph, Drawn]] = field(default_factory=dict)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    packed: Tensor  # the input buffer of the step's numbers
    started: Started
    sends: Sequence[Callable[[], object]] = ()  # of what it computes, to other stages of a pipeline
    sent: bytearray | None = None  # the present content of `packed`
    prefixes: Tensor | None = None  # the buffer of `StepInput.prefixes`; None: it reads none
    sent_prefixes: bytearray | None = None  # its present content


def begin(
    model: Model, computed: Computed, slots: Tensor, rows: PackedRows | None = None, max_accepted: Tensor | None = None
) -> Started:
    """The `Started` of what a model has computed.

    slots: i32[R], that sample
    rows: of a step with prompts; None: all rows are decodes
    max_accepted: i32[R], of decodes with drafts; None: they have none, or `rows` says it
    """
    if rows is not None:
        max_accepted = rows.max_accepted
    started = Started(
        slots, computed.logits, computed.draft_logits, None if rows is None else computed.hidden, max_accepted
    )
    started.unscored, started.taps = computed.unscored, computed.taps
    if model.has_draft_programs:
        started.follow = partial(model.follow, computed, slots, rows)
    return started


def draw(model: Model, started: Started, logits: Tensor, kind: str, penalties: bool = False) -> Drawn:
    """Sample rows that were started, also after their drafts. logits: [R, V], after the newest tokens"""
    slots = started.slots[: len(logits)]
    if started.max_accepted is None or not started.draft_logits:
        return model.sample(slots, logits, kind, penalties)[None], None
    others = [each[: len(logits)] for each in started.draft_logits]
    return model.verify(slots, started.max_accepted[: len(logits)], [logits, *others], kind, penalties)


class Graphs:
    def __init__(self, model: Model, flops: float | None = None) -> None:
        """flops: of a token in the pipeline stage with the most; None: in the model"""
        self._model, self._flops = model, flops
        self._decodes: dict[int, _Captured | None] = {}  # by their number, ascending; None: not captured yet
        self._drafts: dict[tuple[int, int], _Captured | None] = {}  # of decodes with drafts, by both numbers
        self._mixed: dict[BatchShape, _Captured | None] = {}  # ascending
        self._with_prefixes: dict[Any, _Captured | None] = {}  # by the keys of those without
        self._max_tokens = PROMPT_TOKENS[-1]  # of a step, as passed to `compile`
        self._sizes: Sequence[int] = ()  # numbers of decodes, as passed to `compile`
        self._pool: Any = None
        self._stream: Any = None  # of all captures: the pool reuses memory only within one stream

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured numbers of decodes, ascending."""
        return tuple(self._decodes)

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """The captured shapes of steps with prompts, ascending."""
        return tuple(self._mixed)

    @property
    def draft_sizes(self) -> tuple[tuple[int, int], ...]:
        """The captured numbers of decodes, and of drafts of each, ascending."""
        return tuple(self._drafts)

    def clear(self) -> None:
        self._decodes.clear()
        self._drafts.clear()
        self._mixed.clear()
        self._with_prefixes.clear()
        self._pool = None

    def start(self, step: StepInput) -> Started | None:
        """Start a step; None if its shape was not captured, or its tokens have images."""
        if step.image_rows:
            return None
        shape, size = step.shape, step.shape.num_rows
        if not step.is_decode:
            found = self._find(step, self._mixed, self._capture_mixed, shape)
        elif shape.num_drafts:
            found = self._find(step, self._drafts, self._capture_drafts, size, shape.num_drafts)
        else:
            found = self._find(step, self._decodes, self._capture_decodes, size)
        if found is None:
            return None
        if found.sent != step.packed:
            found.packed.copy_(self._model.send(step.packed))
            found.sent = step.packed
        if found.prefixes is not None and found.sent_prefixes != step.prefixes:
            found.prefixes.copy_(self._model.send(step.prefixes))
            found.sent_prefixes = step.prefixes
        found.graph.replay()
        for send in found.sends:
            send()
        if found.started.unscored:  # the next replay comes before this step samples
            return replace(found.started, slots=found.started.slots.clone())
        return found.started

    def _find(
        self, step: StepInput, captured: dict[Any, _Captured | None], capture: Callable[..., _Captured], *sizes: Any
    ) -> _Captured | None:
        """The graph of a step, captured now if that was deferred; None if its shape gets none."""
        key = sizes[0] if len(sizes) == 1 else sizes
        if key not in captured:
            return None
        if step.prefixes:
            captured, capture = self._with_prefixes, partial(capture, has_prefixes=True)
        found = captured[key] = captured.get(key) or capture(*sizes)
        return found

    @torch.inference_mode()
    def compile(self, sizes: Sequence[int], max_tokens: int) -> None:
        """Compile, on all cores, the kernels of steps of up to max_tokens, captured or not.

        sizes: those that `capture` is then called with
        """
        self._max_tokens, self._sizes = max_tokens, sizes
        draft_sizes = self._find_draft_sizes()
        model = self._model
        max_rows = min(max_tokens, model.state.num_slots)
        largest = max([*sizes, max_rows])
        # kernels of decodes differ by the power of two that holds the rows
        powers = {1 << power for power in range(largest.bit_length())}
        with (
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            compile_launches(model.device.type, pool),
            model.thinned(),
        ):
            # the slowest to compile first: long prompts, and sampling
            self._rehearse_mixed(BatchShape(min(max_tokens, LONG), 1, 1))
            self._sample_in_every_way()
            self._rehearse_mixed(BatchShape(max_tokens, max_rows, max_rows))  # with which memory is measured
            self._rehearse_images(BatchShape(min(max_tokens, LONG), 1, 1))
            self._rehearse_images(BatchShape(max_tokens, max_rows, max_rows))
            for shape in self._find_shapes():
                if not shape.num_decodes and shape.num_tokens <= SHORT:
                    self._rehearse_mixed(shape)
            for num_tokens in _doubled(2 * SHORT, max_tokens) if model.has_experts else ():
                self._rehearse_mixed(BatchShape(num_tokens, 1, 1))
            for size in sorted({*powers, largest}):
                self._rehearse_decodes(size)
                if model.prefix_rule and size > 1:
                    self._rehearse_decodes(size, self._pad_prefixes(size))
            fewest = {((size - 1).bit_length(), num_drafts): size for size, num_drafts in draft_sizes[::-1]}
            for (_, num_drafts), size in fewest.items():
                self._rehearse_drafts(size, num_drafts)
                if model.prefix_rule and size > 1:
                    self._rehearse_drafts(size, num_drafts, self._pad_prefixes(size))
            for num_drafts in range(1, 1 + model.num_drafts):  # fewer at the end of answers, not captured
                self._rehearse_mixed(BatchShape(3, 2, 2, 1).drafting(num_drafts))
                for size in {1, self._max_drafting_rows(num_drafts, largest)}:
                    self._rehearse_drafts(size, num_drafts)
            padding_entry = model.padding * model.tables.shape[2]
            model.extend_tables(bytearray(np.array([padding_entry, 0], np.int32)))  # which it already has
        self._sample_in_every_way()  # launched, since a kernel's first launch must not be in a graph

    def _find_shapes(self, is_likely: bool = False) -> list[BatchShape]:
        """The shapes of steps with prompts to capture, ascending; none is larger than a step can be.

        is_likely: as in `_choices`
        """
        num_slots = self._model.state.num_slots
        largest = max(FREE_TOKENS, int(MAX_FLOPS / (self._flops or self._model.flops_a_token)))
        shapes, fewer = [], -1  # fewer: decodes of the preceding shapes
        for num_decodes in (0, *_doubled(MIN_DECODES, num_slots)):
            num_left = num_slots - (fewer + 1)  # for prompts
            max_tokens = min(self._max_tokens - (fewer + 1), PROMPT_TOKENS[-1]) if num_left else 0
            for num_tokens in (*(num for num in PROMPT_TOKENS if num < max_tokens), max_tokens):
                if 0 <= num_tokens <= largest - num_decodes:
                    num_rows = num_decodes + min(num_tokens + 1, num_left + 1, PROMPT_ROWS)
                    plain = BatchShape(num_decodes + num_tokens, num_rows, num_rows, num_decodes)
                    choices = self._choices(fewer + 1, num_decodes, is_likely)
                    drafting = (plain.drafting(num_drafts) for num_drafts in choices)
                    shapes += [plain, *(shape for shape in drafting if shape.num_tokens <= largest)]
            fewer = num_decodes
        return sorted(shapes, key=lambda each: (each.num_tokens, each.num_rows))

    def _rehearse_decodes(self, size: int, prefixes: Tensor | None = None) -> None:
        slots = self._model.send(np.full(size, self._model.padding, np.int32))
        self._end_rehearsal(begin(self._model, self._model.decode(slots, prefixes), slots))

    def _find_draft_sizes(self, is_likely: bool = False) -> list[tuple[int, int]]:
        """The numbers of decodes, and of drafts of each, to capture. is_likely: as in `_choices`"""
        fewer, found = 0, list[tuple[int, int]]()
        for size in sorted(self._sizes):
            found += [(size, num_drafts) for num_drafts in self._choices(fewer + 1, size, is_likely)]
            fewer = size
        return found

    def _choices(self, first: int, last: int, is_likely: bool = False) -> list[int]:
        """The numbers of drafts that first to last decodes may have, ascending.

        Without a draft table this is one number, the one that the scheduler gives `first` decodes.

        is_likely: only the numbers that the table usually chooses
        """
        limits, num_drafts = self._model.limits, self._model.num_drafts
        if not num_drafts or not last:
            return []
        if (table := limits.draft_table) is None:
            choices = {min(num_drafts, limits.max_verified_tokens // max(first, 1) - 1)}
        else:
            find = table.likely if is_likely else table.choices
            choices = {each for num in range(max(first, 1), last + 1) for each in find(num)}
        return sorted(each for each in choices if each > 0)

    def _max_drafting_rows(self, num_drafts: int, largest: int) -> int:
        """The max number of decodes, up to `largest`, that may have this number of drafts each; 1 or more."""
        limits = self._model.limits
        return largest if limits.draft_table else max(min(largest, limits.max_verified_tokens // (1 + num_drafts)), 1)

    def _rehearse_drafts(self, size: int, num_drafts: int, prefixes: Tensor | None = None) -> None:
        slots, max_accepted = self._pad_drafts(size)
        begin(self._model, self._model.decode_drafts(slots, max_accepted, num_drafts, prefixes), slots).follow()

    def _pad_drafts(self, size: int) -> Tensor:
        """Slots and max_accepted i32[2, S] of padding."""
        return self._model.send(np.repeat(np.array([self._model.padding, 0], np.int32), size)).view(2, size)

    def _pad_prefixes(self, num_decodes: int) -> Tensor:
        """Of so many decodes, none of which is in a group."""
        return torch.zeros(packed_size(num_decodes), dtype=torch.int32, device=self._model.device)

    def _rehearse_mixed(self, shape: BatchShape, prefixes: Tensor | None = None) -> None:
        packed = self._model.send(shape.pad(self._model.padding))
        rows = shape.split(packed)
        self._end_rehearsal(begin(self._model, self._model.mix(shape, packed, prefixes), rows.sampled, rows))

    def _rehearse_images(self, shape: BatchShape) -> None:
        """Run a step with images, if its kernels differ from those of others."""
        if self._model.images is None or not self._model.images.has_ends:
            return
        packed, images = self._model.send(shape.pad(self._model.padding)), self._model.images.rehearse(shape.num_tokens)
        rows, computed = shape.split(packed), self._model.mix(shape, packed, images=images)
        self._end_rehearsal(begin(self._model, computed, rows.sampled, rows))

    def _end_rehearsal(self, started: Started) -> None:
        if started.unscored:  # the last stage has sent the logits
            score(self._model.head, started.unscored)
        started.follow()

    def _sample_in_every_way(self) -> None:
        """Sample a row of padding with penalties, with the host's logit processors, and as graphs do."""
        model = self._model
        slots = model.send(np.full(1, model.padding, np.int32))
        logits = torch.zeros(1, model.state.vocab, dtype=model.logits_dtype, device=model.device)
        model.sample(slots, logits, SAMPLING_KINDS[-1], penalties=True)
        for penalties in (True, False):
            model.sample(slots, logits.float(), SAMPLING_KINDS[-1], penalties)
        for kind in SAMPLING_KINDS[::-1]:
            model.sample(slots, logits, kind)
        if model.num_drafts:
            slots, max_accepted = self._pad_drafts(1)
            for num_drafts in sorted({model.num_drafts, *(each for _, each in self._find_draft_sizes())}):
                drafted = logits.new_zeros(1, 1 + num_drafts, model.state.vocab).unbind(1)  # not contiguous
                for kind in SAMPLING_KINDS:
                    model.verify(slots, max_accepted, drafted, kind)
                model.verify(slots, max_accepted, drafted, SAMPLING_KINDS[-1], penalties=True)
        first, total = torch.zeros(1, dtype=torch.int64, device=model.device), torch.zeros(1, device=model.device)
        model.score_drawn(logits, first, first, total, torch.zeros_like(total), first.int())

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], is_lazy: bool = False) -> None:
        """Capture decodes of these numbers of rows, and steps with prompts; `compile` comes first.

        Numbers of drafts that seldom pay are captured when they are first needed.

        is_lazy: so are all shapes except those that take the most memory
        """
        self.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._decodes = dict.fromkeys(sorted(sizes))
        self._drafts = dict.fromkeys(each for each in self._find_draft_sizes() if sizes and each[0] <= max(sizes))
        self._mixed = dict.fromkeys(self._find_shapes() if sizes else ())
        likely = {*self._find_draft_sizes(is_likely=True), *self._find_shapes(is_likely=True)}
        # the smaller ones fit into the memory of the largest
        for size in list(self._decodes)[-1:] if is_lazy else list(self._decodes)[::-1]:
            self._decodes[size] = self._capture_decodes(size)
        if sizes and self._model.prefix_rule:  # captured later, in memory that is measured now
            self._rehearse(self._rehearse_decodes, max(sizes), self._pad_prefixes(max(sizes)))
        by_tokens = sorted(self._drafts, key=lambda each: each[0] * (1 + each[1]), reverse=True)
        for drafting in by_tokens:
            if drafting == by_tokens[0] or (drafting in likely and not is_lazy):
                self._drafts[drafting] = self._capture_drafts(*drafting)
        largest = {max(self._mixed, key=of) for of in (_tokens_first, _rows_first)} if self._mixed else set()
        for shape in list(self._mixed)[::-1]:
            if shape in largest or (shape in likely and not is_lazy):
                self._mixed[shape] = self._capture_mixed(shape)

    def _rehearse(self, step: Callable[..., None], *sizes: Any) -> None:
        """Launch what a step to be captured launches: what a first launch allocates for good must not be in a graph."""
        with self._model.thinned():
            step(*sizes)

    @torch.inference_mode()
    def _capture_decodes(self, size: int, *, has_prefixes: bool = False) -> _Captured:
        model, prefixes = self._model, self._pad_prefixes(size) if has_prefixes else None
        self._rehearse(self._rehearse_decodes, size, prefixes)
        slots = torch.full((size,), model.padding, dtype=torch.int32, device=model.device)
        graph, computed = self._capture(lambda: model.decode(slots, prefixes))
        sends = self._take_sends()
        return _Captured(graph, slots, self._started(begin(model, computed, slots)), sends, prefixes=prefixes)

    @torch.inference_mode()
    def _capture_drafts(self, size: int, num_drafts: int, *, has_prefixes: bool = False) -> _Captured:
        model, prefixes = self._model, self._pad_prefixes(size) if has_prefixes else None
        self._rehearse(self._rehearse_drafts, size, num_drafts, prefixes)
        packed = self._pad_drafts(size).clone()
        slots, max_accepted = packed
        graph, computed = self._capture(lambda: model.decode_drafts(slots, max_accepted, num_drafts, prefixes))
        started = self._started(begin(model, computed, slots, max_accepted=max_accepted))
        return _Captured(graph, packed.view(-1), started, prefixes=prefixes)

    @torch.inference_mode()
    def _capture_mixed(self, shape: BatchShape, *, has_prefixes: bool = False) -> _Captured:
        model, prefixes = self._model, self._pad_prefixes(shape.num_decodes) if has_prefixes else None
        self._rehearse(self._rehearse_mixed, shape, prefixes)
        packed = torch.frombuffer(shape.pad(model.padding), dtype=torch.int32).to(model.device)
        graph, computed = self._capture(lambda: model.mix(shape, packed, prefixes))
        sends, rows = self._take_sends(), shape.split(packed)
        started = self._started(begin(model, computed, rows.sampled, rows))
        return _Captured(graph, packed, started, sends, prefixes=prefixes)

    def _take_sends(self) -> list[Callable[[], object]]:
        """The sends that the last capture has deferred."""
        communicator = self._model.communicator
        return [] if communicator is None else [partial(send, unowned(x)) for x, send in communicator.take_held()]

    def _started(self, started: Started) -> Started:
        """What the graph that has just been captured starts; also captures what follows it."""
        model, logits = self._model, started.logits
        if not started.unscored:  # otherwise what follows waits for another stage
            assert logits is not None, "each shape has rows that sample"
            started.tails = {
                kind: self._capture(partial(draw, model, started, logits, kind)) for kind in SAMPLING_KINDS
            }
            if model.has_draft_programs:
                started.follow = self._capture(started.follow)[0].replay
            started.logits = unowned(logits)
            started.draft_logits = tuple(map(unowned, started.draft_logits))
        started.hidden = started.hidden and tuple(map(unowned, started.hidden))
        started.unscored = tuple(map(unowned, started.unscored))
        started.taps = tuple(map(unowned, started.taps))
        return started

    def _capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture what a function launches: the graph, and the function's results on the device."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # a failed capture raises again here
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, result


_tokens_first, _rows_first = attrgetter("num_tokens", "num_rows"), attrgetter("num_rows", "num_tokens")


def _doubled(first: int, last: int) -> list[int]:
    """first, its doubles below last, and last, which may be smaller."""
    return [*(first << power for power in range(32) if first << power < last), last]


def unowned(tensor: Tensor) -> Tensor:
    """The same memory without owning it, so that the next graph of the pool may reuse it."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())

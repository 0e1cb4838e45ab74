"""Execute steps on a device: start now, wait at commit.

    runner = Runner(model)                  # of `atom.runtime.step.model`
    runner.graphs.capture([1, 2, 4, 8])     # on a GPU: pure decodes of these numbers of rows are one CUDA graph each
    pending = runner.execute(step)          # a StepInput
    sampled = pending.wait()

The host runs ahead of a GPU. On a CPU the step is complete when `execute` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atom.errors import CapacityError, EngineDeadError, is_out_of_memory
from atom.kernels.logprobs import top_logprobs
from atom.runtime.images.encoder import SentImages
from atom.runtime.kv.host_blocks import HostBlocks
from atom.runtime.step.cuda_graphs import Graphs, Started, begin, draw
from atom.runtime.step.input import NUM_REPORTED, BatchShape, Capacity, Encode, Scored, Shaping, StepInput, Tapped
from atom.runtime.step.model import Model
from atom.runtime.step.program import Hidden, rows_of, score
from atom.runtime.types import BlockCopies, Logprobs, Sampled
from atom.sampling_params import SAMPLING_KINDS

RUN_AHEAD = 2  # steps started after the one that is waited for: the host may take as long for a step as a GPU for two
POLL_SECONDS = 2e-5  # between two checks whether a step is over; the following steps keep the GPU busy
HEAD_ROWS = 256  # rows of a prompt whose logits are computed at a time


class Runner:
    def __init__(self, model: Model, run_ahead: int | None = None, flops: float | None = None) -> None:
        """
        run_ahead: steps to start after one that is not committed; None: by device
        flops: as in `Graphs`
        """
        self.model = model
        self.run_ahead = (0 if self.model.is_cpu else RUN_AHEAD) if run_ahead is None else run_ahead
        assert self.run_ahead < NUM_REPORTED, f"the host can read {NUM_REPORTED} tokens of a slot"
        self.graphs = Graphs(self.model, flops)
        self.host: HostBlocks | None = None  # the target of copied blocks, if any
        self._dead: EngineDeadError | None = None  # why no further step can be started

    @property
    def capacity(self) -> Capacity:
        model, graphs = self.model, self.graphs
        return Capacity(
            tuple(model.kinds),
            model.padding,
            model.tables.shape[2],
            model.state.vocab,
            graphs.sizes,
            graphs.shapes,
            model.num_drafts,
            graphs.draft_sizes,
            model.recurrent,
            model.limits.num_states,
            model.block_size,
            model.prefix_rule,
            model.num_scales,
            model.num_taps,
        )

    def bind(self, num_blocks: Mapping[str, int]) -> None:
        """Allocate another KV pool, empty; captured graphs are dropped."""
        self.graphs.clear()
        self.model.bind(num_blocks)

    def execute(self, step: StepInput) -> Pending:
        """Start a step. CapacityError if memory does not suffice: it can then be started again.

        A retry writes again what was written before tokens were drawn: the KV of the step's tokens, and the state of
        newly admitted sequences. EngineDeadError, now and from then on, if it fails after the draw and steps run
        ahead: the host does not know the slots' former state, so it cannot draw again.
        """
        if self._dead is not None:
            raise self._dead
        try:
            with torch.inference_mode():
                return self._execute(step)
        except (MemoryError, RuntimeError) as error:
            if is_raised_by(error, "KeyboardInterrupt"):
                raise KeyboardInterrupt from None
            if not is_out_of_memory(error):
                raise
            knob = "kv_cache_memory" if self.model.is_cpu else "gpu_memory_utilization"
            raise out_of_memory(step.shape, f"serve.{knob}") from error

    @torch.inference_mode()
    def encode(self, encode: Encode) -> None:
        """Encode images apart from a step, to measure or compile that."""
        self.model.encode(encode)

    def copy(self, copies: BlockCopies) -> None:
        """Start copies of blocks, which run during the next step. EngineDeadError, now and from then on, if that fails.

        Otherwise blocks that were not copied would be used as if they were.
        """
        assert self.host is not None, "only a cache with blocks on the host plans copies"
        if self._dead is not None:
            raise self._dead
        try:
            self.host.copy(copies)
        except BaseException as error:
            self._dead = EngineDeadError(f"copying KV to the host or back failed: {type(error).__name__}")
            if not isinstance(error, Exception):
                raise
            raise self._dead from error

    def keep(self, kept: Iterable[tuple[str, int, int, bytes]], seconds: float) -> None:
        """Write blocks to files, as `HostBlocks.keep` does, unless a copy has failed and left them in doubt."""
        if self.host is not None and self._dead is None:
            self.host.keep(kept, seconds)

    def _execute(self, step: StepInput) -> Pending:
        model = self.model
        if self.host is not None:
            self.host.join()
        if step.admissions:
            model.state.admit(step.admissions, step.steering)
            for each in step.counted:
                model.state.set_counts(each.slot, each.prompt, each.output)
            for history in step.histories:
                model.state.set_history(history.slot, history.tokens)
        if step.drafted:
            model.state.set_drafts(step.drafted)
        if step.table_entries:
            model.extend_tables(step.table_entries)
        if step.restores:
            model.restore_states(step.restores)
        if step.encode is not None:
            model.encode(step.encode)
        started = self.graphs.start(step) or self._start(step)
        indices = {each.index for each in step.tapped} & model.own_taps
        tapped = [self._tap(started.taps[index], index, step) for index in sorted(indices)]
        if step.copies and not model.limits.num_drafts:
            model.copy_states(step.copies)
        if model.defers_logits and (started.unscored or step.scored or step.num_pooled):
            return Pending(
                step, self._reported, [], None, None, finish=partial(self._finish_later, step, started, tapped)
            )
        return self._finish(step, started, tapped)

    @torch.inference_mode()
    def _finish_later(self, step: StepInput, started: Started, tapped: list[_TappedStates]) -> Pending:
        """Finish a step whose logits were deferred."""
        if started.unscored:
            started.logits = score(self.model.head, started.unscored)
        return self._finish(step, started, tapped)

    def _finish(self, step: StepInput, started: Started, tapped: list[_TappedStates]) -> Pending:
        """Sample, once the body has run."""
        model = self.model
        scored = [(each, self._score_prompt(started.hidden, each)) for each in step.scored if started.hidden]
        pooled = self._pool(started.hidden, step) if step.num_pooled and started.hidden else None
        if step.drafts:  # which are not verified yet
            slots = model.send(np.array([each.slot for each in step.drafts]), torch.int64)
            lengths = model.send(np.array([each.length for each in step.drafts], np.int32))
            model.state.lengths.index_copy_(0, slots, lengths)
        if not step.reported:
            started.follow()
            if step.copies and model.limits.num_drafts:
                model.copy_states(step.copies)
            return Pending(step, self._reported, scored, None, self._record(), pooled=pooled, tapped=tapped)
        pending = self._sample(step, started, scored, pooled)
        pending.tapped = tapped
        return pending

    def _start(self, step: StepInput) -> Started:
        packed = self.model.send(step.packed)
        prefixes = self.model.send(step.prefixes) if step.prefixes else None
        if step.is_decode and step.shape.num_drafts:
            slots, max_accepted = packed.view(2, -1)
            computed = self.model.decode_drafts(slots, max_accepted, step.shape.num_drafts, prefixes)
            return begin(self.model, computed, slots, max_accepted=max_accepted)
        if step.is_decode:
            return begin(self.model, self.model.decode(packed, prefixes), packed)
        rows = step.shape.split(packed)
        return begin(
            self.model, self.model.mix(step.shape, packed, prefixes, self._send_images(step)), rows.sampled, rows
        )

    def _send_images(self, step: StepInput) -> SentImages | None:
        """What the step sends of the images of its tokens; None if all of them are text."""
        if not step.image_rows:
            return None
        rope = self.model.send(step.rope_positions).view(4, -1) if step.rope_positions else None
        ends = self.model.send(step.image_ends) if step.image_ends else None
        return SentImages(self.model.send(step.image_rows), rope, ends)

    def _score_prompt(self, hidden: Hidden, prompt: Scored) -> list[_Report]:
        """Compute log probabilities of a prompt's tokens. hidden: of all tokens of the step"""
        reports = []
        for start in range(0, prompt.num_rows, HEAD_ROWS):
            chunk, num_rows = prompt.targets[start : start + HEAD_ROWS], min(prompt.num_rows - start, HEAD_ROWS)
            logits = score(self.model.head, rows_of(hidden, self._places(prompt.first + start, len(chunk), num_rows)))
            if not chunk:
                continue
            targets = self.model.send(np.array(chunk), torch.int64)
            report = self._report(logits, list(range(len(chunk))), prompt.num_top)
            chosen = torch.empty_like(report.totals)
            ranks = torch.empty_like(chosen, dtype=torch.int32)
            self.model.score_drawn(logits, report.rows, targets, report.totals, chosen, ranks)
            reports.append(report._replace(chosen=self._fetch(chosen), ranks=self._fetch(ranks)))
        return reports

    def _pool(self, hidden: Hidden, step: StepInput) -> Tensor:
        """Sum the vectors of embeddings; fp32[P, H] on the host. hidden: of all tokens of the step"""
        model, num = self.model, len(step.pooled)
        token_index, owners = np.zeros(step.num_pooled, np.int64), np.full(step.num_pooled, num)  # those of padding
        if step.pooled:
            found = [np.arange(each.first, each.first + each.num_tokens) for each in step.pooled]
            joined = np.concatenate(found)
            token_index[: len(joined)] = joined
            owners[: len(joined)] = np.repeat(np.arange(num), [each.num_tokens for each in step.pooled])
        sums = torch.zeros(num + 1, model.hidden_size, dtype=torch.float32, device=model.device)
        for start in range(0, step.num_pooled, HEAD_ROWS):
            some = slice(start, start + HEAD_ROWS)
            model.pool(hidden, model.send(token_index[some], torch.int64), model.send(owners[some], torch.int64), sums)
        return self._fetch(sums[:num])

    def _tap(self, states: Tensor, index: int, step: StepInput) -> _TappedStates:
        """Fetch what a layer gives of tokens that are tapped. states: [T, H] of all tokens of the step"""
        places = [each for each in step.tapped if each.index == index]
        sizes = [1 if each.is_sum else each.num_tokens for each in places]
        tokens = [np.arange(each.first, each.first + each.num_tokens) for each in places]
        targets = zip(np.cumsum(sizes) - sizes, places, strict=True)
        owners = [start + np.arange(each.num_tokens) * (not each.is_sum) for start, each in targets]
        rows = states.index_select(0, self.model.send(np.concatenate(tokens), torch.int64)).float()
        made = torch.zeros(sum(sizes), rows.shape[1], device=rows.device)
        made.index_add_(0, self.model.send(np.concatenate(owners), torch.int64), rows)
        return _TappedStates(places, sizes, self._fetch(made))

    def _places(self, first: int, num_targets: int, num_rows: int) -> slice | Tensor:
        """The indices, among a step's tokens, of the rows that the head computes: targets, then padding."""
        if num_targets == num_rows:
            return slice(first, first + num_rows)
        token_index = np.zeros(num_rows, np.int64)
        token_index[:num_targets] = range(first, first + num_targets)
        return self.model.send(token_index, torch.int64)

    def _sample(
        self, step: StepInput, started: Started, scored: list[tuple[Scored, list[_Report]]], pooled: Tensor | None
    ) -> Pending:
        """Draw the tokens. What needs much memory comes first, except drafts, since a draw cannot be repeated."""
        logits, report, shaping = started.logits, None, step.shaping
        assert logits is not None, "there are rows that sample"
        if step.logprobs:
            report = self._report(logits, [row for row, _ in step.logprobs], max(num for _, num in step.logprobs))
        is_plain, accepted = shaping is None and not step.has_penalties, {}
        # of other batches than plain ones, a start compiles only the last kind
        kind = step.sampling if is_plain else SAMPLING_KINDS[-1]
        if is_plain and step.sampling in started.tails:
            graph, (drawn, drafts) = started.tails[step.sampling]
            graph.replay()
        else:
            shaped = logits if not step.drafts else logits[: len(step.reported)]
            if shaping is not None:
                shaped = shape_logits(logits[: len(step.reported)], shaping, self.model.send)
            drawn, drafts = draw(self.model, started, shaped, kind, step.has_penalties)
        try:
            if step.drafts:
                accepted = self._verify(step, logits, drawn[0], kind)
            if report is not None:
                self.model.score_drawn(logits, report.rows, drawn[0], report.totals, report.chosen, report.ranks)
            pending = Pending(step, self._reported, scored, report, None, accepted, pooled=pooled)
            if self.model.num_drafts:
                pending.drawn, pending.drafts = self._fetch(drawn), None if drafts is None else self._fetch(drafts)
            pending.event = self._record()
            started.follow()  # which the host need not wait for
            if step.copies and self.model.limits.num_drafts:  # the draws say which states have come to stay
                self.model.copy_states(step.copies, count_drawn(drawn, accepted))
            return pending
        except Exception as error:
            if not self.run_ahead:
                raise
            self._dead = EngineDeadError(f"the GPU failed after a step's draw: {type(error).__name__}")
            raise self._dead from error

    def _verify(self, step: StepInput, logits: Tensor, drawn: Tensor, kind: str) -> dict[int, list[int]]:
        """Draw after the drafts that equal what was drawn before them, one by one; by row, what was drawn."""
        tokens, accepted, depth = drawn.tolist(), dict[int, list[int]](), 0
        left = [each for each in step.drafts if tokens[each.row] == each.tokens[0]]
        while left:
            slots = self.model.send(np.array([each.slot for each in left], np.int32))
            rows = self.model.send(np.array([each.first + depth for each in left]), torch.int64)
            tokens, depth = self.model.sample(slots, logits[rows], kind, step.has_penalties).tolist(), depth + 1
            for each, token in zip(left, tokens, strict=True):
                accepted.setdefault(each.row, []).append(token)
            left = [each for each, token in zip(left, tokens, strict=True) if each.tokens[depth : depth + 1] == [token]]
        return accepted

    def _report(self, logits: Tensor, rows: list[int], num_top: int) -> _Report:
        """Compute log probabilities of some rows, except what depends on the tokens drawn."""
        index = self.model.send(np.array(rows), torch.int64)
        totals, ids, top = top_logprobs(logits, index, num_top)
        chosen, ranks = self._on_host(totals), self._on_host(totals, torch.int32)
        return _Report(index, totals, chosen, ranks, self._fetch(ids), self._fetch(top))

    def _on_host(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate host memory that the device writes to; its content is valid once the step's event is over."""
        return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=not self.model.is_cpu)

    def _fetch(self, tensor: Tensor) -> Tensor:
        return self._on_host(tensor).copy_(tensor, non_blocking=True)

    @property
    def _reported(self) -> npt.NDArray[np.int64]:
        return self.model.state.reported.numpy().reshape(-1)

    def _record(self) -> torch.cuda.Event | None:
        if self.model.is_cpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class Pending:
    """A started step."""

    step: StepInput
    reported: npt.NDArray[np.int64]  # of all slots, in a row
    scored: list[tuple[Scored, list[_Report]]]
    report: _Report | None  # of the rows that `step.logprobs` names
    event: torch.cuda.Event | None
    accepted: dict[int, list[int]] = field(default_factory=dict)  # row that samples -> what was drawn after drafts
    drawn: Tensor | None = None  # i64[draws, R], -1 if none was drawn, of a runner that drafts; None: in `reported`
    pooled: Tensor | None = None  # fp32[P, H]
    drafts: Tensor | None = None  # i64[R, drafts], -1 for none
    tapped: Iterable[_TappedStates] = ()  # by layer
    finish: Callable[[], Pending] | None = None  # samples, if that was deferred

    def finished(self) -> Pending:
        """The same step, started to its end."""
        return self if self.finish is None else self.finish()

    @property
    def is_over(self) -> bool:
        """Whether the device has finished it. The step must be started to its end."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self, check: Callable[[], object] | None = None) -> Sampled:
        """Wait for the device, and return what was sampled.

        check: called now and then; raises if the device would wait forever, as for a rank that is gone
        """
        if self.finish is not None:
            return self.finish().wait(check)
        if self.event is not None:
            if check is None:
                self.event.synchronize()
            else:
                wait_for(self.event, check)
        tokens, accepted = self._read_tokens()
        sums: Any = [] if self.pooled is None else self.pooled.numpy()
        pooled = {each.row: one.tobytes() for each, one in zip(self.step.pooled, sums, strict=True)}
        tapped: dict[int, dict[int, bytes]] = {}
        for of_layer in self.tapped:
            for place, states in of_layer.by_place():
                tapped.setdefault(place.row, {})[place.number] = states.numpy().tobytes()
        return Sampled(
            tokens,
            self._read_logprobs(tokens),
            {prompt.row: _read_prompt(prompt, reports) for prompt, reports in self.scored if prompt.targets},
            accepted,
            self._count_drafts(len(tokens)),
            pooled,
            tapped,
        )

    def _read_tokens(self) -> tuple[list[int], dict[int, list[int]]]:
        """The first token drawn for each row, and by row those drawn after it."""
        step = self.step
        if self.drawn is None:
            return (self.reported[step.reported].tolist() if step.reported else []), self.accepted
        tokens, *others = self.drawn[:, : len(step.reported)].tolist()
        found = enumerate(zip(*others, strict=True))
        return tokens, {row: [token for token in each if token >= 0] for row, each in found}

    def _count_drafts(self, num_rows: int) -> dict[int, int]:
        """The number of drafts that were verified, by row that had any."""
        step = self.step
        if self.drafts is None:
            return {each.row: len(each.tokens) for each in step.drafts}
        packed = np.frombuffer(step.packed, np.int32)
        limits = packed[step.shape.num_rows :] if step.is_decode else step.shape.split(packed).max_accepted
        counts = np.minimum((self.drafts[:num_rows] >= 0).sum(1).numpy(), limits[:num_rows]).tolist()
        return {row: count for row, count in enumerate(counts) if count}

    def _read_logprobs(self, tokens: list[int]) -> list[Logprobs | None]:
        """The log probabilities of each row, None if they were not requested."""
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        if self.report is not None:
            rows, nums = zip(*self.step.logprobs, strict=True)
            for row, logprob in zip(rows, self.report.read([tokens[row] for row in rows], nums), strict=True):
                logprobs[row] = logprob
        return logprobs


class _TappedStates(NamedTuple):
    """The hidden states of a layer that a step reports."""

    places: list[Tapped]
    sizes: list[int]  # rows of each: its tokens, or their sum
    states: Tensor  # fp32[N, H] of all, in host memory

    def by_place(self) -> Iterable[tuple[Tapped, Tensor]]:
        return zip(self.places, torch.split(self.states, self.sizes), strict=True)


def _read_prompt(prompt: Scored, reports: list[_Report]) -> list[Logprobs]:
    """The log probabilities of a prompt's tokens. Each report has HEAD_ROWS of them."""
    return [
        logprob
        for start, report in zip(range(0, len(prompt.targets), HEAD_ROWS), reports, strict=True)
        for logprob in report.read(prompt.targets[start : start + HEAD_ROWS], [prompt.num_top] * HEAD_ROWS)
    ]


def wait_for(event: torch.cuda.Event, check: Callable[[], object]) -> None:
    """Wait for an event while `check` does not raise."""
    while not event.query():  # type: ignore[no-untyped-call]
        check()
        time.sleep(POLL_SECONDS)
    check()  # collectives that were ended have computed nothing


class _Report(NamedTuple):
    """Log probabilities of A rows of logits."""

    rows: Tensor  # i64[A]
    totals: Tensor  # fp32[A]
    chosen: Tensor  # fp32[A], of the tokens drawn; this and the following in host memory
    ranks: Tensor  # i32[A], of these
    ids: Tensor  # i32[A, num_top], the most likely
    top: Tensor  # fp32[A, num_top], of these

    def read(self, tokens: list[int], nums: Any) -> list[Logprobs]:
        """The log probabilities of each row: of the token drawn, and of the most likely ones. nums: of these, by row"""
        columns = zip(tokens, nums, *(each.tolist() for each in self[2:]), strict=False)
        return [
            Logprobs(token, chosen, rank, list(zip(ids, values, strict=True))[:num])
            for token, num, chosen, rank, ids, values in columns
        ]


def count_drawn(drawn: Tensor, accepted: Mapping[int, list[int]]) -> Tensor:
    """The number of tokens i64[R] that rows have drawn.

    drawn: i64[draws, R], -1 if none was drawn
    accepted: by row, those drawn after drafts of the host
    """
    counts = (drawn >= 0).sum(0)
    for row, tokens in accepted.items():
        counts[row] += len(tokens)
    return counts


def shape_logits(logits: Tensor, shaping: Shaping, send: Callable[[Any, torch.dtype], Tensor]) -> Tensor:
    """A copy of logits [R, V] in fp32, after the host's logit processors."""
    logits = logits.to(torch.float32, copy=True)
    banned = [(row, token, -np.inf) for row, token in shaping.banned]
    for entries, accumulate in ((shaping.added, True), (banned, False)):
        if entries:
            rows, tokens, values = zip(*entries, strict=True)
            index = send(np.array(rows), torch.int64), send(np.array(tokens), torch.int64)
            logits.index_put_(index, send(np.array(values, np.float32), torch.float32), accumulate=accumulate)
    for row, allowed in shaping.allowed:
        logits[row].masked_fill_(send(bytearray(allowed), torch.bool).logical_not_(), -torch.inf)
    return logits


def out_of_memory(shape: BatchShape, knob: str) -> CapacityError:
    """The error of a step that ran out of memory. knob: the setting of the KV cache's memory."""
    return CapacityError(
        f"a step of {shape.num_tokens} tokens of {shape.num_rows} sequences ran out of memory: "
        f"lower serve.max_num_batched_tokens (to {max(shape.num_tokens // 2, 1)}), serve.max_num_seqs or {knob}"
    )


def is_raised_by(error: Exception, name: str) -> bool:
    """Whether a Python kernel raised this class; a compiled piece makes it a RuntimeError that begins with its name."""
    return str(error).startswith(f"{name}: ")

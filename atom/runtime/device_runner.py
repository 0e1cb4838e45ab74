"""The verb `execute` on a device that the host runs ahead of: a step is started, and waited for when it is committed.

    runner = DeviceRunner(graph, weights, {"full": 1024}, 16, device="cuda", max_num_seqs=256, …)
    runner.graphs.capture([1, 2, 4, 8])    # pure decodes of these numbers of rows are one CUDA graph each
    pending = runner.execute(plan)
    sampled = pending.wait()

A row of the device's state, its slot, stands for a sequence while it is admitted. The host gives the tokens of a prompt
and the blocks of KV; what is sampled goes from one step to the next on the device, and a copy of it to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atom.errors import EngineDeadError, is_out_of_memory
from atom.graph import Graph, Recipe
from atom.pieces import PieceCode
from atom.runtime.batch_shape import Layout
from atom.runtime.cuda_graphs import Graphs, Step
from atom.runtime.logit_processors import Shaping, shape
from atom.runtime.model import KINDS, DeviceModel
from atom.runtime.program import rows_of
from atom.runtime.request_state import NUM_REPORTED, describe
from atom.runtime.runner import out_of_memory, score_prompt
from atom.runtime.sampling import MIN_TEMPERATURE
from atom.runtime.types import Logprobs, Plan, Row, Sampled
from atom.runtime.types import Sequence as Running

RUN_AHEAD = 2  # steps behind the one that is waited for: the host may take two of the device's steps for one of its own


class DeviceRunner:
    def __init__(
        self,
        graph: Graph,
        weights: Mapping[Recipe, Any],
        num_blocks: Mapping[str, int],
        block_size: int,
        code: Mapping[str, PieceCode] = MappingProxyType({}),
        *,
        device: str,
        max_num_seqs: int,
        max_model_len: int,
        run_ahead: int = RUN_AHEAD,
    ) -> None:
        """num_blocks by cache kind; code by the text of a piece"""
        assert run_ahead < NUM_REPORTED, f"the host can read {NUM_REPORTED} tokens of a slot"
        self.run_ahead = run_ahead
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        self.model = DeviceModel(graph, weights, num_blocks, block_size, code, device=device, **limits)
        self.graphs = Graphs(self.model)
        self._residents: list[_Resident | None] = [None] * max_num_seqs  # by slot
        self._dead: EngineDeadError | None = None  # why no step can be started any more

    def bind(self, num_blocks: Mapping[str, int]) -> None:
        """Take another KV pool, empty; what was captured is forgotten."""
        self.graphs.clear()
        self.model.bind(num_blocks)

    def execute(self, plan: Plan) -> Pending:
        """Start a step. CapacityError where memory does not suffice: it can then be started again.

        What is written before tokens are drawn is written again by another try: the KV of the plan's tokens, and what
        the slots keep of sequences that are new to them. EngineDeadError, this time and from then on, where it fails
        behind that: what was drawn cannot be drawn again.
        """
        if self._dead is not None:
            raise self._dead
        try:
            with torch.inference_mode():
                return self._execute(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(plan, "serve.gpu_memory_utilization") from error

    def _execute(self, plan: Plan) -> Pending:
        residents = self._settle(plan.rows)
        sampling = [(row, each) for row, each in zip(plan.rows, residents, strict=True) if row.samples]
        scored: dict[str, list[Logprobs]] = {}
        if all(row.start >= row.sequence.num_given for row in plan.rows):
            step = self._decode([row.sequence.slot for row in plan.rows])
        else:
            step = self.graphs.mix(plan) or self._mix(plan)
            scored = self._score_prompts(plan, step)
        if not sampling:
            return Pending(self.model.slots.reported, [], {}, scored, self._record())
        return self._sample(step, sampling, scored)

    def _settle(self, rows: Sequence[Row]) -> list[_Resident]:
        """Tell the device which sequences have come, and the blocks that each has got since its last row."""
        residents: list[_Resident] = []
        came: list[Running] = []
        told: list[tuple[_Resident, int, int]] = []
        places: list[int] = []
        blocks: list[int] = []
        kinds, (num_slots, width) = self.model.kinds, self.model.tables.shape[1:]
        for row in rows:
            sequence, slot = row.sequence, row.sequence.slot
            resident = self._residents[slot]
            if resident is None or resident.blocks is not sequence.blocks:
                resident = _Resident.of(sequence, len(kinds))
                came.append(sequence)
            residents.append(resident)
            for kind, name in enumerate(kinds):
                table, num_told = sequence.blocks[name], resident.num_told[kind]
                if len(table) > num_told:
                    first = (kind * num_slots + slot) * width
                    places += range(first + num_told, first + len(table))
                    blocks += table[num_told:]
                    told.append((resident, kind, len(table)))
        if came:
            self._admit(came)
        if places:
            self.model.extend_tables(places, blocks)
        for row, resident in zip(rows, residents, strict=True):  # only now: what raised is told again
            self._residents[row.sequence.slot] = resident
        for resident, kind, num_told in told:
            resident.num_told[kind] = num_told
        return residents

    def _admit(self, sequences: Sequence[Running]) -> None:
        slots = self.model.slots
        described = [describe(each.params, each.seed, each.num_tokens) for each in sequences]
        slots.admit([each.slot for each in sequences], described)
        for each in sequences:
            if has_penalties(each):
                slots.set_counts(each.slot, each.prompt, each.output)

    def _decode(self, slots: list[int]) -> Step:
        step = self.graphs.decode(slots)
        if step is None:
            rows = self.model.send(np.array(slots, np.int32))
            step = Step(rows, self.model.decode(rows))
        return step

    def _mix(self, plan: Plan) -> Step:
        layout = Layout.of(plan)
        packed = self.model.send(layout.pack(plan, self.model.padding))
        hidden, logits = self.model.mix(layout, packed)
        return Step(layout.samples(packed)[0], logits, hidden, layout.num_decodes)

    def _score_prompts(self, plan: Plan, step: Step) -> dict[str, list[Logprobs]]:
        scored: dict[str, list[Logprobs]] = {}
        assert step.hidden is not None, "a step with prompts has it"
        last = 0
        for at, row in enumerate(plan.rows):
            first = step.num_decodes if at == plan.num_decodes else last
            last = first + row.num_tokens
            if row.sequence.params.prompt_logprobs is not None and row.start < len(row.sequence.prompt):
                scored[row.sequence.id] = score_prompt(self.model.head, row, rows_of(step.hidden, slice(first, last)))
        return scored

    def _sample(self, step: Step, sampling: Sampling, scored: dict[str, list[Logprobs]]) -> Pending:
        """Draw, behind all that allocates: what has been drawn cannot be drawn again."""
        assert step.logits is not None, "there are rows that sample"
        asked = {at: n for at, (row, _) in enumerate(sampling) if (n := row.sequence.params.logprobs) is not None}
        report = self._report(step.logits, list(asked), max(asked.values())) if asked else None
        count, kind = len(sampling), KINDS[max(each.kind for _, each in sampling)]
        has_penalties = any(each.has_penalties for _, each in sampling)
        shaping = shape([row for row, each in sampling if each.may_be_shaped], step.logits.shape[-1])
        is_plain = shaping is None and not has_penalties
        if is_plain and kind in step.tails:
            graph, out = step.tails[kind]
            graph.replay()
        else:
            logits = step.logits if shaping is None else self._shape(step.logits[:count], sampling, shaping)
            # of what is not plain, a start compiles only the last kind
            out = self.model.sample(step.rows[: len(logits)], logits, kind if is_plain else KINDS[-1], has_penalties)
        places = [(row.sequence.slot, (row.start + row.num_tokens) % NUM_REPORTED) for row, _ in sampling]
        try:
            if report is not None:
                self.model.score_drawn(step.logits, report.rows, out, report.totals, report.chosen, report.ranks)
            return Pending(self.model.slots.reported, places, asked, scored, self._record(), report)
        except Exception as error:
            self._dead = EngineDeadError(f"the GPU failed behind a step's draw: {type(error).__name__}")
            raise self._dead from error

    def _report(self, logits: Tensor, rows: list[int], num_top: int) -> _Report:
        """Log probabilities of some rows, but for what follows from the tokens drawn."""
        told = self.model.send(np.array(rows, np.int64))
        totals, ids, top = self.model.top_logprobs(logits, told, num_top)
        chosen, ranks = self._on_host(totals), self._on_host(totals, torch.int32)
        fetched = [self._on_host(each).copy_(each, non_blocking=True) for each in (ids, top)]
        return _Report(told, totals, chosen, ranks, *fetched)

    def _shape(self, logits: Tensor, sampling: Sampling, shaping: Shaping) -> Tensor:
        """A copy of logits [R, V], in fp32, with what the host says of some rows."""
        logits, send = logits.to(torch.float32, copy=True), self.model.send
        place_of = {row.sequence.id: at for at, (row, _) in enumerate(sampling)}
        for entries, accumulate in ((shaping.added, True), (shaping.banned, False)):
            if entries:
                rows = send(np.array([place_of[id] for id, _, _ in entries], np.int64))
                tokens = send(np.array([token for _, token, _ in entries], np.int64))
                values = send(np.array([value for _, _, value in entries], np.float32))
                logits.index_put_((rows, tokens), values, accumulate=accumulate)
        for id, allowed in shaping.allowed.items():
            logits[place_of[id]].masked_fill_(send(~allowed), -torch.inf)
        return logits

    def _on_host(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of the host that the device writes to: what is in it counts once the step's event has taken place."""
        is_pinned = self.model.device.type != "cpu"
        return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=is_pinned)

    def _record(self) -> torch.cuda.Event | None:
        if self.model.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class Pending:
    """A step that runs."""

    reported: Tensor  # of the slots
    places: list[tuple[int, int]]  # in it, of the tokens that the step samples
    asked: dict[int, int]  # rows with log probabilities, and how many
    scored: dict[str, list[Logprobs]]
    event: torch.cuda.Event | None
    report: _Report | None = None  # of the rows asked about

    def wait(self) -> Sampled:
        """What it gave, once the device is done with it."""
        if self.event is not None:
            self.event.synchronize()
        slots, places = zip(*self.places, strict=True) if self.places else ((), ())
        tokens: list[int] = self.reported.numpy()[list(slots), list(places)].tolist()
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        if self.report is not None:
            columns = [each.tolist() for each in self.report[2:]]
            for (at, num_top), chosen, rank, ids, values in zip(self.asked.items(), *columns, strict=True):
                top = list(zip(ids, values, strict=True))[:num_top]
                logprobs[at] = Logprobs(tokens[at], chosen, rank, top)
        return Sampled(tokens, logprobs, self.scored)


class _Report(NamedTuple):
    """Log probabilities of A rows of a step."""

    rows: Tensor  # i64[A]
    totals: Tensor  # fp32[A]
    chosen: Tensor  # fp32[A], of the tokens drawn; from here on in memory of the host
    ranks: Tensor  # i32[A], of these
    ids: Tensor  # i32[A, num_top], the most likely
    top: Tensor  # fp32[A, num_top], of these


@dataclass
class _Resident:
    """The sequence that has a slot, and what the device knows of it."""

    blocks: dict[str, list[int]]  # its tables: others after each admission
    num_told: list[int]  # entries of them, by kind
    kind: int  # of sampling, in KINDS
    has_penalties: bool
    may_be_shaped: bool  # the host has a say in what comes next

    @classmethod
    def of(cls, sequence: Running, num_kinds: int) -> _Resident:
        p = sequence.params
        is_cut = p.top_p < 1 or p.top_k > 0 or p.min_p > 0
        kind = "greedy" if p.temperature < MIN_TEMPERATURE else "cut" if is_cut else "random"
        may_be_shaped = bool(p.logit_bias) or p.min_tokens > 0 or sequence.matcher is not None
        return cls(sequence.blocks, [0] * num_kinds, KINDS.index(kind), has_penalties(sequence), may_be_shaped)


Sampling = list[tuple[Row, _Resident]]  # the rows of a step that sample


def has_penalties(sequence: Running) -> bool:
    p = sequence.params
    return bool(p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty)

"""Build a runner's StepInput from a plan of the scheduler.

It remembers what the runner knows of each slot. No device, no tensors.

    builder = StepBuilder(runner.capacity)
    pending = runner.execute(builder.build(plan))
    builder.retract(plan)                              # where that raised: the next step sends its slots' state again

The host gives the tokens of a prompt and the blocks of KV. What is sampled goes from one step to the next in the
runner: a row whose token the host did not give computes the newest one of its slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from atom.runtime.requests.logit_processors import find_shaping, is_shaped
from atom.runtime.step.input import (
    NO_DRAFT,
    NUM_REPORTED,
    BatchShape,
    Capacity,
    Counted,
    Draft,
    History,
    Pooled,
    Scored,
    StepInput,
    pack_admission,
)
from atom.runtime.types import Plan, ScheduledRequest, Sequence
from atom.sampling_params import PENALTY, SAMPLING_KINDS, has_use, sampling_kind


@dataclass(slots=True)
class _Resident:
    """The sequence in a slot, and what the runner knows of it."""

    blocks: dict[str, list[int]]  # its tables; new objects at each admission
    tables: list[list[int]]  # the same, by kind
    num_sent: list[int]  # entries of them that were sent, by kind
    num_known: int  # tokens known at its admission: the host sends them, the runner has the later ones
    sampling: int  # index in SAMPLING_KINDS
    has_penalties: bool
    is_shaped: bool  # it may need a logit processor
    num_logprobs: int | None
    is_special: bool  # one of the three before


_Special = tuple[int, ScheduledRequest, _Resident]  # a special row: its index among the rows that sample, it, resident


@dataclass(slots=True)
class Collected:
    """The rows of a plan, and what its step sends of them."""

    plan: Plan
    residents: list[_Resident] = field(default_factory=list)  # by row
    admitted: list[Sequence] = field(default_factory=list)  # that the runner does not have
    indices: array[int] = field(default_factory=lambda: array("i"))  # where entries of block tables go
    blocks: array[int] = field(default_factory=lambda: array("i"))  # these entries
    reported: list[int] = field(default_factory=list)  # as in StepInput
    special: list[_Special] = field(default_factory=list)
    sampling: int = 0  # index in SAMPLING_KINDS, the largest of those that sample
    is_decode: bool = True  # the runner has the newest token of each row, and drafts what they have behind it


class StepBuilder:
    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._residents: list[_Resident | None] = [None] * capacity.num_slots

    def build(self, plan: Plan) -> StepInput:
        """Build the step of a plan. What it sends counts as known to the runner, until `retract`."""
        num_drafts = self.count_drafts(plan)
        rows = self.collect(plan, num_drafts)
        return self.pack(rows, num_drafts, rows.is_decode)

    def collect(self, plan: Plan, num_drafts: int) -> Collected:
        """Collect the rows of a plan, and what the runner does not know of them; `pack` has to follow.

        What is collected counts as known, until `retract`. num_drafts: that the runner drafts for each decode
        """
        capacity, residents = self._capacity, self._residents
        if capacity.num_drafts and not num_drafts:
            plan = without_drafts(plan)
        rows = Collected(plan)
        indices, blocks = rows.indices, rows.blocks
        for row in plan.rows:
            sequence, start, num_tokens, samples, drafts = row
            slot = sequence.slot
            resident = residents[slot]
            if resident is None or resident.blocks is not sequence.blocks:
                resident = residents[slot] = self._admit(sequence)
                rows.admitted.append(sequence)
            rows.residents.append(resident)
            num_sent = resident.num_sent
            for kind, table in enumerate(resident.tables):
                first = num_sent[kind]
                if len(table) > first:
                    origin = (kind * (capacity.num_slots + 1) + slot) * capacity.table_width
                    indices.extend(range(origin + first, origin + len(table)))
                    blocks.extend(table[first:])
                    num_sent[kind] = len(table)
            if start < resident.num_known or (drafts and not num_drafts):
                rows.is_decode = False
            if samples:
                if resident.sampling > rows.sampling:
                    rows.sampling = resident.sampling
                if resident.is_special:
                    rows.special.append((len(rows.reported), row, resident))
                rows.reported.append(slot * NUM_REPORTED + (start + num_tokens - len(drafts)) % NUM_REPORTED)
        return rows

    def pack(self, rows: Collected, num_drafts: int, is_decode: bool, least: BatchShape | None = None) -> StepInput:
        """Pack rows into a step, of decodes alone or not. least: a shape that holds theirs, for the step to have"""
        plan = rows.plan
        if is_decode:
            shape, packed = self._pack_decodes(plan, num_drafts, least)
        else:
            shape, packed = self._pack(plan, rows.residents, num_drafts, least)
        step = StepInput(
            shape=shape,
            is_decode=is_decode,
            packed=packed,
            reported=rows.reported,
            sampling=SAMPLING_KINDS[rows.sampling],
        )
        if rows.admitted:
            add_admissions(step, rows.admitted, has_histories=bool(self._capacity.num_drafts))
        if rows.indices:
            step.table_entries = bytearray(rows.indices + rows.blocks)
        if rows.special:
            add_special(step, rows.special, self._capacity.vocab)
        if not is_decode:
            step.scored = find_scored(plan, shape)
            step.pooled = find_pooled(plan, shape)
            step.num_pooled = sum(each.num_tokens for each in step.pooled)
            step.drafts = [] if num_drafts else find_drafts(plan)
        return step

    def shape_of(self, plan: Plan) -> BatchShape:
        """The shape of a plan's batch, without padding; where the runner drafts, without drafts."""
        return shape_of(without_drafts(plan) if self._capacity.num_drafts else plan)

    def retract(self, plan: Plan) -> None:
        """Take back the newest plan, whose step did not take place, or not to its end: its rows are sent anew.

        Tokens in flight are known to the runner alone: its state of these rows stands.
        """
        for row in plan.rows:
            sequence = row.sequence
            resident = self._residents[sequence.slot]
            if resident is None or resident.blocks is not sequence.blocks:
                continue
            if row.start + row.num_tokens - len(row.drafts) <= sequence.num_tokens:
                self._residents[sequence.slot] = None
            else:
                resident.num_sent = [0] * len(resident.num_sent)

    def _admit(self, sequence: Sequence) -> _Resident:
        p, blocks = sequence.params, sequence.blocks
        flags = has_use(p, PENALTY), is_shaped(sequence), p.logprobs
        tables = [blocks[name] for name in self._capacity.kinds]
        is_special = flags[0] or flags[1] or p.logprobs is not None
        return _Resident(
            blocks,
            tables,
            [0] * len(tables),
            sequence.num_tokens,
            SAMPLING_KINDS.index(sampling_kind(p)),
            *flags,
            is_special,
        )

    def count_drafts(self, plan: Plan) -> int:
        """Count the most that the runner drafts for a row; it does where it knows the newest token."""
        if not self._capacity.num_drafts:
            return 0
        return max((len(row.drafts) for row in plan.rows if row.drafts and self._is_known(row)), default=0)

    def _is_known(self, row: ScheduledRequest) -> bool:
        resident = self._residents[row.sequence.slot]
        return resident is not None and resident.blocks is row.sequence.blocks and row.start >= resident.num_known

    def _pack_decodes(self, plan: Plan, num_drafts: int, least: BatchShape | None) -> tuple[BatchShape, bytearray]:
        """Pack decodes, with so many drafts or more where that is captured."""
        slots, capacity = array("i", [row.sequence.slot for row in plan.rows]), self._capacity
        num_rows = len(slots) if least is None else least.num_rows
        if num_drafts:
            fitting = (each for each in capacity.draft_sizes if each[0] >= num_rows and each[1] >= num_drafts)
            size, num_drafts = next(fitting, (num_rows, num_drafts))
        else:
            size = next((size for size in capacity.decode_sizes if size >= num_rows), num_rows)
        slots.extend([capacity.num_slots] * (size - len(slots)))
        if num_drafts:
            slots.extend([len(row.drafts) for row in plan.rows] + [0] * (size - len(plan.rows)))
        num_tokens = size * (1 + num_drafts)
        return BatchShape(num_tokens, size, num_tokens, size, num_drafts), bytearray(slots)

    def _pack(
        self, plan: Plan, residents: list[_Resident], num_drafts: int, least: BatchShape | None
    ) -> tuple[BatchShape, bytearray]:
        """Pack the rows and tokens of a step with prompts, in the smallest captured shape that holds `least`, if any.

        The rest behind its decodes, and behind all rows, is padding.
        """
        least = least or (self.shape_of(plan).drafting(num_drafts) if num_drafts else shape_of(plan))
        shape = next((each for each in self._capacity.mixed_shapes if each.holds(least)), least)
        packed = shape.pad(self._capacity.num_slots)
        slots, starts, ends, sampled, indices, given, row_of, most = shape.split(np.frombuffer(packed, np.int32))
        if shape.num_drafts:
            own = self.shape_of(plan).drafting(shape.num_drafts)
            decodes = zip(plan.rows[: own.num_decodes], residents, strict=False)
            rows = [drafting(row, resident, shape.num_drafts) for row, resident in decodes]
            others = zip(plan.rows[own.num_decodes :], residents[own.num_decodes :], strict=True)
        else:
            own, rows, others = shape_of(plan), [], zip(plan.rows, residents, strict=True)
        rows += [each for row, resident in others for each in split(row, resident)]
        num_left = shape.num_decodes - own.num_decodes
        num_rows, num_tokens = own.num_rows + num_left, own.num_tokens + num_left * (1 + shape.num_drafts)
        numbers = np.array(
            [(row.slot, len(row.tokens), row.end, row.draw, row.num_drafts) for row in rows], np.int64
        ).reshape(-1, 5)
        row_slots, counts, row_ends, draws, drafts = numbers.T
        places, stops = np.arange(own.num_rows), np.cumsum(counts)
        places[own.num_decodes :] += num_left
        stops[own.num_decodes :] += num_tokens - own.num_tokens
        slots[places] = row_slots
        starts[places], starts[num_rows:] = stops - counts, num_tokens
        ends[places] = row_ends
        (chosen,) = (draws >= 0).nonzero()
        chosen = chosen[draws[chosen].argsort(kind="stable")]  # draws behind drafts come last
        lasts = stops - 1  # but for drafts
        lasts[: own.num_decodes] -= shape.num_drafts
        sampled[: len(chosen)], indices[: len(chosen)] = slots[places[chosen]], lasts[chosen]
        most[: len(chosen)] = drafts[chosen]
        tokens = [token for row in rows for token in row.tokens]
        given[: own.num_decoded] = tokens[: own.num_decoded]
        given[shape.num_decoded : num_tokens] = tokens[own.num_decoded :]
        row_of[shape.num_decoded : num_tokens] = np.repeat(places, counts)[own.num_decoded :]
        row_of[num_tokens:] = num_rows
        return shape, packed


def add_admissions(step: StepInput, admitted: list[Sequence], *, has_histories: bool) -> None:
    """Add what the runner is to know of sequences that it does not have. has_histories: all their tokens, too"""
    packs = [pack_admission(each.slot, each.num_tokens, each.params, each.seed, number_of(each)) for each in admitted]
    step.admissions = bytearray(b"".join(packs))
    counted = [each for each in admitted if has_use(each.params, PENALTY)]
    step.counted = [Counted(each.slot, each.prompt, list(each.output)) for each in counted]
    if has_histories:
        known = [(each.slot, array("i", each.prompt + each.output)) for each in admitted]
        step.histories = [History(slot, bytearray(tokens)) for slot, tokens in known]


def add_special(step: StepInput, special: list[_Special], vocab: int) -> None:
    """Add the penalties, log probabilities and logit processors of rows that have some."""
    step.has_penalties = any(resident.has_penalties for _, _, resident in special)
    step.logprobs = [(at, num) for at, _, resident in special if (num := resident.num_logprobs) is not None]
    shaped = [
        (at, row.sequence, row.start + row.num_tokens - len(row.sequence.prompt))
        for at, row, resident in special
        if resident.is_shaped
    ]
    step.shaping = find_shaping(shaped, vocab)


def without_drafts(plan: Plan) -> Plan:
    """A plan whose decodes compute their newest token alone."""
    rows = [row._replace(num_tokens=row.num_tokens - len(row.drafts), drafts=()) for row in plan.rows]
    return Plan(rows, plan.num_decodes)


class _Row(NamedTuple):
    """A row of a batch."""

    slot: int
    tokens: list[int]  # as in PackedRows.given
    end: int  # positions known after the step; 0: the runner knows
    draw: int  # -1: it does not sample; 0: it does; 1: behind a draft
    num_drafts: int = 0  # of the runner that may be accepted


def split(row: ScheduledRequest, resident: _Resident) -> list[_Row]:
    """The rows of a sequence: one, and one for each of its drafts."""
    sequence, start, num_tokens, samples, drafts = row
    slot, draw, end = sequence.slot, samples - 1, start + num_tokens - len(drafts)
    if start >= resident.num_known and not drafts:
        return [_Row(slot, [-1], 0, draw)]
    return [
        _Row(slot, sequence.tokens(start, end), end, draw),
        *(_Row(slot, [token], end + at, 1) for at, token in enumerate(drafts, 1)),
    ]


def drafting(row: ScheduledRequest, resident: _Resident, num_drafts: int) -> _Row:
    """The row of a decode with room for so many drafts, which the runner makes where it knows the newest token."""
    (alone,) = split(row._replace(num_tokens=1, drafts=()), resident)
    most = len(row.drafts) if row.start >= resident.num_known else 0
    tokens = [-2 - number if number < most else NO_DRAFT for number in range(num_drafts)]
    return alone._replace(tokens=alone.tokens + tokens, num_drafts=most)


def shape_of(plan: Plan) -> BatchShape:
    """The shape of a plan's batch, without padding."""
    num_drafted = sum(len(row.drafts) for row in plan.rows)
    num_samples = sum(row.samples for row in plan.rows)
    return BatchShape(
        plan.num_tokens, len(plan.rows) + num_drafted, num_samples + num_drafted, plan.num_decodes + num_drafted
    )


def find_drafts(plan: Plan) -> list[Draft]:
    """Find the drafts of a plan, and the rows that sample behind them."""
    sampling = [row for row in plan.rows if row.samples]
    drafts, first = [], len(sampling)
    for at, row in enumerate(sampling):
        if row.drafts:
            drafts.append(Draft(at, first, list(row.drafts), row.sequence.slot, row.start + 1))
            first += len(row.drafts)
    return drafts


def number_of(sequence: Sequence) -> int:
    """The number of a sequence's adapter, -1 without one."""
    return -1 if sequence.adapter is None else sequence.adapter.number


def find_scored(plan: Plan, shape: BatchShape) -> list[Scored]:
    """Find the rows whose prompts are to be scored. shape: of the batch, padding decodes included."""
    scored = []
    for at, (row, first) in enumerate(zip(plan.rows, find_firsts(plan, shape), strict=True)):
        num_top, prompt = row.sequence.params.prompt_logprobs, row.sequence.prompt
        if num_top is not None and row.start < len(prompt):
            targets = prompt[row.start + 1 : row.start + 1 + row.num_tokens]
            scored.append(Scored(at, first, targets, num_top, len(targets)))
    return scored


def find_pooled(plan: Plan, shape: BatchShape) -> list[Pooled]:
    """Find the rows of embeddings that have tokens which are pooled. shape: as in `find_scored`"""
    pooled = []
    for at, (row, first) in enumerate(zip(plan.rows, find_firsts(plan, shape), strict=True)):
        pooling, num_prompt = row.sequence.pooling, len(row.sequence.prompt)
        if pooling == "MEAN" and row.start < num_prompt:
            pooled.append(Pooled(at, first, row.num_tokens))
        elif pooling == "LAST" and row.start < num_prompt <= row.start + row.num_tokens:
            pooled.append(Pooled(at, first + num_prompt - row.start - 1, 1))
    return pooled


def find_firsts(plan: Plan, shape: BatchShape) -> Iterator[int]:
    """The index of each row's first token in the batch. shape: as in `find_scored`"""
    last = 0
    for at, row in enumerate(plan.rows):
        first = shape.num_decoded if at == plan.num_decodes else last
        last = first + (1 + shape.num_drafts if at < plan.num_decodes else row.num_tokens)
        yield first

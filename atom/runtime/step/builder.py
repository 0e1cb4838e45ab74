"""Build a runner's StepInput from a plan of the scheduler.

It remembers what the runner knows of each slot. No device, no tensors.

    builder = StepBuilder(runner.capacity)
    pending = runner.execute(builder.build(plan))
    builder.retract(plan)                              # if that raised: the next step sends its slots' state again

The host gives the tokens of a prompt and the blocks of KV. Sampled tokens go from one step to the next in the runner: a
row whose token the host did not give computes the newest one of its slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from atom.runtime.images.placeholders import hide_placeholders, without_placeholders
from atom.runtime.images.step_images import StepImages
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
    Tapped,
    pack_admission,
)
from atom.runtime.step.prefix_groups import PrefixGroups
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
    indices: array[int] = field(default_factory=lambda: array("i"))  # targets of the entries of block tables
    blocks: array[int] = field(default_factory=lambda: array("i"))  # these entries
    restores: dict[str, array[int]] = field(default_factory=dict)  # by kind, the columns of `StepInput.restores`
    copies: dict[str, array[int]] = field(default_factory=dict)  # those of `StepInput.copies`
    reported: list[int] = field(default_factory=list)  # as in StepInput
    special: list[_Special] = field(default_factory=list)
    sampling: int = 0  # index in SAMPLING_KINDS, the largest of those that sample
    is_decode: bool = True  # the runner has the newest token of each row, and makes its drafts


class StepBuilder:
    def __init__(self, capacity: Capacity, images: StepImages | None = None) -> None:
        """images: adds those of prompts; None: no prompt has any"""
        self._capacity, self._images = capacity, images
        self._residents: list[_Resident | None] = [None] * capacity.num_slots
        rule = capacity.prefixes
        self._prefixes = None if rule is None else PrefixGroups(rule, capacity.block_size)
        self._prefix_kind = 0 if rule is None else capacity.kinds.index(rule.kind)

    @property
    def can_repeat(self) -> bool:
        """Whether a step that failed may be run again: not if it may have written over recurrent state."""
        return not self._capacity.recurrent

    def build(self, plan: Plan) -> StepInput:
        """Build the step of a plan. What it sends counts as known to the runner, until `retract`."""
        num_drafts = self.count_drafts(plan)
        rows = self.collect(plan, num_drafts)
        return self.pack(rows, num_drafts, rows.is_decode)

    def collect(self, plan: Plan, num_drafts: int) -> Collected:
        """Collect the rows of a plan, and what the runner does not know of them; `pack` has to follow.

        What is collected counts as known, until `retract`.

        num_drafts: tokens that the runner drafts for each decode
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
                self._restore_state(rows.restores, sequence, start)
            rows.residents.append(resident)
            num_sent = resident.num_sent
            for kind, table in enumerate(resident.tables):
                first = num_sent[kind]
                if len(table) > first:
                    origin = (kind * (capacity.num_slots + 1) + slot) * capacity.table_width
                    indices.extend(range(origin + first, origin + len(table)))
                    blocks.extend(table[first:])
                    num_sent[kind] = len(table)
            if capacity.recurrent:
                self._copy_states(rows.copies, row, len(rows.reported) if samples else -1)
            if start < resident.num_known or (drafts and not num_drafts):
                rows.is_decode = False
            if samples:
                if resident.sampling > rows.sampling:
                    rows.sampling = resident.sampling
                if resident.is_special:
                    rows.special.append((len(rows.reported), row, resident))
                rows.reported.append(slot * NUM_REPORTED + (start + num_tokens - len(drafts)) % NUM_REPORTED)
        return rows

    def pack(self, rows: Collected, num_drafts: int, is_decode: bool, min_shape: BatchShape | None = None) -> StepInput:
        """Pack rows into a step.

        num_drafts: that the runner drafts for each decode
        is_decode: all rows are decodes
        min_shape: a shape that holds the rows and that the step shall hold; None: the rows' own
        """
        plan = rows.plan
        if is_decode:
            shape, packed = self._pack_decodes(plan, num_drafts, min_shape)
        else:
            shape, packed = self._pack(plan, rows.residents, num_drafts, min_shape)
        step = StepInput(
            shape=shape,
            is_decode=is_decode,
            packed=packed,
            reported=rows.reported,
            sampling=SAMPLING_KINDS[rows.sampling],
        )
        if rows.admitted:
            add_admissions(step, rows.admitted, has_histories=bool(self._capacity.num_drafts))
            step.steering = pack_steering(rows.admitted, self._capacity.num_scales)
        if rows.indices:
            step.table_entries = bytearray(rows.indices + rows.blocks)
        step.restores = {kind: in_rows(moved, 2) for kind, moved in rows.restores.items()}
        step.copies = {kind: in_rows(moved, 4) for kind, moved in rows.copies.items()}
        if rows.special:
            add_special(step, rows.special, self._capacity.vocab)
        if num_drafts:
            step.drafted = pack_drafts(plan, self._capacity.num_drafts)
        if self._capacity.num_taps:
            step.tapped = find_tapped(plan, shape)
        if not is_decode:
            step.scored = find_scored(plan, shape)
            step.pooled = find_pooled(plan, shape)
            step.num_pooled = sum(each.num_tokens for each in step.pooled)
            step.drafts = [] if num_drafts else find_drafts(plan)
            if self._images is not None:
                self._images.add(step, plan.rows, find_firsts(plan, shape))
        if self._prefixes is not None and not step.drafts:
            num_decodes = len(plan.rows) if is_decode else plan.num_decodes
            tables = [resident.tables[self._prefix_kind] for resident in rows.residents[:num_decodes]]
            ends = [row.start - row.sequence.num_unverified for row in plan.rows[:num_decodes]]
            step.prefixes = self._prefixes.find(tables, ends, shape.num_decodes)
        return step

    def shape_of(self, plan: Plan) -> BatchShape:
        """The shape of a plan's batch, without padding; without drafts if the runner drafts."""
        return shape_of(without_drafts(plan) if self._capacity.num_drafts else plan)

    def retract(self, plan: Plan) -> None:
        """Take back the newest plan, whose step did not take place, or not to its end: its rows are sent anew.

        Tokens in flight are known only to the runner: its state of these rows stays valid.
        """
        if self._images is not None:
            self._images.retract(plan.rows)
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

    def _restore_state(self, restores: dict[str, array[int]], sequence: Sequence, start: int) -> None:
        """Restore the state of a sequence that begins after `start` tokens from blocks with copies of it, if any."""
        for kind in self._capacity.recurrent:
            index, rest = divmod(start, self._capacity.block_size)
            if index and not rest and (block := sequence.blocks[kind][index - 1]):
                restores.setdefault(kind, array("i")).extend((self._state_of(sequence, start), block))

    def _copy_states(self, copies: dict[str, array[int]], row: ScheduledRequest, place: int) -> None:
        """Copy the states of a row to the blocks that are there for copies.

        As long as drafts are not verified, its positions are the max ones: any step may be the one that passes a block.

        place: of the row among those that sample; -1: it does not
        """
        sequence, start, num_tokens, *_ = row
        size, end = self._capacity.block_size, start + num_tokens
        for kind in self._capacity.recurrent:
            table = sequence.blocks[kind]
            for index in range((start - sequence.num_unverified) // size, end // size):
                if index >= 0 and (block := table[index]):
                    at = (index + 1) * size
                    copies.setdefault(kind, array("i")).extend((self._state_of(sequence, at), block, place, at))

    def _state_of(self, sequence: Sequence, num_tokens: int) -> int:
        """The number of a sequence's state after so many tokens, among those of all slots."""
        num_states = self._capacity.num_states
        return sequence.slot * num_states + num_tokens % num_states

    def count_drafts(self, plan: Plan) -> int:
        """The max number of tokens that the runner drafts for a row, which it does if it knows the newest token."""
        if not self._capacity.num_drafts:
            return 0
        return max((len(row.drafts) for row in plan.rows if row.drafts and self._is_known(row)), default=0)

    def _is_known(self, row: ScheduledRequest) -> bool:
        resident = self._residents[row.sequence.slot]
        return resident is not None and resident.blocks is row.sequence.blocks and row.start >= resident.num_known

    def _pack_decodes(self, plan: Plan, num_drafts: int, min_shape: BatchShape | None) -> tuple[BatchShape, bytearray]:
        """Pack decodes with this number of drafts, or the next larger captured one."""
        slots, capacity = array("i", [row.sequence.slot for row in plan.rows]), self._capacity
        num_rows = len(slots) if min_shape is None else min_shape.num_rows
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
        self, plan: Plan, residents: list[_Resident], num_drafts: int, min_shape: BatchShape | None
    ) -> tuple[BatchShape, bytearray]:
        """Pack the rows and tokens of a step with prompts, in the smallest captured shape that holds them, if any.

        Padding follows the decodes, and all rows.
        """
        min_shape = min_shape or (self.shape_of(plan).drafting(num_drafts) if num_drafts else shape_of(plan))
        shape = next((each for each in self._capacity.mixed_shapes if each.holds(min_shape)), min_shape)
        packed = shape.pad(self._capacity.num_slots)
        rows_of_step = shape.split(np.frombuffer(packed, np.int32))
        slots, starts, new_length, sampled, token_index, host_tokens, row_of, max_accepted = rows_of_step
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
            [(row.slot, len(row.tokens), row.new_length, row.draws, row.num_drafts) for row in rows], np.int64
        ).reshape(-1, 5)
        row_slots, counts, lengths, draws, drafts = numbers.T
        index, stops = np.arange(own.num_rows), np.cumsum(counts)
        index[own.num_decodes :] += num_left
        stops[own.num_decodes :] += num_tokens - own.num_tokens
        slots[index] = row_slots
        starts[index], starts[num_rows:] = stops - counts, num_tokens
        new_length[index] = lengths
        (chosen,) = (draws >= 0).nonzero()
        chosen = chosen[draws[chosen].argsort(kind="stable")]  # draws after drafts come last
        lasts = stops - 1  # apart from drafts
        lasts[: own.num_decodes] -= shape.num_drafts
        sampled[: len(chosen)], token_index[: len(chosen)] = slots[index[chosen]], lasts[chosen]
        max_accepted[: len(chosen)] = drafts[chosen]
        tokens = [token for row in rows for token in row.tokens]
        host_tokens[: own.num_decoded] = tokens[: own.num_decoded]
        host_tokens[shape.num_decoded : num_tokens] = tokens[own.num_decoded :]
        row_of[shape.num_decoded : num_tokens] = np.repeat(index, counts)[own.num_decoded :]
        row_of[num_tokens:] = num_rows
        return shape, packed


def in_rows(columns: array[int], num_rows: int) -> bytearray:
    """Numbers i32[num_rows, N] that come column by column."""
    return bytearray(b"".join(columns[row::num_rows].tobytes() for row in range(num_rows)))


def add_admissions(step: StepInput, admitted: list[Sequence], *, has_histories: bool) -> None:
    """Add the state of sequences that the runner does not have. has_histories: all their tokens, too"""
    packs = [
        pack_admission(each.slot, each.num_tokens, each.params, each.seed, number_of(each), each.rope_delta)
        for each in admitted
    ]
    step.admissions = bytearray(b"".join(packs))
    counted = [each for each in admitted if has_use(each.params, PENALTY)]
    step.counted = [Counted(each.slot, text_of(each), list(each.output)) for each in counted]
    if has_histories:
        known = [(each.slot, array("i", each.shown_tokens(0, each.num_tokens))) for each in admitted]
        step.histories = [History(slot, bytearray(tokens)) for slot, tokens in known]


def pack_steering(admitted: list[Sequence], num_scales: int) -> bytearray:
    """The scales f32[A, K] of sequences' steering vectors."""
    unsteered = (0.0,) * num_scales
    return bytearray(array("f", [scale for each in admitted for scale in each.steering or unsteered]))


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
    """A plan whose decodes compute only their newest token."""
    rows = [row._replace(num_tokens=row.num_tokens - len(row.drafts), drafts=()) for row in plan.rows]
    return Plan(rows, plan.num_decodes)


class _Row(NamedTuple):
    """A row of a batch."""

    slot: int
    tokens: list[int]  # as in PackedRows.host_tokens
    new_length: int  # as in PackedRows
    draws: int  # -1: it does not sample; 0: it does; 1: it does, after a draft
    num_drafts: int = 0  # of the runner that may be accepted


def split(row: ScheduledRequest, resident: _Resident) -> list[_Row]:
    """The rows of a sequence: one, and one for each of its drafts."""
    sequence, start, num_tokens, samples, drafts = row
    slot, draws, end = sequence.slot, samples - 1, start + num_tokens - len(drafts)
    if start >= resident.num_known and not drafts:
        return [_Row(slot, [-1], 0, draws)]
    return [
        _Row(slot, sequence.shown_tokens(start, end), end, draws),
        *(_Row(slot, [token], end + at, 1) for at, token in enumerate(drafts, 1)),
    ]


def drafting(row: ScheduledRequest, resident: _Resident, num_drafts: int) -> _Row:
    """The row of a decode with room for drafts, which the runner makes if it knows the newest token."""
    (undrafted,) = split(row._replace(num_tokens=1, drafts=()), resident)
    max_accepted = len(row.drafts) if row.start >= resident.num_known else 0
    tokens = [-2 - number if number < max_accepted else NO_DRAFT for number in range(num_drafts)]
    return undrafted._replace(tokens=undrafted.tokens + tokens, num_drafts=max_accepted)


def shape_of(plan: Plan) -> BatchShape:
    """The shape of a plan's batch, without padding."""
    num_drafted = sum(len(row.drafts) for row in plan.rows)
    num_samples = sum(row.samples for row in plan.rows)
    return BatchShape(
        plan.num_tokens, len(plan.rows) + num_drafted, num_samples + num_drafted, plan.num_decodes + num_drafted
    )


def find_drafts(plan: Plan) -> list[Draft]:
    """Find the drafts of a plan, and the rows that sample after them."""
    sampling = [row for row in plan.rows if row.samples]
    drafts, first = [], len(sampling)
    for at, row in enumerate(sampling):
        if row.drafts:
            drafts.append(Draft(at, first, list(row.drafts), row.sequence.slot, row.start + 1))
            first += len(row.drafts)
    return drafts


def pack_drafts(plan: Plan, num_drafts: int) -> bytearray:
    """What the host has drafted, as in `StepInput.drafted`; nothing if the runner drafts."""
    drafted = array("q")
    for row in plan.rows:
        if row.drafts and row.drafts[0] >= 0:
            drafted.extend((row.sequence.slot, *row.drafts, *[-1] * (num_drafts - len(row.drafts))))
    return bytearray(drafted)


def text_of(sequence: Sequence) -> list[int]:
    """The tokens of a sequence's prompt that are no placeholders."""
    return without_placeholders(sequence.prompt) if sequence.images else sequence.prompt


def number_of(sequence: Sequence) -> int:
    """The number of a sequence's adapter, -1 without one."""
    return -1 if sequence.adapter is None else sequence.adapter.number


def find_scored(plan: Plan, shape: BatchShape) -> list[Scored]:
    """Find the rows whose prompts are to be scored. shape: of the batch, padding decodes included."""
    scored = []
    for at, (row, first) in enumerate(zip(plan.rows, find_firsts(plan, shape), strict=True)):
        num_top, prompt = row.sequence.params.prompt_logprobs, row.sequence.prompt
        if num_top is not None and row.start < len(prompt):
            targets = hide_placeholders(prompt[row.start + 1 : row.start + 1 + row.num_tokens])
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


def find_tapped(plan: Plan, shape: BatchShape) -> list[Tapped]:
    """Find the tokens whose hidden states are reported. shape: as in `find_scored`"""
    found = []
    for at, (row, first) in enumerate(zip(plan.rows, find_firsts(plan, shape), strict=True)):
        for number, each in enumerate(row.sequence.tapped):
            before, num_tokens = each.span(row.start, row.num_tokens, len(row.sequence.prompt))
            if num_tokens:
                found.append(Tapped(at, number, each.index, first + before, num_tokens, each.tap.pool == "mean"))
    return found


def find_firsts(plan: Plan, shape: BatchShape) -> Iterator[int]:
    """The index of each row's first token in the batch. shape: as in `find_scored`"""
    last = 0
    for at, row in enumerate(plan.rows):
        first = shape.num_decoded if at == plan.num_decodes else last
        is_drafting = at < plan.num_decodes and shape.num_drafts
        last = first + (1 + shape.num_drafts if is_drafting else row.num_tokens)
        yield first

"""Schedule data-parallel groups: each has its own sequences, and all step together.

    scheduler = DataParallelScheduler([Scheduler(…), Scheduler(…)])
    builder = DataParallelBuilder([StepBuilder(capacity), StepBuilder(capacity)])
    plan = scheduler.schedule()                                      # rows of all groups
    pending = runner.execute(builder.build(plan))                    # of `runtime.ranks.driver`: a step of each group
    ended = scheduler.commit(plan, pending.wait(), finish)

A sequence waits for all groups at once. It is placed when a group has room: in the group with the fewest tokens to
compute, its own that the group has neither cached nor computes for another one, and those of the group's sequences, or
with its parent. It stays there.

The steps of all groups have one shape, that of the largest, since their ranks meet in collectives.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping

from msgspec.structs import replace

from atom.errors import RequestError
from atom.runtime.kv.retention import RetentionCounts
from atom.runtime.metrics import SchedulerStats
from atom.runtime.schedule.fair_queue import FairQueue
from atom.runtime.schedule.prefill_budget import PrefillBudget
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.schedule.step_costs import StepLoad, load_of
from atom.runtime.step.bisect_failures import take
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import BatchShape, Scored, StepInput
from atom.runtime.types import BlockCopies, Plan, Sampled, Sequence

ANSWER_TOKENS = 64  # of a prompt: computing them costs a group as much as the rest of a sequence's answer


class DataParallelScheduler:
    """One queue in front of the schedulers of the groups, with the interface of one of them."""

    def __init__(self, groups: list[Scheduler], prefill_budget: PrefillBudget | None = None) -> None:
        """prefill_budget: limits prompts next to decodes, of all groups; None: no limit"""
        self.groups = groups
        self._prefill_budget = prefill_budget
        self.limits = groups[0].limits
        self.num_slots = sum(group.num_slots for group in groups)
        self.waiting = FairQueue()  # those that no group has
        self._queued: dict[str, Sequence] = {}  # the same, by id
        self.sequences: MutableMapping[str, Sequence] = ChainMap(self._queued, *(each.sequences for each in groups))
        self.stats = SchedulerStats()  # of all groups; a step of all counts as one
        for group in groups:
            group.stats = self.stats
            group.waiting = FairQueue(self.waiting.counters)

    @property
    def is_paused(self) -> bool:
        """Whether no group admits a sequence."""
        return self.groups[0].is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        for group in self.groups:
            group.is_paused = is_paused

    @property
    def has_work(self) -> bool:
        return bool(self._queued) or any(group.has_work for group in self.groups)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for group in self.groups for sequence in group.running]

    @property
    def num_running(self) -> int:
        return sum(group.num_running for group in self.groups)

    @property
    def has_suspects(self) -> bool:
        """As of `Scheduler`."""
        return any(group.has_suspects for group in self.groups)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(group.num_waiting for group in self.groups)

    @property
    def num_deferred(self) -> int:
        return sum(group.num_deferred for group in self.groups)

    @property
    def num_waiting_by_tenant(self) -> Counter[str]:
        return sum((group.num_waiting_by_tenant for group in self.groups), self.waiting.counts())

    @property
    def fullest(self) -> tuple[int, int]:
        """Used blocks and all blocks of the groups' fullest pools."""
        num_used, num_blocks = zip(*(group.fullest for group in self.groups), strict=True)
        return sum(num_used), sum(num_blocks)

    @property
    def host_usage(self) -> tuple[int, int]:
        """Used blocks and all blocks of the groups' fullest pools on the host."""
        num_used, num_blocks = zip(*(group.host_usage for group in self.groups), strict=True)
        return sum(num_used), sum(num_blocks)

    @property
    def retention(self) -> RetentionCounts:
        """What became of the retained blocks of the groups' KV."""
        return sum((group.retention for group in self.groups), RetentionCounts())

    def check(self, sequence: Sequence) -> None:
        """Raise RequestError for a sequence that can never run."""
        if sequence.id in self._queued:
            raise RequestError(f"the id {sequence.id} is in use, choose another")
        for group in self.groups:
            group.check(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises as `check` does, with nothing changed."""
        self.check(sequence)
        self._queued[sequence.id] = sequence
        self.waiting.add(sequence)

    def abort(self, id: str, reason: str = "abort") -> Sequence | None:
        """End a sequence, whatever step it is in; None if no sequence has this id."""
        sequence = self._queued.pop(id, None)
        if sequence is None:
            return next((ended for group in self.groups if (ended := group.abort(id, reason))), None)
        self.waiting.remove(sequence)
        sequence.finish_reason = reason
        return sequence

    def schedule(self) -> Plan:
        """Plan the next step of all groups; it has no rows if no group has anything to compute.

        While a sequence at fault is being found, one group has rows.
        """
        self._place()
        if self._prefill_budget is not None:
            self._prefill_budget.begin(is_idle=all(group.is_idle for group in self.groups))
            limit = self._prefill_budget.limit(_largest(group.decode_load for group in self.groups))
            self.stats.max_prompt_tokens = limit or 0
            for group in self.groups:
                group.max_prompt_tokens = limit
        suspected = next((group for group in self.groups if group.has_suspects), None)
        plans = [group.schedule() if suspected in (None, group) else Plan([], 0) for group in self.groups]
        decodes = [row for plan in plans for row in plan.rows[: plan.num_decodes]]
        others = [row for plan in plans for row in plan.rows[plan.num_decodes :]]
        copies = [plan.copies or BlockCopies() for plan in plans]
        first = replace(copies[0], others=copies[1:]) if any(plan.copies for plan in plans) else None
        return Plan(decodes + others, len(decodes), first, any(plan.is_chained for plan in plans))

    def commit(self, plan: Plan, sampled: Sampled, finish: Callable[[Sequence], str | None]) -> list[Sequence]:
        """Append what a step sampled; the sequences that it ended."""
        num_steps, ended = self.stats.num_steps + 1, []
        parts = split(plan, len(self.groups))
        if self._prefill_budget is not None:
            self._prefill_budget.commit(_largest(map(load_of, parts)))
        for group, part, own in zip(self.groups, parts, (sampled, *sampled.others), strict=True):
            ended += group.commit(part, own, finish)
        self.stats.num_steps = num_steps
        return ended

    def retract(self, plan: Plan) -> None:
        """Take back the newest plan, whose step did not take place: its rows may be planned again."""
        for group, part in zip(self.groups, split(plan, len(self.groups)), strict=True):
            group.retract(part)

    def drop_kv(self) -> None:
        """Preempt all running sequences, and forget all prefixes; no plan is pending."""
        for group in self.groups:
            group.drop_kv()

    def _place(self) -> None:
        """Give waiting sequences, in their order, to groups that have room."""
        num_open = [group.num_open for group in self.groups]
        if self.is_paused or not self.waiting or not any(num_open):
            return
        costs = [sum(map(_cost, group.sequences.values())) for group in self.groups]
        num_promised = [0] * len(self.groups)  # blocks
        while self.waiting:
            sequence = self.waiting.peek()
            cached = [group.find_cached(sequence) for group in self.groups]
            open_groups = [
                at
                for at, group in enumerate(self.groups)
                if num_open[at] and group.has_room(sequence, cached[at].num_shared, num_promised[at])
            ]
            if not open_groups:
                return
            self.waiting.remove(sequence)
            del self._queued[sequence.id]
            num_spared = {at: self.groups[at].count_spared(sequence, cached[at]) for at in open_groups}
            group = min(open_groups, key=lambda at: costs[at] - num_spared[at])
            if sequence.parent is not None and sequence.parent.group in open_groups:
                group = sequence.parent.group
            sequence.group = group
            self.groups[group].add(sequence)
            num_open[group] -= 1
            num_new = sequence.num_tokens - cached[group].num_shared
            num_promised[group] += -(-num_new // self.groups[group].cache.block_size) + 1
            costs[group] += _cost(sequence) - num_spared[group]


def _largest(loads: Iterable[StepLoad]) -> StepLoad:
    """The load that the steps of all groups wait for."""
    return StepLoad(*map(max, zip(*loads, strict=True)))


def _cost(sequence: Sequence) -> int:
    """The work that a sequence still causes its group, in tokens of a prompt."""
    return sequence.num_tokens - sequence.num_computed + ANSWER_TOKENS


def split(plan: Plan, num_groups: int) -> list[Plan]:
    """The plan of each group."""
    if num_groups == 1:
        return [plan]
    parts = (take([row for row in plan.rows if row.sequence.group == group]) for group in range(num_groups))
    return [dataclasses.replace(part, is_chained=plan.is_chained) for part in parts]


class DataParallelBuilder:
    """Builds a step of each group, all of one shape. `StepBuilder` says what of a step is remembered."""

    def __init__(self, groups: list[StepBuilder]) -> None:
        self.groups = groups

    @property
    def can_repeat(self) -> bool:
        return all(group.can_repeat for group in self.groups)

    def build(self, plan: Plan) -> StepInput:
        """Build the steps of a plan. What they send counts as known to the runners, until `retract`."""
        plans = split(plan, len(self.groups))
        parts = list(zip(self.groups, plans, strict=True))
        num_drafts = max(group.count_drafts(each) for group, each in parts)
        shape = common_shape([group.shape_of(each) for group, each in parts]).drafting(num_drafts)
        collected = [group.collect(each, num_drafts) for group, each in parts]
        # the last token of a prompt is one row, as a decode is, but only its own group knows that the runner lacks it
        is_decode = all(rows.is_decode for rows in collected)
        steps = [
            group.pack(rows, num_drafts, is_decode, shape) for group, rows in zip(self.groups, collected, strict=True)
        ]
        pad_scored(steps)
        num_pooled = max(step.num_pooled for step in steps)
        for step in steps:
            step.num_pooled = num_pooled
        first, *first.others = steps
        return first

    def retract(self, plan: Plan) -> None:
        """Take back the newest plan, whose step did not take place, or not to its end: its rows are sent anew."""
        for group, each in zip(self.groups, split(plan, len(self.groups)), strict=True):
            group.retract(each)


def common_shape(shapes: list[BatchShape]) -> BatchShape:
    """The smallest shape that holds each of these."""
    num_decodes = max(shape.num_decodes for shape in shapes)
    num_samples = max(shape.num_samples for shape in shapes)
    num_tokens = max(shape.num_tokens - shape.num_decodes for shape in shapes)
    if not num_tokens:
        return BatchShape(num_decodes, num_decodes, num_decodes, num_decodes)
    num_rows = max(  # including one of padding in groups with fewer tokens
        shape.num_rows - shape.num_decodes + (shape.num_tokens - shape.num_decodes < num_tokens) for shape in shapes
    )
    return BatchShape(num_decodes + num_tokens, num_decodes + num_rows, num_samples, num_decodes)


def pad_scored(steps: list[StepInput]) -> None:
    """Make the head score the same number of rows in each step, in the same order."""
    num_rows = [max(counts) for counts in _columns([[each.num_rows for each in step.scored] for step in steps])]
    for step in steps:
        for each, rows in zip(step.scored, num_rows, strict=False):
            each.num_rows = rows
        step.scored += [Scored(-1, 0, [], 0, rows) for rows in num_rows[len(step.scored) :]]


def _columns(lists: list[list[int]]) -> Iterator[list[int]]:
    """The first number of each list, then the second one of each that has it, and so on."""
    for at in range(max(map(len, lists))):
        yield [each[at] for each in lists if at < len(each)]

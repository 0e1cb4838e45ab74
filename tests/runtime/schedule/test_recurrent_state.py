"""Recurrent state: what is in a slot when a step computes a row, whatever was cached, shared, preempted or dropped.

The machine below stands for a runner: a state is the tokens that it was made of.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kinds import full_kind, recurrent_kind, window_kind

from atom.runtime.draft.speculation import Drafter, RunnerDrafter
from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import Capacity, StepInput
from atom.runtime.types import Plan, Sampled, ScheduledRequest, Sequence, StateKind, StepLimits
from atom.sampling_params import SamplingParams

BLOCK = 4
FULL, STATE, WINDOW = full_kind(1, BLOCK), recurrent_kind(50, BLOCK), window_kind(6, 1, BLOCK)
counter = itertools.count()
State = tuple[int, ...]


def after(state: State) -> int:
    """The token that a model with this state draws."""
    return (sum(state) * 31 + len(state) * 7) % 50


def columns(moves: bytearray, num_rows: int) -> list[list[int]]:
    return np.frombuffer(moves, np.int32).reshape(num_rows, -1).T.tolist()  # type: ignore[no-any-return]


@dataclass
class Machine:
    """Runs plans; asserts that each row finds the state of the tokens before it, whatever was drafted for it."""

    num_states: int = 1  # of a slot
    chance: random.Random = field(default_factory=random.Random)  # by which a draft of the runner is right
    tokens: dict[int, State] = field(default_factory=dict)  # by slot, those of its sequence, the newest included
    owners: dict[int, object] = field(default_factory=dict)  # by slot, the blocks of its sequence once it has drawn
    states: dict[int, State] = field(default_factory=dict)
    blocks: dict[int, State] = field(default_factory=dict)
    num_restored: int = 0
    num_accepted: Counter[int] = field(default_factory=Counter)  # decodes with drafts, by those that were right
    num_passed: Counter[bool] = field(default_factory=Counter)  # copies of decodes, by whether they took place

    def run(self, plan: Plan, step: StepInput) -> Sampled:
        for place, block in columns(step.restores["state"], 2) if step.restores else []:
            self.states[place] = self.blocks[block]
            self.num_restored += 1
        drawn = [
            draws for row in plan.rows if (draws := self._compute(row, bool(step.drafts or step.shape.num_drafts)))
        ]
        for place, block, row, end in columns(step.copies["state"], 4) if step.copies else []:
            last = len(self.tokens[place // self.num_states]) - 1
            is_passed = row < 0 or last - len(drawn[row]) < end <= last
            self.num_passed[is_passed] += row >= 0
            if is_passed:
                self.blocks[block] = self.states[place]
        firsts, accepted = [draws[0] for draws in drawn], {at: draws[1:] for at, draws in enumerate(drawn) if draws[1:]}
        return Sampled(firsts, [None] * len(drawn), accepted=accepted, num_drafted=dict.fromkeys(accepted, 1))

    def _compute(self, row: ScheduledRequest, drafts: bool) -> list[int]:
        """Compute a row; what it draws."""
        sequence, slot = row.sequence, row.sequence.slot
        tokens, start = tuple(sequence.prompt + sequence.output), row.start
        is_known = row.is_decode and self.owners.get(slot) is sequence.blocks
        if is_known:  # the host may not know how many there are
            tokens = self.tokens[slot]
            start = len(tokens) - 1
        tokens = tokens[: start + row.num_tokens - len(row.drafts)]
        state = self.states[self._place(slot, start)] if start else ()
        assert state == tokens[:start], f"{sequence.id} at {start}"
        for token in tokens[start:]:
            state = self._extend(slot, state, token)
        draws = [after(state)] if row.samples else []
        for number in range(self.num_states - 1 if drafts and row.is_decode else 0):
            right = after(state)
            draft = -2  # padding
            if number < len(row.drafts) and (is_known or row.drafts[0] >= 0):
                draft = row.drafts[number] if row.drafts[0] >= 0 else self.chance.choice((right, right, 50))
            if len(draws) == number + 1 and draft == right:
                draws.append(after((*state, draft)))
            state = self._extend(slot, state, draft)
        self.num_accepted[len(draws) - 1] += bool(drafts and row.drafts)
        self.tokens[slot], self.owners[slot] = (*tokens, *draws), sequence.blocks if draws else None
        return draws

    def _extend(self, slot: int, state: State, token: int) -> State:
        state = (*state, token)
        self.states[self._place(slot, len(state))] = state
        return state

    def _place(self, slot: int, num_tokens: int) -> int:
        return slot * self.num_states + num_tokens % self.num_states


class AtRandom:
    """Drafts of the host, which are right now and then."""

    def __init__(self, num_drafts: int, chance: random.Random) -> None:
        self.num_drafts, self.chance = num_drafts, chance

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        state, drafts = tuple(sequence.prompt + sequence.output), list[int]()
        for _ in range(min(max_drafts, self.num_drafts)):
            drafts.append(after(state) if self.chance.random() < 0.7 else 50)
            state = (*state, drafts[-1])
        return drafts[: self.chance.randrange(1 + self.num_drafts)]

    def forget(self, sequence: Sequence) -> None: ...


@dataclass
class Served:
    """A scheduler with its machine, whose steps are committed `run_ahead` plans later."""

    kinds: SequenceOf[StateKind] = (FULL, STATE)
    num_blocks: int = 60
    num_copies: int = 8
    max_num_seqs: int = 4
    max_step: int = 16
    run_ahead: int = 0
    prefix: bool = True
    interval: int = 8
    fails: frozenset[int] = frozenset()  # steps that fail after they have written over states
    at_fault: int = -1  # a token whose sequence makes every step fail
    num_drafts: int = 0
    seed: int = 0
    is_host: bool = False  # the host drafts

    def __post_init__(self) -> None:
        blocks = {kind.name: 1 + (self.num_copies if kind is STATE else self.num_blocks) for kind in self.kinds}
        self.cache = KVCache(self.kinds, blocks, BLOCK, enable_prefix_caching=self.prefix, state_interval=self.interval)
        limits = StepLimits(self.max_num_seqs, self.max_step, 200, 100, self.num_drafts)
        chance = random.Random(self.seed)
        drafter: Drafter | None = None
        if self.num_drafts:
            drafter = AtRandom(self.num_drafts, chance) if self.is_host else RunnerDrafter(self.num_drafts)
        self.scheduler = Scheduler(self.cache, limits, self.run_ahead, drafter)
        paged = tuple(kind.name for kind in self.kinds if kind is not STATE)
        capacity = Capacity(
            paged, limits.max_decodes, 50, 50, num_drafts=0 if self.is_host else self.num_drafts, recurrent=("state",),
            num_states=limits.num_states, block_size=BLOCK,
        )  # fmt: skip
        self.builder = StepBuilder(capacity)
        self.machine = Machine(limits.num_states, chance)
        self.num_steps = 0

    def add(self, tokens: SequenceOf[int], max_tokens: int = 10, n: int = 1) -> list[Sequence]:
        request, params = str(next(counter)), SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        first = Sequence(f"{request}-0", list(tokens), params, request_id=request)
        siblings = [
            Sequence(f"{request}-{index}", list(tokens), params, request_id=request, index=index, parent=first)
            for index in range(1, n)
        ]
        for each in (first, *siblings):
            self.scheduler.add(each)
        return [first, *siblings]

    def run(self) -> None:
        """Run all that was added, and compare each answer with that of a machine of its own."""
        pending: deque[tuple[Plan, Sampled]] = deque()
        every = list(self.scheduler.sequences.values())
        while self.scheduler.has_work or pending:
            plan = self.scheduler.schedule()
            if plan.rows:
                self.num_steps += 1
                sampled = self.machine.run(plan, self.builder.build(plan))
                is_at_fault = any(row.sequence.prompt[0] == self.at_fault for row in plan.rows)
                if self.num_steps in self.fails or is_at_fault:
                    self.builder.retract(plan)
                    self.scheduler.retract(plan)
                    if is_at_fault and len(plan.rows) == 1:
                        self.scheduler.abort(plan.rows[0].sequence.id, "error")
                else:
                    pending.append((plan, sampled))
            if len(pending) > self.run_ahead or (pending and not plan.rows):
                done, sampled = pending.popleft()
                self.scheduler.commit(done, sampled, lambda sequence: finish_reason(sequence, 200))
        for sequence in every:
            state = tuple(sequence.prompt)
            for token in sequence.output:
                assert token == after(state)
                state += (token,)
            assert len(sequence.output) == sequence.params.max_tokens or sequence.finish_reason == "error"


def test_a_prompt_begins_after_the_last_full_block_of_an_equal_one() -> None:
    served = Served()
    (first,) = served.add(range(19))
    served.run()
    (second,) = served.add(range(19))
    served.run()
    assert (first.num_cached, second.num_cached) == (0, 16)
    assert served.machine.num_restored == 1


@pytest.mark.parametrize("fields", [{}, {"num_drafts": 3, "is_host": True}, {"num_drafts": 3, "run_ahead": 2}], ids=str)
def test_a_conversation_goes_on_after_its_answer(fields: dict[str, Any]) -> None:
    served = Served(**fields)
    (first,) = served.add(range(10), max_tokens=25)
    served.run()
    (second,) = served.add([*first.prompt, *first.output, 3, 4, 5])
    served.run()
    assert second.num_cached == 32  # of 35 tokens, the last copy each 8


def test_a_copy_that_was_planned_for_a_dropped_step_is_given_back() -> None:
    cache = Served(num_copies=2).cache
    sequence = Sequence("long", list(range(30)), SamplingParams())
    assert cache.match_prefix(sequence) == 0
    assert [cache.allocate(sequence, stop) for stop in (8, 12)] == [8, 12]  # the step up to 8 is not planned
    sequence.num_computed = 12
    cache.commit(sequence)
    assert cache.match_prefix(Sequence("short", list(range(10)), SamplingParams())) == 0
    assert cache.match_prefix(Sequence("longer", list(range(14)), SamplingParams())) == 12


def test_where_prompts_part_the_third_one_finds_a_state() -> None:
    served = Served(max_step=64)
    shared = list(range(21))
    found = []
    for number in range(3):
        (sequence,) = served.add([*shared, *[30 + number] * 13])
        served.run()
        found.append(sequence.num_cached)
    assert found == [0, 0, 20]


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_prompts_that_wait_together_compute_what_they_share_once(run_ahead: int) -> None:
    served = Served(max_num_seqs=8, max_step=300, num_copies=30, run_ahead=run_ahead)
    shared = list(range(21))
    every = [served.add([*shared, *[30 + number] * 13])[0] for number in range(8)]
    served.run()
    assert [each.num_cached for each in every] == [0] + [20] * 7
    assert served.machine.num_restored == 7


def test_a_prompt_that_is_cut_into_chunks_leaves_states_at_their_ends() -> None:
    served = Served(max_step=10)
    served.add(range(40), max_tokens=1)
    served.run()
    (sequence,) = served.add([*range(17), 49, 49, 49], max_tokens=1)
    served.run()
    assert sequence.num_cached == 16


def test_siblings_begin_with_the_state_of_their_prompt() -> None:
    for prefix in (True, False):
        served = Served(prefix=prefix)
        served.add(range(13), n=4)
        served.run()
        assert served.machine.num_restored == 3
        stats = served.scheduler.stats
        assert stats.num_prefix_hit_tokens + stats.num_forked_tokens == 3 * 12


def test_without_prefix_caching_no_state_is_copied() -> None:
    served = Served(prefix=False)
    for _ in range(2):
        served.add(range(33), max_tokens=20)
        served.run()
    assert not served.machine.blocks


def test_without_room_for_a_copy_everything_runs() -> None:
    served = Served(num_copies=1)
    for number in range(6):
        served.add([number] * 11 + list(range(9)), n=2)
    served.run()


@pytest.mark.parametrize("fields", [{}, {"num_drafts": 3, "run_ahead": 2}], ids=str)
def test_an_answer_keeps_one_copy_of_its_state(fields: dict[str, Any]) -> None:
    served = Served(num_copies=12, **fields)
    (sequence,) = served.add(range(9), max_tokens=90)
    served.run()
    assert len(sequence.output) == 90
    (pool,) = [pool for pool in served.cache.pools if pool.name == "state"]
    assert len(pool.cached) == 2  # of the prompt, and of the answer


@pytest.mark.parametrize("fails", [frozenset({3}), frozenset({2, 4, 7, 11})])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_after_a_step_that_fails_rows_begin_again_from_a_copy(run_ahead: int, fails: frozenset[int]) -> None:
    served = Served(run_ahead=run_ahead, fails=fails)
    for number in range(4):
        served.add([number, *range(20)], max_tokens=12)
    served.run()
    assert served.scheduler.stats.num_preemptions
    assert served.machine.num_restored


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_the_sequence_at_fault_is_found_and_no_other_ends(place: int, run_ahead: int) -> None:
    served = Served(run_ahead=run_ahead, max_num_seqs=7, max_step=90, num_copies=20, at_fault=45)
    every = [served.add([45 if number == place else number, *range(12)])[0] for number in range(7)]
    served.run()
    assert [number for number, each in enumerate(every) if each.finish_reason == "error"] == [place]
    assert served.num_steps < 40, "not one by one"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kinds", [(FULL, STATE), (STATE,), (STATE, WINDOW), (FULL, WINDOW, STATE)])
@pytest.mark.parametrize(
    ("run_ahead", "num_drafts", "is_host"),
    [(0, 0, False), (2, 0, False), (0, 3, True), (0, 3, False), (2, 1, False), (2, 3, False)],
)
def test_every_row_finds_the_state_of_the_tokens_before_it(
    kinds: tuple[StateKind, ...], run_ahead: int, num_drafts: int, is_host: bool
) -> None:
    num_preemptions = num_restored = num_forked = 0
    num_accepted, num_passed = Counter[int](), Counter[bool]()
    for seed in range(20 if not num_drafts else 8):
        random_of = random.Random(seed)
        served = Served(
            kinds,
            num_blocks=random_of.choice((12, 30, 90)),
            num_copies=random_of.choice((1, 3, 10)),
            max_num_seqs=random_of.choice((1, 3, 5)),
            max_step=random_of.choice((5, 7, 16, 64)),
            run_ahead=run_ahead,
            prefix=random_of.random() < 0.5,
            interval=random_of.choice((1, 4, 12)),
            num_drafts=num_drafts,
            seed=seed,
            is_host=is_host,
            fails=frozenset(random_of.sample(range(1, 80), 4)),
        )
        roots = [[random_of.randrange(50) for _ in range(16)] for _ in range(2)]
        for _ in range(3):
            for _ in range(random_of.randrange(1, 7)):
                root = random_of.choice(roots)[: random_of.randrange(17)]
                tail = [random_of.randrange(50) for _ in range(random_of.randrange(1, 14))]
                served.add(root + tail, max_tokens=random_of.randrange(1, 16), n=random_of.choice((1, 3)))
            served.run()
        num_preemptions += served.scheduler.stats.num_preemptions
        num_restored += served.machine.num_restored
        num_forked += served.scheduler.stats.num_forked_tokens
        num_accepted += served.machine.num_accepted
        num_passed += served.machine.num_passed
    assert num_preemptions and num_restored and num_forked
    assert all(num_accepted[number] for number in range(1 + num_drafts)) or not num_drafts
    assert (num_passed[True] and num_passed[False]) or not num_drafts

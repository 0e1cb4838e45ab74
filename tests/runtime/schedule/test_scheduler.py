from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kinds import cells_of, every_kind, full_kind, in_blocks, window_kind

from atom.errors import RequestError
from atom.runtime.kv import prefix_cache
from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.prefix_cache import Prefix, pack
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.types import Logprobs, Plan, Sampled, ScheduledRequest, Sequence, StateKind, StepLimits
from atom.sampling_params import SamplingParams

FULL = full_kind()
WINDOW = window_kind(5)


def make_scheduler(
    *kinds: StateKind,
    num_blocks: int = 100,
    prefix: bool = False,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 100,
) -> Scheduler:
    sizes = {kind.name: num_blocks for kind in kinds or (FULL,)}
    return Scheduler(
        KVCache(kinds or (FULL,), sizes, 4, enable_prefix_caching=prefix),
        StepLimits(max_num_seqs, max_num_batched_tokens, max_model_len),
    )


def make(id: str, num_prompt: int, max_tokens: int = 8, parent: Sequence | None = None, **params: object) -> Sequence:
    prompt = list(range(1000, 1000 + num_prompt))
    return Sequence(id, prompt, SamplingParams(max_tokens=max_tokens, **params), parent=parent)  # type: ignore[arg-type]


def with_priority(sequence: Sequence, priority: int) -> Sequence:
    sequence.priority = priority
    return sequence


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def rows(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def sample(plan: Plan, token: int = 7) -> Sampled:
    num_sampled = sum(row.samples for row in plan.rows)
    return Sampled([token] * num_sampled, [None] * num_sampled)


def commit(scheduler: Scheduler, plan: Plan, token: int = 7) -> list[str]:
    ended = scheduler.commit(
        plan, sample(plan, token), lambda sequence: finish_reason(sequence, scheduler.limits.max_model_len)
    )
    return [sequence.id for sequence in ended]


def step(scheduler: Scheduler) -> list[tuple[str, int, int, bool]]:
    plan = scheduler.schedule()
    commit(scheduler, plan)
    return rows(plan)


def finish_all(scheduler: Scheduler, max_steps: int = 1000) -> None:
    for _ in range(max_steps):
        if not scheduler.has_work:
            break
        assert step(scheduler), "has work and plans none"
    assert not scheduler.has_work
    assert all(pool.num_free == pool.num_blocks - 1 for pool in scheduler.cache.pools)


def test_a_delay_factor_gathers_prompts_while_others_run() -> None:
    now = 0.0
    limits = StepLimits(8, 64, 100)
    cache = KVCache((FULL,), {"full": 100}, 4, enable_prefix_caching=False)
    scheduler = Scheduler(cache, limits, delay_factor=0.5, clock=lambda: now)

    def step_of(seconds: float) -> list[str]:
        nonlocal now
        plan = scheduler.schedule()
        now += seconds
        commit(scheduler, plan)
        return [row.sequence.id for row in plan.rows]

    def arrive(id: str) -> None:
        sequence = make(id, 5, max_tokens=20)
        sequence.arrival = now
        scheduler.add(sequence)

    arrive("a")
    assert step_of(2.0) == ["a"], "nothing runs"
    arrive("b")
    assert step_of(0.5) == ["a"]
    arrive("c")
    assert step_of(0.5) == ["a"], "b has waited for 0.5 s of 0.5 * 2.0"
    assert step_of(0.1) == ["a"], "and now for just as long"
    assert step_of(0.4) == ["a", "b", "c"]
    arrive("d")
    assert step_of(0.3) == ["a", "b", "c"]
    assert step_of(0.1) == ["a", "b", "c", "d"], "0.3 s is more than 0.5 * 0.4: a step of decodes counts for nothing"
    arrive("e")
    for id in "abcd":
        scheduler.abort(id)
    assert step_of(0.1) == ["e"], "nothing runs any more"


def test_a_prompt_then_a_token_a_step() -> None:
    scheduler = make_scheduler()
    sequence = make("a", 5, max_tokens=3)
    add(scheduler, sequence)
    assert step(scheduler) == [("a", 0, 5, True)]
    assert step(scheduler) == [("a", 5, 1, True)]
    plan = scheduler.schedule()
    assert commit(scheduler, plan) == ["a"]
    assert (sequence.output, sequence.finish_reason) == ([7, 7, 7], "max_tokens")
    assert not scheduler.has_work
    assert scheduler.schedule() == Plan([], 0)


def test_prompts_run_in_chunks_with_decodes_which_come_first_and_never_wait() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, make("a", 3), make("b", 25))
    assert step(scheduler) == [("a", 0, 3, True), ("b", 0, 7, False)]
    add(scheduler, make("c", 4))
    assert step(scheduler) == [("a", 3, 1, True), ("b", 7, 9, False)]
    assert step(scheduler) == [("a", 4, 1, True), ("b", 16, 9, True)]
    plan = scheduler.schedule()
    assert rows(plan) == [("a", 5, 1, True), ("b", 25, 1, True), ("c", 0, 4, True)]
    assert plan.num_decodes == 2
    assert scheduler.stats.num_chunks == 2


def test_a_row_of_one_token_that_samples_counts_as_a_decode() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make("a", 3), make("b", 1), make("c", 2))
    plan = scheduler.schedule()
    assert rows(plan) == [("b", 0, 1, True), ("a", 0, 3, True)]
    assert plan.num_decodes == 1
    commit(scheduler, plan)
    plan = scheduler.schedule()
    assert rows(plan) == [("a", 3, 1, True), ("b", 1, 1, True), ("c", 0, 2, True)]
    assert plan.num_decodes == 2


def test_a_step_has_at_most_max_num_seqs_sequences_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make(id, 3, max_tokens=2) for id in "abc"))
    assert step(scheduler) == [("a", 0, 3, True), ("b", 0, 3, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    step(scheduler)
    assert step(scheduler) == [("c", 0, 3, True)]


def test_every_decode_has_a_token_in_the_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=3)
    add(scheduler, *(make(id, 1, max_tokens=5) for id in "abcde"))
    plan = scheduler.schedule()
    assert (len(plan.rows), scheduler.schedule().rows) == (3, [])
    commit(scheduler, plan)
    assert [len(step(scheduler)) for _ in range(4)] == [3] * 4
    finish_all(scheduler)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (make("x", 0), "the prompt is empty, give at least one token"),
        (make("x", 30), "leaves no room for an answer in max_model_len=30"),
        (make("x", 20, max_tokens=9), "prompt and max_tokens are 29 tokens, more than the whole KV cache holds"),
        (make("a", 3), "the id a is in use"),
    ],
)
def test_what_can_never_run_is_refused_and_disturbs_nobody(sequence: Sequence, message: str) -> None:
    scheduler = make_scheduler(num_blocks=1 + 6, max_model_len=30)
    add(scheduler, make("a", 20, max_tokens=5))
    step(scheduler)
    for refuse in (scheduler.check, scheduler.add):
        with pytest.raises(RequestError, match=message):
            refuse(sequence)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    assert step(scheduler) == [("a", 20, 1, True)]
    finish_all(scheduler)


def test_what_just_fits_runs_by_itself_to_its_end() -> None:
    scheduler = make_scheduler(num_blocks=1 + 6, max_model_len=1000)
    sequence = make("a", 20, max_tokens=5)  # the last token is never computed
    add(scheduler, sequence)
    finish_all(scheduler)
    assert len(sequence.output) == 5


def test_a_sequence_ends_at_max_model_len() -> None:
    scheduler = make_scheduler(max_model_len=10)
    sequence = make("a", 7, max_tokens=50)
    add(scheduler, sequence)
    finish_all(scheduler)
    assert (len(sequence.output), sequence.finish_reason) == (3, "max_tokens")


def test_the_last_to_come_gives_its_blocks_and_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=1 + 6, max_num_seqs=2)
    first, second = make("a", 8, max_tokens=12), make("b", 8, max_tokens=12)
    add(scheduler, first, second, make("c", 1, max_tokens=1))
    for _ in range(5):  # 3 blocks each, then
        step(scheduler)
    assert second.num_computed == 12
    assert step(scheduler) == [("a", 12, 1, True)]
    assert (second.num_computed, second.blocks, len(second.output)) == (0, {}, 5)
    assert scheduler.stats.num_preemptions == 1
    assert [sequence.id for sequence in scheduler.waiting] == ["b", "c"]
    while first.finish_reason is None:
        step(scheduler)
    assert step(scheduler) == [("c", 0, 1, True), ("b", 0, 13, True)]
    finish_all(scheduler)
    assert (len(first.output), len(second.output)) == (12, 12)


def test_the_last_to_come_waits_for_a_block_with_what_it_has() -> None:
    scheduler = make_scheduler(num_blocks=1 + 5)
    add(scheduler, make("a", 4, max_tokens=4), make("b", 11, max_tokens=8))
    step(scheduler)
    assert step(scheduler) == [("a", 4, 1, True), ("b", 11, 1, True)]
    assert step(scheduler) == [("a", 5, 1, True)]
    assert step(scheduler) == [("a", 6, 1, True)]
    assert step(scheduler) == [("b", 12, 1, True)]
    assert scheduler.stats.num_preemptions == 0


def test_nobody_is_let_in_on_the_blocks_that_decodes_are_about_to_need() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4)
    add(scheduler, make("a", 8, max_tokens=4), make("b", 8, max_tokens=1))
    assert step(scheduler) == [("a", 0, 8, True)]
    finish_all(scheduler)
    assert scheduler.stats.num_preemptions == 0


def test_one_that_would_have_no_room_by_itself_is_let_in_with_what_another_computes() -> None:
    scheduler = make_scheduler(num_blocks=1 + 8, prefix=True)
    add(scheduler, make("a", 20), make("b", 20))
    assert step(scheduler) == [("a", 0, 20, True), ("b", 16, 4, True)]


def test_one_that_was_refused_is_not_looked_up_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_blocks=1 + 8, prefix=True)
    add(scheduler, make("a", 20))
    step(scheduler)
    lookups = []
    monkeypatch.setattr(scheduler.cache, "match_prefix", lambda sequence, spare: lookups.append(sequence.id) or 0)
    add(scheduler, make("b", 20))
    for _ in range(5):
        step(scheduler)
    assert lookups == ["b"]
    finish_all(scheduler)
    assert lookups == ["b", "b"]


def test_a_prompt_takes_the_blocks_of_a_decode_that_came_after_it() -> None:
    cache = KVCache([FULL, WINDOW], {"full": 50, "window": 1 + 3}, 4, enable_prefix_caching=False)
    scheduler = Scheduler(cache, StepLimits(8, 4, 100))
    add(scheduler, make("a", 20), make("b", 4))
    plans = [scheduler.schedule(), scheduler.schedule()]  # a's next chunk has to wait for its commit, b not
    assert [rows(plan) for plan in plans] == [[("a", 0, 4, False)], [("b", 0, 4, True)]]
    for plan in plans:
        commit(scheduler, plan)
    assert step(scheduler) == [("a", 4, 4, False)]  # b was in the plan already
    assert scheduler.stats.num_preemptions == 1
    finish_all(scheduler)


def test_a_preempted_sequence_gets_its_blocks_back_from_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=1 + 6, prefix=True)
    add(scheduler, make("a", 8, max_tokens=9), make("b", 8, max_tokens=12))
    scheduler.sequences["b"].prompt[:] = range(8)
    finish_all(scheduler)
    assert scheduler.stats.num_preemptions == 1
    assert scheduler.stats.num_prefix_hit_tokens == 8  # the third block was taken


def test_a_prompt_hits_what_another_has_computed_unless_it_wants_prompt_logprobs() -> None:
    scheduler = make_scheduler(prefix=True)
    add(scheduler, make("a", 10, max_tokens=1))
    step(scheduler)
    second, third = make("b", 11), make("c", 11, prompt_logprobs=0)
    add(scheduler, second, third)
    assert step(scheduler) == [("b", 8, 3, True), ("c", 0, 11, True)]
    assert (second.num_cached, third.num_cached) == (8, 0)
    assert scheduler.stats.num_prefix_hit_tokens == 8


def test_siblings_wait_for_the_prompt_and_share_its_full_blocks() -> None:
    scheduler = make_scheduler(FULL, WINDOW, max_num_batched_tokens=6)
    parent = make("a", 10, max_tokens=20)
    children = [make("b", 10, 20, parent), make("c", 10, 20, parent)]
    other = make("d", 2, max_tokens=20)
    add(scheduler, parent, *children, other)
    assert step(scheduler) == [("a", 0, 6, False)]
    assert (scheduler.num_waiting, scheduler.num_deferred) == (3, 0), "the step has no room for any"
    assert step(scheduler) == [("a", 6, 4, True), ("d", 0, 2, True)]
    assert (scheduler.num_waiting, scheduler.num_deferred) == (2, 2)
    assert step(scheduler) == [("a", 10, 1, True), ("d", 2, 1, True), ("b", 8, 2, True), ("c", 8, 2, True)]
    assert scheduler.num_deferred == 0
    assert children[0].blocks["full"][:2] == children[1].blocks["full"][:2] == parent.blocks["full"][:2]
    assert scheduler.stats.num_forked_tokens == 16
    scheduler.abort("a")
    finish_all(scheduler)
    assert [len(child.output) for child in children] == [20, 20]


@pytest.mark.parametrize("end", ["abort", "max_tokens"])
def test_siblings_of_one_that_ended_run_on_their_own(end: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    parent = make("a", 10, max_tokens=1)
    add(scheduler, parent, make("b", 10, parent=parent))
    step(scheduler)
    if end == "abort":
        scheduler.abort("a")
    else:
        step(scheduler)
    assert parent.finish_reason == end
    assert step(scheduler) == [("b", 0, 6, False)]
    finish_all(scheduler)


def test_a_preempted_parent_leaves_the_shared_blocks_to_its_siblings() -> None:
    scheduler = make_scheduler(num_blocks=1 + 8)
    pool = scheduler.cache.pools[0]
    first, parent = make("x", 7), make("a", 10)
    child = make("b", 10, parent=parent)
    add(scheduler, first, parent)
    step(scheduler)
    before = scheduler.schedule()
    add(scheduler, child)
    pending = scheduler.schedule()
    assert rows(pending) == [("b", 8, 2, True)]
    commit(scheduler, before)
    taken = [pool.take() for _ in range(pool.num_free)]
    assert step(scheduler) == [("x", 8, 1, True)]  # with a block of a, since b is in a pending plan
    assert list(scheduler.waiting) == [parent]
    assert [pool.num_holders[block] for block in child.blocks["full"]] == [1, 1, 1]
    commit(scheduler, pending)
    for block in taken:
        pool.release(block)
    finish_all(scheduler)
    assert len(parent.output) == len(child.output) == 8


def test_a_lower_priority_number_is_admitted_first_and_equals_as_they_came() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    numbers = {"a": 1, "b": 0, "c": 1, "d": -3, "e": 0}
    add(scheduler, *(with_priority(make(id, 2, max_tokens=1), number) for id, number in numbers.items()))
    assert [step(scheduler)[0][0] for _ in numbers] == [*"dbeac"]


def test_who_waits_takes_nothing_from_who_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, with_priority(make("a", 2, max_tokens=3), 9))
    step(scheduler)
    add(scheduler, with_priority(make("b", 2), 0))
    assert step(scheduler) == [("a", 2, 1, True)]
    assert scheduler.stats.num_preemptions == 0


def test_the_largest_priority_number_gives_its_blocks_whoever_came_first() -> None:
    scheduler = make_scheduler(num_blocks=1 + 8)
    add(scheduler, with_priority(make("a", 8, max_tokens=9), 1), make("b", 8, max_tokens=9))
    step(scheduler)
    assert step(scheduler) == [("b", 8, 1, True), ("a", 8, 1, True)]
    scheduler.cache.pools[0].take(), scheduler.cache.pools[0].take()
    for _ in range(3):
        step(scheduler)
    assert step(scheduler) == [("b", 12, 1, True)]
    assert [sequence.id for sequence in scheduler.waiting] == ["a"]
    assert scheduler.stats.num_preemptions == 1


def test_one_that_is_preempted_is_the_first_of_its_priority_to_come_back() -> None:
    scheduler = make_scheduler(num_blocks=1 + 6, max_num_seqs=2)
    first, second = make("a", 8, max_tokens=12), with_priority(make("b", 8, max_tokens=12), 1)
    add(scheduler, first, second)
    step(scheduler)
    add(scheduler, with_priority(make("c", 1), 1), with_priority(make("d", 1), 0), with_priority(make("e", 1), 2))
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    assert [sequence.id for sequence in scheduler.waiting] == [*"bce"]  # d was let in for it


def test_prompts_share_the_budget_by_priority() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, with_priority(make("a", 20), 1))
    step(scheduler)
    add(scheduler, make("b", 20))
    scheduler.limits = StepLimits(8, 16, 100)
    assert step(scheduler) == [("a", 8, 12, True), ("b", 0, 4, False)]
    scheduler.limits = StepLimits(8, 8, 100)
    add(scheduler, with_priority(make("c", 20), -1))
    assert step(scheduler) == [("a", 20, 1, True), ("b", 4, 7, False)]  # c came too late


def test_an_abort_frees_blocks_at_once_or_at_the_commit_of_the_plan_that_names_them() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make("a", 8), make("b", 8)
    add(scheduler, running, waiting)
    plan = scheduler.schedule()
    free = scheduler.cache.num_free
    assert scheduler.abort("b") is waiting
    assert scheduler.abort("a") is running
    assert scheduler.abort("a") is None
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert scheduler.cache.num_free == free
    assert not scheduler.has_work
    assert commit(scheduler, plan) == []
    assert running.output == []
    assert scheduler.cache.num_free == {"full": 99}
    add(scheduler, again := make("a", 8))
    step(scheduler)
    scheduler.abort("a")
    assert scheduler.cache.num_free == {"full": 99}
    assert again.output == [7]


def test_an_aborted_row_leaves_the_others_their_tokens() -> None:
    scheduler = make_scheduler()
    sequences = [make(id, 2) for id in "abc"]
    add(scheduler, *sequences)
    plan = scheduler.schedule()
    scheduler.abort("b")
    scheduler.commit(plan, Sampled([1, 2, 3], [None, None, None]), lambda sequence: None)
    assert [sequence.output for sequence in sequences] == [[1], [], [3]]


def test_finish_may_abort_any_sequence() -> None:
    scheduler = make_scheduler()
    sequences = [make(id, 2) for id in "abc"]
    add(scheduler, *sequences)
    plan = scheduler.schedule()

    def finish(sequence: Sequence) -> str | None:
        if sequence.id == "b":
            for id in "abc":
                scheduler.abort(id)
        return "eos" if sequence.id == "b" else None

    assert scheduler.commit(plan, sample(plan), finish) == []
    assert [(sequence.finish_reason, len(sequence.output)) for sequence in sequences] == [
        ("abort", 1),
        ("abort", 1),
        ("abort", 0),
    ]
    assert scheduler.cache.num_free == {"full": 99}


def test_a_pending_plan_s_sequences_are_left_out_of_the_next_one_and_not_preempted() -> None:
    scheduler = make_scheduler(num_blocks=1 + 6, max_num_batched_tokens=8)
    add(scheduler, make("a", 8, max_tokens=9), make("b", 7, max_tokens=9))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert rows(first) == [("a", 0, 8, True)]
    assert rows(second) == [("b", 0, 7, True)]
    assert scheduler.schedule().rows == []
    commit(scheduler, first)
    third = scheduler.schedule()
    assert rows(third) == [("a", 8, 1, True)]
    commit(scheduler, second)
    commit(scheduler, third)
    finish_all(scheduler)


def test_commit_appends_log_probabilities_and_those_of_the_prompt_by_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3)
    sequence = make("a", 5, prompt_logprobs=0, logprobs=0)
    add(scheduler, sequence)
    entries = [Logprobs(token, -1.0, 1, []) for token in range(1000, 1006)]
    plan = scheduler.schedule()
    scheduler.commit(plan, Sampled([], [], {0: entries[1:4]}), lambda sequence: None)
    plan = scheduler.schedule()
    scheduler.commit(plan, Sampled([9], [entries[5]], {0: entries[4:5]}), lambda sequence: None)
    assert sequence.prompt_logprobs == [None, *entries[1:5]]
    assert sequence.logprobs == [entries[5]]


@pytest.mark.parametrize(
    ("output", "params", "reason"),
    [
        ([5], {}, None),
        ([5, 2], {}, "eos"),
        ([5, 2], {"ignore_eos": True}, None),
        ([5, 2], {"min_tokens": 2}, "eos"),
        ([5, 2], {"min_tokens": 3}, None),
        ([5, 9], {"stop_token_ids": [8, 9]}, "stop_9"),
        ([5, 9], {"stop_token_ids": [8, 9], "ignore_eos": True}, "stop_9"),
        ([9], {"stop_token_ids": [8, 9], "min_tokens": 2}, None),
        ([5, 5, 5], {}, "max_tokens"),
        ([5, 5, 2], {}, "eos"),
        ([5, 5, 2], {"ignore_eos": True}, "max_tokens"),
    ],
)
def test_the_reason_to_finish(output: list[int], params: dict[str, object], reason: str | None) -> None:
    sequence = make("a", 4, max_tokens=3, **params)
    sequence.stop_ids, sequence.output = frozenset({2, 3}), output
    assert finish_reason(sequence, 100) == reason


def test_the_longest_sequence_finishes_with_max_tokens() -> None:
    sequence = make("a", 4, max_tokens=30)
    sequence.output = [5, 5]
    assert (finish_reason(sequence, 7), finish_reason(sequence, 6)) == (None, "max_tokens")


@dataclass
class World:
    """A scheduler and a device that remembers what each cell of the pools holds, with everything checked that must hold.

    A cell's content is the whole past of its token, so a row that reads another one's KV, or stale KV, is found out.
    The device takes steps in the order of their plans. In each it writes all entries before it reads any, but for
    decodes, which read what there was before the step.
    """

    scheduler: Scheduler
    cells: dict[tuple[str, int, int], object] = field(default_factory=dict)  # kind, block, place in it -> past
    pending: list[tuple[Plan, list[dict[str, list[int]]]]] = field(default_factory=list)  # with the tables they saw
    alive: list[Sequence] = field(default_factory=list)
    num_added: int = 0
    num_chained: int = 0  # steps in which a row read what another one wrote

    def add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: bytes,
        prompt_logprobs: bool = False,
        priority: int = 0,
    ) -> None:
        """Siblings, if there are several prompts (which are equal)."""
        parent = None
        for prompt in prompts:
            params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if prompt_logprobs else None)
            sequence = Sequence(str(self.num_added), prompt, params, salt=salt, parent=parent, stop_ids=frozenset({0}))
            sequence.priority = priority
            self.num_added += 1
            try:
                self.scheduler.add(sequence)
            except RequestError:
                continue
            self.alive.append(sequence)
            parent = parent or sequence

    def abort(self, index: int) -> None:
        if self.alive:
            sequence = self.alive.pop(index % len(self.alive))
            assert self.scheduler.abort(sequence.id) is sequence
            assert sequence.finish_reason == "abort"

    def schedule(self, fails: bool = False) -> None:
        """fails: the step of the plan does not take place"""
        plan = self.scheduler.schedule()
        if not self.pending:
            assert bool(plan.rows) == bool(self.alive), "work and no rows, or rows and no work"
        assert plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        in_flight = {row.sequence for pending, _ in self.pending for row in pending.rows}
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            assert sequence.finish_reason is None
            assert sequence not in in_flight
            assert sequence.admitted_at is not None
            assert sequence.num_cached < len(sequence.prompt)
            assert row.num_tokens > 0
            assert row.samples == (row.start + row.num_tokens == sequence.num_tokens)
            assert (index < plan.num_decodes) == (row.samples and row.num_tokens == 1)
        tables = [{kind: list(table) for kind, table in row.sequence.blocks.items()} for row in plan.rows]
        if plan.rows and fails:
            self.scheduler.retract(plan)
        elif plan.rows:
            self._compute(plan, tables)
            self.pending.append((plan, tables))

    def commit(self, chance: random.Random) -> None:
        plan, _ = self.pending.pop(0)
        expected = []
        sampled = []
        for row in plan.rows:
            if row.samples:
                sampled.append(chance.choices([0, 1, 2], [1, 6, 6])[0])
            if row.sequence.finish_reason is None:
                expected.append((row.sequence, list(row.sequence.output) + sampled[-1:] * row.samples))

        def finish(sequence: Sequence) -> str | None:
            return finish_reason(sequence, self.scheduler.limits.max_model_len)

        prompt_logprobs = {
            place: [
                Logprobs(token, -1.0, 1, [])
                for token in row.sequence.prompt[row.start + 1 : row.start + row.num_tokens + 1]
            ]
            for place, row in enumerate(plan.rows)
            if row.sequence.params.prompt_logprobs is not None
        }
        ended = self.scheduler.commit(plan, Sampled(sampled, [None] * len(sampled), prompt_logprobs), finish)
        for sequence, output in expected:
            assert sequence.output == output
        for sequence in ended:
            assert sequence.finish_reason in ("eos", "max_tokens")
            self.alive.remove(sequence)
            if sequence.params.prompt_logprobs is not None:
                tokens = [entry and entry.token for entry in sequence.prompt_logprobs]
                assert tokens == [None, *sequence.prompt[1:]]

    def _compute(self, plan: Plan, tables: list[dict[str, list[int]]]) -> None:
        size, chained = self.scheduler.cache.block_size, False
        before = dict(self.cells)
        written: dict[tuple[str, int, int], Sequence] = {}
        rows = list(zip(plan.rows, tables, strict=True))
        for row, blocks in rows:
            for pool in self.scheduler.cache.pools:
                pasts = _pasts(row)
                for position, index, place in cells_of(pool.kind, row.start, len(pasts), size):
                    block = blocks[pool.name][index]
                    assert block, "a token has no block to be written to"
                    cell = pool.name, block, place
                    assert written.setdefault(cell, row.sequence) is row.sequence, "two rows write to a block"
                    self.cells[cell] = pasts[position]
        for row, blocks in rows:
            for pool in self.scheduler.cache.pools:
                first = 0 if pool.keeps_all else max(row.start - pool.kind.rule.window + 1, 0)
                pasts = _pasts(row)
                for position, index, place in cells_of(pool.kind, first, len(pasts), size):
                    cell = pool.name, blocks[pool.name][index], place
                    is_other = written.get(cell, row.sequence) is not row.sequence
                    assert (before if is_other and row.is_decode else self.cells).get(cell) == pasts[position]
                    chained |= is_other
        assert chained <= plan.is_chained, "a step whose rows read one another's KV may be run in parts"
        self.num_chained += chained

    def check(self) -> None:
        cache, size = self.scheduler.cache, self.scheduler.cache.block_size
        assert {*self.scheduler.sequences.values()} == {*self.alive}
        assert {*self.scheduler.waiting} | {*self.scheduler.running} == {*self.alive}
        assert self.scheduler.num_waiting + self.scheduler.num_running == len(self.alive)
        assert all(not sequence.blocks and not sequence.num_computed for sequence in self.scheduler.waiting)
        numbers = [sequence.priority for sequence in self.scheduler.waiting]
        assert numbers == sorted(numbers)
        holders = {*self.alive}
        for plan, tables in self.pending:
            for row, seen in zip(plan.rows, tables, strict=True):
                holders.add(row.sequence)
                assert row.sequence.blocks == seen, "blocks of a pending plan are not touched"
        for pool in cache.pools:
            counts: Counter[int] = Counter()
            for sequence in holders:
                blocks = [block for block in sequence.blocks.get(pool.name, []) if block]
                assert len(blocks) == len(set(blocks))
                counts.update(blocks)
            assert [counts[block] for block in range(pool.num_blocks)] == pool.num_holders
            assert not {*pool.blank} & {*pool.cached}
            assert len(pool.blank) == len({*pool.blank})
            assert {*pool.blank, *pool.cached} == {b for b in range(1, pool.num_blocks) if not counts[b]}
            for block, prefix in enumerate(pool.prefix):
                assert (block in pool.cached) == (prefix is not None and not counts[block])
                if prefix:
                    assert prefix.blocks[pool.name] == block
                    assert cache.prefixes.by_hash[prefix.key] is prefix
                    past = self._past(prefix)
                    end = len(past[1])
                    for position, _, place in cells_of(pool.kind, end - size, end, size):
                        assert self.cells[pool.name, block, place] == (past[0], past[1][: position + 1])
        users: Counter[int] = Counter()
        for prefix in cache.prefixes.by_hash.values():
            if prefix.parent:
                users[id(prefix.parent)] += 1
                assert cache.prefixes.by_hash[prefix.parent.key] is prefix.parent
        for prefix, _ in cache._published.values():
            users[id(prefix)] += 1
        for prefix in cache.prefixes.by_hash.values():
            assert prefix.num_users == users[id(prefix)]
            assert prefix.blocks or prefix.num_users

    def _past(self, prefix: Prefix) -> tuple[bytes, tuple[int, ...]]:
        content = b""
        while prefix.parent:
            content = prefix.content + content
            prefix = prefix.parent
        tokens = memoryview(content).cast("q").tolist()
        assert pack(tokens) == content
        return prefix.content, tuple(tokens)

    def finish(self, chance: random.Random) -> None:
        for _ in range(2000):
            if not self.pending and not self.alive:
                break
            if not self.pending:
                self.schedule()
            self.commit(chance)
            self.check()
        assert not self.pending and not self.alive, "some never end"
        assert not self.scheduler.has_work
        assert not self.scheduler.cache._published
        for pool in self.scheduler.cache.pools:
            assert pool.num_free == pool.num_blocks - 1
            if not self.scheduler.cache.enable_prefix_caching:
                assert len(pool.blank) == pool.num_blocks - 1


def _pasts(row: ScheduledRequest) -> list[tuple[bytes, tuple[int, ...]]]:
    """All tokens up to each that a row computes, and those before it."""
    tokens = row.sequence.tokens(0, row.start + row.num_tokens)
    return [(row.sequence.salt, tuple(tokens[: position + 1])) for position in range(len(tokens))]


KINDS = [
    [FULL],
    [WINDOW],
    [FULL, WINDOW],
    [window_kind(1, name="w1"), window_kind(7, name="w7"), FULL],
    [WINDOW, every_kind(4), every_kind(8)],
]


def make_world(
    kinds: list[StateKind],
    num_blocks: int,
    block_size: int,
    prefix: bool,
    max_num_seqs: int,
    budget: int,
    max_model_len: int,
) -> World:
    kinds = in_blocks(kinds, block_size)
    cache = KVCache(kinds, {k.name: num_blocks for k in kinds}, block_size, enable_prefix_caching=prefix)
    return World(Scheduler(cache, StepLimits(max_num_seqs, budget, max_model_len)))


class Serving(RuleBasedStateMachine):
    """Any order of arrivals, aborts, plans and commits, in tiny pools."""

    @initialize(
        kinds=st.sampled_from(KINDS),
        num_blocks=st.integers(3, 16),
        block_size=st.sampled_from([1, 2, 4]),
        prefix=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        max_model_len=st.integers(2, 40),
        weak_hash=st.sampled_from([None, None, 1, 5]),
    )
    def begin(self, weak_hash: int | None, **limits: object) -> None:
        self.patch = pytest.MonkeyPatch()
        if weak_hash:
            self.patch.setattr(prefix_cache, "chain_hash", lambda parent, content: sum(content) % weak_hash)
        self.world = make_world(**limits)  # type: ignore[arg-type]

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        num_siblings=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from([b"", b"", b"s"]),
        prompt_logprobs=st.sampled_from([False, False, True]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def add(self, prompt: list[int], num_siblings: int, **params: Any) -> None:
        self.world.add([prompt] * num_siblings, **params)

    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        self.world.abort(index)

    @rule(fails=st.sampled_from([False, False, False, True]))
    def schedule(self, fails: bool) -> None:
        if len(self.world.pending) < 3:
            self.world.schedule(fails)

    @rule(seed=st.integers(0, 99))
    def commit(self, seed: int) -> None:
        if self.world.pending:
            self.world.commit(random.Random(seed))

    @rule(seed=st.integers(0, 99), num_steps=st.integers(1, 8))
    def steps(self, seed: int, num_steps: int) -> None:
        for index in range(num_steps):
            self.schedule(fails=False)
            self.commit(seed + index)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish(random.Random(0))
            self.patch.undo()


Serving.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestServing = Serving.TestCase


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("kinds", "num_blocks"), [*zip(KINDS, [14, 9, 14, 14, 14], strict=True)])
def test_a_tiny_pool_under_load_ends_every_sequence(kinds: list[StateKind], num_blocks: int, prefix: bool) -> None:
    chance = random.Random(1)
    world = make_world(kinds, num_blocks, block_size=2, prefix=prefix, max_num_seqs=6, budget=9, max_model_len=30)
    for _ in range(600):
        if len(world.alive) < 10:
            prompt = [chance.choice([1, 1, 1, 2]) for _ in range(chance.randint(1, 14))]
            world.add([prompt] * chance.choice([1, 1, 3]), chance.randint(1, 16), b"")
        if chance.random() < 0.05:
            world.abort(chance.randrange(99))
        world.schedule()
        if chance.random() < 0.1:
            world.abort(chance.randrange(99))
        if world.pending:
            world.commit(chance)
        world.check()
    world.finish(chance)
    stats = world.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_chunks > 0
    assert stats.num_prefix_hit_tokens > 0 if prefix else stats.num_forked_tokens > 0
    assert (world.num_chained > 0) == prefix

"""A prefix that is being computed: who begins after it, in which step, and who does not wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from kinds import full_kind, recurrent_kind, window_kind
from runtime.schedule.test_scheduler import commit, finish_all, rows, step

from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.prefix_cache import count_common
from atom.runtime.schedule.data_parallel import DataParallelScheduler
from atom.runtime.schedule.prefix_makers import PrefixMakers
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.types import Sequence, StateKind, StepLimits
from atom.sampling_params import SamplingParams

FULL, WINDOW, STATE = full_kind(), window_kind(5), recurrent_kind()


def make_scheduler(
    *kinds: StateKind, prefix: bool = True, budget: int = 200, run_ahead: int = 0, num_blocks: int = 200
) -> Scheduler:
    sizes = {kind.name: num_blocks for kind in kinds or (FULL,)}
    cache = KVCache(kinds or (FULL,), sizes, 4, enable_prefix_caching=prefix)
    return Scheduler(cache, StepLimits(16, budget, 200), run_ahead)


def make(id: str, shared: int, own: int = 9, priority: int = 0, salt: bytes = b"", **params: int) -> Sequence:
    """A prompt of which the first tokens are those of all others."""
    prompt = [*range(1000, 1000 + shared), *([ord(id)] * own)]
    return Sequence(id, prompt, SamplingParams(max_tokens=3, **params), salt=salt, priority=priority)  # type: ignore[arg-type]


def serve(scheduler: Scheduler, *sequences: Sequence) -> list[tuple[str, int, int]]:
    """All prompts' rows, until each has ended."""
    for sequence in sequences:
        scheduler.add(sequence)
    found = []
    while scheduler.has_work:
        found += [(id, start, num) for id, start, num, _ in step(scheduler) if num > 1]
    return found


@pytest.mark.parametrize(("num_shared", "num_found"), [(19, 16), (20, 20), (21, 20)])
@pytest.mark.parametrize("kinds", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_prompts_that_begin_alike_compute_their_beginning_once(
    kinds: tuple[StateKind, ...], num_shared: int, num_found: int
) -> None:
    scheduler = make_scheduler(*kinds)
    sequences = [make(id, num_shared) for id in "abcdefgh"]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan.num_tokens == num_found + 8 * (num_shared + 9 - num_found), "in one step"
    assert plan.is_chained
    commit(scheduler, plan)
    assert [each.num_cached for each in sequences] == [0] + [num_found] * 7
    finish_all(scheduler)


def test_without_prefix_caching_each_computes_its_own() -> None:
    scheduler = make_scheduler(prefix=False)
    assert serve(scheduler, make("a", 20), make("b", 20)) == [("a", 0, 29), ("b", 0, 29)]


@pytest.mark.parametrize("other", [{"salt": b"x"}, {"prompt_logprobs": 0}], ids=str)
def test_another_salt_and_log_probabilities_of_the_prompt_share_nothing(other: dict[str, object]) -> None:
    rows = serve(make_scheduler(), make("a", 20), make("b", 20, **other))  # type: ignore[arg-type]
    assert rows == [("a", 0, 29), ("b", 0, 29)]
    assert serve(make_scheduler(budget=16), make("a", 20), make("b", 20, **other))[-1][0] == "b"  # type: ignore[arg-type]


def test_one_follows_a_prompt_that_takes_several_steps_without_blocks_or_slot() -> None:
    scheduler = make_scheduler(budget=10)
    first, second = make("a", 24), make("b", 24)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [("a", 0, 10, False)]
    assert step(scheduler) == [("a", 10, 10, False)]
    assert not second.blocks and second.slot < 0 and second in scheduler.waiting
    assert step(scheduler) == [("a", 20, 10, False)]
    assert step(scheduler) == [("a", 30, 3, True), ("b", 24, 7, False)]


def test_a_plan_that_is_not_committed_counts_and_is_no_chain() -> None:
    scheduler = make_scheduler(run_ahead=2, budget=29)
    for id in "ab":
        scheduler.add(make(id, 20))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert rows(first) == [("a", 0, 29, True)]
    assert rows(second) == [("a", 29, 1, True), ("b", 20, 9, True)] and not second.is_chained
    commit(scheduler, first)
    commit(scheduler, second)


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_one_whose_prefix_will_not_be_computed_computes_it_itself(end: str) -> None:
    scheduler = make_scheduler(budget=10)
    first, second = make("a", 24), make("b", 24)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    if end == "abort":
        scheduler.abort("a")
    else:
        scheduler.drop_kv()
        scheduler.abort("a")
    found = 8 if end == "abort" else 0
    assert step(scheduler) == [("b", found, 10, False)]


def test_an_abort_in_the_step_leaves_what_the_step_computes() -> None:
    scheduler = make_scheduler()
    scheduler.add(make("a", 20))
    scheduler.add(make("b", 20))
    plan = scheduler.schedule()
    scheduler.abort("a")
    commit(scheduler, plan)
    assert serve(scheduler, make("c", 20)) == [("c", 20, 9)]


@pytest.mark.parametrize(
    ("other", "waits"),
    [({"priority": 1}, True), ({}, True), ({"priority": -1}, False), ({"salt": b"x"}, False), ({"shared": 3}, False)],
)
def test_nobody_waits_for_a_prompt_of_a_worse_priority_or_another_salt(other: dict[str, Any], waits: bool) -> None:
    cache, maker = KVCache([FULL], {"full": 200}, 4, enable_prefix_caching=True), make("a", 24)
    cache.allocate(maker, 10)
    makers = PrefixMakers(cache, {maker: 10})
    makers.add(maker)
    assert makers.is_awaited_by(make("b", **{"shared": 24, **other})) == waits


def test_nobody_waits_on_for_a_prompt_that_is_computed_no_more() -> None:
    cache, late = KVCache([FULL], {"full": 200}, 4, enable_prefix_caching=True), make("b", 24)
    for maker, waits in ((make("a", 24), True), (make("c", 0), False)):
        cache.allocate(maker, 8)
        makers = PrefixMakers(cache, {maker: 8})
        makers.add(maker)
        assert makers.is_awaited_by(late) == waits


@pytest.mark.parametrize(("kinds", "num_found"), [((FULL,), 8), ((FULL, STATE), 0)])
def test_a_step_s_entries_are_found_in_it_and_its_copies_of_state_in_the_next(
    kinds: tuple[StateKind, ...], num_found: int
) -> None:
    cache = KVCache(kinds, {"full": 200, "state": 9}, 4, enable_prefix_caching=True)
    maker, other = make("a", 24), make("b", 24)
    cache.allocate(maker, 8)
    cache.publish_planned(maker, 8)
    assert cache.find_cached(other).num_tokens == num_found
    cache.begin_plan()
    assert cache.find_cached(other).num_tokens == 8


def test_a_prompt_with_recurrent_state_stops_where_one_that_came_later_parts_from_it() -> None:
    cache = KVCache([FULL, STATE], {"full": 200, "state": 9}, 4, enable_prefix_caching=True)
    maker, late = make("a", 40), make("b", 30)
    cache.allocate(maker, 16)
    makers = PrefixMakers(cache, {maker: 16})
    makers.add(maker)
    assert makers.is_awaited_by(late) and late.awaits == (maker, 28)
    maker.num_planned = 16
    assert cache.chunk_end(maker, 49) == 28


def test_what_a_prompt_with_recurrent_state_leaves_after_makes_nobody_wait() -> None:
    cache = KVCache([FULL, STATE], {"full": 200, "state": 9}, 4, enable_prefix_caching=True)
    maker = make("a", 40)
    cache.allocate(maker, 40)
    makers = PrefixMakers(cache, {maker: 40})
    makers.add(maker)
    assert not makers.is_awaited_by(make("b", 30)), "there will be no state after 28 tokens"
    for later, end in ((make("c", 41), 40), (make("a", 40), 48)):
        assert makers.is_awaited_by(later) and later.awaits == (maker, end)


def test_a_row_of_one_token_reads_no_block_of_its_step() -> None:
    scheduler = make_scheduler()
    assert serve(scheduler, make("a", 21, own=0), make("b", 21, own=0)) == [("a", 0, 21), ("b", 16, 5)]
    scheduler.add(make("c", 21, own=0))
    assert step(scheduler) == [("c", 20, 1, True)], "but of an earlier one"


def test_a_step_that_did_not_take_place_takes_those_along_that_begin_after_its_blocks() -> None:
    scheduler = make_scheduler()
    sequences = [make(id, 20) for id in "abc"]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.retract(scheduler.schedule())
    assert [each.num_computed for each in sequences] == [0, 0, 0]
    assert not any(scheduler.cache.pools[0].prefix)
    plan = scheduler.schedule()
    assert rows(plan) == [("a", 0, 29, True)] and not plan.is_chained, "so that the one at fault is found"
    commit(scheduler, plan)
    plan = scheduler.schedule()
    assert rows(plan) == [("b", 20, 9, True), ("c", 20, 9, True)], "one of them may be at fault, a is not"
    assert [each.num_cached for each in sequences] == [0, 20, 20]
    commit(scheduler, plan)
    finish_all(scheduler)


def test_a_group_that_computes_a_prefix_counts_as_if_it_had_it() -> None:
    limits = StepLimits(8, 16, 200)
    caches = [KVCache([FULL], {"full": 200}, 4, enable_prefix_caching=True) for _ in range(2)]
    scheduler = DataParallelScheduler([Scheduler(cache, limits) for cache in caches])
    first, other = make("a", 100), Sequence("o", [7] * 100, SamplingParams())
    second = make("b", 100)
    for sequence in (first, other, second):
        scheduler.add(sequence)
    scheduler.schedule()
    assert (first.group, other.group, second.group) == (0, 1, 0)


@pytest.mark.parametrize(
    ("first", "second", "common"), [("", "a", 0), ("abc", "abd", 2), ("abc", "abcd", 3), ("x", "a", 0)]
)
def test_common_tokens_are_counted_to_the_first_that_differs(first: str, second: str, common: int) -> None:
    assert count_common(first, second) == count_common(second, first) == common

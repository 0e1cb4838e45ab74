"""Data groups: which one takes a sequence, and the one shape of their steps."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import full_kind

from atom.errors import RequestError
from atom.runtime.draft.speculation import RunnerDrafter
from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.data_parallel import DataParallelBuilder, DataParallelScheduler, common_shape, pad_scored
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import BatchShape, Capacity, Scored, StepInput
from atom.runtime.types import Plan, Sampled, Sequence, StepLimits
from atom.sampling_params import SamplingParams

FULL = full_kind()


def make_scheduler(
    num_groups: int = 2, num_blocks: int = 100, max_num_seqs: int = 4, num_drafts: int = 0
) -> DataParallelScheduler:
    limits = StepLimits(max_num_seqs, max_num_batched_tokens=16, max_model_len=100)
    caches = [KVCache([FULL], {"full": num_blocks}, 4, enable_prefix_caching=True) for _ in range(num_groups)]
    drafter = RunnerDrafter(num_drafts) if num_drafts else None
    return DataParallelScheduler([Scheduler(cache, limits, drafter=drafter) for cache in caches])


def make(id: str, prompt: range, max_tokens: int = 8, parent: Sequence | None = None, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(id, [*prompt], params, parent=parent, priority=priority)


def commit(scheduler: DataParallelScheduler, plan: Plan, token: int = 7) -> list[Sequence]:
    first, *others = (
        Sampled([token] * num, [None] * num)
        for group in range(len(scheduler.groups))
        for num in [sum(row.samples for row in plan.rows if row.sequence.group == group)]
    )
    first.others.extend(others)
    return scheduler.commit(plan, first, lambda sequence: finish_reason(sequence, 100))


def run(scheduler: DataParallelScheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    while any(sequence.finish_reason is None for sequence in sequences):
        commit(scheduler, scheduler.schedule())


def test_sequences_go_where_least_is_to_be_computed():
    scheduler = make_scheduler()
    long, short, third = make("long", range(40)), make("short", range(100, 105)), make("third", range(200, 205))
    for sequence in (long, short, third):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [sequence.group for sequence in (long, short, third)] == [0, 1, 1]
    assert [(row.sequence.id, row.num_tokens) for row in plan.rows] == [("long", 16), ("short", 5), ("third", 5)]
    assert scheduler.running == [long, short, third] and scheduler.num_waiting == 0


@pytest.mark.parametrize(("num_others", "group"), [(0, 1), (1, 1), (2, 0)])
def test_a_cached_prefix_draws_a_sequence_until_its_group_has_too_much(num_others: int, group: int):
    scheduler = make_scheduler()
    run(scheduler, make("a", range(9), 1), make("b", range(100, 180), 1))  # b's 80 tokens are in group 1
    for number in range(num_others):  # 2 + 64 each, against the 81 tokens that group 0 would compute
        scheduler.groups[1].add(make(f"other-{number}", range(200, 202)))
    like_b = make("like-b", range(100, 181))
    scheduler.add(like_b)
    scheduler.schedule()
    assert like_b.group == group and like_b.num_cached == (80 if group else 0)


def test_all_groups_forget_what_is_cached():
    scheduler = make_scheduler()
    run(scheduler, make("a", range(9), 1), make("b", range(100, 180), 1))
    scheduler.drop_kv()
    like_a, like_b = make("like-a", range(10)), make("like-b", range(100, 181))
    run(scheduler, like_a, like_b)
    assert like_a.num_cached == like_b.num_cached == 0


def test_a_sequence_waits_for_a_group_with_blocks_for_it():
    scheduler = make_scheduler(num_blocks=31)
    long, *short = make("long", range(60), 40), make("a", range(100, 102), 40), make("b", range(200, 202), 40)
    for sequence in (long, *short):
        scheduler.add(sequence)
    while len(long.output) < 2:
        commit(scheduler, scheduler.schedule())
    assert (long.group, [each.group for each in short]) == (0, [1, 1])
    scheduler.add(late := make("late", range(300, 360), 4))
    commit(scheduler, scheduler.schedule())
    assert late.group == 1 and late in scheduler.running, "where its 15 blocks are free"
    scheduler.add(later := make("later", range(400, 460), 4))
    commit(scheduler, scheduler.schedule())
    assert later in scheduler.waiting, "in neither, so it is nobody's yet"


def test_siblings_stay_with_their_parent():
    scheduler = make_scheduler()
    parent = make("p-0", range(33))
    children = [make(f"p-{number}", range(33), parent=parent) for number in (1, 2)]
    for sequence in (parent, *children):
        scheduler.add(sequence)
    for _ in range(4):
        commit(scheduler, scheduler.schedule())
    assert [child.group for child in children] == [parent.group] * 2
    assert scheduler.stats.num_forked_tokens + scheduler.stats.num_prefix_hit_tokens == 2 * 32


def test_those_that_find_no_slot_wait_for_all_groups_by_priority():
    scheduler = make_scheduler(max_num_seqs=2)
    first = [make(str(number), range(5), 3) for number in range(4)]
    late, urgent = make("late", range(5), 3), make("urgent", range(5), 3, priority=-1)
    for sequence in (*first, late, urgent):
        scheduler.add(sequence)
    assert scheduler.num_waiting == 6
    commit(scheduler, scheduler.schedule())
    assert scheduler.num_waiting == 2 and scheduler.num_running == 4
    assert {sequence.id for sequence in scheduler.running} == {"urgent", "0", "1", "2"}
    with pytest.raises(RequestError, match="late is in use"):
        scheduler.add(make("late", range(3)))
    with pytest.raises(RequestError, match="urgent is in use"):
        scheduler.add(make("urgent", range(3)))
    assert scheduler.abort("late") is late and late.finish_reason == "abort" and scheduler.num_waiting == 1
    assert scheduler.abort("late") is None and "late" not in scheduler.sequences
    scheduler.abort("urgent")
    assert first[3].group == 0 and scheduler.schedule() and first[3] in scheduler.running


def test_a_step_of_all_groups_is_one_step():
    scheduler = make_scheduler()
    run(scheduler, make("a", range(5), 3), make("b", range(100, 105), 3))
    assert scheduler.stats.num_steps == 3
    assert scheduler.stats.num_prefix_queries == 10, "of both groups"
    assert scheduler.fullest == (0, 2 * 99)


def test_what_is_retracted_is_planned_again():
    scheduler = make_scheduler()
    for sequence in (make("a", range(5)), make("b", range(100, 120))):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    scheduler.retract(plan)
    assert scheduler.schedule() == plan


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_ends_in_one_group_whatever_arrives(seed: int, num_drafts: int):
    chance = random.Random(seed)
    scheduler = make_scheduler(chance.choice([1, 2, 3]), chance.choice([28, 40]), 3, num_drafts)
    mixed = BatchShape(12, 9, 9, 4)
    capacity = Capacity(
        ("full",), 3, 25, 100, (1, 2, 4), (mixed, mixed.drafting(2)), num_drafts, draft_sizes=((1, 1), (1, 2), (3, 2))
    )
    builder = DataParallelBuilder([StepBuilder(capacity) for _ in scheduler.groups])
    alive: dict[str, Sequence] = {}
    groups: dict[str, int] = {}
    max_drafted = 0
    for number in range(400):
        if number < 60 and chance.random() < 0.6:
            start = chance.choice([0, 0, 1000])
            sequence = make(str(number), range(start, start + chance.randint(1, 60)), chance.randint(1, 40))
            sequence.priority = chance.choice([0, 0, 1])
            scheduler.add(sequence)
            alive[sequence.id] = sequence
        if alive and chance.random() < 0.05:
            id = chance.choice([*alive])
            assert scheduler.abort(id) is alive.pop(id)
        plan = scheduler.schedule()
        assert bool(plan.rows) == bool(alive)
        assert set(scheduler.sequences) == set(alive)
        for row in plan.rows:
            assert groups.setdefault(row.sequence.id, row.sequence.group) == row.sequence.group
        if plan.rows:
            step = builder.build(plan)
            assert len({(each.shape, each.is_decode) for each in (step, *step.others)}) == 1, "or ranks would not meet"
            max_drafted = max(max_drafted, step.shape.num_drafts)
        for sequence in commit(scheduler, plan):
            del alive[sequence.id]
    assert not alive and not scheduler.has_work and max_drafted == num_drafts
    assert len(set(groups.values())) == len(scheduler.groups)


@pytest.mark.parametrize(
    ("shapes", "common"),
    [
        ([BatchShape(3, 3, 3, 3), BatchShape(5, 5, 5, 5)], BatchShape(5, 5, 5, 5)),
        ([BatchShape(0, 0, 0, 0), BatchShape(1, 1, 1, 1)], BatchShape(1, 1, 1, 1)),
        # a prompt of 7 tokens and, in the other group, no tokens at all, which need a row of padding
        ([BatchShape(7, 1, 1, 0), BatchShape(0, 0, 0, 0)], BatchShape(7, 1, 1, 0)),
        ([BatchShape(7, 1, 0, 0), BatchShape(2, 2, 2, 2)], BatchShape(9, 3, 2, 2)),
        # 2 chunks of 7 tokens and, in the other group, 2 of 6, followed by a row of padding
        ([BatchShape(7, 2, 1, 0), BatchShape(7, 3, 3, 1)], BatchShape(8, 4, 3, 1)),
    ],
)
def test_the_common_shape_of_steps(shapes: list[BatchShape], common: BatchShape):
    assert common_shape(shapes) == common


counts = st.integers(0, 9)


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    num_decodes, prompts = draw(counts), draw(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=4))
    num_samples = num_decodes + sum(samples for _, samples in prompts)
    num_tokens = num_decodes + sum(num for num, _ in prompts)
    return BatchShape(num_tokens, num_decodes + len(prompts), num_samples, num_decodes)


@given(st.lists(shapes(), min_size=1, max_size=4))
def test_the_common_shape_holds_each(found: list[BatchShape]):
    common = common_shape(found)
    assert all(common.holds(shape) for shape in found)
    assert common_shape([found[0]]) == found[0], "one group is not padded"
    for name in ("num_tokens", "num_rows"):
        smaller = msgspec.structs.replace(common, **{name: getattr(common, name) - 1})
        assert not all(smaller.holds(shape) for shape in found) or not common.num_tokens


def test_steps_have_one_shape_and_that_of_an_empty_group_is_padding():
    capacity = Capacity(("full",), num_slots=4, table_width=25, vocab=100)
    scheduler, builder = make_scheduler(), DataParallelBuilder([StepBuilder(capacity), StepBuilder(capacity)])
    scheduler.add(make("a", range(5), 4))
    first = builder.build(plan := scheduler.schedule())
    (other,) = first.others
    assert first.shape == other.shape == BatchShape(5, 1, 1, 0)
    assert first.reported and not other.reported and not other.admissions
    commit(scheduler, plan)
    scheduler.add(make("b", range(100, 107), 4))  # a prompt with a decode
    first = builder.build(plan := scheduler.schedule())
    (other,) = first.others
    assert first.shape == other.shape == BatchShape(1 + 7, 1 + 1, 1, 1) and not first.is_decode
    commit(scheduler, plan)
    first = builder.build(scheduler.schedule())
    assert first.is_decode and first.others[0].is_decode and first.packed == first.others[0].packed


def test_no_group_takes_a_step_for_decodes_where_one_of_them_computes_the_last_token_of_a_prompt():
    capacity = Capacity(("full",), 4, 25, 100, decode_sizes=(1, 2, 4), mixed_shapes=(BatchShape(12, 9, 9, 4),))
    scheduler, builder = make_scheduler(), DataParallelBuilder([StepBuilder(capacity), StepBuilder(capacity)])
    for sequence in (make("a", range(5)), make("b", range(100, 117))):  # of 17 tokens, one more than a step's
        scheduler.add(sequence)
    builder.build(plan := scheduler.schedule())
    commit(scheduler, plan)
    first = builder.build(plan := scheduler.schedule())
    assert [row.num_tokens for row in plan.rows] == [1, 1]
    (other,) = first.others
    assert first.shape == other.shape and not first.is_decode and not other.is_decode


def test_heads_score_as_many_rows_in_each_group():
    def step(*counts: int) -> StepInput:
        scored = [Scored(at, 10 * at, [5] * count, 1, count) for at, count in enumerate(counts)]
        return StepInput(shape=BatchShape(1, 1, 1), is_decode=False, packed=bytearray(), scored=scored)

    steps = [step(3, 8), step(), step(5)]
    pad_scored(steps)
    assert [[each.num_rows for each in step.scored] for step in steps] == [[5, 8]] * 3
    assert [[len(each.targets) for each in step.scored] for step in steps] == [[3, 8], [0, 0], [5, 0]]


def test_no_group_admits_a_sequence_of_a_paused_scheduler():
    scheduler = make_scheduler(max_num_seqs=1)
    first, second, third = make("first", range(5)), make("second", range(10, 15)), make("third", range(20, 25))
    scheduler.add(first)
    scheduler.add(second)
    commit(scheduler, scheduler.schedule())
    scheduler.add(third)
    scheduler.is_paused = True
    assert scheduler.is_paused and all(group.is_paused for group in scheduler.groups)
    while plan := scheduler.schedule().rows:
        assert third not in [row.sequence for row in plan]
        commit(scheduler, Plan(plan, len(plan)))
    assert (first.finish_reason, second.finish_reason) == ("max_tokens", "max_tokens")
    assert scheduler.num_waiting == 1 and not any(group.num_waiting for group in scheduler.groups)
    scheduler.is_paused = False
    run_to_end = scheduler.schedule()
    assert [row.sequence for row in run_to_end.rows] == [third]

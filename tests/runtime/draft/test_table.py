"""How many tokens are drafted, by what steps take and what is accepted."""

from __future__ import annotations

import pytest
from kinds import full_kind

from atom.runtime.draft.speculation import RunnerDrafter
from atom.runtime.draft.table import WINDOW, Acceptance, DraftTable
from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.types import Sampled, Sequence, StepLimits
from atom.sampling_params import SamplingParams

TABLE = DraftTable(
    {2: [1.0, 1.1, 1.2, 1.3], 8: [1.0, 1.5, 2.2, 4.5], 4: [1.0, 1.2, 1.7, 2.2], 16: [1.0, 2.1, 3.5, 5.0]}
)


@pytest.mark.parametrize(
    ("num_decodes", "rates", "best"),
    [
        (1, [1, 1, 1], 3),
        (2, [0.8, 0.8, 0.8], 3),  # 1, 1.8, 2.44, 2.95 tokens
        (3, [0.8, 0.8, 0.8], 1),  # 1.5, 1.44, 1.34 a unit of time
        (4, [1, 1, 1], 3),
        (8, [1, 1, 1], 2),
        (8, [0.6, 1, 1], 1),
        (8, [0.5, 0, 0], 0),  # as good as none
        (8, [0.4, 1, 1], 0),
        (9, [1, 1, 1], 0),
        (17, [1, 1, 1], 0),  # nobody has measured so many
    ],
)
def test_what_gives_the_most_tokens_a_second_is_drafted(num_decodes: int, rates: list[float], best: int):
    assert TABLE.best(num_decodes, rates) == best
    assert not best or best in TABLE.choices(num_decodes)


def test_what_can_never_pay_is_no_choice():
    assert [TABLE.choices(num) for num in (1, 8, 9, 17)] == [[1, 2, 3], [1, 2], [], []]


def test_what_usually_pays_is_likely():
    assert TABLE.likely(2) == [2, 3], "1, 1.36, 1.46 and 1.44 a unit of time at 0.5; 1, 1.45, 1.63 and 1.67 at 0.6"
    assert [TABLE.likely(num) for num in (4, 8, 9, 17)] == [[1], [1], [], []]


def test_each_place_is_counted_once_those_before_it_were_accepted():
    counted = Acceptance(3)
    assert counted.rates == [1, 1, 1]
    for num_accepted in (0, 1, 1, 2, 0, 1, 2):
        counted.count(2, num_accepted)
    assert counted.rates == [6 / 8, 3 / 6, 1], "5 of 7, 2 of 5, never tried"
    for _ in range(4 * WINDOW):
        counted.count(3, 0)
    assert counted.rates[0] < 0.01
    for _ in range(10 * WINDOW):
        counted.forget()
    assert counted.rates[0] > 0.95


@pytest.mark.parametrize(("right", "counts"), [(3, {3}), (0, {0, 3})])
def test_a_scheduler_drafts_what_pays(right: int, counts: set[int]):
    """Two sequences whose first `right` drafts are accepted in each step; where none is, drafting ends, but for trials."""
    cache = KVCache([full_kind(1, 16)], {"full": 4000}, 16, enable_prefix_caching=False)
    table = DraftTable({2: [1.0, 1.2, 1.4, 1.6], 4: [1.0, 2.5, 3.5, 4.5]})
    scheduler = Scheduler(cache, StepLimits(4, 64, 20000, draft_table=table), drafter=RunnerDrafter(3))

    def drafted() -> list[int]:
        plan = scheduler.schedule()
        rows = [row for row in plan.rows if row.samples]
        accepted = {at: [5] * min(right, len(row.drafts)) for at, row in enumerate(rows)}
        sampled = Sampled([5] * len(rows), [None] * len(rows), accepted=accepted,
                          num_drafted={at: len(row.drafts) for at, row in enumerate(rows)})  # fmt: skip
        scheduler.commit(plan, sampled, lambda each: finish_reason(each, 20000))
        return [len(row.drafts) for row in plan.rows[: plan.num_decodes]]

    for at in range(2):
        scheduler.add(Sequence(str(at), [1] * 4, SamplingParams(max_tokens=19000)))
    steps = [max(drafted(), default=0) for _ in range(3000)]
    assert set(steps[1:]) == counts
    assert steps[1] == 3, "what was never tried is tried"
    num_drafted = sum(count > 0 for count in steps)
    assert num_drafted == 2999 if right else 5 < num_drafted < 60
    assert right or any(steps[2000:]), "it is tried again"
    if right:
        scheduler.add(Sequence("third", [1] * 4, SamplingParams(max_tokens=9)))
        assert [drafted() for _ in range(3)][1:] == [[0, 0, 0]] * 2, "for three it does not pay"

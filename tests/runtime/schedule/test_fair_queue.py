from __future__ import annotations

from kinds import full_kind

from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.data_parallel import DataParallelScheduler
from atom.runtime.schedule.fair_queue import FairQueue
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.types import Sampled, Sequence, StepLimits
from atom.sampling_params import SamplingParams


def make(id: str, tenant: str, num_prompt: int = 4, max_tokens: int = 4, weight: float = 1.0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(id, [5] * num_prompt, params, tenant=tenant, weight=weight)


def ids(queue: FairQueue, num: int) -> list[str]:
    return [queue.pop().id for _ in range(num)]


def test_one_tenant_is_served_in_the_order_of_arrival_and_priority():
    queue = FairQueue()
    for id, priority in (("a", 0), ("b", 0), ("c", -1), ("d", 1), ("e", 0)):
        sequence = make(id, "")
        sequence.priority = priority
        queue.add(sequence)
    assert len(queue) == 5 and [each.id for each in queue] == [*"cabed"]
    assert ids(queue, 5) == [*"cabed"] and not queue


def test_the_tenant_that_was_served_least_is_next():
    queue = FairQueue()
    for at in range(3):
        queue.add(make(f"a{at}", "a"))
    for at in range(3):
        queue.add(make(f"b{at}", "b"))
    assert queue.counts() == {"a": 3, "b": 3}
    first = queue.pop()
    queue.charge(first, num_prompt=10)
    second = queue.pop()
    queue.charge(second, num_prompt=4)
    third = queue.pop()
    queue.charge(third, num_output=4)  # 8 tokens of a prompt: 12 in all
    assert [each.id for each in (first, second, third)] == ["a0", "b0", "b1"]
    assert ids(queue, 3) == ["a1", "a2", "b2"]


def test_a_weight_divides_what_counts():
    queue, order = FairQueue(), []
    for at in range(9):
        queue.add(make(f"a{at}", "a", weight=2.0))
        queue.add(make(f"b{at}", "b", weight=1.0))
    for _ in range(9):
        sequence = queue.pop()
        order.append(sequence.tenant)
        queue.charge(sequence, num_prompt=100)
    assert order.count("a") == 6 and order.count("b") == 3


def test_nobody_saves_up_what_was_not_asked_for():
    queue = FairQueue()
    for at in range(4):
        queue.add(make(f"a{at}", "a"))
        queue.charge(queue.pop(), num_prompt=1000)
    assert queue.counters["a"] == 4000
    queue.add(make("b", "b"))
    assert queue.counters["b"] == 4000, "of those who have left, the last"
    queue.add(make("a", "a"))
    queue.charge(queue.pop(), num_prompt=1000)
    queue.add(make("c", "c"))
    assert queue.counters["c"] == min(queue.counters[each.tenant] for each in queue)


def test_a_priority_and_a_sequence_that_has_begun_go_before_turns():
    queue = FairQueue()
    urgent, begun, new = make("urgent", "a"), make("begun", "a"), make("new", "b")
    urgent.priority, begun.admitted_at = -1, 1.0
    queue.charge(urgent, num_prompt=1000)
    for each in (new, urgent):
        queue.add(each)
    queue.put_back(begun)
    assert ids(queue, 3) == ["urgent", "begun", "new"]


def make_scheduler(num_slots: int = 2) -> Scheduler:
    kind = full_kind()
    return Scheduler(KVCache((kind,), {"full": 100}, 4, enable_prefix_caching=False), StepLimits(num_slots, 64, 100))


def run(scheduler: Scheduler | DataParallelScheduler) -> dict[str, int]:
    """Tokens that were sampled for each tenant, after a step."""
    plan = scheduler.schedule()
    parts = [[row for row in plan.rows if row.sequence.group == at and row.samples] for at in range(2)]
    sampled = [Sampled([7] * len(part), [None] * len(part)) for part in parts]
    first = sampled[0]
    if isinstance(scheduler, DataParallelScheduler):
        first.others.extend(sampled[1:])
    scheduler.commit(plan, first, lambda sequence: finish_reason(sequence, 100))
    counts: dict[str, int] = {}
    for row in plan.rows:
        counts[row.sequence.tenant] = counts.get(row.sequence.tenant, 0) + row.samples
    return counts


def shares(scheduler: Scheduler | DataParallelScheduler, num_steps: int) -> dict[str, int]:
    totals: dict[str, int] = {}
    for _ in range(num_steps):
        for tenant, count in run(scheduler).items():
            totals[tenant] = totals.get(tenant, 0) + count
    return totals


def test_under_overload_tenants_get_tokens_by_weight_and_not_by_how_much_they_ask_for():
    scheduler = make_scheduler()
    for at in range(300):
        scheduler.add(make(f"a{at}", "a", weight=1.0))
    for at in range(100):
        scheduler.add(make(f"b{at}", "b", weight=1.0))
        scheduler.add(make(f"c{at}", "c", weight=2.0))
    got = shares(scheduler, 100)
    total = sum(got.values())
    assert scheduler.num_waiting, "all of them have more than can be served"
    for tenant, share in (("a", 0.25), ("b", 0.25), ("c", 0.5)):
        assert abs(got[tenant] / total - share) < 0.05


def test_long_answers_count_for_more_than_short_ones():
    scheduler = make_scheduler()
    for at in range(500):
        scheduler.add(make(f"long{at}", "long", max_tokens=20))
        scheduler.add(make(f"short{at}", "short", max_tokens=2))
    got = shares(scheduler, 500)
    assert scheduler.num_waiting_by_tenant["short"] and scheduler.num_waiting_by_tenant["long"]
    # a prompt of 4 tokens to 20 of an answer, which count twice, or to 2
    served = {"long": got["long"] * (4 + 40) / 20, "short": got["short"] * (4 + 4) / 2}
    assert 0.9 < served["short"] / served["long"] < 1.1


def test_data_groups_share_the_turns():
    scheduler = DataParallelScheduler([make_scheduler(), make_scheduler()])
    for at in range(100):
        scheduler.add(make(f"a{at}", "a"))
    for at in range(40):
        scheduler.add(make(f"b{at}", "b"))
    got = shares(scheduler, 40)
    assert scheduler.num_waiting_by_tenant["a"] and scheduler.num_waiting_by_tenant["b"]
    assert 0.8 < got["a"] / got["b"] < 1.25

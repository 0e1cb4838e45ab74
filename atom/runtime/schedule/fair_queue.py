"""Fair queue: waiting sequences by priority, round-robin among tenants, by arrival.

    queue = FairQueue()
    queue.add(sequence)
    sequence = queue.pop()                      # of the best priority, of the tenant with the smallest counter
    queue.charge(sequence, num_prompt=512)      # at its admission, and for each token of its answer

A virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): a tenant's counter grows
by the tokens computed for it, divided by its weight. A new tenant starts at the current minimum counter of those that
wait, so that nobody saves up unused turns. No tenant's turn is left unused. With one tenant it is first come, first
served.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import attrgetter

from atom.runtime.types import Sequence

OUTPUT_WEIGHT = 2  # tokens of a prompt that a token of an answer counts as, as in the paper

_priority = attrgetter("priority")


class FairQueue:
    def __init__(self, counters: defaultdict[str, float] | None = None) -> None:
        """counters: by tenant, of the queue that these sequences come from"""
        self._is_first = counters is None
        self.counters = defaultdict[str, float](float) if counters is None else counters
        self._queues: dict[str, list[Sequence]] = {}  # by tenant, without empty ones; each by priority
        self._last = ""  # the tenant that left last

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def counts(self) -> Counter[str]:
        """The number of sequences that wait, by tenant."""
        return Counter({tenant: len(queue) for tenant, queue in self._queues.items()})

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        tenant, counters = sequence.tenant, self.counters
        if self._is_first and tenant not in self._queues:
            lowest = min((counters[each] for each in self._queues), default=counters[self._last])
            counters[tenant] = max(counters[tenant], lowest)
        insort_right(self._queues.setdefault(tenant, []), sequence, key=_priority)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence in front of those of its tenant and priority: it has been first before."""
        insort_left(self._queues.setdefault(sequence.tenant, []), sequence, key=_priority)

    def peek(self) -> Sequence:
        """The next sequence; one that was preempted goes before those that have not begun."""
        return min((queue[0] for queue in self._queues.values()), key=self._rank)

    def pop(self) -> Sequence:
        """Take the next sequence."""
        sequence = self.peek()
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.tenant]
            self._last = sequence.tenant

    def charge(self, sequence: Sequence, num_prompt: int = 0, num_output: int = 0) -> None:
        """Count tokens that are computed for a sequence."""
        self.counters[sequence.tenant] += (num_prompt + OUTPUT_WEIGHT * num_output) / sequence.weight

    def _rank(self, sequence: Sequence) -> tuple[int, bool, float, float]:
        is_new = sequence.admitted_at is None
        return sequence.priority, is_new, self.counters[sequence.tenant], sequence.arrival

"""Retain cached prefixes: an order of eviction by priority, until a deadline.

    retained = RetainedBlocks(pool.cached, num_blocks=1024, share=0.5)
    retained.claim([7, 3], "key1", 50, deadline)     # blocks, for the requests of a key
    retained.find_next()                             # the cached block that is evicted next, past those retained
    retained.take_back(7)                            # it was found once more
    retained.find_least()                            # no other is free: the retained block that is given up first

A retained block has its place among the least recently used ones as any other. Where it comes up for eviction it is
passed over, until its deadline; then it is the next to go. So retention never makes a block go sooner. It is only a
preference: what a running sequence needs is taken from retained blocks if no other is free, by priority, then from the
least recently used one on. What can be done without, a copy of recurrent state or one in host memory, is not.

A key's claims take at most a share of the pool, and those of all keys ALL_KEYS. Beyond it claims are dropped, of the
key that has most: those of the lowest priority, and of these the oldest. A prefix is claimed from its end on, so that
what is left of one that is too long is its beginning.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from heapq import heapify, heappop, heappush
from itertools import count, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from atom.runtime.kv.eviction import EvictionOrder
from atom.runtime.kv.prefix_cache import Prefix
from atom.runtime.types import RetainedPrefix, Sequence, StateKind
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.runtime.kv.block_pool import BlockPool

ALL_KEYS = 0.9  # max share of a pool that the claims of all keys take
SPARE_EXPIRIES = 1024  # blocks in the heap without a claim, before they are removed


class RetentionLimits(NamedTuple):
    """What a cache retains."""

    share: float = 0.0  # of a pool, that a key may claim; 0: none
    clock: Callable[[], float] = time.monotonic  # seconds


class RetentionCounts(NamedTuple):
    """What became of the retained blocks of pools."""

    num_claimed: int = 0  # now
    num_found: int = 0  # by requests, past the time at which they would have been evicted
    num_overridden: int = 0  # given up for running sequences before their deadline

    def __add__(self, other: object) -> RetentionCounts:
        assert isinstance(other, RetentionCounts)
        return RetentionCounts(*map(sum, zip(self, other, strict=True)))


class Claim(NamedTuple):
    priority: int  # blocks of a lower one are given up first
    deadline: float  # by the clock


class RetainedBlocks:
    """The claims to the blocks of a pool, and the free ones that were passed over."""

    def __init__(self, cached: EvictionOrder, num_blocks: int, limits: RetentionLimits) -> None:
        """
        cached: the pool's free blocks with content; passed over, they are here instead
        num_blocks: of the pool
        """
        self.max_by_key = int(num_blocks * min(limits.share, ALL_KEYS))
        self.max_claimed = int(num_blocks * ALL_KEYS)
        self.num_found = 0  # passed over, and then found by a request: without a claim they would be gone
        self.num_overridden = 0  # given up before their deadline
        self.clock = limits.clock
        self._cached = cached
        self._claims: dict[int, dict[str, Claim]] = {}  # by block and key
        self._order: defaultdict[str, defaultdict[int, OrderedDict[int, None]]] = defaultdict(
            lambda: defaultdict(OrderedDict)
        )  # blocks by key and priority, the oldest claim first
        self._num_claims = Counter[str]()  # by key
        self._passed: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)  # by priority
        self._passed_at: dict[int, int] = {}  # the priority at which a block was passed over
        self._expiries: list[tuple[float, int, str, list[int]]] = []  # heap: deadline, number, key, blocks
        self._num_expiries = 0  # blocks of these, some without a claim
        self._numbers = count()

    def __contains__(self, block: int) -> bool:
        return block in self._claims

    @property
    def counts(self) -> RetentionCounts:
        return RetentionCounts(len(self._claims), self.num_found, self.num_overridden)

    @property
    def num_passed(self) -> int:
        """Free blocks that were passed over."""
        return len(self._passed_at)

    @property
    def passed(self) -> list[int]:
        """The free blocks that were passed over, in the order in which they are given up."""
        return [block for level in sorted(self._passed) for block in self._passed[level]]

    def claim(self, blocks: SequenceOf[int], key: str, priority: int, deadline: float) -> None:
        """Claim blocks until a deadline, the last one first to be kept; of several claims of a key the most counts."""
        if not self.max_by_key or not blocks:
            return
        self._expire()  # of what is over, nothing counts
        levels, added = self._order[key], list[int]()
        level = levels[priority]
        for block in blocks:
            claims = self._claims.setdefault(block, {})
            known = claims.get(key)
            if known is None:
                claims[key] = Claim(priority, deadline)
                level[block] = None
                added.append(block)
                continue
            del levels[known.priority][block]
            claims[key] = Claim(max(priority, known.priority), max(deadline, known.deadline))
            levels[max(priority, known.priority)][block] = None
        self._num_claims[key] += len(added)
        self._push(deadline, key, added)
        freed = []
        while self._num_claims[key] > self.max_by_key:
            freed += self._drop_oldest(key)
        while len(self._claims) > self.max_claimed:
            freed += self._drop_oldest(self._num_claims.most_common(1)[0][0])
        self._put_back(freed)

    def copy_claims(self, block: int, other: RetainedBlocks, copy: int) -> None:
        """Claim a copy of a block in another pool for as long as the block."""
        for key, claim in self._claims.get(block, {}).items():
            other.claim([copy], key, claim.priority, claim.deadline)

    def find_next(self) -> int | None:
        """The cached block that is evicted next; None if there is none that is not retained."""
        self._expire()
        while (block := self._cached.first) is not None and self._pass_over(block):
            self._cached.remove(block)
        return block

    def find_least(self) -> int:
        """The block that is given up first, of those that were passed over; at least one was."""
        return next(iter(self._passed[min(self._passed)]))

    def take_back(self, block: int) -> None:
        """Note that a block which was passed over is free no more: a request has found it."""
        self._remove_passed(block)
        self.num_found += 1

    def forget(self, block: int) -> None:
        """Drop all claims to a block whose content is gone."""
        self.num_overridden += block in self._passed_at
        self._remove_passed(block)
        for key in list(self._claims.get(block, ())):
            self._drop(block, key)

    def clear(self) -> None:
        """Drop all claims."""
        freed = []
        while self._num_claims:
            freed += self._drop_oldest(next(iter(self._num_claims)))
        self._put_back(freed)

    def _expire(self) -> None:
        """Drop the claims whose time is over."""
        freed = []
        now = self.clock() if self._expiries else 0.0
        while self._expiries and self._expiries[0][0] <= now:
            _, _, key, blocks = heappop(self._expiries)
            self._num_expiries -= len(blocks)
            deadlines = self._find_deadlines(key, blocks)
            for block, deadline in deadlines.items():
                freed += self._drop(block, key) if deadline <= now else []
            later = {block: deadline for block, deadline in deadlines.items() if deadline > now}
            if later:
                self._push(min(later.values()), key, list(later))
        self._put_back(freed)

    def _find_deadlines(self, key: str, blocks: Iterable[int]) -> dict[int, float]:
        """The deadlines of a key's claims to these blocks, as far as there are any."""
        claims = ((block, self._claims.get(block, {}).get(key)) for block in blocks)
        return {block: claim.deadline for block, claim in claims if claim is not None}

    def _put_back(self, blocks: list[int]) -> None:
        """Make blocks that were passed over the next to be evicted, in this order."""
        for block in reversed(blocks):
            self._cached.add_first(block)

    def _push(self, deadline: float, key: str, blocks: list[int]) -> None:
        """Have a key's claims to blocks looked at again at this time."""
        if self._num_expiries > 2 * self._num_claims.total() + SPARE_EXPIRIES:
            found = [
                (at, number, name, list(self._find_deadlines(name, of))) for at, number, name, of in self._expiries
            ]
            self._expiries = [each for each in found if each[3]]
            self._num_expiries = sum(len(each[3]) for each in self._expiries)
            heapify(self._expiries)
        if blocks:
            self._num_expiries += len(blocks)
            heappush(self._expiries, (deadline, next(self._numbers), key, blocks))

    def _pass_over(self, block: int) -> bool:
        """Whether a free block that comes up for eviction is retained; it is passed over then."""
        claims = self._claims.get(block)
        if claims is None:
            return False
        self._passed_at[block] = priority = max(claim.priority for claim in claims.values())
        self._passed[priority][block] = None
        return True

    def _remove_passed(self, block: int) -> None:
        if (priority := self._passed_at.pop(block, None)) is not None:
            del self._passed[priority][block]
            if not self._passed[priority]:
                del self._passed[priority]

    def _drop_oldest(self, key: str) -> list[int]:
        """Drop the oldest claim of a key's lowest priority; as `_drop`."""
        levels = self._order[key]
        return self._drop(next(iter(levels[min(level for level, blocks in levels.items() if blocks)])), key)

    def _drop(self, block: int, key: str) -> list[int]:
        """Drop a claim; the block, if it was passed over and has none left."""
        claims = self._claims[block]
        claim = claims.pop(key)
        if not claims:
            del self._claims[block]
        del self._order[key][claim.priority][block]
        self._num_claims[key] -= 1
        if not self._num_claims[key]:
            del self._num_claims[key], self._order[key]
        if block not in self._passed_at:
            return []
        self._remove_passed(block)
        return [] if self._pass_over(block) else [block]


def retained_prefixes(
    given: tuple[RetainedPrefix, ...], params: SamplingParams, num_prompt: int
) -> tuple[RetainedPrefix, ...]:
    """What a request wants to be kept of a prompt: those given, and all of it with `cache_retention`."""
    if (whole := params.cache_retention) is None:
        return given
    return (*given, RetainedPrefix(num_prompt, whole["seconds"], int(whole["priority"])))


def retain(sequence: Sequence, last: Prefix, num_blocks: int, pools: Iterable[BlockPool], block_size: int) -> None:
    """Claim the blocks that the retained prefixes of a sequence need, as far as they are there.

    last, num_blocks: the prefix that the sequence has come to, and its blocks
    """
    path, prefix = list[Prefix](), last
    while prefix.parent is not None:  # the last is the salt
        path.append(prefix)
        prefix = prefix.parent
    assert len(path) == num_blocks, "a prefix has as many ancestors as blocks"
    spans = sorted(sequence.retained, key=lambda span: -span.num_tokens)
    for pool in pools:
        now = pool.retained.clock()
        for (priority, seconds), claimed in groupby(_claimed(pool, spans, path, block_size), itemgetter(1, 2)):
            blocks = [each.blocks[pool.name] for each, *_ in claimed if pool.name in each.blocks]
            pool.retained.claim(blocks, sequence.tenant, priority, now + seconds)


def _claimed(
    pool: BlockPool, spans: SequenceOf[RetainedPrefix], path: SequenceOf[Prefix], block_size: int
) -> Iterator[tuple[Prefix, int, float]]:
    """What of a path, whose end comes first, a pool has to keep so that all spans can be hit: priority, seconds."""
    kind: StateKind = pool.kind
    if kind.rule.keeps_all:
        left, priority, seconds = list(reversed(spans)), 0, 0.0
        for at, each in enumerate(path):
            while left and left[-1].num_tokens // block_size >= len(path) - at:
                span = left.pop()
                priority, seconds = max(priority, span.priority), max(seconds, span.seconds)
            if seconds:
                yield each, priority, seconds
        return
    for span in spans:
        stop = min(span.num_tokens // block_size, len(path))
        seen = path[len(path) - stop :]
        if kind.rule.in_slot:  # the last copy of the state
            seen = next(([each] for each in seen if pool.name in each.blocks), [])
        else:
            seen = seen[: stop - kind.first_visible(stop * block_size)]
        for each in seen:
            yield each, span.priority, span.seconds

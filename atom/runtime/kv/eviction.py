"""Order the free blocks of a pool for eviction: LRU, in two queues.

    cached = EvictionOrder(min_skipped=16)
    cached.add(7)                       # read until its sequence ended: the next turn of the conversation reads it
    cached.add(3, is_skipped=True)      # a window has moved past it: only a prompt that parts there reads it
    cached.first                        # 3, if more than 16 blocks are skipped; else 7

Without a queue of their own, the skipped blocks of long prompts would push out the ends of all idle conversations: a
prompt of 8,000 tokens leaves 500 blocks of a window of 128, and a conversation needs 9 to go on. (As in 2Q, Johnson and
Shasha, VLDB 1994, blocks that are read once go through a short queue.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice


class EvictionOrder:
    """Blocks in the order in which they are evicted."""

    def __init__(self, min_skipped: int = 0) -> None:
        """min_skipped: skipped blocks that stay as long as there are others"""
        self._min_skipped = min_skipped
        self._skipped: OrderedDict[int, None] = OrderedDict()  # least recently used first, as the others
        self._used: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._skipped) + len(self._used)

    def __contains__(self, block: object) -> bool:
        return block in self._used or block in self._skipped

    def __iter__(self) -> Iterator[int]:
        num_first = max(len(self._skipped) - self._min_skipped, 0)
        yield from islice(self._skipped, num_first)
        yield from self._used
        yield from islice(self._skipped, num_first, None)

    @property
    def first(self) -> int | None:
        """The block that is evicted next; None if there is none."""
        return next(iter(self), None)

    @property
    def newest_first(self) -> list[int]:
        """Those that are worth most first: used ones, then skipped ones."""
        return [*reversed(self._used), *reversed(self._skipped)]

    def is_skipped(self, block: int) -> bool:
        return block in self._skipped

    def add(self, block: int, *, is_skipped: bool = False) -> None:
        """Add a block that was used last."""
        (self._skipped if is_skipped else self._used)[block] = None

    def add_first(self, block: int) -> None:
        """Add a block that is evicted next."""
        queue = self._skipped if len(self._skipped) > self._min_skipped else self._used
        queue[block] = None
        queue.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """Remove a block; KeyError if it is not there."""
        del (self._used if block in self._used else self._skipped)[block]

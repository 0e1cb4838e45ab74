"""The inbox of the engine's thread: work from other threads, run between steps.

inbox.put(work)                                # any thread; None: the engine's thread is to end
inbox.put(Urgent(lambda: engine.abort("1")))
while (work := inbox.get()) is not None:       # only the engine's thread
    work()
engine.sleep(1, "wait", inbox.do_urgent)       # so that an abort need not wait for what it would end
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from atom.errors import EngineDeadError

Work = Callable[[], object]


@dataclass(frozen=True)
class Urgent:
    """Work that may be done ahead of its turn, and once more in its turn."""

    work: Work

    def __call__(self) -> None:
        self.work()


class Inbox:
    def __init__(self) -> None:
        self._new: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._held: deque[Work | None] = deque()  # older, seen by `do_urgent`

    def put(self, work: Work | None) -> None:
        """Queue work; None: the engine's thread is to end."""
        self._new.put(work)

    def get(self, block: bool = True) -> Work | None:
        """The oldest work, None for the end. queue.Empty if there is none and it is not to be waited for."""
        return self._held.popleft() if self._held else self._new.get(block)

    def empty(self) -> bool:
        return not self._held and self._new.empty()

    def do_urgent(self) -> None:
        """Do the urgent work that has come, in the middle of other work. EngineDeadError if the thread is to end.

        All of it keeps its turn: what an abort is to end may have come just before it.
        """
        while not self._new.empty():
            work = self._new.get()
            self._held.append(work)
            if isinstance(work, Urgent):
                work()
        if None in self._held:
            raise EngineDeadError("the engine is to end")

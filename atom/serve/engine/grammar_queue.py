"""Prepare requests with grammars in a thread, one tenant after the other.

    queue = GrammarQueue(prepare)                # prepare(message): may take seconds
    threading.Thread(target=queue.run, daemon=True).start()
    queue.add(message)
    queue.drop(message.id)                       # it need not be prepared any more

To compile a grammar may take seconds, and a client may send hundreds of them. Requests without one do not wait for
that, and those of another tenant for one grammar at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from atom.serve.engine.protocol import Submit


class GrammarQueue:
    """Any thread may add and drop; one runs."""

    def __init__(self, prepare: Callable[[Submit], object]) -> None:
        self._prepare = prepare
        self._tenants: dict[str, deque[Submit]] = {}  # those with requests, the next one first
        self._changed = threading.Condition()

    def add(self, message: Submit) -> None:
        with self._changed:
            self._tenants.setdefault(message.options.tenant, deque()).append(message)
            self._changed.notify()

    def drop(self, id: str) -> None:
        """Take out a request, unless it is being prepared or has been."""
        with self._changed:
            for tenant, waiting in self._tenants.items():
                kept = deque(message for message in waiting if message.id != id)
                if len(kept) < len(waiting):
                    self._keep(tenant, kept)
                    return

    def run(self) -> None:
        """Prepare what comes, for ever."""
        while True:
            self._prepare(self._next())

    def _next(self) -> Submit:
        with self._changed:
            self._changed.wait_for(lambda: self._tenants)
            tenant = next(iter(self._tenants))
            waiting = self._tenants.pop(tenant)
            message = waiting.popleft()
            self._keep(tenant, waiting)  # after the others
            return message

    def _keep(self, tenant: str, waiting: deque[Submit]) -> None:
        if waiting:
            self._tenants[tenant] = waiting
        else:
            self._tenants.pop(tenant, None)

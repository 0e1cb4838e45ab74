"""Write log lines in a thread, without blocking callers on a full pipe.

    writer = LogWriter(2, lambda count: f"{count} lines were dropped", 1 << 20)
    writer.put("a line")                 # never blocks
    writer.flush(2.0)                    # waits until all is written, for this many seconds at most

A pipe whose reader has stopped, or a terminal after Ctrl-S, blocks a write for as long as that lasts. Lines wait in
memory meanwhile, up to a bound; later ones are dropped and counted, and a line in their place says how many.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable


class LogWriter:
    def __init__(self, descriptor: int, describe: Callable[[int], str], max_waiting: int) -> None:
        """
        describe: the line that says how many were dropped
        max_waiting: bytes of lines that are not written yet
        """
        self.num_dropped = 0  # lines, in all
        self._descriptor, self._describe, self._max_waiting = descriptor, describe, max_waiting
        self._lines: deque[bytes] = deque()
        self._num_waiting = 0  # bytes, those of the line that is being written included
        self._num_missing = 0  # lines dropped since the last that was taken
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Have a line written after those before it, or dropped if too many wait."""
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._num_waiting and self._num_waiting + len(data) > self._max_waiting:
                self.num_dropped += 1
                self._num_missing += 1
                return
            self._add_missing()
            self._add(data)
            if self._thread is None:
                # a daemon, since it may never come back from a write
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all lines are written, for this many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting, seconds)

    def _add(self, data: bytes) -> None:
        self._lines.append(data)
        self._num_waiting += len(data)

    def _add_missing(self) -> None:
        if self._num_missing:
            count, self._num_missing = self._num_missing, 0
            self._add(f"{self._describe(count)}\n".encode())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                data = self._lines.popleft()
            with contextlib.suppress(OSError):  # a full disk or a closed pipe: the line is lost
                write_all(self._descriptor, data)
            with self._changed:
                self._num_waiting -= len(data)
                if not self._lines:
                    self._add_missing()
                self._changed.notify_all()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, also if the other end has made the descriptor non-blocking."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])

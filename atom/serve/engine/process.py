"""The engine's process, seen from the one that starts it.

engine = EngineProcess()                  # runs `python -m atom.serve.engine.worker`
await client.connect(engine.connection)
engine.has_ended()
engine.end()                              # its exit code; what still runs of it, compilers included, is killed
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from atom.child_process import end, exit_status

READ_SECONDS = 1.0  # for its last lines, whose end another process may hold open
WORKER = (sys.executable, "-m", "atom.serve.engine.worker")


class EngineProcess:
    """A child with one end of a socket pair, which no other process can open, and a process group of its own."""

    def __init__(self, command: tuple[str, ...] = WORKER, relay: Callable[[str], object] | None = None) -> None:
        """command: gets the number of the socket's descriptor as its last argument. relay: gets each line that it
        prints to stderr, in a thread; None: they go to ours."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(number)],
                stdin=subprocess.DEVNULL,
                stderr=None if relay is None else subprocess.PIPE,
                errors="replace",
                pass_fds=[number],
                process_group=0,
            )
        self._reading: threading.Thread | None = None
        if relay is not None:
            self._reading = threading.Thread(target=self._read, args=(relay,), name="engine's stderr", daemon=True)
            self._reading.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it has; it ends by itself when the socket is closed."""
        return self._process.returncode is not None or exit_status(self._process, os.WNOHANG) is not None

    def end(self) -> int:
        """Its exit code, negative for a signal. Whatever is left of its group is killed."""
        return end(self._process, self._reading, READ_SECONDS)

    def _read(self, relay: Callable[[str], object]) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        for line in self._process.stderr:
            relay(line)

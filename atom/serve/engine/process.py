"""The engine's process, seen from the one that starts it.

engine = EngineProcess()                  # runs `python -m atom.serve.engine.worker`
await client.connect(engine.connection)
engine.has_ended()
engine.end()                              # its exit code; what still runs of it, compilers included, is killed
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

WORKER = (sys.executable, "-m", "atom.serve.engine.worker")


class EngineProcess:
    """A child with one end of a socket pair, which no other process can open, and a process group of its own."""

    def __init__(self, command: tuple[str, ...] = WORKER) -> None:
        """command: gets the number of the socket's descriptor as its last argument."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(number)], stdin=subprocess.DEVNULL, pass_fds=[number], process_group=0
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it has; it ends by itself when the socket is closed."""
        if self._process.returncode is not None:
            return True
        # it is not reaped here: its number must stay its own until the group is gone
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> int:
        """Its exit code, negative for a signal. Whatever is left of its group is killed."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

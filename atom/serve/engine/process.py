"""Start and end the engine's process.

engine = EngineProcess()                  # runs `python -m atom.serve.engine.worker`, which imports torch at once
engine = EngineProcess(work)              # or a fork of this process, which need not import what this one has
engine.configure(config)                  # sends what it opens; an `EngineClient` takes the connection then
engine.has_ended()
code = engine.end()                       # kills what is left of it, compilers included
describe_exit(code, has_left=client.has_left)
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

from atom.config import Config
from atom.process.child_process import Process, end, exit_status, fork
from atom.runtime.metrics import DEFAULT_VERSION
from atom.serve.engine.frames import Start, encode

READ_SECONDS = 1.0  # to read its last lines: another process may hold its stderr open
WORKER = (sys.executable, "-m", "atom.serve.engine.worker")


class EngineProcess:
    """A child process with one end of a socket pair, which no other process can open, and its own process group."""

    def __init__(self, command: tuple[str, ...] | Callable[[int], int] = WORKER, *, is_piped: bool = False) -> None:
        """command: its last argument becomes the socket's file descriptor; or a function of it, run in a fork.

        is_piped: its stderr is a pipe, which `relay` reads; else it shares ours
        """
        self.is_piped = is_piped
        self.is_configured = False
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(command, theirs.fileno())
        self._ending = threading.Lock()
        self._reading: threading.Thread | None = None

    def _start(self, command: tuple[str, ...] | Callable[[int], int], descriptor: int) -> Process:
        if callable(command):
            return fork(partial(self._work, command, descriptor), is_piped=self.is_piped)
        return subprocess.Popen(
            [*command, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if self.is_piped else None,
            errors="replace",
            pass_fds=[descriptor],
            process_group=0,
        )

    def _work(self, work: Callable[[int], int], descriptor: int) -> int:
        self.connection.close()  # here, if it is the other's
        return work(descriptor)

    def configure(
        self, config: Config, replica: int = 0, *, is_paused: bool = False, weight_version: str = DEFAULT_VERSION
    ) -> None:
        """Send the configuration, once. replica: the engine's number"""
        if not self.is_configured:
            self.is_configured = True
            with contextlib.suppress(OSError):  # it is gone, which its client sees
                self.connection.sendall(encode(Start(config, replica, is_paused, weight_version)))

    def relay(self, take: Callable[[str], object]) -> None:
        """Call `take` in a thread with each line of its stderr, also with those of before."""
        self._reading = threading.Thread(target=self._read, args=(take,), name="engine's stderr", daemon=True)
        self._reading.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether the process has ended; it ends by itself when the socket is closed."""
        try:
            return self._process.returncode is not None or exit_status(self._process, os.WNOHANG) is not None
        except ChildProcessError:  # another thread is in `end`
            return True

    def end(self) -> int:
        """End the process and kill what is left of its group; the exit code, negative for a signal."""
        with self._ending:
            return end(self._process, self._reading, READ_SECONDS)

    def _read(self, relay: Callable[[str], object]) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        for line in self._process.stderr:
            relay(line)


class Spare:
    """A process that has imported torch, for the next engine that starts."""

    def __init__(self, command: tuple[str, ...], process: EngineProcess | None = None) -> None:
        """process: the first, if there is one already"""
        self._command, self._process = command, process

    def prepare(self, *, is_piped: bool) -> None:
        """Start a process, unless one waits."""
        if self._process is None:
            with contextlib.suppress(OSError):  # a start that has none says what is wrong
                self._process = EngineProcess(self._command, is_piped=is_piped)

    def take(self) -> EngineProcess | None:
        """The process, if there is one and it has not ended."""
        process, self._process = self._process, None
        if process is not None and process.has_ended():
            process.end()
            return None
        return process

    def end(self) -> None:
        if (process := self.take()) is not None:
            process.end()
            process.connection.close()


def describe_exit(code: int, *, has_left: bool) -> str:
    """Describe the exit code of the engine's process. has_left: it ended unexpectedly."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if -code != signal.SIGKILL:
        return name
    return f"{name}, as when memory runs out" if has_left else f"{name}, at the server's request"

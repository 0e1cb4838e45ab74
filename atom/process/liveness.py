"""Distinguish dead and hung processes from busy and stopped ones.

    watch = Watch(seconds=60.0)
    watch.hear()                                             # whenever the process sends anything, in any thread
    life = watch.look(time.monotonic(), read_vitals(pid))    # every LOOK_SECONDS

Silence is not death: a process sends no heartbeat while a call holds the interpreter's lock, nor while it is stopped.
It is dead once it has ended, and hung once it has neither sent anything nor used the CPU for a generous time without
being stopped. Only observed silence counts: a watcher that was stopped itself could not listen.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

BEAT_SECONDS = 0.4  # between two heartbeats
LOOK_SECONDS = 0.5  # between two looks, and the silence that one look counts at most
HANG_SECONDS = 60.0  # default of advanced.heartbeat_seconds
BUSY_SHARE = 0.05  # of one CPU; less is idle: a thread that waits for the interpreter's lock polls, with 0.003
STAT = Path("/proc/self/stat")


class Life(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"  # by SIGSTOP, a terminal or a debugger
    HUNG = "hung"
    ENDED = "ended"


class Vitals(NamedTuple):
    """The kernel's statistics of a process."""

    state: str  # as in /proc/PID/stat
    cpu: float  # seconds of CPU time that all its threads have used

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def has_ended(self) -> bool:
        return self.state in ("Z", "X")


def read_vitals(pid: int) -> Vitals | None:
    """The vitals of a process of this host; None if the system has no /proc, so that only its exit is noticed."""
    try:
        stat = (STAT.parents[1] / str(pid) / STAT.name).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return Vitals("X", 0.0) if STAT.exists() else None
    state, *numbers = stat.rpartition(b")")[2].split()
    return Vitals(state.decode(), (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK"))


class Watch:
    """Observations of one process. One thread looks, any thread hears."""

    def __init__(self, seconds: float = HANG_SECONDS) -> None:
        """seconds: without a sign of life after which the process is hung"""
        self.seconds = seconds
        self.silence = 0.0  # seconds since the process was last heard, in which it was not stopped
        self._idle = 0.0  # of these, seconds since it last used the CPU
        self._cpu = 0.0  # its CPU time then
        self._looked_at: float | None = None
        self._is_heard = False

    def hear(self) -> None:
        self._is_heard = True

    def look(self, now: float, vitals: Vitals | None) -> Life:
        """How the process is.

        now: seconds of a steady clock
        vitals: None if unknown
        """
        gap = 0.0 if self._looked_at is None else min(now - self._looked_at, LOOK_SECONDS)
        self._looked_at = now
        is_stopped = vitals is not None and vitals.is_stopped
        if self._is_heard:
            self._is_heard, self.silence = False, 0.0
        elif not is_stopped:
            self.silence += gap
        is_busy = vitals is None or vitals.cpu - self._cpu >= BUSY_SHARE * self.seconds
        if is_stopped or is_busy or not self.silence:
            self._idle, self._cpu = 0.0, 0.0 if vitals is None else vitals.cpu
        else:
            self._idle += gap
        if is_stopped:
            return Life.STOPPED
        if vitals is not None and vitals.has_ended and self.silence > 2 * LOOK_SECONDS:  # its last words have come
            return Life.ENDED
        return Life.HUNG if self._idle > self.seconds else Life.RUNNING

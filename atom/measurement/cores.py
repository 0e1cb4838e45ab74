"""Measure how long this process's threads waited for a CPU core.

    before = core_seconds()
    waited = core_seconds().share_waited(before)     # 0.6: of the time in which they wanted to run
    warn_of(waited)     # ["this machine was busy: …"]

Linux counts both times for each thread; elsewhere, and if a sandbox hides the counts, nothing is known.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

MAX_WAITED = 0.1  # share of the time in which threads waited for a core; above it, a run is said to be too slow


class CoreSeconds(NamedTuple):
    """Seconds that a process's threads ran, and waited for a core."""

    ran: float
    waited: float

    def share_waited(self, before: CoreSeconds) -> float | None:
        """The share of waiting since then; None if nothing was counted."""
        ran, waited = max(0.0, self.ran - before.ran), max(0.0, self.waited - before.waited)
        return waited / (ran + waited) if ran else None


def core_seconds(root: Path = Path("/")) -> CoreSeconds:
    """The seconds of the threads that are running. root: where /proc is."""
    counts = []
    for path in (root / "proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            counts += [[int(count) for count in path.read_text().split()[:2]] or [0, 0]]  # a sandbox's may be empty
    ran, waited = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    return CoreSeconds(ran / 1e9, waited / 1e9)


def warn_of(waited: float | None) -> list[str]:
    """What makes the numbers of a run doubtful. waited: the share of the time in which threads waited for a core"""
    if waited is None or waited <= MAX_WAITED:
        return []
    return [
        f"this machine was busy: threads waited for a core {waited:.0%} of the time, so the run was too slow; "
        "end other programs, or lower OMP_NUM_THREADS"
    ]

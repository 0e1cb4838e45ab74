"""Time the phases of a start.

clock = PhaseClock({"imports": seconds_since_exec()})
clock.stop("weights")        # the time since the last stop went to the weights
clock.seconds                # {"imports": 1.9, "weights": 1.2}
clock.describe()             # 3.10 s: imports 1.90, weights 1.20
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

STAT = Path("/proc/self/stat")
START_TIME = 19  # its field after the process's name, in ticks since boot


class PhaseClock:
    """Seconds by phase. before: of phases that are over"""

    def __init__(self, before: Mapping[str, float] = MappingProxyType({})) -> None:
        self.seconds = dict(before)
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        """End a phase; one that comes again adds to its time."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def describe(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s: {parts}"


def seconds_since_exec() -> float:
    """How long ago this process began, to about 0.01 s; 0 if the system does not say."""
    try:
        started = int(STAT.read_text().rpartition(")")[2].split()[START_TIME]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0

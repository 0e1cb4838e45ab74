"""Time limits on a machine that others use too.

limit = END_SECONDS * slowness()
"""

from __future__ import annotations

import time

END_SECONDS = 5.0  # in which the end of a rank ends all, on a machine that does nothing else
WORK_SECONDS = 0.2  # of a processor


def slowness() -> float:
    """How much longer work takes than a processor computes for it: measured now, in this thread; 1 on an idle machine."""
    start, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < WORK_SECONDS:
        pass
    return max(1.0, (time.monotonic() - start) / WORK_SECONDS)

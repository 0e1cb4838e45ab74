"""Whether a call releases the interpreter's lock, so that other threads run meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

MAX_CALLS = 200  # a busy machine may not run the other thread during each call


def releases_gil(call: Callable[[], object]) -> bool:
    """Whether another thread runs during a call, which is repeated until one does.

    No thread is forced off the lock meanwhile, so the other one runs only if the call itself lets go of it.
    """
    num_ticks, ended = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not ended.wait(0.0005):
            num_ticks += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    try:
        sys.setswitchinterval(1000)  # ahead of its first wait for the lock, which would force this one off after 5 ms
        thread.start()
        for _ in range(MAX_CALLS):
            result = None  # freed before the count: that releases the lock too if it is a tensor
            before = num_ticks
            result = call()
            if num_ticks > before:
                return True
        del result
        return False
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()

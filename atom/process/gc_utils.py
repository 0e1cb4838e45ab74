"""Pause garbage collection during start-up, and freeze what stays.

A start makes a million objects that stay; to look for garbage among them takes a quarter of its time.

with no_collection():
    import torch
settle()                        # before requests come: a full collection is a pause of 50 ms and more
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection within this context; at its end, freeze all objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def settle() -> None:
    """Collect garbage once, and freeze what stays."""
    gc.collect()
    gc.freeze()

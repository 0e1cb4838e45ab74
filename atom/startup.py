"""A start makes a million objects that stay: looking for garbage among them takes a quarter of its time.

with no_collection():
    import torch
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile; what is there at the end is never looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()

"""Limit how long OpenMP threads spin while they wait.

On a CPU, torch computes with GNU's OpenMP, in which a thread that waits for the others spins for some milliseconds
before it sleeps. If other programs want the cores too, the one it waits for is then not running, and a decode takes
ten times as long. The bound is longer than the gaps within a step: on idle cores nothing changes.
"""

from __future__ import annotations

import os

SPINS = "5000"  # about 70 us


def bound_spinning() -> None:
    """Limit it in this process, if torch is not imported yet, and in its children; a user's own setting stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

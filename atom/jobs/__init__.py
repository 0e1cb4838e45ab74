"""The jobs of `atom-run`, each with `run(config) -> exit code`.

A job with numbers for sweeps has their names in OBJECTIVES, and `run(config, report)` calls `report` with them.
"""

from __future__ import annotations

import importlib
from typing import Any

from atom.process.gc_utils import no_collection

FOLDERS = ("bench", "compare", "eval", "explain", "plan", "port", "profile")  # of several files, of which `job.py` runs


def module_of(name: str) -> Any:
    """Import a module of this package when it is needed: jobs load torch, and `flags` and `start` load Hydra."""
    with no_collection():
        return importlib.import_module(f"atom.jobs.{name}.job" if name in FOLDERS else f"atom.jobs.{name}")

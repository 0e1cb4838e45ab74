"""Run steps so that one that raises ends only its requests.

guard = StepGuard(engine)
while engine.has_work:
    guard.step()                   # raises if two steps in a row do, or memory is lacking: the engine has to end
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from atom.errors import CapacityError, EngineDeadError

if TYPE_CHECKING:
    from atom.runtime.engine import Engine

LOG = logging.getLogger("atom.engine")
LAST = (CapacityError, EngineDeadError, BrokenPipeError, ConnectionResetError)  # the latter two: nobody reads outputs


class StepGuard:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._has_failed = False  # the last step has

    def step(self, on_plan: Callable[[], object] | None = None) -> None:
        """Run a step; the requests of one that raises end with reason error."""
        try:
            self._engine.step(on_plan)
            self._has_failed = False
        except LAST:
            raise
        except Exception:
            if self._has_failed:
                raise
            self._has_failed = True
            LOG.exception("a step failed")
            self._engine.end_failed()

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from atom.measurement import phases
from atom.measurement.phases import PhaseClock, seconds_since_exec


def test_each_phase_has_what_passed_since_the_last_stop(monkeypatch: pytest.MonkeyPatch):
    times = iter([10.0, 11.5, 12.0, 15.0])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(times))
    clock = PhaseClock({"imports": 2.0})
    for phase in ("model", "weights", "model"):
        clock.stop(phase)
    assert clock.seconds == {"imports": 2.0, "model": 4.5, "weights": 0.5}
    assert clock.describe() == "7.00 s: imports 2.00, model 4.50, weights 0.50"


def test_a_process_knows_how_long_ago_it_began():
    script = "import time; time.sleep(0.5); from atom.measurement.phases import seconds_since_exec as s; print(s())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert 0.45 < float(done.stdout) < time.monotonic() - began + 0.05, done.stderr


def test_a_system_that_does_not_say_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(phases, "STAT", phases.Path("/nowhere"))
    assert seconds_since_exec() == 0.0

"""What OpenMP itself says of how long its threads spin."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

CODE = "from atom.jobs.report import report; report(lambda: bool(__import__('torch')) - 1)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
    ids=["as we set it", "as a user sets it", "by the user's policy"],
)
def test_threads_spin_for_microseconds(given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "OMP_DISPLAY_ENV": "VERBOSE"}.items():
        monkeypatch.setenv(name, value)
    shown = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stderr
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shown) == [expected]

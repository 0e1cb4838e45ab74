"""What OpenMP itself says of how long its threads spin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# the library that torch brings, without the rest of torch
CODE = """
import ctypes, sys
from atom.jobs.report import report
report(lambda: ctypes.CDLL(sys.argv[1]) is None)
"""


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
    (library,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    command = [sys.executable, "-c", CODE, str(library)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shown) == [expected]

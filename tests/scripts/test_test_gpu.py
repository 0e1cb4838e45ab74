"""scripts/test-gpu says by its exit status whether a test failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-gpu"
TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("name", ["good", "bad"])
def test_it(name): assert name == "good"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "status", "expected"), [("good", 0, "no failure"), ("bad", 1, "FAILED")])
def test_its_exit_status_is_that_of_the_tests(tmp_path: Path, chosen: str, status: int, expected: str):
    (tmp_path / "tests").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(tmp_path / "scripts" / "test-gpu"), "-k", chosen, "-W", "ignore"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert expected in done.stdout.splitlines()[-1]

"""scripts/test-gpu says by its exit status whether a test failed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test-gpu"
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


@pytest.mark.slow
def test_it_looks_into_every_file_with_a_test_of_a_gpu():
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}
    (pattern,) = re.findall(r"grep -rlE '(.*?)' tests", SCRIPT.read_text())
    assert files, done.stdout
    assert [file for file in sorted(files) if not re.search(pattern, (ROOT / file).read_text())] == []

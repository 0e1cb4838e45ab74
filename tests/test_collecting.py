"""A run without slow tests does not collect them, unless they are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import collecting
import pytest
from collecting import marks_of_file, unwanted_marks

SLOW_FILE = (
    "import pytest\npytestmark = [\n    pytest.mark.slow,\n]\nopen('imported', 'w')\ndef test_in_a_slow_file(): pass\n"
)
MIXED_FILE = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("n", range(9))
def test_slow(n): pass
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_of_both_kinds(n): pass
@pytest.mark.slow
class TestSlow:
    def test_in_a_slow_class(self): pass
"""


@pytest.mark.parametrize(
    ("expression", "unwanted"),
    [
        ("", set()),
        ("not slow and not gpu", {"slow", "gpu"}),
        ("gpu and not slow", {"slow"}),
        ("slow or aiter_sources", set()),
        ("not slow or gpu", set()),
        ("not (slow and gpu)", set()),
    ],
)
def test_marks_are_unwanted_if_each_test_must_lack_them(expression: str, unwanted: set[str]):
    assert unwanted_marks(expression) == unwanted


def test_the_marks_of_a_file_are_read_without_running_it():
    assert marks_of_file(SLOW_FILE) == {"slow"}
    assert marks_of_file("pytestmark = pytest.mark.gpu\n\n@pytest.mark.slow\ndef test_it(): ...\n") == {"gpu"}
    assert marks_of_file(MIXED_FILE) == set()


@pytest.mark.parametrize(
    ("chosen", "collected"),
    [
        (["-m", "not slow"], ["test_of_both_kinds[1]"]),
        (["-m", "not slow", "test_mixed.py"], ["test_of_both_kinds[1]"]),
        (["-m", "slow", "-k", "class or file"], ["test_in_a_slow_class", "test_in_a_slow_file"]),
        (["test_slow.py"], ["test_in_a_slow_file"]),
        (["-m", "not slow", "-m", "", "test_mixed.py::test_slow", "-k", "8"], ["test_slow[8]"]),
    ],
)
def test_what_is_collected(tmp_path: Path, chosen: list[str], collected: list[str]):
    (tmp_path / "test_slow.py").write_text(SLOW_FILE)
    (tmp_path / "test_mixed.py").write_text(MIXED_FILE)
    (tmp_path / "collecting.py").write_text(Path(collecting.__file__).read_text())
    options = ["-p", "no:cacheprovider", "-p", "collecting", "-W", "ignore", "--collect-only", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line] == collected, done.stdout
    assert (tmp_path / "imported").exists() == ("test_in_a_slow_file" in collected)

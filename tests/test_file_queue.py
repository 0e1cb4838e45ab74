"""Processes take test files from a queue, and collect no others."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import file_queue
import pytest

CONFTEST = """
import os, pathlib, file_queue, pytest
def pytest_configure(config): file_queue.register(config)
@pytest.fixture(scope="session", autouse=True)
def session():
    yield
    pathlib.Path("ended").open("a").write("session ")
"""
FILE = """
import os, pathlib, pytest
pathlib.Path("collected").open("a").write(__file__ + "\\n")
@pytest.fixture(scope="module", autouse=True)
def module():
    assert os.environ.get("ATOM_TEST_QUEUE") is None, "a pytest in a test would take files of this run"
    yield
    pathlib.Path("ended").open("a").write("module ")
@pytest.mark.parametrize("n", range(3))
def test_it(n): BODY
"""
HANGS = """
import os, pathlib, time
def test_it():
    pathlib.Path("fifo").write_text(str(os.getpid()))
    time.sleep(600)
"""


# a folder's fixture, which files of one process share
NESTED = """
import pathlib, pytest
@pytest.fixture(scope="session")
def nested():
    pathlib.Path("made").open("a").write("nested ")
"""


def run(folder: Path, bodies: dict[str, str], *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, body in bodies.items():
        (folder / f"test_{name}.py").write_text(FILE.replace("BODY", body))
    source = Path(file_queue.__file__)
    env = {**os.environ, "PYTHONPATH": str(source.parent), "TMPDIR": str(folder)}
    command = [sys.executable, str(source), "2", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def test_each_file_is_collected_by_one_process_which_tears_down_its_fixtures(tmp_path: Path):
    status, output = run(tmp_path, dict.fromkeys("abcd", "pass"), "-k", "not 1")
    assert status == 0 and output.splitlines()[-1].startswith("8 passed, 4 deselected in "), output
    collected = (tmp_path / "collected").read_text().split()
    assert sorted(collected) == [str(tmp_path / f"test_{name}.py") for name in "abcd"]
    assert (tmp_path / "ended").read_text().split().count("module") == 4
    assert 1 <= (tmp_path / "ended").read_text().split().count("session") <= 2
    assert not [*tmp_path.glob("atom-tests-*")]


def test_a_failure_and_a_crash_are_named_and_the_others_run(tmp_path: Path):
    bodies = {"a": "assert n != 1", "b": "n == 1 and os.kill(os.getpid(), 9)", "c": "pass", "d": "pass"}
    status, output = run(tmp_path, bodies)
    assert status == 2, output
    assert "FAILED test_a.py::test_it[1] - assert 1 != 1" in output
    assert "FAILED test_b.py::test_it[1]: its process ended with -9" in output
    assert len((tmp_path / "collected").read_text().split()) == 4


def test_a_run_that_is_terminated_ends_its_processes(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(HANGS)
    source = Path(file_queue.__file__)
    env = {**os.environ, "PYTHONPATH": str(source.parent), "TMPDIR": str(tmp_path)}
    run = subprocess.Popen([sys.executable, str(source), "1"], cwd=tmp_path, env=env)
    ended = os.pidfd_open(int((tmp_path / "fifo").read_text()))  # waits until it is written
    run.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert select.select([ended], [], [], 0)[0], "its process runs on"
    os.close(ended)


def test_fixtures_of_a_folder_are_made_once_in_a_process(tmp_path: Path):
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "conftest.py").write_text(NESTED)
    for name in "abcde":
        (tmp_path / "nested" / f"test_nested_{name}.py").write_text("def test_it(nested): pass")
    status, output = run(tmp_path, {})
    assert status == 0 and output.splitlines()[-1].startswith("5 passed in "), output
    assert 1 <= (tmp_path / "made").read_text().split().count("nested") <= 2


@pytest.mark.parametrize(
    ("arguments", "status", "summary"),
    [
        (["test_a.py::test_it[2]", "test_b.py"], 0, "4 passed in "),
        (["-k", "nothing"], 5, "6 deselected in "),
        (["test_a.py::test_other"], 4, "no tests ran in "),
    ],
)
def test_arguments_are_those_of_pytest(tmp_path: Path, arguments: list[str], status: int, summary: str):
    found, output = run(tmp_path, dict.fromkeys("ab", "pass"), *arguments)
    assert found == status and output.splitlines()[-1 if status != 4 else -2].startswith(summary), output

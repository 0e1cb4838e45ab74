"""Temporary folders end with their process, or with the next one's start where that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from atom.cache.temporary import temporary_folder

MAKE = """
import sys, tempfile
from pathlib import Path
from atom.cache.temporary import temporary_folder

tempfile.tempdir = sys.argv[1]
with temporary_folder() as folder:
    Path(folder, "a.s").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder until its stdin ends, and the folder, which was made long ago."""
    command = [sys.executable, "-c", MAKE, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    os.utime(folder, (0, 0))
    return process, folder


def test_a_folder_ends_with_its_process_or_with_the_next_where_that_is_killed(parent: Path):
    (killed, left), (running, used) = make(parent), make(parent)
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert (left / "a.s").exists()
        with temporary_folder() as folder:
            assert not left.exists() and (used / "a.s").exists() and Path(folder).parent == parent
        running.communicate("\n")
        assert list(parent.iterdir()) == []
    finally:
        running.kill()
        running.wait()


def test_what_may_be_somebody_else_s_stays(parent: Path):
    for name in ("atom-run-a", "other.tmp", "atom-run-young.tmp", "atom-run-linked.tmp.d"):
        (parent / name).mkdir()
    (parent / "atom-run-link.tmp").symlink_to("atom-run-linked.tmp.d")
    for name in ("atom-run-a", "other.tmp", "atom-run-linked.tmp.d", "atom-run-link.tmp"):
        os.utime(parent / name, (0, 0), follow_symlinks=False)
    before = sorted(parent.iterdir())
    temporary_folder().cleanup()
    assert sorted(parent.iterdir()) == before
    os.utime(parent / "atom-run-young.tmp", (0, 0))
    temporary_folder().cleanup()
    assert len(before) - len(list(parent.iterdir())) == 1


def test_another_user_s_folder_stays(parent: Path, monkeypatch: pytest.MonkeyPatch):
    (parent / "atom-run-a.tmp").mkdir()
    os.utime(parent / "atom-run-a.tmp", (0, 0))
    user = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)
        temporary_folder().cleanup()
    assert len(list(parent.iterdir())) == 1
    temporary_folder().cleanup()
    assert list(parent.iterdir()) == []

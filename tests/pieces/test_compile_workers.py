"""Compilers end with what has started them, in whatever way that ends, and leave no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atom.errors import ArtifactError
from atom.pieces import compile_pieces

TEXTS = [
    f"def piece(x0: fp32[A, {size}]):\n    y = inductor.add(x0, x0)\n    return y\n"
    for size in (8, 16)
]  # fmt: skip

COMPILER = """\
#!/bin/sh
case $TMPDIR in
*/{failing}/*)
    case $* in *--version*) echo g++ 99.9.9; exit;; esac
    while ! test -e {pid}; do sleep 0.05; done
    echo this is broken >&2
    exit 1;;
esac
echo half > $TMPDIR/half.s
echo $$ > {pid}.new
mv {pid}.new {pid}
exec sleep 600
"""

PARENT = """\
import sys
from atom.pieces import compile_pieces
for _ in compile_pieces([sys.argv[1]]):
    pass
"""


def wait_until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def session_of(pid: int) -> list[int]:
    """The processes of a process's session, itself included."""
    wanted = os.getsid(pid)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == wanted:
                found.append(int(folder.name))
        except ProcessLookupError:
            continue
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; a compiler of ours is the first g++, next to it is where it writes its number."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "files").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(COMPILER.format(pid=tmp_path / "pid", failing="none"))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "files"


@pytest.mark.slow
def test_a_compiler_that_fails_ends_the_others(place: Path, monkeypatch: pytest.MonkeyPatch):
    pid = place.parent / "pid"
    (place.parent / "bin" / "g++").write_text(COMPILER.format(pid=pid, failing=1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ArtifactError, match=r"^compiling failed: .*broken.*; level=1 runs without a compiler$"):
        list(compile_pieces(TEXTS))
    wait_until(lambda: not is_running(int(pid.read_text())), 20)
    assert not list(place.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_their_parent_and_leave_no_file(place: Path, number: int):
    pid = place.parent / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, TEXTS[0]], stderr=subprocess.DEVNULL)
    wait_until(pid.exists, 60)
    session = session_of(int(pid.read_text()))
    assert len(session) >= 2 and parent.pid not in session, "a terminal's Ctrl-C is only for the parent"
    assert list(place.rglob("half.s"))
    parent.send_signal(number)
    assert parent.wait(120) != 0
    wait_until(lambda: not any(map(is_running, session)), 20)
    assert not list(place.iterdir())

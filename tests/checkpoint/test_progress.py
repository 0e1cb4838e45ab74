from __future__ import annotations

import io
import re
import sys
import time

import pytest
import wire

from atom.checkpoint import RichProgress, SilentProgress, WatchedProgress, progress


def wait_for_line(capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    """A thread writes it."""
    wire.wait_until(lambda: any(re.fullmatch(pattern, line) for line in capsys.readouterr().err.splitlines()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_a_task_has_a_line_at_its_begin_now_and_then_and_at_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    with RichProgress().task("compiling 12 pieces", 12, in_bytes=False) as task:
        assert capsys.readouterr().err == "atom-run: compiling 12 pieces\n"
        task.advance(1)
        task.advance(2)
        wait_for_line(capsys, r"atom-run: compiling 12 pieces: 3 of 12 done, \d+ s so far")
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"atom-run: compiling 12 pieces: done in \d", last)
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "it is over"


def test_a_task_that_fails_is_not_shown_as_done(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ArithmeticError), RichProgress().task("loading weights", 100):
        raise ArithmeticError
    assert capsys.readouterr().err == "atom-run: loading weights\n"


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with RichProgress().task("loading weights", 100) as task:
        task.advance(100)
    assert "loading weights" in terminal.getvalue() and "atom-run" not in terminal.getvalue()


def test_a_process_that_is_killed_while_it_shows_a_bar_leaves_the_terminal_its_cursor(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with RichProgress().task("loading weights", 100) as task:
        task.advance(1)
        assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_a_task_whose_size_is_unknown_says_how_many_bytes_have_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    with RichProgress().task("Fetching org/name from the hub") as task:
        task.advance(1_234_000_000)
        wait_for_line(capsys, r"atom-run: Fetching org/name from the hub: 1,234 MB, \d+ s so far")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with RichProgress().task("Fetching org/name from the hub") as task:
        task.advance(1_234_000_000)
    assert "1.2 GB" in terminal.getvalue()
    with RichProgress().task("compiling kernels"):
        pass
    assert "0 bytes" not in terminal.getvalue()


def test_a_terminal_shows_how_far_a_task_is():
    watched = WatchedProgress(SilentProgress())
    assert watched.doing == ""
    with watched.task("loading weights", 1000) as weights:
        weights.advance(399)
        assert watched.doing == "loading weights: 39%"
        with watched.task("compiling pieces", 12, in_bytes=False) as pieces:
            assert watched.doing == "compiling pieces: 0 of 12 done"
            pieces.advance(3)
            assert watched.doing == "compiling pieces: 3 of 12 done"
        with watched.task("compiling kernels"):
            assert watched.doing == "compiling kernels"
        assert watched.doing == "loading weights: 39%"
    assert watched.doing == ""


def test_a_line_is_one_write_since_other_threads_print_too(monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", written.append)
    monkeypatch.setattr(sys, "stderr", stream)
    with RichProgress().task("loading weights"):
        pass
    assert len([text for text in written if text]) == 2 and all(text.endswith("\n") for text in written if text)

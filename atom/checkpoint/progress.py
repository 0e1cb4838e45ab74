"""Show the progress of long work.

It is silent by default; the command line shows a bar or lines on stderr.

with progress.task("loading weights", total=num_bytes) as task:
    task.advance(4096)
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from atom.process.messages import say

if TYPE_CHECKING:
    import rich.progress

LINE_SECONDS = 60.0  # between two lines about a long task


class Task(Protocol):
    def advance(self, amount: int, /) -> None:
        """Count `amount` more as done. Safe to call from several threads."""


class Progress(Protocol):
    def task(
        self, description: str, total: int | None = None, *, in_bytes: bool = True
    ) -> AbstractContextManager[Task]:
        """A task of `total` bytes or items; None if the total is unknown."""


class SilentProgress:
    @contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Task]:
        yield _SilentTask()


SILENT = SilentProgress()


class RichProgress:
    """Progress on stderr: a bar on a terminal, else a line at the start of a task, every minute, and at its end."""

    def task(
        self, description: str, total: int | None = None, *, in_bytes: bool = True
    ) -> AbstractContextManager[Task]:
        show = _show_bar if sys.stderr.isatty() else _show_lines
        return show(description, total, in_bytes=in_bytes)


class WatchedProgress:
    """Forwards tasks to another progress, and knows the present one: `loading weights: 40%`, "" if there is none."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._running: list[_CountedTask] = []

    @property
    def doing(self) -> str:
        return "".join(map(str, self._running[-1:]))  # a slice, since another thread may end the task

    @contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Task]:
        with self._shown.task(description, total, in_bytes=in_bytes) as shown:
            counted = _CountedTask(description, total, in_bytes, shown.advance)
            self._running.append(counted)
            try:
                yield counted
            finally:
                self._running.remove(counted)


class CheckedProgress:
    """Forwards tasks to another progress, and has those raise whose work is in vain, as after a rank has died."""

    def __init__(self, shown: Progress, check: Callable[[], object]) -> None:
        """check: is called as a task advances, by several threads, and may raise"""
        self._shown, self._check = shown, check

    @contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Task]:
        with self._shown.task(description, total, in_bytes=in_bytes) as shown:
            yield _CheckedTask(shown, self._check)


class _CheckedTask:
    def __init__(self, shown: Task, check: Callable[[], object]) -> None:
        self._shown, self._check = shown, check

    def advance(self, amount: int, /) -> None:
        self._check()
        self._shown.advance(amount)


class _SilentTask:
    def advance(self, amount: int, /) -> None:
        pass


class _RichTask:
    def __init__(self, bars: rich.progress.Progress, task_id: rich.progress.TaskID) -> None:
        self._bars, self._id = bars, task_id

    def advance(self, amount: int, /) -> None:
        self._bars.advance(self._id, amount)


class _CountedTask:
    """A task that shows its progress as text."""

    def __init__(
        self, description: str, total: int | None, in_bytes: bool, then: Callable[[int], object] = bool
    ) -> None:
        self._description, self._total, self._in_bytes, self._then = description, total, in_bytes, then
        self._done, self._counting = 0, threading.Lock()

    def advance(self, amount: int, /) -> None:
        with self._counting:
            self._done += amount
        self._then(amount)

    def __str__(self) -> str:
        if not self._total:
            so_far = f": {self._done / 1e6:,.0f} MB" if self._in_bytes and self._done else ""
            return self._description + so_far
        done = f"{self._done * 100 // self._total}%" if self._in_bytes else f"{self._done} of {self._total} done"
        return f"{self._description}: {done}"


@contextmanager
def _show_bar(description: str, total: int | None, *, in_bytes: bool) -> Iterator[Task]:
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class BytesSoFar(progress.FileSizeColumn):
        def render(self, task: progress.Task) -> Text:
            return super().render(task) if task.completed else Text("")

    known = (progress.BarColumn(), progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn())
    columns = known if total is not None else (progress.SpinnerColumn(finished_text=""), BytesSoFar())
    text, elapsed = progress.TextColumn("{task.description}", markup=False), progress.TimeElapsedColumn()
    with progress.Progress(text, *columns, elapsed, console=Console(stderr=True)) as bars:
        bars.console.show_cursor()  # a process that is killed could not bring it back
        yield _RichTask(bars, bars.add_task(description, total=total))


@contextmanager
def _show_lines(description: str, total: int | None, *, in_bytes: bool) -> Iterator[Task]:
    task, start, ended = _CountedTask(description, total, in_bytes), time.monotonic(), threading.Event()

    def print_regularly() -> None:
        while not ended.wait(LINE_SECONDS):
            say(f"{task}, {time.monotonic() - start:.0f} s so far")

    say(description)
    printer = threading.Thread(target=print_regularly, name="progress", daemon=True)
    printer.start()
    try:
        yield task
        say(f"{description}: done in {time.monotonic() - start:.1f} s")
    finally:
        ended.set()
        printer.join()

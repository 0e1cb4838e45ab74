"""How long work tells the user that it moves: silent by default, a bar on stderr from the command line.

with progress.task("Loading weights", total=num_bytes) as task:
    task.advance(4096)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Task(Protocol):
    def advance(self, amount: int, /) -> None:
        """Count `amount` more as done. Safe to call from several threads."""


class Progress(Protocol):
    def task(
        self, description: str, total: int | None = None, *, in_bytes: bool = True
    ) -> AbstractContextManager[Task]:
        """A piece of work of `total` bytes or things; None where nobody knows how many."""


class SilentProgress:
    @contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Task]:
        yield _SilentTask()


SILENT = SilentProgress()


class RichProgress:
    """A line on stderr for each task: a moving bar on a terminal, the last state elsewhere."""

    @contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Task]:
        from rich import progress
        from rich.console import Console

        known = (progress.BarColumn(), progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn())
        columns = known if total is not None else (progress.SpinnerColumn(finished_text=""),)
        text, elapsed = progress.TextColumn("{task.description}", markup=False), progress.TimeElapsedColumn()
        with progress.Progress(text, *columns, elapsed, console=Console(stderr=True)) as bars:
            yield _RichTask(bars, bars.add_task(description, total=total))


class _SilentTask:
    def advance(self, amount: int, /) -> None:
        pass


class _RichTask:
    def __init__(self, bars: rich.progress.Progress, task_id: rich.progress.TaskID) -> None:
        self._bars, self._id = bars, task_id

    def advance(self, amount: int, /) -> None:
        self._bars.advance(self._id, amount)

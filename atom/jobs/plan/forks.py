"""Call a function with many numbers in forks of this process.

    with Forks(lambda number: work(items[number]), len(items), num_processes=8) as forks:
        for number, result in forks:         # as they are done, in any order
            …

Forks inherit what the function reads, however large it is; only results are sent. This process must have no other
thread, and no GPU open.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from atom.errors import CapacityError
from atom.jobs.forked_load import end_with

T = TypeVar("T")


class WorkerTraceback(Exception):
    """The cause of an error that was sent from a fork: its traceback there, as text."""


class Forks(Generic[T]):
    """Processes that each take the next number until none is left."""

    def __init__(self, function: Callable[[int], T], num_calls: int, num_processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._function, self._num_calls, self._next = function, num_calls, context.Value("q", 0)
        sys.stdout.flush()
        self._results, self._parent = list[Connection](), os.getpid()
        self._processes = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=self._work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._results.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Forks[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        """Results with their numbers. What a call raises is raised here, CapacityError if processes are killed."""
        waiting, num_left = [*self._results], self._num_calls
        while num_left:
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                try:
                    number, result, error = connection.recv()
                except EOFError:  # it has no number left
                    waiting.remove(connection)
                    if not waiting:
                        raise CapacityError(
                            "the processes were killed, as if memory had run out; run it again"
                        ) from None
                    continue
                if error is not None:
                    fault, trace = error
                    raise fault from WorkerTraceback(trace)
                num_left -= 1
                yield number, result

    def _work(self, results: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process's parent ends it
        end_with(self._parent)
        while (number := self._take()) < self._num_calls:
            answer: tuple[int, Any, tuple[Exception, str] | None]
            try:
                answer = number, self._function(number), None
            except Exception as error:  # raised by the process that reads it
                answer = number, None, (error, traceback.format_exc())
            results.send(answer)

    def _take(self) -> int:
        with self._next.get_lock():
            number: int = self._next.value
            self._next.value += 1
        return number

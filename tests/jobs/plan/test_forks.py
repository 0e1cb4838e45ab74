"""Calls in forks: each once, their errors here, and no wait for processes that were killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from atom.errors import CapacityError, ConfigError
from atom.jobs.plan.forks import Forks


def test_each_number_is_taken_once_and_what_is_read_is_inherited():
    words = ["a", "bb", "ccc", "dddd", "eeeee"]
    read: Callable[[int], tuple[int, int]] = lambda number: (len(words[number]), os.getpid())  # noqa: E731
    with Forks(read, len(words), 2) as forks:
        found = list(forks)
    assert sorted((number, size) for number, (size, _) in found) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert os.getpid() not in {process for _, (_, process) in found}


def test_what_a_call_raises_is_raised_here():
    def refuse(number: int) -> int:
        if number == 1:
            raise ConfigError("not this one")
        return number

    with pytest.raises(ConfigError, match="not this one") as raised, Forks(refuse, 3, 2) as forks:
        list(forks)
    assert 'in refuse\n    raise ConfigError("not this one")' in str(raised.value.__cause__), "where it was raised"


def test_processes_that_are_killed_are_not_waited_for():
    def end(number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(CapacityError, match="were killed"), Forks(end, 4, 2) as forks:
        list(forks)


def test_processes_end_with_a_parent_that_is_killed():
    reading, writing = os.pipe()  # whose last writer has ended once all processes have
    script = "from atom.jobs.plan.forks import Forks; import os, signal\n" + (
        "with Forks(lambda number: bytes(1 << 20), 4, 2) as forks:\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=[writing])
    os.close(writing)
    assert parent.wait() == -signal.SIGKILL
    ended, _, _ = select.select([reading], [], [], 60)
    assert ended, "a process is left"
    os.close(reading)

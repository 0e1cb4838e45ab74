"""Calls in forks: each once, their errors here, and no wait for processes that were killed."""

from __future__ import annotations

import os
import signal
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

    with pytest.raises(ConfigError, match="not this one"), Forks(refuse, 3, 2) as forks:
        list(forks)


def test_processes_that_are_killed_are_not_waited_for():
    def end(number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(CapacityError, match="were killed"), Forks(end, 4, 2) as forks:
        list(forks)

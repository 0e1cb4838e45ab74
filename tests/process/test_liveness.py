"""What is taken for dead, hung, stopped or alive: observations in, a verdict out, no clocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from atom.config.load import load
from atom.process import liveness
from atom.process.liveness import BEAT_SECONDS, HANG_SECONDS, Life, Vitals, Watch, read_vitals

IDLE, STOPPED, TRACED, ENDED = (Vitals(state, 5.0) for state in "STtZ")


class Observed:
    """A watch of 10 s, and the time."""

    def __init__(self) -> None:
        self.watch, self.now = Watch(10.0), 1000.0
        self.watch.look(self.now, IDLE)

    def look(self, seconds: float, vitals: Callable[[], Vitals] | Vitals | None, every: float = 0.5) -> Life:
        """Look for so long; the last verdict."""
        for _ in range(round(seconds / every)):
            self.now += every
            life = self.watch.look(self.now, vitals() if callable(vitals) else vitals)
            assert life is not Life.HUNG or self.watch.silence > 10, "no verdict before its time"
        return life


def test_a_process_that_neither_sends_nor_uses_the_cpu_hangs_after_the_limit():
    observed = Observed()
    assert observed.look(10.0, IDLE) is Life.RUNNING
    assert observed.look(0.5, IDLE) is Life.HUNG


def test_a_process_that_sends_is_alive_whatever_its_cpu_time():
    observed = Observed()
    for _ in range(10):
        assert observed.look(9.5, IDLE) is Life.RUNNING
        observed.watch.hear()
    assert observed.look(10.5, IDLE) is Life.RUNNING and observed.watch.silence == 10.0, "what it sent counts from then"


@pytest.mark.parametrize("share", [1.0, 0.06], ids=["all of a CPU", "little, on a loaded machine"])
def test_a_process_that_uses_the_cpu_is_alive_however_long_it_sends_nothing(share: float):
    observed = Observed()
    assert observed.look(600, lambda: Vitals("R", 5.0 + share * (observed.now - 1000))) is Life.RUNNING
    assert observed.watch.silence == 600
    assert observed.look(10.5, Vitals("S", 5.0 + share * 600)) is Life.HUNG


def test_threads_that_poll_for_the_lock_do_not_count_as_use_of_the_cpu():
    observed = Observed()
    assert observed.look(10.5, lambda: Vitals("S", 5.0 + 10 * 0.003 * (observed.now - 1000))) is Life.HUNG


@pytest.mark.parametrize("vitals", [STOPPED, TRACED], ids=["by a signal", "by a debugger"])
def test_a_process_that_is_stopped_is_never_hung_and_has_all_its_time_when_it_continues(vitals: Vitals):
    observed = Observed()
    observed.look(9.5, IDLE)
    assert observed.look(3600, vitals) is Life.STOPPED and observed.watch.silence == 9.5
    assert observed.look(10.0, IDLE) is Life.RUNNING
    assert observed.look(0.5, IDLE) is Life.HUNG


def test_time_in_which_the_watcher_was_stopped_is_no_silence():
    observed = Observed()
    assert observed.look(19 * 3600, IDLE, every=3600) is Life.RUNNING and observed.watch.silence == 9.5


def test_a_process_that_has_ended_is_dead_once_its_last_words_have_come():
    observed = Observed()
    assert observed.look(1.0, ENDED) is Life.RUNNING
    observed.watch.hear()
    assert observed.look(1.5, ENDED) is Life.RUNNING
    assert observed.look(0.5, ENDED) is Life.ENDED


def test_without_proc_there_is_no_verdict():
    assert Observed().look(3600, None) is Life.RUNNING


def test_the_time_is_that_of_the_configuration_and_many_beats_fit_in_it():
    assert load([]).advanced.heartbeat_seconds == HANG_SECONDS == 60 and BEAT_SECONDS == 0.4


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    code = """
import time
while time.process_time() < 0.05: pass  # several of the kernel's units
print('(a) name', flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.01)


def vitals_of(pid: int) -> Vitals:
    vitals = read_vitals(pid)
    assert vitals is not None, "this system has /proc"
    return vitals


def test_the_kernel_says_whether_a_process_sleeps_is_stopped_or_has_ended(sleeping: subprocess.Popen[bytes]):
    wait_for(lambda: vitals_of(sleeping.pid).state == "S")
    before = vitals_of(sleeping.pid)
    assert before.cpu > 0 and not before.is_stopped and not before.has_ended
    sleeping.send_signal(signal.SIGSTOP)
    wait_for(lambda: vitals_of(sleeping.pid).is_stopped)
    assert vitals_of(sleeping.pid).cpu == before.cpu
    sleeping.send_signal(signal.SIGCONT)
    wait_for(lambda: not vitals_of(sleeping.pid).is_stopped)
    sleeping.kill()
    wait_for(lambda: vitals_of(sleeping.pid).has_ended)
    sleeping.wait()
    assert vitals_of(sleeping.pid).has_ended


def test_cpu_time_is_that_of_all_threads():
    code = """
import threading, time
def work():
    while time.thread_time() < 0.5: pass
threads = [threading.Thread(target=work) for _ in range(2)]
for each in threads: each.start()
for each in threads: each.join()
print(flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert vitals_of(process.pid).cpu >= 0.98


def test_a_system_without_proc_knows_nothing_of_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "STAT", liveness.STAT.with_name("nothing"))
    assert read_vitals(os.getpid()) is None

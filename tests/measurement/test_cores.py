from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom.measurement.cores import CoreSeconds, core_seconds

WORK = """
import os, time
from atom.measurement.cores import core_seconds
before, end = core_seconds(), time.perf_counter() + 1
while time.perf_counter() < end:
    pass
print(core_seconds().share_waited(before))
"""


def test_the_times_of_all_threads_are_summed(tmp_path: Path):
    for thread, text in (("1", "2000000000 500000000 7\n"), ("2", "1000000000 250000000 3\n")):
        (tmp_path / "proc/self/task" / thread).mkdir(parents=True)
        (tmp_path / "proc/self/task" / thread / "schedstat").write_text(text)
    assert core_seconds(tmp_path) == CoreSeconds(3.0, 0.75)
    assert CoreSeconds(3.0, 0.75).share_waited(CoreSeconds(2.0, 0.5)) == 0.2


def test_nothing_is_known_without_counts(tmp_path: Path):
    assert core_seconds(tmp_path).share_waited(core_seconds(tmp_path)) is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waiting")
def test_two_programs_on_one_core_wait_for_each_other():
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, [{core}])\n"
    other = subprocess.Popen([sys.executable, "-c", f"{pinned}while True: pass"])
    try:
        done = subprocess.run([sys.executable, "-c", pinned + WORK], capture_output=True, text=True, check=True)
    finally:
        other.kill()
        other.wait()
    assert 0.3 < float(done.stdout) < 1, "half of the core, or less where more programs run"

"""Run test files in several processes, each of which collects only those that it takes.

    python tests/file_queue.py 3 -m "not slow and not gpu" tests/graph        # 3 processes; the rest is pytest's

pytest-xdist has each process collect all tests. Here a process takes the next file once it has run the last one. So a
file stays in one process, which makes its servers, engines and pieces once; those marked `early` come first. If a
process crashes, its test is named and the others run what is left.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import pytest
from collecting import marks_of_file

FOLDER, PROCESS = "ATOM_TEST_QUEUE", "ATOM_TEST_PROCESS"  # variables of a process: the queue's folder, its own number
ONE_PROCESS = {"--co", "--collect-only", "-h", "--help", "--version", "--markers", "--fixtures"}
PROGRESS_SECONDS = 60
PASSED, INTERRUPTED, NO_TESTS = 0, 2, 5  # pytest's exit statuses


def find_files(session: pytest.Session) -> list[list[pytest.Item | pytest.Collector]]:
    """What is to be collected of each file, in the order in which files are taken: a mixed one, the longest files first.

    Files of tests/serve wait for processes: they meet files that compute, not each other.
    """
    option, by_file = session.config.option, dict[Path, list[pytest.Item | pytest.Collector]]()
    chosen, option.markexpr, option.keyword = (option.markexpr, option.keyword), "", ""  # of tests, not of folders
    nodes = [*session.perform_collect(genitems=False)]
    option.markexpr, option.keyword = chosen
    while nodes:
        node = nodes.pop()
        if isinstance(node, pytest.Directory):  # its fixtures are those of this node: there is one for all files
            report = node.ihook.pytest_make_collect_report(collector=node)
            node.ihook.pytest_collectreport(report=report)
            nodes += report.result if report.passed else []
        else:
            by_file.setdefault(node.path, []).insert(0, node)

    def place(path: Path) -> tuple[bool, int]:
        is_early = "early" in marks_of_file(path.read_text())
        return not is_early, crc32(os.path.relpath(path, session.config.rootpath).encode())

    return [by_file[path] for path in sorted(by_file, key=place)]


class FileQueue:
    """pytest's plugin in a process of a run."""

    def __init__(self, folder: Path, process: int) -> None:
        self._folder, self._process = folder, process
        self._num_tests = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        self._files = find_files(session)  # each is collected once it is taken
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        files = self._files
        for number in self._take(len(files)):
            # after the last test of a file comes the session: of all fixtures, its own stay
            for item, following in pairwise([*self._collect(session, files[number]), session]):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    self._write_next(len(files))  # the others end too, after their files
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    raise session.Interrupted(session.shouldstop)
        session.testscollected = self._num_tests
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        (self._folder / f"running-{self._process}").write_text(nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        stats = session.config.pluginmanager.getplugin("terminalreporter").stats
        counts = {kind: len(stats[kind]) for kind in stats if kind not in ("", "warnings")}
        (self._folder / f"counts-{self._process}").write_text(json.dumps(counts))

    def _collect(self, session: pytest.Session, nodes: list[pytest.Item | pytest.Collector]) -> list[pytest.Item]:
        gc.disable()
        try:
            session.items = [item for node in nodes for item in session.genitems(node)]
            session.config.hook.pytest_collection_modifyitems(
                session=session, config=session.config, items=session.items
            )
        finally:
            nodes.clear()  # what its fixtures hold is freed once it has run
            gc.collect()  # then what modules and tests are made of is no garbage: no later collection looks at it
            gc.freeze()
            gc.enable()
        self._num_tests += len(session.items)
        return session.items

    def _take(self, num_files: int) -> Iterator[int]:
        while True:
            with open(self._folder / "next", "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                number = int(file.read())
                if number >= num_files:
                    return
                file.seek(0)
                file.write(str(number + 1))
            yield number

    def _write_next(self, number: int) -> None:
        with open(self._folder / "next", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(str(number))


def register(config: pytest.Config) -> None:
    """Have pytest take files from the queue of the run, if it is a process of one."""
    if FOLDER in os.environ and PROCESS in os.environ:
        queue = FileQueue(Path(os.environ.pop(FOLDER)), int(os.environ[PROCESS]))  # a pytest in a test has none
        config.pluginmanager.register(queue)


def run(num_processes: int, arguments: Sequence[str]) -> int:
    """Run tests in processes and print what they printed; pytest's exit status."""
    command = [sys.executable, "-m", "pytest"]
    if ONE_PROCESS.intersection(arguments):
        return subprocess.run([*command, *arguments]).returncode
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="atom-tests-"))
    (folder / "next").write_text("0")
    command += ["-q", "-o", "console_output_style=classic", "-p", "no:cacheprovider"]
    processes: list[subprocess.Popen[bytes]] = []
    for number in range(num_processes):
        env = {**os.environ, FOLDER: str(folder), PROCESS: str(number)}
        with open(folder / f"output-{number}", "wb") as output:
            own = [f"--basetemp={folder}/process-{number}", *arguments]
            processes.append(subprocess.Popen([*command, *own], env=env, stdout=output, stderr=subprocess.STDOUT))
    try:
        await_all(processes, folder)
    except KeyboardInterrupt:  # each of them has it too
        await_all(processes, folder)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    codes = [process.returncode for process in processes]
    print_outputs(folder, codes)
    counts: Counter[str] = Counter()
    for file in folder.glob("counts-*"):
        counts.update(json.loads(file.read_text()))
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "no tests ran"
    print(f"{summary} in {time.monotonic() - began:.0f} s in {num_processes} processes")
    faults = [code for code in codes if code not in (PASSED, NO_TESTS)]
    if not faults:
        shutil.rmtree(folder, ignore_errors=True)
        return min(codes)
    print(f"temporary folders: {folder}")
    return max(code if code > 0 else INTERRUPTED for code in faults)


def await_all(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    shown = time.monotonic()
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            shown += PROGRESS_SECONDS
            print(f"{(folder / 'next').read_text()} files are taken", file=sys.stderr, flush=True)


def print_outputs(folder: Path, codes: Sequence[int]) -> None:
    """Print what processes printed, without dots, and the tests in which they crashed."""
    for number, code in enumerate(codes):
        for line in (folder / f"output-{number}").read_text(errors="replace").splitlines():
            if not re.fullmatch(r"[.sxXFE]*", line):
                print(line)
        running = folder / f"running-{number}"
        if not (folder / f"counts-{number}").exists() and running.exists():
            print(f"FAILED {running.read_text()}: its process ended with {code}, and ran nothing more of this file")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # then its processes are ended too
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))

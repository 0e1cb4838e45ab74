"""Plant known faults in copies of the tree, and check that their tests fail.

A fault is a patch of scripts/mutants.d. Lines before its diff name the tests that must fail and say what goes wrong:

    # tests: tests/runtime/kv/test_cache.py::test_another_past_or_salt_is_no_hit
    # why: a prefix is found without its salt, so one tenant's KV serves another
    diff --git a/atom/runtime/kv/cache.py b/atom/runtime/kv/cache.py
    …

A fault is caught if each of its tests fails, or does not end. A survivor has a line `# survives: reason`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("scripts/mutants.d")
MIN_CAUGHT = 0.95
TIMEOUT = 300  # seconds a fault's tests may take; a fault that hangs them is caught
CAUGHT, SURVIVED, EXPLAINED = "caught", "survived", "survived, explained"
STALE, NO_RUN, BROKEN = "does not apply", "its tests do not run", "its tests fail without it"
PASSED, FAILED = 0, 1  # pytest's exit statuses


# kills the groups that it has read of and that have not ended, once this process has, in whatever way
WATCH = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    path: Path  # of its patch
    tests: tuple[str, ...]  # node ids, of which each has to fail
    why: str
    survives: str  # why no test can fail, or ""


@dataclass(frozen=True)
class Verdict:
    kind: str
    details: str = ""


def read_mutant(path: Path) -> Mutant:
    head = path.read_text().partition("diff --git ")[0]
    lines = [line.removeprefix("# ").partition(": ") for line in head.splitlines()]
    values = {key: value.strip() for key, _, value in lines}
    tests = tuple(values.get("tests", "").split())
    return Mutant(path.stem, path, tests, values.get("why", ""), values.get("survives", ""))


def read_mutants(root: Path, only: Sequence[str] = ()) -> list[Mutant]:
    mutants = [read_mutant(path) for path in sorted((root / FOLDER).glob("*.patch"))]
    unknown = set(only) - {mutant.name for mutant in mutants}
    if unknown:
        raise SystemExit(f"mutants: there is no {FOLDER}/{min(unknown)}.patch")
    return [mutant for mutant in mutants if not only or mutant.name in only]


def apply(mutant: Mutant, tree: Path, *options: str) -> str:
    """Apply a patch to a tree; why it does not apply, or ""."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}  # a copy is no repository, wherever it is
    done = subprocess.run(["git", "apply", *options, mutant.path], cwd=tree, env=env, capture_output=True, text=True)
    return done.stderr.strip()


def copy_tree(root: Path, copy: Path) -> None:
    """The files of a checkout that git does not ignore, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


class Groups:
    """Process groups that do not outlive this process."""

    def __enter__(self) -> Groups:
        self._watch = subprocess.Popen([sys.executable, "-c", WATCH], stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watch.stdin is not None
        self._watch.stdin.close()
        self._watch.wait()

    def note(self, group: int, *, runs: bool) -> None:
        assert self._watch.stdin is not None
        os.write(self._watch.stdin.fileno(), f"{'+' if runs else '-'}{group}\n".encode())  # whole, whichever thread


def run_tests(tests: Iterable[str], tree: Path, groups: Groups, seconds: float | None = None) -> tuple[int | None, str]:
    """pytest's exit status, None if it did not end in time; and what it printed."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=line", "-m", "not slow"]
    with tempfile.TemporaryFile("w+") as output:  # no pipe, which a process that a test leaves would keep open
        process = subprocess.Popen(
            [*command, *tests], cwd=tree, env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        groups.note(process.pid, runs=True)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            groups.note(process.pid, runs=False)  # while no other process can have its number
            process.wait()
        output.seek(0)
        return status, output.read()


def find_failed(tests: Iterable[str], output: str) -> set[str]:
    """Those of the tests that failed, in one of their cases at least."""
    failed = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {test for test in tests if any(line == test or line.startswith((f"{test} ", f"{test}[")) for line in failed)}


def judge(mutant: Mutant, base: Path, groups: Groups) -> Verdict:
    """Run a fault's tests in a copy of the tree that has it."""
    with tempfile.TemporaryDirectory(prefix="atom-mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(base, tree)  # with times, so that bytecode of what is not patched counts
        if reason := apply(mutant, tree):
            return Verdict(STALE, reason)
        for name in re.findall(r"^\+\+\+ b/(.+)$", mutant.path.read_text(), re.MULTILINE):
            os.utime(tree / name, (1, 1))  # bytecode of a file as large, written in the same second, would count
        status, output = run_tests(mutant.tests, tree, groups, TIMEOUT)
    if status is None:
        return Verdict(CAUGHT, f"no end within {TIMEOUT} s")
    if status not in (PASSED, FAILED):
        return Verdict(NO_RUN, "\n".join(output.splitlines()[-5:]))
    passed = set(mutant.tests) - find_failed(mutant.tests, output)
    if not passed:
        return Verdict(CAUGHT)
    if mutant.survives:
        return Verdict(EXPLAINED, mutant.survives)
    return Verdict(SURVIVED, "passed: " + " ".join(sorted(passed)))


def find_broken(mutants: Sequence[Mutant], base: Path, groups: Groups) -> dict[Mutant, Verdict]:
    """The faults with a test that fails without them too."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    status, output = run_tests(tests, base, groups)
    if status not in (PASSED, FAILED):
        raise SystemExit(f"mutants: the tests do not run\n{output}")
    failed = find_failed(tests, output)
    found = {mutant: " ".join(sorted(failed.intersection(mutant.tests))) for mutant in mutants}
    return {mutant: Verdict(BROKEN, names) for mutant, names in found.items() if names}


def summarize(verdicts: Sequence[Verdict]) -> tuple[str, bool]:
    """A line, and whether all is well."""
    counts = dict.fromkeys((CAUGHT, EXPLAINED, SURVIVED, NO_RUN, STALE, BROKEN), 0)
    counts |= Counter(verdict.kind for verdict in verdicts)
    share = counts[CAUGHT] / len(verdicts) if verdicts else 1.0
    line = f"{share:.1%} of {len(verdicts)} caught: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return line, share >= MIN_CAUGHT and counts[CAUGHT] + counts[EXPLAINED] == len(verdicts)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Plant known faults; check that tests fail.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="patches of scripts/mutants.d")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="tests of how many run at once")
    options = parser.parse_args(arguments)
    mutants = read_mutants(root, options.only)
    with tempfile.TemporaryDirectory(prefix="atom-mutants-") as folder, Groups() as groups:
        base = Path(folder) / "tree"
        copy_tree(root, base)
        broken = find_broken(mutants, base, groups) if mutants else {}

        def judge_timed(mutant: Mutant) -> Verdict:
            begun = time.perf_counter()
            verdict = broken.get(mutant) or judge(mutant, base, groups)
            seconds = time.perf_counter() - begun
            print(f"{verdict.kind:8}  {mutant.name}  {seconds:.0f} s  {verdict.details}".rstrip(), flush=True)
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(judge_timed, mutants))
    line, is_well = summarize(verdicts)
    print(line)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

"""`scripts/mutants` on a small tree; and that each fault of its list applies to this one and names tests that exist."""

from __future__ import annotations

import ast
import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import FOLDER, ROOT, apply, main, read_mutant, read_mutants

MODULE = "def add(a, b):\n    return a + b\n"
TESTS = """\
import pytest
from module import add

def test_sum(): assert add(2, 3) == 5
def test_zero(): assert add(0, 0) == 0
@pytest.mark.parametrize("a", [0, 1])
def test_each(a): assert add(a, 1) == a + 1
def test_wrong(): assert add(1, 1) == 3
"""
HANGS = """\
import os, subprocess

def test_sum():
    child = subprocess.Popen(["sleep", "600"])
    with open(os.environ["FIFO"], "w") as fifo:
        fifo.write(str(child.pid))
    child.wait()
"""
DIFF = """\
diff --git a/module.py b/module.py
--- a/module.py
+++ b/module.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return {}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "tests/test_module.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def plant(tree: Path, name: str, value: str, *tests: str, survives: str = "", diff: str = DIFF) -> None:
    lines = ["# tests: " + " ".join(f"tests/test_module.py::{test}" for test in tests), "# why: it is wrong"]
    lines += [f"# survives: {survives}"] if survives else []
    (tree / FOLDER / f"{name}.patch").write_text("\n".join(lines) + "\n" + diff.format(value))


def test_faults_whose_tests_all_fail_are_caught(tree: Path, capsys: pytest.CaptureFixture[str]):
    plant(tree, "minus", "a - b", "test_sum", "test_each")
    assert main(["--jobs", "1"], tree) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("caught    minus ") and shown[-1].startswith("100.0% of 1 caught: 1 caught, 0 survived")
    assert (tree / "module.py").read_text() == MODULE, "the checkout is never patched"


@pytest.mark.slow
def test_a_fault_that_a_named_test_misses_survives(tree: Path, capsys: pytest.CaptureFixture[str]):
    plant(tree, "minus", "a - b", "test_sum", "test_zero")
    assert main([], tree) == 1
    assert "passed: tests/test_module.py::test_zero" in capsys.readouterr().out


@pytest.mark.slow
def test_too_few_are_caught_even_if_each_survivor_is_explained(tree: Path, capsys: pytest.CaptureFixture[str]):
    plant(tree, "same", "b + a", "test_sum", survives="the sum is the same")
    plant(tree, "minus", "a - b", "test_sum")
    plant(tree, "other", "a - b", "test_wrong")
    assert main(["--only", "same", "minus"], tree) == 1
    shown = capsys.readouterr().out
    assert "survived, explained  same" in shown and "the sum is the same" in shown and "other" not in shown
    assert "50.0% of 2 caught: 1 caught, 1 survived, explained" in shown


def test_an_explained_survivor_among_many_is_well():
    caught, explained, survived = (
        mutants.Verdict(each) for each in (mutants.CAUGHT, mutants.EXPLAINED, mutants.SURVIVED)
    )
    assert mutants.summarize([caught] * 19 + [explained])[1]
    assert not mutants.summarize([caught] * 18 + [explained])[1], "94.7%"
    assert not mutants.summarize([caught] * 99 + [survived])[1], "nobody has explained it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "tests", "diff", "verdict"),
    [
        ("stale", "a - b", ["test_sum"], DIFF.replace("a + b", "a + b + 0"), "does not apply"),
        ("broken", "a - b", ["test_sum", "test_wrong"], DIFF, "its tests fail without it"),
        ("unreadable", "a -", ["test_sum"], DIFF, "its tests do not run"),
    ],
)
def test_a_fault_without_a_verdict_fails(
    name: str, value: str, tests: list[str], diff: str, verdict: str, tree: Path, capsys: pytest.CaptureFixture[str]
):
    plant(tree, "minus", "a - b", "test_sum")
    plant(tree, name, value, *tests, diff=diff)
    assert main([], tree) == 1
    shown = capsys.readouterr().out
    assert f"{verdict}  {name} " in shown and "caught    minus " in shown and f"1 {verdict}" in shown.splitlines()[-1]


@pytest.mark.slow
def test_a_fault_that_hangs_is_caught(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    plant(tree, "hang", "add(a, b) if __import__('time').sleep(9) else 0", "test_sum")
    monkeypatch.setattr(mutants, "TIMEOUT", 2)
    assert main([], tree) == 0
    assert "no end within 2 s" in capsys.readouterr().out


def test_unknown_names_and_tests_end_it(tree: Path):
    plant(tree, "minus", "a - b", "test_gone")
    with pytest.raises(SystemExit, match=r"there is no scripts/mutants\.d/plus\.patch"):
        main(["--only", "plus"], tree)
    with pytest.raises(SystemExit, match=r"the tests do not run\n[^$]*test_gone"):
        main([], tree)


@cache
def functions_of(path: Path) -> set[str]:
    """A file's functions, and the methods of its classes as `Class::method`."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    body = ast.parse(path.read_text()).body
    methods = {
        f"{each.name}::{node.name}"
        for each in body
        if isinstance(each, ast.ClassDef)
        for node in each.body
        if isinstance(node, functions)
    }
    return methods | {node.name for node in body if isinstance(node, functions)}


@pytest.mark.parametrize("path", sorted((ROOT / FOLDER).iterdir()), ids=lambda path: path.stem)
def test_each_fault_applies_and_names_tests_that_exist(path: Path):
    assert path.suffix == ".patch"
    mutant = read_mutant(path)
    assert mutant.why and mutant.tests
    assert not (reason := apply(mutant, ROOT, "--check")), f"write {FOLDER}/{path.name} anew: {reason}"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_of(ROOT / file), f"{FOLDER}/{path.name}: there is no {test}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_tests_catch_the_faults_of_the_list():
    assert len(read_mutants(ROOT)) > 50
    assert main([]) == 0


def test_tests_end_with_a_run_that_is_killed(tree: Path):
    fifo = tree / "fifo"
    os.mkfifo(fifo)
    (tree / "tests/test_module.py").write_text(HANGS)
    plant(tree, "minus", "a - b", "test_sum")
    script = "import sys, pathlib; from scripts.mutants import main; main([], pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "FIFO": str(fifo)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tree)], cwd=ROOT, env=env, stdout=subprocess.DEVNULL
    ) as run:
        ended = os.pidfd_open(int(fifo.read_text()))  # waits until it is written
        run.kill()
    assert select.select([ended], [], [], 60)[0], "a child of pytest is left"
    os.close(ended)

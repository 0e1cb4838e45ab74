"""Leaves out of a collection what `-m "not slow and not gpu"` would deselect by the marks of a file, class or function.

A test that is deselected has cost what one that runs costs to collect, in each process of a run. Tests that are named
(`tests/test_it.py::test_it`) are collected, and so are cases that are marked one by one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def unwanted_marks(expression: str) -> set[str]:
    """The marks that a test must not have, by an expression of -m."""
    if " or " in expression or "(" in expression:
        return set()
    return {part.removeprefix("not ").strip() for part in expression.split(" and ") if part.startswith("not ")}


def unwanted_by(config: pytest.Config) -> set[str]:
    return set() if any("::" in each for each in config.args) else unwanted_marks(config.option.markexpr)


def marks_of_file(text: str) -> set[str]:
    """What a file's `pytestmark = …` names, in one line or indented ones."""
    stated = re.search(r"^pytestmark = .*\n(?: +.*\n)*", text, re.MULTILINE)
    return set(re.findall(r"pytest\.mark\.(\w+)", stated[0])) if stated else set()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    unwanted = unwanted_by(config)
    if not unwanted or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    return True if unwanted & marks_of_file(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    if not name.startswith(("test", "Test")):
        return None
    marks = getattr(obj, "pytestmark", [])
    return [] if unwanted_by(collector.config) & {mark.name for mark in marks} else None

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import worded

from atom.jobs.eval.job import evaluate
from atom.jobs.start import load_job

LENGTHS = {"prose": 80, "verse": 53}  # tokens


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, list[int]]:
    """The tokens of two files, by their paths."""
    tokens = {str(tmp_path / name): tiny.prompt(num, seed) for seed, (name, num) in enumerate(LENGTHS.items())}
    for path, each in tokens.items():
        Path(path).write_text(worded.spell(each))
    return tokens


@pytest.fixture
def evaluated(texts: dict[str, list[int]]) -> Callable[..., dict[str, Any]]:
    """The result of `job=eval` of the two files, in windows of 24 tokens unless an override differs."""

    def run(folder: Path, *overrides: str) -> dict[str, Any]:
        fields = [f"checkpoint={folder}", f"job.texts=[{','.join(texts)}]", "job.context_len=24", *worded.FAST]
        return evaluate(load_job(["job=eval", *fields, *overrides]))

    return run

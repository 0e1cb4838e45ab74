"""`scripts/bench-drafts` on the embedded model."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from scripts import bench_drafts

pytestmark = pytest.mark.slow


def test_answers_are_those_without_drafts_of_which_some_are_accepted(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(
        sys, "argv", ["bench_drafts.py", "--drafted=2", "--output=48", "--runs=1", "level=1", "dtype=fp32"]
    )
    assert bench_drafts.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["answer"] for row in rows] == list(bench_drafts.PROMPTS)
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["drafted_2"]["speedup"] > 0
        assert row["drafted_2"]["is_same"], "in float32"
    code = rows[0]["drafted_2"]
    assert 0 < code["accepted"] <= code["drafted"] <= 2 * 48

"""`scripts/bench-turns` on a tiny model."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from scripts import bench_turns


@pytest.mark.slow
def test_conversations_are_computed_again_without_host_memory_and_loaded_with_it(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    sizes = {"talks": 6, "turns": 3, "fits": 2, "input": 20, "output": 4, "runs": 1}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    overrides = [f"checkpoint={checkpoints('llama')}", "dtype=fp32", "level=1", "serve.max_num_batched_tokens=64"]
    monkeypatch.setattr(sys, "argv", ["bench_turns.py", *options, *overrides])
    assert bench_turns.main() == 0
    results = json.loads(capsys.readouterr().out)
    assert results["recomputed"]["loaded_tokens"] == results["recomputed"]["saved_blocks"] == 0
    assert results["loaded"]["saved_blocks"] > 0 and results["swap_space"] > 0
    rates = [results[name]["turns_per_second"] for name in ("loaded", "recomputed")]
    assert results["ratio"] == round(rates[0] / rates[1], 3) > 0
    queried = sum((turn + 1) * 20 + turn * 4 for turn in range(3)) * 6 * 2
    assert results["loaded"]["queried_tokens"] >= queried, "of two runs; those that were preempted ask again"

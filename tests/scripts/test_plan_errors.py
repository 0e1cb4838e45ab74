"""What job=plan estimates of rows on several GPUs."""

from __future__ import annotations

from atom.config.load import load_gpu
from scripts.bench_results import RESULTS, read
from scripts.bench_rows import ROWS
from scripts.plan_errors import MACHINE, estimate_row


def test_a_dense_row_on_two_gpus_is_estimated_as_it_was_measured():
    name, row = next((name, row) for name, row in ROWS.items() if row.num_gpus == 2 and row.model == "qwen3_32b")
    measured = read(RESULTS / "gpu" / "nvidia_h200.json")["rows"][name]["value"]
    assert 0.8 < estimate_row(row, load_gpu(MACHINE)) / measured < 1.25, name

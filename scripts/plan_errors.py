"""Print how far estimates of `job=plan` are from rows on several GPUs.

Those rows are not among the shares that it estimates by. Of each, tokens/s estimated over those that were measured:

    python -m scripts.plan_errors       # the table of docs/plan.md; a minute, without a GPU
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from atom.compiler import semantic_graph
from atom.config.load import load, load_gpu
from atom.config.schema import GPUConfig
from atom.jobs.plan.candidates import Format, compile_candidate
from atom.jobs.plan.estimate import estimate_run
from atom.jobs.plan.load import Load
from atom.jobs.plan.shares import find_shares
from atom.kernels import Target
from scripts.bench_results import RESULTS, read
from scripts.bench_rows import ROWS, Row
from scripts.plan_shares import CONFIGS

MACHINE = "h200"
COLUMNS = ("1 request", "32", "128", "prefill 8 × 8192")


def estimate_row(row: Row, gpu: GPUConfig) -> float:
    """Estimate a row's tokens/s; the layout is in its setup."""
    input_len, output_len = int(row.input_len), int(row.output_len)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text((CONFIGS / f"{row.model}.json").read_text())
        choices = ["job=explain", f"job.gpu={MACHINE}", "device=cuda", f"serve.max_model_len={input_len + output_len}"]
        config = load([f"checkpoint={folder}", *choices, *row.setup])
    fmt = Format("", config.serve.kv_cache_dtype, config, [], semantic_graph(config))
    candidate = compile_candidate(fmt, config.parallel, Target("cuda", frozenset(gpu.features)))
    asked = Load(row.num_prompts, input_len, output_len, input_len + output_len)
    seconds = estimate_run(candidate, gpu, asked, find_shares(MACHINE, gpu)).seconds
    return row.num_prompts * (input_len if row.counted == "input" else output_len) / seconds


def find_errors() -> dict[str, dict[str, float]]:
    """Estimated over measured, by model and column."""
    measured = read(RESULTS / "gpu" / "nvidia_h200.json")["rows"]
    gpu = load_gpu(MACHINE)
    found: dict[str, dict[str, float]] = {}
    for name, row in ROWS.items():
        if row.num_gpus == 1 or name not in measured:
            continue
        column = COLUMNS[-1] if row.counted == "input" else COLUMNS[(1, 32, 128).index(row.num_prompts)]
        found.setdefault(row.title, {})[column] = estimate_row(row, gpu) / measured[name]["value"]
    return found


def main() -> None:
    print(f"| on H200s | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for title, errors in find_errors().items():
        cells = (f"{errors[column]:.2f}" if column in errors else "" for column in COLUMNS)
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

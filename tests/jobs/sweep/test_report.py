"""The table, the files and the page of a sweep's results."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.jobs.sweep.job import Result
from atom.jobs.sweep.report import describe, make_plots, make_rows, make_series, report_results, sort_results


def result(number: int, overrides: str, throughput: float, tpot: float | None, **changes: Any) -> Result:
    own = [*overrides.split(), "job=bench"]
    numbers = {"output_throughput": throughput, "p99_ttft_ms": 10.0 * number, "completed": 2.0}
    numbers |= {} if tpot is None else {"median_tpot_ms": tpot}
    given = {"code": 0, "device": "cpu", "numbers": numbers, "hardware": "4 x CPU Z", "versions": {"torch": "9.9"}}
    return Result("k", "2026-01-02T03:04:05", number, own, **{**given, **changes})


JOBS = [
    result(0, "quant=none job.num_prompts=1", 100.0, 10.0),
    result(1, "quant=none job.num_prompts=16", 1234.5, 20.0, numbers={"output_throughput": 1234.5, "p99_ttft_ms": 10.0, "median_tpot_ms": 20.0, "completed": 16.0}),
    result(2, "quant=fp8 job.num_prompts=1", 125.0, 8.0),
    result(3, "quant=fp8 job.num_prompts=16", 0.0, None, numbers={}, code=1, error="CapacityError: <too> small"),
]  # fmt: skip


def test_the_best_is_first_and_what_failed_is_last():
    assert [each.number for each in sort_results(JOBS)] == [1, 2, 0, 3], "the most output tokens a second"
    by_latency = [Result(**{**vars(each), "objective_name": "p99_ttft_ms"}) for each in JOBS]
    assert [each.number for each in sort_results(by_latency)] == [0, 1, 2, 3], "the fewest milliseconds"


def test_what_does_not_fit_comes_after_what_does():
    jobs = [
        result(0, "parallel=tp1", 0.0, None, numbers={"decode_limit": 300.0, "fits": 0}),
        result(1, "parallel=tp8", 0.0, None, numbers={"decode_limit": 100.0, "fits": 1}),
        result(2, "parallel=tp4", 0.0, None, numbers={}, code=2),
        result(3, "parallel=tp4_ep", 0.0, None, numbers={"decode_limit": 90.0, "fits": 1}),
    ]
    assert [each.number for each in sort_results(jobs)] == [1, 3, 0, 2]


def test_numbers_that_were_computed_are_not_called_measured():
    explained = [result(at, "job.gpu=x", 1.0, None, job="explain", gpu=gpu) for at, gpu in enumerate(("h200", "h100"))]
    limit = "Computed for h100 and h200 from config.json, not measured: no run exceeds a limit."
    assert describe(explained) == [limit]
    assert describe(JOBS[:1]) == ["Measured on 4 x CPU Z with torch 9.9, 2026-01-02 03:04."]


def test_jobs_that_waited_for_cores_are_named():
    shares = {0: 0.05, 1: 0.6, 2: None}
    jobs = [result(at, "seed=1", 1.0, 10.0, numbers={} if share is None else {"share_waited_for_cores": share})
            for at, share in shares.items()]  # fmt: skip
    _, *notes = describe(jobs)
    busy = "this machine was busy: threads waited for a core 60% of the time, so the run was too slow"
    assert notes == [f"Job 1: {busy}; end other programs, or lower OMP_NUM_THREADS."]


def test_a_row_has_what_a_job_differs_in_and_its_numbers():
    assert make_rows(sort_results(JOBS)) == [
        ["job", "quant", "job.num_prompts", "output_throughput", "median_tpot_ms", "p99_ttft_ms"],
        ["1", "none", "16", "1,234", "20", "10"],
        ["2", "fp8", "1", "125", "8", "20"],
        ["0", "none", "1", "100", "10", "0"],
        ["3", "fp8", "16", "failed", "-", "-"],
    ]


def test_a_variant_is_a_line_and_lengths_are_plots():
    assert make_series(sort_results(JOBS)) == [
        (
            "points by job.num_prompts",
            "quant=none",
            ((100.0, 100.0, "1"), (50.0, 1234.5, "16")),
        ),  # 1000 / TPOT, throughput, prompts
        ("points by job.num_prompts", "quant=fp8", ((125.0, 125.0, "1"),)),
    ]
    lengths = [result(number, f"job.input_len={size}", 10.0, 5.0) for number, size in enumerate((8, 16))]
    assert [each.panel for each in make_series(lengths)] == ["job.input_len=8", "job.input_len=16"]


def test_the_throughput_of_ranks_on_gpus_is_that_of_one():
    jobs = [result(0, "parallel=tp1", 100.0, 10.0), result(1, "parallel=tp4", 200.0, 5.0, num_ranks=4)]
    on_gpus = [Result(**{**vars(each), "device": "cuda"}) for each in jobs]
    assert [each.points[0].throughput for each in make_series(jobs)] == [100.0, 200.0], "ranks share a CPU"
    assert [each.points[0].throughput for each in make_series(on_gpus)] == [100.0, 50.0]


def test_the_files_have_every_job_and_the_page_needs_nothing_from_outside(tmp_path: Path, capsys: Any):
    report_results(JOBS, tmp_path)
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == ["1", "none", "16", "1,234", "20", "10"]
    assert err == f"atom-run: {tmp_path}: results.csv, results.json and results.html\n"
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["number"], row["quant"], row["output_throughput"], row["code"]) for row in rows] == [
        ("1", "none", "1234.5", "0"),
        ("2", "fp8", "125.0", "0"),
        ("0", "none", "100.0", "0"),
        ("3", "fp8", "", "1"),
    ]
    assert [each["number"] for each in json.loads((tmp_path / "results.json").read_text())] == [1, 2, 0, 3]
    page = (tmp_path / "results.html").read_text()
    assert page.count("<svg") == 1 and "quant=fp8" in page and "<td>1,234</td>" in page
    assert "Sweep of job=bench" in page and "Measured on 4 x CPU Z with torch 9.9" in page
    assert "Job 3 failed: CapacityError: &lt;too&gt; small" in page
    assert not re.search(r"fill: ?#|stroke: ?#|background: ?#fff", page[page.index("<svg") :]), (
        "colors of the page's own"
    )
    assert "var(--text)" in page[page.index("<svg") :] and "stroke: var(--c0)" in page
    assert not re.findall(r"<(?:script|link|img|iframe)|url\((?!#)|@import|(?:src|href)=\"(?!#)", page)


EVALUATED = [
    result(at, f"quant={fmt}", 0.0, None, job="eval", numbers={"perplexity": value, "perplexity_error": 0.4, "tasks.capitals.acc": 0.5,
           "tasks.capitals.acc_error": 0.25, "output_throughput": 9.0 + at, "weights_bytes": 2e9 / 2**at})
    for at, (fmt, value) in enumerate({"none": 18.087, "fp8": 18.339, "int4": 17.5}.items())
]  # fmt: skip


def test_quality_is_sorted_and_shown_with_its_errors():
    assert make_rows(sort_results(EVALUATED))[:2] == [
        ["job", "quant", "perplexity", "tasks.capitals.acc", "output_throughput", "weights_bytes"],
        ["2", "int4", "17.50 ± 0.40", "0.50 ± 0.25", "11", "500,000,000"],
    ]
    by_task = [Result(**{**vars(each), "objective_name": "tasks.capitals.acc"}) for each in EVALUATED]
    assert make_rows(by_task)[0][2:4] == ["tasks.capitals.acc", "perplexity"]


def test_quality_is_plotted_against_bytes_and_speed(tmp_path: Path):
    in_bytes, by_speed = make_plots([*EVALUATED, *JOBS])
    assert (in_bytes.across, in_bytes.up, by_speed.across) == ("weights, GB", "perplexity", "output tokens/s")
    assert in_bytes.points[1] == (1.0, 18.339, 0.4, "quant=fp8") and by_speed.points[2].x == 11.0
    compared = [Result(**{**vars(each), "numbers": {**each.numbers, "kl": 0.1}}) for each in EVALUATED]
    assert {plot.up for plot in make_plots(compared)} == {"KL divergence of the reference, nats"} and make_plots(
        JOBS
    ) == []
    report_results(EVALUATED, tmp_path)
    drawn = (tmp_path / "results.html").read_text()
    assert drawn.count("<svg") == 1 and ">weights, GB<" in drawn and drawn.count(">quant=int4<") == 2


def test_where_stdout_has_objects_the_table_is_on_stderr(tmp_path: Path, capsys: Any):
    report_results([Result(**{**vars(each), "output": "json"}) for each in JOBS], tmp_path)
    out, err = capsys.readouterr()
    assert out == "" and "1,234" in err


def test_jobs_without_numbers_are_not_reported(tmp_path: Path, capsys: Any):
    report_results([result(0, "level=0", 0.0, None, numbers={}, job="explain")], tmp_path)
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_without_matplotlib_there_is_no_page_and_a_line_says_so(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report_results(JOBS, tmp_path)
    assert "no page: drawing needs the package matplotlib: pip install 'atom-run[bench]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json"]

"""The table of `scripts/bench-gpu`, and its measurements of a tiny model on a CPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import eagle3
import pytest

from atom.config.load import load
from scripts import bench_gpu
from scripts.bench_gpu import BEGIN, END, ROWS, Figure, Row, measure_model, replace_section, write_section

LIMITS = {"bandwidth": 4.47e12, "flops": 804e12, "fp8": 1411e12}
ABOUT = {
    "hardware": "A GPU",
    "date": "2026-11-21",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "commit": "abc",
    "command": "scripts/bench-gpu",
    "limits": LIMITS,
}


def figure(unit: str, target: float, values: list[float], limit: float | None = None) -> Figure:
    return Figure("A row", unit, 191, target, values, limit)


def test_a_rate_is_reached_from_the_target_upwards_and_a_time_downwards():
    assert figure("output tok/s", 265, [264, 265, 900]).is_met
    assert not figure("output tok/s", 265, [264.9, 264.9, 900]).is_met
    assert figure("s", 8, [8, 30, 7]).is_met
    assert not figure("s", 8, [8.1, 30, 7]).is_met
    assert not figure("s", 8, []).is_met
    assert figure("µs", 8, [8, 30, 7]).is_met and not figure("GB/s", 8, [7.9]).is_met
    assert (figure("s", 8, [9, 30, 7]).best, figure("output tok/s", 8, [9, 30, 7]).best) == (7, 30)


def test_a_mixture_that_reads_too_few_experts_reaches_nothing():
    shares = {0.949: False, 0.95: True, 1.1: True}
    for share, is_met in shares.items():
        rate = figure("output tok/s", 265, [300])
        rate.details["experts_read"] = {"share": share}
        assert rate.is_met == is_met


def test_a_row_is_held_against_the_figure_or_the_share_of_another():
    other, own = figure("output tok/s", 1, [300], 1000), figure("output tok/s", 1, [90], 200)
    assert bench_gpu.compared_with(own, other, by_share=False) == 300
    assert bench_gpu.compared_with(own, other, by_share=True) == 60
    unmeasured = figure("output tok/s", 1, [])
    assert all(math.isnan(bench_gpu.compared_with(own, unmeasured, by_share=by_share)) for by_share in (True, False))
    assert math.isnan(bench_gpu.compared_with(unmeasured, other, by_share=True))


def test_the_table_shows_what_was_reached_and_what_not():
    table = write_section(ABOUT, [
        figure("output tok/s", 265, [264, 270.4, 269.6], 295.2),
        figure("output tok/s", 6750, [5400, 5500], 7500),
        figure("s", 8, [10.04, 10, 9]),
        figure("s", 20, []),
    ])  # fmt: skip
    head, *rows = table.split("\n\n")[1].splitlines()[0:1] + table.split("\n\n")[1].splitlines()[2:]
    assert head == "| | | vLLM 0.26 | limit | atom, median (best) | of the limit | to reach | reached |"
    assert rows == [
        "| A row | output tok/s | 191 | 295 | 270 (270) | 91% | 265 | yes |",
        "| A row | output tok/s | 191 | 7,500 | 5,450 (5,500) | 73% | 6,750 | no, 19% less |",
        "| A row | s | 191 | - | 10.0 (9.0) | - | 8.0 | no, 25% more |",
        "| A row | s | 191 | - | failed | - | 20.0 | no |",
    ]
    assert "4.47 TB/s read, 804 TFLOP/s" in table and "torch 2.11.0, triton 3.6.0, commit abc" in table


def test_only_what_is_between_the_marks_is_written():
    text = f"before\n{BEGIN}old\n\nolder\n{END}after\n"
    once = replace_section(text, "new \\1 | \\g<0>\n")
    assert once == f"before\n{BEGIN}\nnew \\1 | \\g<0>\n\n{END}after\n"
    assert replace_section(once, "new \\1 | \\g<0>\n") == once


def test_the_page_has_a_place_for_the_table():
    text = bench_gpu.DOCS.read_text()
    replaced = replace_section(text, "table")
    assert replaced.partition(BEGIN)[0] == text.partition(BEGIN)[0]
    assert replaced.partition(END)[2] == text.partition(END)[2]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_workload_of_a_model_that_is_there(name: str):
    row = ROWS[name]
    with bench_gpu.checkpoint(row.model) as folder:
        config = load([*row.overrides(folder), "device=cpu", "tune=false"])
    assert (config.job.kind, config.dtype, config.load_dummy) == ("bench", "bf16", True)
    stated = f"{config.job.num_prompts} {config.job.input_len} {config.job.output_len}"
    assert stated == f"{row.num_prompts} {row.input_len} {row.output_len}"
    assert config.sampling.ignore_eos and config.sampling.top_p == 1 and config.seed == 0
    assert config.sampling.temperature == (0.6 if "sampled" in row.title else 0)
    assert config.job.input_len in row.title
    assert config.parallel.num_ranks == row.num_gpus


def test_rows_of_a_layout_share_an_engine_and_say_what_is_to_be_reached():
    layouts = {row.setup: name.rsplit("-", 1)[0] for name, row in ROWS.items() if row.num_gpus == 4}
    assert [*layouts.values()] == ["32b-tp4", "235b-tp4", "235b-tp4-ep", "235b-dp4-ep"]
    for name in layouts.values():
        rows = [ROWS[f"{name}-{kind}"] for kind in (1, 32, 128, "prefill")]
        assert len({row.engine for row in rows}) == 1
        goals = (200, 3100, 5200, 33000) if name == "32b-tp4" else (280, 1750, 4500, 40000)
        assert [row.target for row in rows] == [*goals]


@pytest.fixture
def tiny_rows(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    small = ("device=cpu", "level=1", "serve.kv_cache_memory=4194304")
    rows = {
        "sampled": Row("A", "tiny", 3, "10-20", "5-9", 1, 2, "output", ("sampling.temperature=0.6", *small)),
        "prefill": Row("B", "tiny", 2, "30", "1", 1, 2, "input", small),
        "too long": Row("C", "tiny", 1, "5000", "1", 1, 2, "input", small),
        "behind": Row("D", "tiny", 1, "5", "5", 1, 2, "output", small),
    }
    shutil.copy(checkpoints("qwen3") / "config.json", tmp_path / "tiny.json")
    monkeypatch.setattr(bench_gpu, "CONFIGS", tmp_path)
    monkeypatch.setattr(bench_gpu, "ROWS", rows)
    return rows


def test_rows_are_measured_in_one_engine_until_one_fails(tiny_rows: dict[str, Row], capsys: Any):
    figures = {name: Figure(row.title, f"{row.counted} tok/s", 1, 2) for name, row in tiny_rows.items()}
    measured = measure_model("tiny", figures, 1, LIMITS)
    assert [len(each.values) for each in measured.values()] == [1, 1, 0, 0]
    sampled, prefill = measured["sampled"], measured["prefill"]
    assert sampled.values == sampled.details["output_throughputs"]
    assert prefill.details["total_input_tokens"] == 60
    assert prefill.values == [pytest.approx(60 / prefill.details["duration"])]
    assert prefill.limit == pytest.approx(prefill.details["phases"]["all"]["limit_tokens_per_second"])
    shown = capsys.readouterr().err
    assert "sampled: " in shown and "of its limit" in shown
    assert "job.input_len" in shown and "bench-gpu: tiny failed" in shown


def test_a_row_with_a_draft_is_held_against_the_same_without(
    tiny_rows: dict[str, Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "draft").mkdir()
    eagle3.write_config(tmp_path / "draft", json.loads((tmp_path / "tiny.json").read_text()), draft_vocab_size=7)
    shutil.move(tmp_path / "draft" / "config.json", tmp_path / "tiny_eagle3.json")
    plain = tiny_rows["prefill"]._replace(output_len="9", counted="output")
    drafts = ("serve.method=eagle3", "serve.draft_model={folder}/tiny_eagle3", "serve.acceptance_length=2.5")
    drafted = plain._replace(setup=(*plain.setup, *drafts), target=1.5, than="plain")
    for name, row in {"plain": plain, "drafted": drafted}.items():
        monkeypatch.setitem(tiny_rows, name, row)
    monkeypatch.setattr(bench_gpu, "alone", lambda work, *given: work(*given))
    monkeypatch.setattr(bench_gpu, "NAMES", (*tiny_rows, bench_gpu.GRAPHS))
    figures = bench_gpu.measure(bench_gpu.with_compared(["drafted"]), 1, LIMITS)
    assert [len(each.values) for each in figures.values()] == [1, 1]
    assert figures["drafted"].target == 1.5 * figures["plain"].median


def test_drafts_are_held_against_the_rows_that_they_change():
    drafted = {name: row for name, row in ROWS.items() if "serve.method" in " ".join(row.setup)}
    assert len(drafted) == 19
    for name, row in drafted.items():
        plain = ROWS[row.than]
        assert name.endswith(f"-{plain.num_prompts}") and row.setup[: len(plain.setup)] == plain.setup
        assert (row.model, row.num_prompts, row.output_len) == (plain.model, plain.num_prompts, plain.output_len)
    assert bench_gpu.with_compared(["v2-lite-mtp-32", "8b-eagle3-256", "start"]) == [
        "8b-128", "8b-256", "v2-lite-32", "8b-eagle3-256", "v2-lite-mtp-32", "start",
    ]  # fmt: skip


def test_a_start_of_ranks_is_held_against_that_of_one_gpu(monkeypatch: pytest.MonkeyPatch):
    seconds = {(): [15.0, 6.0], ("parallel=tp4",): [19.0, 12.0]}
    asked = []

    def time_start(model: Path, folder: Path, setup: tuple[str, ...]) -> float:
        asked.append(json.loads((model / "config.json").read_text())["hidden_size"])
        assert setup[0] == "load_dummy=true"
        return seconds[setup[1:]].pop(0)

    monkeypatch.setattr(bench_gpu, "time_start", time_start)
    figures = bench_gpu.measure(bench_gpu.with_compared(["start-tp4"]), 1, LIMITS)
    found = {name: (figure.target, figure.is_met) for name, figure in figures.items()}
    assert found == {
        "start-cold": (20, True), "start-warm": (8, True), "start-tp4-cold": (20, True), "start-tp4-warm": (11, False),
    }  # fmt: skip
    assert asked == [4096] * 4, "of Qwen3-8B"


def test_sums_are_rows_by_size_with_a_bound_by_ranks(monkeypatch: pytest.MonkeyPatch):
    times = {2: [[2.5], [2.9], [3.1]], 4: [[3.5], [3.9], [4.1]]}
    monkeypatch.setattr(bench_gpu, "alone", lambda work, num, runs: times[num])
    figures = bench_gpu.measure(["sums-2", "sums-4"], 1, LIMITS)
    assert {name: figure.is_met for name, figure in figures.items()} == {
        "sums-2-8k": True, "sums-2-16k": True, "sums-2-64k": False,
        "sums-4-8k": True, "sums-4-16k": True, "sums-4-64k": False,
    }  # fmt: skip
    assert "| a sum of 64 KB among 4 GPUs | µs | - | - | 4.1 (4.1) | - | 4.0 | no, 2% more |" in write_section(
        ABOUT, list(figures.values())
    )


@pytest.mark.slow
def test_a_start_that_fails_is_reported_with_its_reason(tmp_path: Path):
    with pytest.raises(RuntimeError, match="CheckpointError"):
        bench_gpu.time_start(tmp_path / "nothing", tmp_path, ["load_dummy=true"])


def test_work_alone_is_in_a_process_of_its_own():
    assert bench_gpu.alone(os.getpid) != os.getpid()


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(bench_gpu, "find_device", lambda: "cpu")
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--only", "8b-1"])
    assert bench_gpu.main() == 2
    assert capsys.readouterr().err == "bench-gpu: there is no GPU here that torch can use\n"


def test_an_unknown_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--only", "8b-1,8b-2"])
    with pytest.raises(SystemExit, match="2"):
        bench_gpu.main()
    assert "there is no row 8b-2" in capsys.readouterr().err

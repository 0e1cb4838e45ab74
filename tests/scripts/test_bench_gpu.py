"""The figures of `scripts/bench-gpu`, and its measurements of a tiny model on a CPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import eagle3
import pytest

from atom import LLMEngine
from scripts import bench_gpu, bench_results, bench_rows
from scripts.bench_gpu import Figure, describe_figure, measure_model
from scripts.bench_results import Origin
from scripts.bench_rows import Agents, Row, with_compared

LIMITS = {"bandwidth": 4.47e12, "flops": 804e12, "fp8": 1411e12}


def figure(unit: str, target: float, values: list[float], limit: float | None = None) -> Figure:
    return Figure("A model", "a load", unit, target, values, limit)


def test_a_rate_is_reached_from_the_target_upwards_and_a_time_downwards():
    assert figure("tok/s", 265, [264, 265, 900]).is_met
    assert not figure("tok/s", 265, [264.9, 264.9, 900]).is_met
    assert figure("s", 8, [8, 30, 7]).is_met
    assert not figure("s", 8, [8.1, 30, 7]).is_met
    assert not figure("s", 8, []).is_met
    assert figure("µs", 8, [8, 30, 7]).is_met and not figure("GB/s", 8, [7.9]).is_met
    assert (figure("s", 8, [9, 30, 7]).best, figure("tok/s", 8, [9, 30, 7]).best) == (7, 30)


def test_a_share_is_reached_from_the_target_upwards():
    assert figure("%", 80, [81, 79, 90]).is_met and figure("%", 80, [81, 90]).best == 90
    assert not figure("%", 80, [79]).is_met and not figure("%", math.nan, [79]).is_met


def test_a_mixture_that_reads_too_few_experts_reaches_nothing():
    shares = {0.949: False, 0.95: True, 1.1: True}
    for share, is_met in shares.items():
        rate = figure("tok/s", 265, [300])
        rate.details["experts_read"] = {"share": share}
        assert rate.is_met == is_met


def test_a_row_is_held_against_the_figure_or_the_share_of_another():
    other, own = figure("tok/s", 1, [300], 1000), figure("tok/s", 1, [90], 200)
    assert bench_gpu.compared_with(own, other, by_share=False) == 300
    assert bench_gpu.compared_with(own, other, by_share=True) == 60
    unmeasured = figure("tok/s", 1, [])
    assert all(math.isnan(bench_gpu.compared_with(own, unmeasured, by_share=by_share)) for by_share in (True, False))
    assert math.isnan(bench_gpu.compared_with(unmeasured, other, by_share=True))


def test_a_line_says_what_was_reached_and_what_not():
    lines = [
        describe_figure("row", figure("tok/s", 265, [264, 270.4, 269.6], 295.2)),
        describe_figure("row", figure("tok/s", 6750, [5400, 5500], 7500)),
        describe_figure("row", figure("s", 8, [10.04, 10, 9])),
        describe_figure("row", figure("s", 20, [])),
    ]
    assert lines == [
        "row: 270 tok/s, 91% of the limit; 265 is reached",
        "row: 5,450 tok/s, 73% of the limit; 6,750 is missed by 19%",
        "row: 10.0 s; 8.0 is missed by 25%",
        "row: failed",
    ]


def test_a_result_has_the_median_its_share_and_what_it_was_compared_with():
    origin: Origin = {"date": "2026-11-21", "commit": "abc", "versions": {"torch": "2.11.0"}}
    measured = figure("tok/s", 265, [264, 270.4, 269.6], 300)
    measured.compared["without drafts"] = 134.8
    assert measured.as_result(origin) == {
        "model": "A model", "load": "a load", "value": 270, "unit": "tok/s", **origin,
        "share_of_limit": 0.8987, "compared": {"without drafts": 135},
    }  # fmt: skip
    assert figure("µs", 3, [2.245]).as_result(origin)["value"] == 2.25


@pytest.fixture
def tiny_rows(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    small = ("device=cpu", "level=1", "serve.kv_cache_memory=4194304")
    rows = {
        "sampled": Row("A", "tiny", 3, "10-20", "5-9", 2, "output", ("sampling.temperature=0.6", *small)),
        "prefill": Row("B", "tiny", 2, "30", "1", 2, "input", small),
        "too long": Row("C", "tiny", 1, "5000", "1", 2, "input", small),
        "after": Row("D", "tiny", 1, "5", "5", 2, "output", small),
    }
    shutil.copy(checkpoints("qwen3") / "config.json", tmp_path / "tiny.json")
    monkeypatch.setattr(bench_gpu, "CONFIGS", tmp_path)
    for module in (bench_gpu, bench_rows):
        monkeypatch.setattr(module, "ROWS", rows)
    return rows


def test_rows_are_measured_in_one_engine_until_one_fails(tiny_rows: dict[str, Row], capsys: Any):
    figures = {name: Figure(row.title, row.load, "tok/s", 2) for name, row in tiny_rows.items()}
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


@pytest.fixture
def tiny_agents(tiny_rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch) -> dict[str, Agents]:
    small = ("device=cpu", "level=1", "serve.kv_cache_memory=4194304", "serve.block_size=8", "serve.max_model_len=256")
    dense = Agents("A", "tiny", 3, 16, 8, 4, (60.0, 0.0), compared={"other": (9.0, 2.0)}, setup=small, num_turns=3)
    other = dense._replace(title="B", compared={}, than="dense")
    rows = {"dense": dense, "other": other}
    for module in (bench_gpu, bench_rows):
        monkeypatch.setattr(module, "AGENTS", rows)
    monkeypatch.setattr(bench_gpu, "run_isolated", lambda work, *given: work(*given))
    monkeypatch.setattr(bench_rows, "NAMES", (*tiny_rows, bench_gpu.GRAPHS, *rows))
    return rows


def test_agents_take_turns_in_one_engine(tiny_agents: dict[str, Agents], monkeypatch: pytest.MonkeyPatch):
    asked = []
    generate = LLMEngine.generate

    def watch(engine: LLMEngine, prompts: list[list[int]], params: Any) -> list[dict[str, Any]]:
        answers = generate(engine, prompts, params)
        asked.append((prompts, [answer["token_ids"] for answer in answers]))
        return answers

    monkeypatch.setattr(LLMEngine, "generate", watch)
    figures = bench_gpu.measure(with_compared(["other"]), 2, LIMITS)
    assert [*figures] == ["dense", "dense-first", "other", "other-first", "other-cached"]
    assert [[len(prompt) for prompt in prompts] for prompts, _ in asked] == [[24] * 3, [36] * 3, [48] * 3] * 6
    for (before, answers), (prompts, _) in itertools.pairwise(asked[:3]):
        for said, answer, prompt in zip(before, answers, prompts, strict=True):
            assert prompt[: len(said)] == said and prompt[len(said) : -8] == answer and len(answer) == 4
    assert len({tuple(prompt[:16]) for prompts, _ in asked[:3] for prompt in prompts}) == 1
    assert len({tuple(prompts[0][:16]) for prompts, _ in asked[::3]}) == 3, (
        "new prompts in each run, alike in both rows"
    )

    dense, cached = figures["dense"], figures["other-cached"]
    assert dense.values == [sum(turns) for turns in dense.details["turns"]]
    assert figures["dense-first"].values == [turns[0] for turns in dense.details["turns"]]
    assert (dense.is_met, figures["dense-first"].is_met, dense.compared) == (True, False, {"other": 9.0})
    # of 24 + 36 + 48: blocks of 8 of what was said, in the first turn those that another has computed
    assert all((24 + 32) / 108 <= share <= (16 + 24 + 40) / 108 for share in dense.details["cached_shares"])
    assert cached.target == pytest.approx(90 * statistics.median(dense.details["cached_shares"]))
    assert cached.is_met and cached.values == [100 * each for each in figures["other"].details["cached_shares"]]
    assert (cached.load, cached.unit) == ("3 conversations × 3 turns, 16 shared + 8 new in / 4 out, cached", "%")


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
    monkeypatch.setattr(bench_gpu, "run_isolated", lambda work, *given: work(*given))
    monkeypatch.setattr(bench_rows, "NAMES", (*tiny_rows, bench_gpu.GRAPHS))
    figures = bench_gpu.measure(with_compared(["drafted"]), 1, LIMITS)
    assert [len(each.values) for each in figures.values()] == [1, 1]
    assert figures["drafted"].target == 1.5 * figures["plain"].median
    assert figures["drafted"].compared == {"without drafts": figures["plain"].median}


def test_a_start_of_ranks_is_held_against_that_of_one_gpu(monkeypatch: pytest.MonkeyPatch):
    seconds = {(): [15.0, 6.0], ("parallel=tp4",): [19.0, 12.0]}
    asked = []

    def time_start(model: Path, folder: Path, setup: tuple[str, ...]) -> float:
        asked.append(json.loads((model / "config.json").read_text())["hidden_size"])
        assert setup[0] == "load_dummy=true"
        return seconds[setup[1:]].pop(0)

    monkeypatch.setattr(bench_gpu, "time_start", time_start)
    figures = bench_gpu.measure(with_compared(["start-tp4"]), 1, LIMITS)
    found = {name: (figure.target, figure.is_met) for name, figure in figures.items()}
    assert found == {
        "start-cold": (20, True), "start-warm": (8, True), "start-tp4-cold": (20, True), "start-tp4-warm": (11, False),
    }  # fmt: skip
    assert asked == [4096] * 4, "of Qwen3-8B"


def test_sums_are_rows_by_size_with_a_bound_by_ranks(monkeypatch: pytest.MonkeyPatch):
    times = {2: [[2.5], [2.9], [3.1]], 4: [[3.5], [3.9], [4.1]]}
    monkeypatch.setattr(bench_gpu, "run_isolated", lambda work, num, runs: times[num])
    figures = bench_gpu.measure(["sums-2", "sums-4"], 1, LIMITS)
    assert {name: figure.is_met for name, figure in figures.items()} == {
        "sums-2-8k": True, "sums-2-16k": True, "sums-2-64k": False,
        "sums-4-8k": True, "sums-4-16k": True, "sums-4-64k": False,
    }  # fmt: skip
    largest = figures["sums-4-64k"]
    assert (largest.title, largest.load) == ("sum among 4 GPUs", "64 KB")
    assert describe_figure("sums-4-64k", largest) == "sums-4-64k: 4.1 µs; 4.0 is missed by 2%"


def test_a_run_of_a_few_rows_keeps_the_figures_that_are_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    fewer_experts = figure("tok/s", 2, [4])
    fewer_experts.details["experts_read"] = {"share": 0.5}
    found = {"8b-1": figure("tok/s", 1, [3]), "8b-32": fewer_experts, "8b-128": figure("tok/s", 2, [])}
    monkeypatch.setattr(bench_gpu, "find_device", lambda: "cuda")
    monkeypatch.setattr(bench_gpu, "run_isolated", lambda work: ("A GPU", {"torch": "2.11.0"}, LIMITS))
    monkeypatch.setattr(bench_gpu, "measure", lambda names, runs, limits: {name: found[name] for name in names})
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--only", "8b-1,8b-32,8b-128", "--commit", "abc"])
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_results, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- scripts/bench-gpu -->\n<!-- end of scripts/bench-gpu -->\n")
    assert bench_gpu.main() == 1, "not all reach their targets"
    rows = json.loads((tmp_path / "gpu" / "a_gpu.json").read_text())["rows"]
    assert {name: (row["value"], row["commit"]) for name, row in rows.items()} == {"8b-1": (3, "abc")}
    assert "| A model | a load | 3.0 |" in (tmp_path / "page.md").read_text()
    assert "8b-128: failed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_start_that_fails_is_reported_with_its_reason(tmp_path: Path):
    with pytest.raises(RuntimeError, match="CheckpointError"):
        bench_gpu.time_start(tmp_path / "nothing", tmp_path, ["load_dummy=true"])


def test_isolated_work_runs_in_another_process():
    assert bench_gpu.run_isolated(os.getpid) != os.getpid()


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(bench_gpu, "find_device", lambda: "cpu")
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--only", "8b-1"])
    assert bench_gpu.main() == 2
    assert capsys.readouterr().err == "bench-gpu: torch finds no GPU\n"


def test_an_unknown_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--only", "8b-1,8b-2"])
    with pytest.raises(SystemExit, match="2"):
        bench_gpu.main()
    assert "unknown row 8b-2" in capsys.readouterr().err


WORK = "import os, time\ndef work():\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"


def test_a_measurement_ends_with_a_script_that_is_killed(tmp_path: Path):
    (tmp_path / "measuring.py").write_text(WORK)
    script = "from measuring import work; from scripts.bench_gpu import run_isolated; run_isolated(work)"
    env = {**os.environ, "PYTHONPATH": f"{Path(bench_gpu.__file__).parents[1]}:{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    ended = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([ended], [], [], 60)[0], "it measures still"
    os.close(ended)

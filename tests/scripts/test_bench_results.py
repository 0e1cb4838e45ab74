"""Figures in docs/results, and the page that is rendered from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_results
from scripts.bench_results import Origin, Result, render, replace_section, save

ORIGIN: Origin = {"date": "2026-11-21", "commit": "abc1234", "versions": {"torch": "2.11.0+cu130", "triton": "3.6.0"}}
PAGE = "before\n<!-- scripts/bench-gpu -->\nold\n<!-- end of scripts/bench-gpu -->\nafter\n"
TABLES = """\
### A GPU
torch 2.11, triton 3.6.

| model | load | tok/s | of the limit | vLLM (×) | date, commit |
|---|---|---|---|---|---|
| Qwen3-8B | 1 request | 250 | 87% | 191 (1.31) | 2026-11-21, abc1234 |
| | 32 requests | 3,754 | | | 2026-11-21, abc1234 |
| Qwen3-30B | 1 request | 99.5 | | | 2026-11-21, abc1234 |

| model | load | measured | vLLM (×) | date, commit |
|---|---|---|---|---|
| Qwen3-8B | start | 12.0 s | 73.0 (6.08) | 2026-11-22 |
"""


def row(model: str, load: str, value: float, unit: str = "tok/s", **more: Any) -> Result:
    return {"model": model, "load": load, "value": value, "unit": unit, **ORIGIN, **more}


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench_results, "PAGE", tmp_path / "page.md")
    return tmp_path


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_page_shows_what_the_files_have(kind: str, request: pytest.FixtureRequest):
    page = bench_results.PAGE.read_text()
    expected = replace_section(page, kind, render(kind))
    if request.config.getoption("--update-golden"):
        bench_results.PAGE.write_text(expected)
    else:
        assert page == expected, "scripts/test --update-golden renders it"


@pytest.mark.parametrize("path", sorted(bench_results.RESULTS.glob("*/*.json")), ids=lambda path: path.stem)
def test_a_kept_file_is_as_it_would_be_written(path: Path):
    machine = bench_results.read(path)
    assert path.read_text() == bench_results.write(machine)
    for each in machine["rows"].values():
        assert each["value"] > 0 and 0 < each.get("share_of_limit", 0.5) < 1 and each["date"] >= "2026-11-21"
        assert each["versions"]["torch"]


def test_a_table_is_sorted_by_model_and_load_and_compares_with_others(docs: Path):
    save("gpu", "A GPU", {
        "c": row("Qwen3-30B", "1 request", 99.54),
        "b": row("Qwen3-8B", "32 requests", 3754),
        "a": row("Qwen3-8B", "1 request", 250, share_of_limit=0.8651, compared={"vLLM": 191}),
        "s": row("Qwen3-8B", "start", 12, "s", compared={"vLLM": 73}, date="2026-11-22", commit=""),
    })  # fmt: skip
    assert render("gpu") == TABLES
    page = (docs / "page.md").read_text()
    assert page == PAGE.replace("old\n", f"\n{TABLES}\n")


def test_a_run_replaces_only_the_rows_that_it_measured(docs: Path):
    first = {"a": row("A", "1", 10, compared={"vLLM": 5, "others": 3}), "b": row("B", "1", 20)}
    save("gpu", "NVIDIA H200", first)
    save("gpu", "NVIDIA H200", {"a": row("A", "1", 11, compared={"others": 4}, commit="def5678")})
    (path,) = (docs / "results" / "gpu").iterdir()
    assert path.name == "nvidia_h200.json"
    rows = json.loads(path.read_text())["rows"]
    assert rows["b"] == first["b"]
    assert (rows["a"]["value"], rows["a"]["commit"]) == (11, "def5678")
    assert rows["a"]["compared"] == {"vLLM": 5, "others": 4}, "vLLM is not measured again"


def test_each_machine_has_a_table_and_the_best_measured_is_first(docs: Path):
    save("gpu", "H100", {"a": row("A", "1", 10)})
    save("gpu", "H200", {"a": row("A", "1", 10), "b": row("B", "1", 10)})
    shown = (docs / "page.md").read_text()
    assert [line for line in shown.splitlines() if line.startswith("###")] == ["### H200", "### H100"]


def test_a_page_without_markers_is_an_error():
    with pytest.raises(AssertionError, match="no place"):
        replace_section("nothing", "gpu", "tables")

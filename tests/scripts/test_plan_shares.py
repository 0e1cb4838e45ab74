"""Shares of limits in conf/gpu, which are derived from docs/results."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scripts.bench_results import RESULTS, read
from scripts.bench_rows import ROWS
from scripts.plan_shares import CONF, find_kind, is_plain, replace_shares

H200 = CONF / "h200.yaml"


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_has_what_the_results_have(path: Path, request: pytest.FixtureRequest):
    text = path.read_text()
    expected = replace_shares(text)
    if request.config.getoption("--update-golden"):
        path.write_text(expected)
    else:
        assert text == expected, "scripts/test --update-golden writes it"


def test_a_share_is_that_of_the_page_and_a_layer_takes_its_part_of_the_limit():
    found = yaml.safe_load(replace_shares(H200.read_text()))
    decode, prompt = found["shares"]["8b-32"], found["prompt_shares"]["8b-prefill"]
    # docs/performance.md of 36 layers: 3,748 tok/s, 81% of the limit; 38,695 of prompts of 8,192, 78%
    assert decode == {
        "bits": 16,
        "mixture": 0,
        "recurrent": 0,
        "share": 0.813,
        "layer_seconds": pytest.approx(32 / 3748 * 0.813 / 36, rel=1e-3),
    }
    assert prompt == {
        "bits": 16,
        "mixture": 0,
        "recurrent": 0,
        "share": 0.778,
        "layer_seconds": pytest.approx(8192 / 38695 * 0.778 / 36, rel=1e-3),
    }


def test_sums_are_those_of_the_results():
    rows = read(RESULTS / "gpu" / "nvidia_h200.json")["rows"]
    measured = {tuple(name.split("-")[1:]): row["value"] for name, row in rows.items() if name.startswith("sums-")}
    assert len(measured) == 6
    found = yaml.safe_load(H200.read_text())["all_reduce"]
    for (ranks, kilobytes), microseconds in measured.items():
        num_bytes = int(kilobytes.removesuffix("k")) * 1024
        assert found[int(ranks)][num_bytes] == pytest.approx(microseconds * 1e-6), (
            "scripts/bench-gpu has measured others"
        )


@pytest.mark.parametrize("name", ["32b-tp2-1", "8b-drafts-1", "8b-eagle3-1", "next-mtp-1", "vl-8b-32", "0.6b-256"])
def test_rows_that_a_plan_is_not_like_are_left_out(name: str):
    assert not is_plain(ROWS[name]) and f" {name}:" not in H200.read_text()


@pytest.mark.slow
def test_bits_and_mixtures_are_those_of_the_compiled_models():
    kinds = {row.engine: find_kind(row) for name, row in ROWS.items() if f" {name}:" in H200.read_text()}
    assert (
        replace_shares(H200.read_text(), {name: kinds[row.engine] for name, row in ROWS.items() if row.engine in kinds})
        == H200.read_text()
    )

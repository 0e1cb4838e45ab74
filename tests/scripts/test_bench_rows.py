"""The rows of `scripts/bench-gpu`."""

from __future__ import annotations

import pytest

from atom.compiler import compile_graph
from atom.config.load import load
from scripts.bench_gpu import checkpoint, encoder_flops
from scripts.bench_rows import AGENTS, NAMES, PHOTOS, ROWS, STARTS, with_compared


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_workload_of_a_model_that_is_there(name: str):
    row = ROWS[name]
    with checkpoint(row.model) as folder:
        config = load([*row.overrides(folder), "device=cpu", "tune=false"])
    assert (config.job.kind, config.dtype, config.load_dummy) == ("bench", "bf16", True)
    sizes = f"{config.job.num_prompts} {config.job.input_len} {config.job.output_len}"
    assert sizes == f"{row.num_prompts} {row.input_len} {row.output_len}"
    assert config.sampling.ignore_eos and config.sampling.top_p == 1 and config.seed == 0
    assert config.sampling.temperature == (0.6 if "sampled" in row.load else 0)
    assert config.job.input_len in row.load
    assert config.parallel.num_ranks == row.num_gpus


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", AGENTS)
def test_a_row_of_agents_fits_into_the_context_of_a_model_that_is_there(name: str):
    row = AGENTS[name]
    with checkpoint(row.model) as folder:
        config = load([*row.overrides(folder), "device=cpu", "tune=false"])
    assert (config.dtype, config.load_dummy, config.serve.enable_prefix_caching) == ("bf16", True, True)
    assert row.shared_len + row.num_turns * (row.new_len + row.output_len) <= config.serve.max_model_len == 32768
    assert row.load.startswith(f"{name.rpartition('-')[2]} conversations × 6 turns, ")


def test_agents_have_the_targets_of_their_model_and_hybrids_those_of_a_dense_ones_cache():
    (peer,) = {name for row in AGENTS.values() for name in row.compared}
    totals = {name: (row.targets[0], row.compared[peer][0] / row.targets[0], row.than) for name, row in AGENTS.items()}
    assert totals["agents-32"] == (14.9, pytest.approx(16.2 / 14.9), "")
    assert totals["agents-64"] == (22.3, pytest.approx(1.5, rel=0.01), "")
    assert totals["next-agents-32"] == (11.9, 1, "agents-32") and totals["next-agents-64"] == (25.9, 1, "agents-64")
    assert {row.engine for row in AGENTS.values()} == {
        ("qwen3_8b", ()), ("qwen3_next_80b_a3b", ("model.layers=24",))
    }  # fmt: skip
    assert with_compared(["next-agents-64", "start"]) == ["agents-64", "next-agents-64", "start"]


def test_rows_of_a_layout_share_an_engine_and_say_what_is_to_be_reached():
    layouts = {row.setup: name.rsplit("-", 1)[0] for name, row in ROWS.items() if row.num_gpus == 4}
    assert [*layouts.values()] == ["32b-tp4", "235b-tp4", "235b-tp4-ep", "235b-dp4-ep"]
    for name in layouts.values():
        rows = [ROWS[f"{name}-{kind}"] for kind in (1, 32, 128, "prefill")]
        assert len({row.engine for row in rows}) == 1
        goals = (200, 3100, 5200, 33000) if name == "32b-tp4" else (280, 1750, 4500, 40000)
        assert [row.target for row in rows] == [*goals]


def test_drafts_are_held_against_the_rows_that_they_change():
    drafted = {name: row for name, row in ROWS.items() if "serve.method" in " ".join(row.setup)}
    assert len(drafted) == 21
    for name, row in drafted.items():
        plain = ROWS[row.than]
        assert name.endswith(f"-{plain.num_prompts}") and row.setup[: len(plain.setup)] == plain.setup
        assert (row.model, row.num_prompts, row.output_len) == (plain.model, plain.num_prompts, plain.output_len)
    assert with_compared(["v2-lite-mtp-32", "8b-eagle3-256", "start"]) == [
        "8b-128", "8b-256", "v2-lite-32", "8b-eagle3-256", "v2-lite-mtp-32", "start",
    ]  # fmt: skip


def test_a_hybrid_is_held_against_another_by_its_share_of_the_limit():
    formats = ("nemotron-nano", "next-fp8", "next-fp8-block")
    expected = {f"{name}-{load}": (f"next-{load}", 1) for name in formats for load in (1, 32, 128, "prefill")}
    expected["next-tp2-32"] = "next-32", 0.85
    found = {name: row for name, row in ROWS.items() if row.by_share and row.than.startswith("next-")}
    assert {name: (row.than, row.target) for name, row in found.items()} == expected
    for row in found.values():
        assert (row.load, row.counted) == (ROWS[row.than].load, ROWS[row.than].counted)
    assert (found["next-tp2-32"].num_gpus, found["next-tp2-32"].setup) == (2, ("parallel=tp2",)), "all of its layers"


def test_photos_are_of_a_model_that_reads_images():
    row = PHOTOS["vl-8b-images"]
    with checkpoint(row.model) as folder:
        config = load([*row.overrides(folder), "device=cpu"])
    assert config.reads_images and config.load_dummy
    assert row.load == "64 requests, image of 1024 × 1024 + 100 in / 100 out"
    assert ROWS["vl-8b-32"].setup == row.setup, "a text loses nothing where images may come"
    flops = encoder_flops(compile_graph(config), 1024)
    patches, layers, width = 4096, 27, 1152
    linears = 2 * patches * layers * (4 * width**2 + 2 * width * 4304) + 2 * patches * 3 * 2 * 16**2 * width
    mergers = 4 * 2 * 1024 * (4 * width) * (4 * width + 4096)
    assert flops == linears + mergers + layers * 4 * patches**2 * width


def test_no_two_rows_have_the_same_place_in_a_table():
    places = [(row.title, row.load) for rows in (ROWS, AGENTS, PHOTOS) for row in rows.values()]
    assert len({*places}) == len(places)
    assert len({start.title for start in STARTS.values()}) == len(STARTS)
    assert len({*NAMES}) == len(NAMES)


def test_a_load_says_how_many_requests_of_which_lengths():
    loads = {name: ROWS[name].load for name in ("8b-1", "8b-32", "8b-prefill", "0.6b-256")}
    assert loads == {
        "8b-1": "1 request, 128 in / 256 out",
        "8b-32": "32 requests, 1024 in / 256 out",
        "8b-prefill": "prefill 8 × 8192",
        "0.6b-256": "256 requests, 100-1024 in / 100-1024 out, sampled",
    }

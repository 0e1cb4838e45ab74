"""`job=profile` on a CPU, and how it holds what a trace has against the limits."""

from __future__ import annotations

import gzip
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.cli import main
from atom.compiler import compile_graph
from atom.config.load import load
from atom.graph import Type, parse
from atom.jobs.bench.roofline import Costs, Limits, Matmul
from atom.jobs.bench.workload import Step
from atom.jobs.profile import job as profile
from atom.jobs.profile.job import describe, find_piece_kernels, match_matmuls, name_calls
from atom.jobs.profile.page import COLORS, make_bar, make_boxes
from atom.jobs.profile.trace import Row, Summary, middle_step
from atom.kernels import Target
from atom.measurement.cores import CoreSeconds
from atom.passes import lower

SMALL = ["level=1", "serve.kv_cache_memory=4194304"]


A, B, C = Matmul((8, 4), 100, 10), Matmul((4, 8), 50, 5), Matmul((9, 4), 300, 30)
COSTS = {"body": Costs(matmuls=[A, B, A]), "head": Costs(matmuls=[C])}
LIMITS = Limits(bandwidth=100.0, flops=1000.0)


def step(num_decodes: int, num_sampled: int | None = None) -> Step:
    return Step(0.0, array("q", [1] * num_decodes), [], num_decodes if num_sampled is None else num_sampled)


def test_matmuls_in_order_are_each_compared_with_their_limit():
    launches = [2.0, 1.0, 2.5, 6.0, 4.0, 1.5, 3.5, 6.5]
    expected = [
        ("weight [8, 4]", 4, 12.0, 1.0 + 1.0 + 8.0 + 8.0),  # 400 rows: 2 * 400 * 10 operations are more than 100 bytes
        ("weight [4, 8]", 2, 2.5, 0.5 + 4.0),
        ("weight [9, 4]", 2, 12.5, 3.0 + 24.0),
    ]
    steps = [step(1), step(400)]
    assert match_matmuls(launches, COSTS, steps, LIMITS) == expected
    ahead = launches + [9.0] * 4
    assert match_matmuls(ahead, COSTS, steps, LIMITS) == expected, "of a step that ran ahead"
    for other in (launches[:-1], [*launches, 1.0]):
        assert match_matmuls(other, COSTS, steps, LIMITS) == [], "kernels and matmuls are not one to one"


def test_one_kernel_multiplies_by_the_experts_that_are_chosen_and_by_those_of_all_tokens():
    chosen, shared = Matmul((8, 4, 2), 800, 80, 0.25, with_next=True), Matmul((1, 4, 2), 100, 10)
    costs = {"body": Costs(matmuls=[chosen, shared, A, chosen, shared])}
    result = match_matmuls([3.0, 1.0, 4.0], costs, [step(1)], LIMITS)
    assert result == [("weight [8, 4, 2] + [1, 4, 2]", 2, 7.0, 6.0), ("weight [8, 4]", 1, 1.0, 1.0)]


def test_a_step_that_samples_nothing_has_no_head():
    result = match_matmuls([1.0, 1.0, 1.0], COSTS, [step(1, num_sampled=0)], LIMITS)
    assert [(name, calls) for name, calls, *_ in result] == [("weight [8, 4]", 2), ("weight [4, 8]", 1)]


def test_kinds_are_held_against_what_they_had_to_do():
    rows = [Row("linear", "matrix", 4, 3.0), Row("mm", "matrix", 1, 1.0), Row("split", None, 2, 0.5)]
    result = describe(Summary("device", 5.0, rows, 7, 0.5, []), [step(1)], COSTS, LIMITS)
    attention, matrix, other, gap = result["kinds"]
    assert (matrix["calls"], matrix["seconds"], matrix["share"], matrix["us_per_call"]) == (5, 4.0, 0.8, 8e5)
    assert (matrix["limit_seconds"], matrix["share_of_limit"]) == (5.5, 5.5 / 4), "550 bytes"
    assert attention == {"name": "attention", "calls": 0, "seconds": 0, "share": 0, "us_per_call": None}
    assert (other["calls"], other["share"]) == (2, 0.1) and "limit_seconds" not in other
    assert (gap["name"], gap["calls"], gap["share"]) == ("gap", 7, 0.1)
    assert [row["name"] for row in result["rows"]] == ["linear", "mm", "split"]
    assert (result["steps"], result["tokens"], result["products"]) == (1, 1, [])


def test_routers_are_held_against_their_own_limit_and_other_kinds_against_none():
    costs = {"body": Costs(matmuls=[A], routing=[B, B])}
    rows = [Row("_route_few_kernel", "routing", 2, 2.0), Row("_draw", "step", 1, 1.0), Row("piece 0", None, 1, 0.5)]
    result = describe(Summary("device", 4.0, rows, 0, 0.0, []), [step(1)], costs, LIMITS)
    found = {kind["name"]: (kind["calls"], kind.get("limit_seconds")) for kind in result["kinds"]}
    assert found == {
        "attention": (0, None), "matrix": (0, None), "routing": (2, 1.0), "step": (1, None), "piece": (1, None),
        "other": (0, None), "gap": (0, None),
    }  # fmt: skip


def test_kernels_of_pieces_name_their_piece_and_are_compared_with_what_it_reads():
    text = (Path(__file__).parents[2] / "golden" / "gemma2.semantic.py").read_text()
    pieces = find_piece_kernels(lower(parse(text), 2, Target("cuda", frozenset({"nvidia", "sm_90"}))), "cuda")
    titles = ["piece 0: rotary_embedding_scale_rows_a", "piece 1: rms_norm_rows_a", "piece 2: softcap_rows_a"]
    assert [piece.title for piece in pieces] == titles
    rows = [
        Row("rms_norm_rows_a", None, 6, 40.0),
        Row("rotary_embedding_scale_rows_a", None, 2, 30.0),
        Row("x", None, 1, 1.0),
    ]
    steps = [step(3), step(9, num_sampled=0)]
    result = describe(Summary("device", 71.0, rows, 0, 0.0, []), steps, COSTS, LIMITS, pieces)
    norms, start, other = result["rows"]
    assert [(row["name"], row["kind"]) for row in (norms, start)] == [(titles[1], "piece"), (titles[0], "piece")]
    weight, row = 4 * 48, 2 * 48  # bytes; two norms after the first layer's matmuls, and two after the last one's
    assert norms["limit_seconds"] == pytest.approx((4 * (weight + 3 * row) + 2 * (weight + 9 * row)) / LIMITS.bandwidth)
    token = 8 + 8 + 2 * 48  # its number, its position and its row of the embedding
    assert start["limit_seconds"] == pytest.approx((2 * 4 * 8 + (3 + 9) * token) / LIMITS.bandwidth)
    assert other["name"] == "x" and "limit_seconds" not in other
    all_pieces = next(kind for kind in result["kinds"] if kind["name"] == "piece")
    assert all_pieces["limit_seconds"] == pytest.approx(norms["limit_seconds"] + start["limit_seconds"])
    assert [Type("bf16", shape).bytes_per_token for shape in (("T", 8), ("4*T", 2, 8), ("T",))] == [16, 128, 2]


# the job


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], quick_limits: None) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `job=profile` with these overrides; torch's own words too."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["job=profile", *SMALL, *argv])
        return (code, *capfd.readouterr())

    return run


def test_each_phase_has_a_trace_and_its_time_is_all_accounted_for(run: Any, checkpoints: Any, tmp_path: Path):
    code, out, err = run(
        f"checkpoint={checkpoints('qwen3')}", "job.num_prompts=3", "job.input_len=17", "job.num_steps=5",
        f"serve.torch_profiler_dir={tmp_path}/my traces", "job.output=json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert set(result["phases"]) == {"prefill", "decode"}
    assert [(phase["steps"], phase["tokens"]) for phase in result["phases"].values()] == [(1, 51), (5, 15)]
    assert sorted(tmp_path.glob("my traces/rank_0/*.gz")) == [Path(each["trace"]) for each in result["phases"].values()]
    for phase in result["phases"].values():
        assert phase["timeline"] == "host"
        gap = phase["kinds"][-1]["seconds"]
        assert sum(row["seconds"] for row in phase["rows"]) + gap == pytest.approx(phase["timeline_seconds"])
        assert sum(kind["seconds"] for kind in phase["kinds"]) == pytest.approx(phase["timeline_seconds"])
        assert sum(kind["share"] for kind in phase["kinds"]) == pytest.approx(1)
        calls = Counter({row["name"]: row["calls"] for row in phase["rows"]})
        assert calls["cpp.paged_attention"] == calls["cpp.norm_rope_write"] == 3 * phase["steps"]
        assert calls["torch.linear"] + calls["cpp.linear"] == 13 * phase["steps"]
        assert calls["torch.rms_norm"] == calls["reference.embedding"] == phase["steps"]
        matrix = next(kind for kind in phase["kinds"] if kind["name"] == "matrix")
        assert matrix["calls"] == (3 * 4 + 1) * phase["steps"], "the matmuls of a layer, and the head"
        assert {row["name"]: row["calls"] // phase["steps"] for row in phase["products"]} == {
            "weight [128, 48]": 3, "weight [48, 64]": 3, "weight [160, 48]": 3, "weight [48, 80]": 3, "weight [101, 48]": 1
        }  # fmt: skip
        assert sum(row["seconds"] for row in phase["products"]) == pytest.approx(matrix["seconds"])
        assert matrix["share_of_limit"] == pytest.approx(matrix["limit_seconds"] / matrix["seconds"])
        with gzip.open(phase["trace"]) as file:
            assert any(each.get("name") == "cpp.paged_attention" for each in json.load(file)["traceEvents"])


def test_the_table_names_the_file_of_the_trace(
    run: Any, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)
    code, out, err = run(f"checkpoint={checkpoints('llama')}", "job.num_prompts=2", "job.num_steps=2")
    assert code == 0, err
    assert re.search(r"^decode, steps: 2, tokens: 4, [\d.,]+ ms a step on the host's timeline$", out, re.MULTILINE)
    assert re.search(r"^ +calls +ms +share +µs a call +limit ms +of limit$", out, re.MULTILINE)
    assert re.search(r"^matrix +26( +[\d.,]+%?){5}$", out, re.MULTILINE), "of two steps"
    assert re.search(r"^weight \[48, 80\] +6( +[\d.,]+%?){5}$", out, re.MULTILINE)
    assert re.search(r"^cpp\.paged_attention +6( +[\d.,]+%?){3} *$", out, re.MULTILINE)
    named = re.findall(r"^profiler_traces/.*\.pt\.trace\.json\.gz$", out, re.MULTILINE)
    assert sorted(named) == sorted(str(path) for path in Path("profiler_traces").rglob("*.gz")) and len(named) == 2


@pytest.mark.slow
def test_the_first_of_several_stages_is_held_against_its_own_layers(run: Any, checkpoints: Any, tmp_path: Path):
    """Two layers of three, and no head."""
    given = ["parallel.pipeline=2", "job.num_prompts=2", "job.num_steps=4", f"serve.torch_profiler_dir={tmp_path}"]
    code, out, err = run(f"checkpoint={checkpoints('qwen3')}", *given, "job.output=json")
    assert code == 0, err
    result = json.loads(out)
    assert result["stages"] == 2 and {path.name for path in tmp_path.iterdir()} == {"rank_0", "rank_1"}
    matmuls = {row["name"]: row["calls"] for row in result["phases"]["decode"]["products"]}
    assert matmuls.keys() == {"weight [128, 48]", "weight [48, 64]", "weight [160, 48]", "weight [48, 80]"}
    assert {*matmuls.values()} == {2 * result["phases"]["decode"]["steps"]}


def test_calls_have_the_names_of_the_text_and_equal_pieces_one_number(checkpoints: Any):
    program = compile_graph(load([f"checkpoint={checkpoints('qwen3')}", "level=2", "device=cpu"])).programs["body"]
    layer = ["cpp.norm_rope_write", "cpp.paged_attention"]
    named = ["piece 0", *layer, "piece 1", *layer, "piece 1", *layer]
    assert name_calls(program, len(named), {}) == named
    numbers = {"the text of another": 0}
    assert name_calls(program, len(named), numbers)[0] == "piece 1" and len(numbers) == 3
    names = name_calls(program, len(program.nodes), {})
    assert len(names) == len(program.nodes) and not any(name.startswith("piece") for name in names), (
        "without a compiler each call runs by itself"
    )
    assert [name for name in names if name in layer] == layer * 3


def test_without_decodes_there_is_one_phase(run: Any, checkpoints: Any, tmp_path: Path):
    given = [f"serve.torch_profiler_dir={tmp_path}", "job.output_len=1", "job.num_prompts=2", "job.output=json"]
    code, out, _ = run(f"checkpoint={checkpoints('llama')}", *given)
    assert code == 0
    assert set(json.loads(out)["phases"]) == {"prefill"}
    assert len(list(tmp_path.rglob("*.gz"))) == 1


@pytest.mark.parametrize(
    ("output_len", "said"),
    [
        (2, "the one decode step had run before the trace began, since steps run ahead of it: raise job.output_len"),
        (3, "the trace has no events: the profiler of this torch sees neither operators nor kernels"),
    ],
)
def test_decodes_that_ran_before_their_trace_are_named(
    output_len: int, said: str, run: Any, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU no step runs ahead: at most the one decode that follows a prefill could have run."""
    traces: list[str] = []

    class Late(torch.profiler.profile):
        def export_chrome_trace(self, path: str) -> None:
            traces.append(path)
            super().export_chrome_trace(path)
            if len(traces) == 2:  # of decodes
                Path(path).write_bytes(gzip.compress(b'{"traceEvents": []}'))

    monkeypatch.setattr("atom.runtime.profiler.profile", Late)
    given = [f"serve.torch_profiler_dir={tmp_path}", f"job.output_len={output_len}", "job.num_prompts=2"]
    code, out, err = run(f"checkpoint={checkpoints('llama')}", *given)
    assert (code, out, err.splitlines()[-1]) == (2, "", f"atom-run: ConfigError: {said}")


def test_prompts_that_take_more_steps_are_traced_in_part(run: Any, checkpoints: Any, tmp_path: Path):
    code, out, _ = run(
        f"checkpoint={checkpoints('llama')}", f"serve.torch_profiler_dir={tmp_path}", "job.num_prompts=2", "job.input_len=40",
        "job.num_steps=3", "serve.max_num_batched_tokens=8", "job.output=json",
    )  # fmt: skip
    assert code == 0
    phases = json.loads(out)["phases"]
    assert [(phase["steps"], phase["tokens"]) for phase in phases.values()] == [(3, 24), (3, 6)]


def test_a_folder_that_cannot_be_written_to_is_one_line(run: Any, checkpoints: Any, tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, out, err = run(f"checkpoint={checkpoints('llama')}", f"serve.torch_profiler_dir={tmp_path}/file")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("atom-run: ConfigError: serve.torch_profiler_dir: ")


def test_the_page_has_the_timeline_of_a_step_and_limits(run: Any, checkpoints: Any, tmp_path: Path):
    code, out, err = run(
        f"checkpoint={checkpoints('qwen3')}", "job.num_prompts=2", "job.input_len=9", "job.num_steps=4",
        f"serve.torch_profiler_dir={tmp_path}", "job.output=html",
    )  # fmt: skip
    assert code == 0, err
    assert re.search(r"<h2>prefill: .*<h2>decode: ", out, re.DOTALL)
    assert out.count("<title>cpp.paged_attention: ") >= 3 + 3, "a box for each layer, in either phase"
    limits = re.findall(r"ms, [\d.]+%; (\d+% of|no slower than) its limit", out)
    assert len(limits) >= 4 and not re.search(r"[1-9]\d\d% of its limit", out), "attention and matrix of each phase"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("output", ["json", "html"])
@pytest.mark.parametrize("waited", [0.05, 0.6])
def test_a_busy_machine_is_named(
    waited: float, output: str, run: Any, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    counts = iter([CoreSeconds(10, 3), CoreSeconds(10 + 1 - waited, 3 + waited)])
    monkeypatch.setattr(profile, "core_seconds", lambda: next(counts))
    sizes = ["job.num_prompts=1", "job.input_len=3", "job.num_steps=1", f"job.output={output}"]
    code, out, err = run(f"checkpoint={checkpoints('llama')}", *sizes, f"serve.torch_profiler_dir={tmp_path}")
    line = "this machine was busy: threads waited for a core 60% of the time, so the run was too slow"
    assert code == 0 and (f"atom-run: {line}" in err) is (line in out) is (waited == 0.6)
    if output == "json":
        assert json.loads(out)["share_waited_for_cores"] == pytest.approx(waited)


@pytest.mark.parametrize(
    ("row", "color"),
    [
        ({"name": "piece 3", "kind": None}, "piece"),
        ({"name": "piece 3: triton_red", "kind": "piece"}, "piece"),
        ({"name": "weight [8, 4]"}, "matrix"),
        ({"name": "attention"}, "attention"),
        ({"name": "gap"}, "other"),
        ({"name": "aten::add", "kind": None}, "other"),
    ],
)
def test_a_bar_has_the_color_of_its_kind(row: dict[str, Any], color: str):
    assert make_bar({"seconds": 1.0, "share": 0.5, **row}, 1).color == COLORS[color]


def test_the_bars_of_a_page_are_of_one_step_as_its_heading_is():
    row = {"name": "attention", "seconds": 0.4, "share": 0.5, "limit_seconds": 0.3, "share_of_limit": 0.75}
    bar = make_bar({**row, "kind": "attention"}, 4)
    assert (bar.value, bar.mark_at) == (pytest.approx(0.1), pytest.approx(0.075))
    assert bar.text == "100.000 ms, 50.0%; 75% of its limit"
    fast = make_bar({**row, "limit_seconds": 0.452, "share_of_limit": 1.13}, 4)
    assert fast.text == "100.000 ms, 50.0%; no slower than its limit"


def test_a_step_in_the_middle_of_a_trace_is_cut_out():
    # name, start, duration in µs: three steps of three events, the second of them slow
    events = [("a", 0, 30), ("b", 5, 10), ("c", 28, 20), ("a", 50, 300), ("b", 60, 10), ("c", 355, 20)]
    events += [("a", 380, 20), ("b", 385, 5), ("c", 400, 9)]
    trace = {"traceEvents": [
        {"ph": "X", "cat": "cpu_op", "tid": 1, "name": name, "ts": 1000 + at, "dur": long} for name, at, long in events
    ]}  # fmt: skip
    found = [(event.name, event.start, event.stop) for event in middle_step(trace, 3)]
    assert found == [("a", 0, 300), ("b", 10, 20), ("c", 305, 325)]
    overlapping = {"traceEvents": trace["traceEvents"][:3]}
    assert [(box.name, box.lane) for box in make_boxes(middle_step(overlapping, 1))] == [("a", 0), ("b", 1), ("c", 1)]

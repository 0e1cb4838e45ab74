"""The gaps before steps, off traces written by hand, whose times are known; and the traffic, on a CPU."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from atom.checkpoint import open_checkpoint, stop_ids
from atom.config.load import load
from scripts import gap_gpu
from scripts.gap_gpu import Step, find_missed, measure, read_stamps, read_steps

pytest.importorskip("triton")
from scripts import gap_clock
from scripts.gap_clock import StepClock
from scripts.gap_stamps import Stamp

TO_DEVICE = "Memcpy HtoD (Pinned -> Device)"


def trace(*activities: tuple[str, float, float]) -> dict[str, Any]:
    """Name, start and stop of what a GPU did, in µs, among what is none of it."""
    cats = {TO_DEVICE: "gpu_memcpy", "Memset (Device)": "gpu_memset"}
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": cats.get(name, "kernel"), "name": name, "ts": start, "dur": stop - start, "tid": 7}
        for name, start, stop in activities
    ]
    other = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 500, "tid": 1}
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, other, *events[::-1]]}  # in any order


def test_the_gap_before_a_step_is_the_time_in_which_nothing_ran():
    steps = read_steps(trace(
        ("_prepare", 0, 5), ("_vector_kernel", 5, 90), ("_draw", 95, 100),
        ("_prepare", 106, 110), ("_vector_kernel", 112, 190), ("_draw", 190, 200),  # 6 idle
        (TO_DEVICE, 210, 212), ("index_copy", 215, 218), ("Memset (Device)", 216, 217),  # 10 and 3 idle
        ("_prepare", 225, 230), ("_prefill", 230, 280), ("_draw", 285, 300),  # 7 idle
        ("_prepare", 299, 310), ("_draw", 390, 400),                  # begins before the one before it has ended
    ))  # fmt: skip
    assert steps == [
        Step(start=106, span=94, idle=6, before_others=6, whole=6, has_prompts=False),
        Step(start=225, span=75, idle=20, before_others=10, whole=25, has_prompts=True),
        Step(start=299, span=101, idle=0, before_others=0, whole=0, has_prompts=False),
    ]


def test_only_whole_steps_after_whole_steps_count():
    steps = read_steps(trace(
        ("_vector_kernel", 0, 5), ("_draw", 5, 10),                # its beginning is not in the trace
        ("_prepare", 500, 510), ("_draw", 520, 530),                  # after that one
        ("_prepare", 540, 550), ("_prefill", 550, 560),               # draws no tokens
        ("_prepare", 600, 610), ("_draw", 610, 620),                  # after that one
        ("_prepare", 625, 630), ("_draw", 640, 650),
        ("_prepare", 655, 660),                                       # its end is not in the trace
    ))  # fmt: skip
    assert [(step.start, step.idle) for step in steps] == [(625, 5)]


def test_the_gaps_of_a_clock_are_those_between_two_steps():
    steps = read_stamps([
        (9_000, Stamp.DRAWN),                                    # its beginning was not read
        (20_000, Stamp.DECODES), (100_000, Stamp.DRAWN),
        (106_500, Stamp.DECODES), (200_000, Stamp.DRAWN),
        (210_000, Stamp.TABLES), (219_000, Stamp.COPIED), (225_000, Stamp.DECODES), (290_000, Stamp.DRAWN),
        (300_000, Stamp.PROMPTS), (380_000, Stamp.DRAWN),
        (400_000, Stamp.PROMPTS),                                # draws no tokens
        (500_000, Stamp.DECODES), (590_000, Stamp.DRAWN),        # after that one
        (600_000, Stamp.DECODES),                                # its end was not read
    ])  # fmt: skip
    assert steps == [
        Step(start=106.5, span=93.5, idle=6.5, before_others=6.5, whole=6.5, has_prompts=False),
        Step(start=225, span=65, idle=16, before_others=10, whole=25, has_prompts=False),
        Step(start=300, span=80, idle=10, before_others=10, whole=10, has_prompts=True),
    ]


def test_percentiles_are_only_those_of_steps_of_decodes():
    decodes = [Step(1000.0 * i, 900, float(i % 100), 1, 200, False) for i in range(1000)]
    prompts = [Step(1e6 + 1000.0 * i, 900, 1e6, 1e6, 1e6, True) for i in range(10)]
    report = measure([[*decodes, *prompts], [Step(9e9, 900, 5, 1, 5, True)]])
    assert (report["num_steps"], report["num_decode_steps"]) == (1011, 1000)
    idle = report["gaps_us"]["idle"]
    assert (idle["median"], idle["max"]) == (49.5, 99) and report["gaps_us"]["whole"]["median"] == 200
    assert idle["p90"] == pytest.approx(90, abs=1) and idle["p99"] == pytest.approx(99, abs=1)
    assert report["ms_a_step"] == pytest.approx(1.0), "the time between two traces is no step's"
    assert report["ms_within_steps"] == pytest.approx(0.9)
    assert len(find_missed(report)) == 2


@pytest.mark.parametrize(
    ("idle", "num_steps", "missed"),
    [
        ([19.9] * 985 + [59.9] * 15, 1000, []),
        ([20.0] * 985 + [30.0] * 15, 1000, ["median"]),
        ([5.0] * 985 + [60.0] * 15, 1000, ["p99"]),
        ([5.0] * 999, 999, ["1000 steps"]),
        ([], 0, ["1000 steps", "median", "p99"]),
    ],
)
def test_limits_that_are_missed_are_reported(idle: list[float], num_steps: int, missed: list[str]):
    report = measure([[Step(i, 1, each, each, each, False) for i, each in enumerate(idle)]])
    assert report["num_decode_steps"] == num_steps
    found = find_missed(report)
    assert len(found) == len(missed) and all(word in bound for word, bound in zip(missed, found, strict=True))


def test_requests_must_end_in_every_way():
    report = measure([[Step(i, 1, 5.0, 5.0, 5.0, False) for i in range(1000)]])
    ends = {"eos": 4, "stop_sequence": 3, "max_tokens": 2, "abort": 1}
    assert find_missed({**report, "ended_by": ends}) == []
    assert len(find_missed({**report, "ended_by": {**ends, "abort": 0}})) == 1


def test_the_kernels_that_begin_and_end_a_step_have_these_names():
    from atom.kernels.triton.attention import prefill
    from atom.kernels.triton.step import prepare_inputs, sampling

    for module, name in ((prepare_inputs, gap_gpu.FIRST), (sampling, gap_gpu.LAST), (prefill, gap_gpu.OF_PROMPTS)):
        assert callable(getattr(module, name).run), f"{module.__name__} has no kernel {name}"


@pytest.mark.slow
def test_the_tokenizer_has_every_token_and_eos_among_them(tmp_path: Path):
    gap_gpu.save_checkpoint(tmp_path, json.loads(gap_gpu.CONFIG.read_text()))
    opened = open_checkpoint(str(tmp_path))
    tokenizer = opened.tokenizer()
    assert tokenizer is not None and tokenizer.vocab_size == 151936
    assert len(tokenizer.encode("Grüß")) == 6, "a byte each"
    assert tokenizer.decode(tokenizer.encode("Grüß dich")) == "Grüß dich"
    assert tokenizer.decode([256, 256 + 27]) == " aaaa aabb"
    ends = stop_ids(opened, tokenizer)
    assert len(ends) == 151 and {999, 150999} <= ends
    words = [tokenizer.decode([token]) for token in range(256, 151936)]
    assert 300 < len(words) / sum(gap_gpu.STOP in word for word in words) < 400


def test_a_trace_that_is_there_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    path = tmp_path / "atom.pt.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(trace(*(each for i in range(1001) for each in (("_prepare", i * 50, i * 50 + 9), ("_draw", i * 50 + 9, i * 50 + 40)))), file)  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["gap_gpu.py", "--read", str(path), "--json"])
    assert gap_gpu.main() == 0
    (report,) = json.loads(capsys.readouterr().out).values()
    assert (report["num_decode_steps"], report["gaps_us"]["idle"]["median"]) == (1000, 10)


def test_clocks_that_were_read_are_summarized_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    for rank, gap in enumerate((10, 30)):
        for number in range(2):
            stamps = [(i * 1_000_000 + begun, kind) for i in range(501) for begun, kind in ((gap * 1000, Stamp.DECODES), (1_000_000, Stamp.DRAWN))]  # fmt: skip
            path = tmp_path / f"rank_{rank}" / f"steps.{number}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"stamps": stamps, "floor_us": 2.5 + rank + number}))
    monkeypatch.setattr(sys, "argv", ["gap_gpu.py", "--read", *map(str, tmp_path.glob("*/*"))])
    assert gap_gpu.main() == 1
    captured = capsys.readouterr()
    assert captured.err == "missed: rank_1: the median of the gaps is under 20 µs\n"
    lines = captured.out.splitlines()
    assert [line for line in lines if line.startswith("rank_")] == [
        f"rank_{rank}: steps 1,000, of only decodes 1,000" for rank in range(2)
    ]
    assert [line for line in lines if "floor" in line] == ["floor, µs: 3.0", "floor, µs: 4.0"]
    assert [line.rpartition("median ")[2][:4] for line in lines if "idle" in line] == ["10.0", "30.0"]


def test_clocks_of_stages_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(gap_gpu, "find_device", lambda: "cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sys, "argv", ["gap-gpu", "--clock", "--parallel", "pp2"])
    assert gap_gpu.main() == 2
    assert "--clock is for ranks that draw" in capsys.readouterr().err


def test_a_clock_gives_what_was_read_since_it_was_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gap_clock, "SIZE", 4)
    clock = StepClock()
    clock.open(torch.device("cpu"))
    clock.stamp(Stamp.DRAWN)
    for kinds, kept in (([Stamp.DECODES, Stamp.DRAWN], 2), ([Stamp.TABLES, Stamp.PROMPTS, *[Stamp.DRAWN] * 3], 4)):
        clock.start()
        before = time.perf_counter_ns()
        for kind in kinds:
            clock.stamp(kind)
        after = time.perf_counter_ns()
        stamps = clock.stop()
        times = [now for now, _ in stamps]
        assert [kind for _, kind in stamps] == kinds[-kept:], "the newest, if there is no room for all"
        assert before <= times[0] and times[-1] <= after and times == sorted(times)


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="its clock is that of NVIDIA's GPUs")
def test_a_gpu_reads_its_clock_in_a_graph():
    clock, cycles = StepClock(), 20_000_000  # some 10 ms
    clock.open(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clock.stamp(Stamp.DECODES)
        torch.cuda._sleep(cycles)
        clock.stamp(Stamp.DRAWN)
    graph.replay()  # the first time it is brought to the GPU
    torch.cuda.synchronize()
    clock.start()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    stamps = clock.stop()
    assert [kind for _, kind in stamps] == [Stamp.DECODES, Stamp.DRAWN] * 3
    times = [now for now, _ in stamps]
    assert times == sorted(times)
    assert (times[-1] - times[0]) / 1e6 == pytest.approx(start.elapsed_time(end), rel=0.05)
    assert all(after - before > 1_000_000 for before, after in zip(times[::2], times[1::2], strict=True))
    assert 0 < clock.measure_floor() < 100


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(gap_gpu, "find_device", lambda: "cpu")
    monkeypatch.setattr(sys, "argv", ["gap_gpu.py"])
    assert gap_gpu.main() == 2
    assert capsys.readouterr().err == "gap-gpu: torch finds no GPU\n"


def trace_on_cpu(folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, has_clock: bool):
    """The files of two traces of a tiny model that clients keep busy, and what is reported of the traffic."""
    for name, value in (("WARM_SECONDS", 0.5), ("REST_SECONDS", 0), ("EVERY_EOS", 20), ("NUM_ROWS", 8)):
        monkeypatch.setattr(gap_gpu, name, value)
    hf_config = json.loads((checkpoint / "config.json").read_text())
    gap_gpu.save_checkpoint(folder, {**hf_config, "vocab_size": 2000, "max_position_embeddings": 1024})
    common = ["load_dummy=true", "device=cpu", "level=1", "serve.kv_cache_memory=50000000"]
    config = load([f"checkpoint={folder}", f"serve.torch_profiler_dir={folder / 'traces'}", *common, *overrides])
    return uvloop.run(gap_gpu.trace_traffic(config, 2, 0.5 if has_clock else 0.2, has_clock))


@pytest.mark.slow
def test_each_rank_reads_its_clock(tmp_path: Path, checkpoints: Any, monkeypatch: Any):
    earlier = tmp_path / "traces" / "rank_0" / "steps.1.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("of another run")
    paths, report = trace_on_cpu(tmp_path, checkpoints("qwen3"), monkeypatch, "parallel=tp2", has_clock=True)
    assert [path.parent.name for path in paths] == ["rank_0"] * 2 + ["rank_1"] * 2
    ranks = gap_gpu.measure_ranks(paths)
    assert [*ranks] == ["rank_0", "rank_1"]
    for summary in ranks.values():
        assert 0 < summary["num_decode_steps"] < summary["num_steps"]
        medians = [summary["gaps_us"][name]["median"] for name in ("before_others", "idle", "whole")]
        assert medians == sorted(medians) and medians[0] > 0
        assert 0 < summary["ms_within_steps"] < summary["ms_a_step"] and summary["floor_us"] > 0
    assert ranks["rank_0"]["num_steps"] == pytest.approx(ranks["rank_1"]["num_steps"], abs=10), "they take the same"
    assert report["ms_a_step_without_profiler"] > 0


@pytest.mark.slow
def test_clients_keep_an_engine_busy_while_it_is_traced(tmp_path: Path, checkpoints: Any, monkeypatch: Any):
    paths, report = trace_on_cpu(tmp_path, checkpoints("qwen3"), monkeypatch, has_clock=False)
    assert len(set(paths)) == 2
    assert all(gap_gpu.read_trace(path)["traceEvents"] for path in paths)
    assert read_steps(gap_gpu.read_trace(paths[0])) == [], "no GPU ran"
    assert report["ended_by"]["eos"] > 0 and report["ms_a_step_without_profiler"] > 0

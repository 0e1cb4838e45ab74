"""Benchmark models on a GPU, against its measured limits and vLLM.

bf16 unless the row says more, random weights made on the device, everything else as shipped. All requests come at once,
answers have their full length and are greedy unless the row says more; a figure is all tokens over the wall time from
the first submission to the last token, its limit what `job=bench` works out. The rows of a model and its formats share
a process and an engine, and each has one run that does not count. A start is the time from exec to the first token on
stdout, of a process of its own; cold is one with empty folders for caches and temporary files, warm the next one with
the same folders. Medians count. A row with drafts is held against the same without, which is then measured, too; the
drafts are accepted by chance. What loads weights is held against its own readers, when they do nothing but read the
same files into pinned memory. A sum is one of 8 to 64 KB among ranks with a GPU each, in a CUDA graph of nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import atom
from atom.devices import count_devices, find_device

if TYPE_CHECKING:
    from atom.config import Config
    from atom.jobs.bench.roofline import Costs, Limits
    from atom.runtime.engine import Engine
    from atom.runtime.ranks.links import RankLink

ROOT = Path(__file__).parents[1]
CONFIGS, DOCS = ROOT / "tests" / "configs", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- scripts/bench-gpu -->\n", "<!-- end of scripts/bench-gpu -->\n"
PROMPT = list(range(100, 228))  # of a start


class Row(NamedTuple):
    """A workload; `before` is vLLM 0.26's figure on an H200, `target` our goal there, or how often another row's."""

    title: str
    model: str  # a file of tests/configs
    num_prompts: int
    input_len: str
    output_len: str
    before: float | None
    target: float
    counted: str = "output"  # or input: the tokens of the figure
    sampling: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # overrides of the engine
    than: str = ""  # the row whose figure, in the same run, times `target` is to be reached
    by_share: bool = False  # of the limits, not of the figures
    num_gpus: int = 1

    def overrides(self, folder: Path) -> list[str]:
        """folder: with a config.json, and those of drafts"""
        sizes = [f"job.{name}={getattr(self, name)}" for name in ("num_prompts", "input_len", "output_len")]
        setup = [each.format(folder=folder) for each in self.setup]
        return [f"checkpoint={folder}", "job=bench", "load_dummy=true", *sizes, *self.sampling, *setup]

    @property
    def engine(self) -> tuple[str, tuple[str, ...]]:
        """What rows of one engine have in common."""
        return self.model, self.setup


FP8 = ("quant=fp8", "quant.head=fp8", "quant.kv=fp8")
INT4 = ("quant=int4", "quant.head=fp8", "quant.kv=fp8")
BLOCKS = ("quant=fp8_block",)
MTP = ("model.mtp_layers=1", "serve.method=mtp", "serve.num_speculative_tokens=1", "serve.acceptance_length=1.8")
# by chance: 2.5 tokens of 4 in the mean, 2 of 2 where one is drafted
DRAFTS = ("serve.method=ngram", "serve.acceptance_length=2.5")
EAGLE3 = ("serve.method=eagle3", "serve.draft_model={folder}/qwen3_8b_eagle3", "serve.acceptance_length=2.5")
TABLE = (*EAGLE3, "tune=true", "cache={folder}/cache")  # where no other row finds what it measured
TP2, TP4 = ("parallel=tp2",), ("parallel=tp4",)
AIR, V3 = ("quant=fp8", "model.layers=13"), ("model.layers=7",)  # 12 and 4 layers with experts fit on one GPU
OFF = ("serve.method=ngram", "serve.max_verified_tokens=1")


def decodes(
    title: str,
    model: str,
    figures: Sequence[tuple[float | None, float]],
    setup: tuple[str, ...] = (),
    num_gpus: int = 1,
) -> Iterator[Row]:
    """Rows of 1, 32 and 128 requests; figures: before and target of each."""
    sizes = ((1, "1 request", "128"), (32, "32 requests", "1024"), (128, "128 requests", "1024"))
    for (count, requests, length), (before, target) in zip(sizes, figures, strict=True):
        what = f"{title}, {requests}, {length} in / 256 out"
        yield Row(what, model, count, length, "256", before, target, setup=setup, num_gpus=num_gpus)


def prefill(
    title: str, model: str, before: float | None, target: float, setup: tuple[str, ...] = (), num_gpus: int = 1
) -> Row:
    what = f"{title}, prefill 8 × 8192"
    return Row(what, model, 8, "8192", "1", before, target, "input", setup=setup, num_gpus=num_gpus)


def layout(parallel: str, before: Sequence[float | None] = (None,) * 4) -> dict[str, Row]:
    """Rows of a large mixture on 4 GPUs: the figures are to be reached by one of the layouts. before: of each row"""
    title, model, setup = f"Qwen3-235B-A22B block fp8, {parallel}", "qwen3_235b_a22b", (*BLOCKS, f"parallel={parallel}")
    name, figures = f"235b-{parallel.replace('_', '-')}", list(zip(before, (280, 1750, 4500, 40000), strict=True))
    rows = named(name, decodes(title, model, figures[:3], setup, num_gpus=4))
    return rows | {f"{name}-prefill": prefill(title, model, *figures[3], setup, num_gpus=4)}


def multiples(title: str, of: str, factors: dict[int, float], setup: tuple[str, ...]) -> Iterator[Row]:
    """Rows like others, whose names end in their requests, with more setup. factors: of their figures, to be reached"""
    for count, factor in factors.items():
        row = ROWS[than := f"{of}-{count}"]
        what = f"{row.title}, {title}: {factor:g} × without"
        yield row._replace(title=what, before=None, target=factor, setup=(*row.setup, *setup), than=than)


def shares(title: str, model: str, of: str, setup: tuple[str, ...]) -> Iterator[Row]:
    """Rows of 1 and 32 requests that are to reach the share of the limit that others of as many requests have."""
    for row in decodes(title, model, [(None, 1)] * 3, setup):
        if row.num_prompts <= 32:
            yield row._replace(than=f"{of}-{row.num_prompts}", by_share=True)


def named(name: str, rows: Iterable[Row]) -> dict[str, Row]:
    return {f"{name}-{row.num_prompts}": row for row in rows}


ROWS = {
    "8b-1": Row("Qwen3-8B, 1 request, 128 in / 256 out", "qwen3_8b", 1, "128", "256", 191, 265),
    "8b-32": Row("Qwen3-8B, 32 requests, 1024 in / 256 out", "qwen3_8b", 32, "1024", "256", 3320, 4200),
    "8b-128": Row("Qwen3-8B, 128 requests, 1024 in / 256 out", "qwen3_8b", 128, "1024", "256", 5428, 6750),
    "8b-256": Row("Qwen3-8B, 256 requests, 1024 in / 256 out", "qwen3_8b", 256, "1024", "256", None, 1, than="8b-128"),
    "8b-prefill": prefill("Qwen3-8B", "qwen3_8b", 37650, 43500),
    "0.6b-1": Row("Qwen3-0.6B, 1 request, 128 in / 512 out", "qwen3_0.6b", 1, "128", "512", 616, 2000),
    "0.6b-256": Row(
        "Qwen3-0.6B, 256 requests, 100-1024 in, 100-1024 out, sampled",
        "qwen3_0.6b", 256, "100-1024", "100-1024", 23930, 33000, sampling=("sampling.temperature=0.6",),
    ),
    **named("8b-fp8", decodes("Qwen3-8B fp8, KV too", "qwen3_8b", [(262, 430), (4246, 6000), (7427, 9000)], FP8)),
    "8b-fp8-prefill": prefill("Qwen3-8B fp8", "qwen3_8b", 52720, 62000, FP8),
    **named("8b-int4", decodes("Qwen3-8B int4, fp8 KV", "qwen3_8b", [(None, 600), (None, 6500), (None, 9000)], INT4)),
    **named("v2-lite", decodes("DeepSeek-V2-Lite", "deepseek_v2_lite", [(291, 650), (2973, 3600), (7295, 9500)])),
    **named("gpt-oss-20b", decodes("gpt-oss-20b", "gpt_oss_20b", [(None, 700), (None, 8000), (None, 18000)])),
    **named("gpt-oss-120b", decodes("gpt-oss-120b", "gpt_oss_120b", [(None, 500), (None, 2400), (None, 5500)])),
    **named(
        "30b-a3b-fp8",
        decodes("Qwen3-30B-A3B block fp8", "qwen3_30b_a3b", [(236, 650), (2316, 3600), (None, 8500)], BLOCKS),
    ),
    **named("30b-a3b", decodes("Qwen3-30B-A3B", "qwen3_30b_a3b", [(241, 500), (1834, 2050), (4534, 5200)])),
    **named(
        "32b-tp2", decodes("Qwen3-32B, 2 GPUs", "qwen3_32b", [(90, 112), (1641, 1950), (2823, 3100)], TP2, num_gpus=2)
    ),
    **named(
        "32b-tp4", decodes("Qwen3-32B, 4 GPUs", "qwen3_32b", [(138, 200), (2568, 3100), (4684, 5200)], TP4, num_gpus=4)
    ),
    "32b-tp4-prefill": prefill("Qwen3-32B, 4 GPUs", "qwen3_32b", 30590, 33000, TP4, num_gpus=4),
    **layout("tp4", (103, 1049, 2559, 25055)),
    **layout("tp4_ep"),
    **layout("dp4_ep"),
}  # fmt: skip
SPEED_UPS = {1: 2.0, 32: 1.8, 128: 1.0, 256: 1.0}
ROWS |= {
    **named("8b-drafts", multiples("2.5 looked up a step", "8b", SPEED_UPS, DRAFTS)),
    **named("8b-eagle3", multiples("EAGLE-3 of 2.5 a step", "8b", SPEED_UPS, EAGLE3)),
    **named("8b-eagle3-table", multiples("the same, drafts by measured times", "8b", SPEED_UPS, TABLE)),
    **named("8b-off", multiples("drafts that never come", "8b", dict.fromkeys(SPEED_UPS, 0.995), OFF)),
    **named("glm-air-fp8", shares("GLM-4.5-Air fp8, 13 layers", "glm_4_5_air", "30b-a3b-fp8", AIR)),
    **named("v3-fp8", shares("DeepSeek-V3 block fp8, 7 layers", "deepseek_v3", "30b-a3b-fp8", V3)),
    **named("v2-lite-mtp", multiples("MTP of 1.8 a step", "v2-lite", {1: 1.45, 32: 1.4, 128: 1.0}, MTP)),
}
GRAPHS, PACKED_START, LOAD, LARGE_MODEL = "8b-graphs", "start-packed", "load", "qwen3_8b"


class Start(NamedTuple):
    """Starts of a model, cold and warm; figures: s, as `before` and `target` of a row."""

    title: str
    model: str
    figures: Mapping[str, tuple[float | None, float]]
    setup: tuple[str, ...] = ()
    num_gpus: int = 1
    than: str = ""  # the start that it may take `target` longer than


MIXTURE_START = {"cold": (None, 20), "warm": (None, 9)}
STARTS = {
    "start": Start("Qwen3-8B", LARGE_MODEL, {"cold": (73, 20), "warm": (43, 8)}),
    "start-tp4": Start("Qwen3-8B, 4 GPUs", LARGE_MODEL, {"cold": (None, 5), "warm": (None, 5)}, TP4, 4, than="start"),
    "start-235b-tp4": Start(
        "Qwen3-235B-A22B block fp8, tp4", "qwen3_235b_a22b", {"cold": (193, 45), "warm": (None, 25)}, (*BLOCKS, *TP4), 4
    ),
    "start-30b-a3b-fp8": Start("Qwen3-30B-A3B block fp8", "qwen3_30b_a3b", MIXTURE_START, BLOCKS),
    "start-v2-lite": Start("DeepSeek-V2-Lite", "deepseek_v2_lite", MIXTURE_START),
    "start-gpt-oss-20b": Start("gpt-oss-20b", "gpt_oss_20b", MIXTURE_START),
}
SUMS = {"sums-2": (2, 3.0), "sums-4": (4, 4.0)}  # ranks, and the µs that a sum may take
SUM_ROWS, SUM_WIDTH = (1, 2, 8), 4096  # numbers of bf16: 8, 16 and 64 KB
GRAPH_SUMS, GRAPH_REPLAYS = 100, 10
NAMES = (*ROWS, GRAPHS, *SUMS, *STARTS, PACKED_START, LOAD)
LOAD_LAYERS, LOAD_SHARE = 4, 0.8  # layers of the large model; the share of the rate of reading alone that is the goal
LEAST_READ = 0.95  # of the experts that uniform routing reads: a router with fewer makes a mixture look faster


@dataclass
class Figure:
    title: str
    unit: str  # a time, of which less is better, or a rate, as tok/s
    before: float | None
    target: float
    values: list[float] = field(default_factory=list)  # of the runs; empty where it could not be measured
    limit: float | None = None  # by this run's ceilings
    details: dict[str, Any] = field(default_factory=dict)  # latencies and phases, as `job=bench` tells them

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return (min if self.is_time else max)(self.values)

    @property
    def is_time(self) -> bool:
        return "/" not in self.unit

    @property
    def is_met(self) -> bool:
        if not self.values or self.details.get("experts_read", {}).get("share", 1.0) < LEAST_READ:
            return False
        return self.median <= self.target if self.is_time else self.median >= self.target

    def describe(self) -> dict[str, Any]:
        if not self.values:
            return vars(self) | {"is_met": False}
        share = None if self.limit is None else self.median / self.limit
        return vars(self) | {"median": self.median, "best": self.best, "share_of_limit": share, "is_met": self.is_met}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in NAMES if gpus_of(name) <= count_devices()]
    parser.add_argument("--only", default=",".join(here), help="some of these; docs/ are written with all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no row {unknown[0]}; rows: {', '.join(NAMES)}")
    names = with_compared(names)
    if find_device() == "cpu":
        print("bench-gpu: there is no GPU here that torch can use", file=sys.stderr)
        return 2
    about = alone(measure_machine) | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": options.commit or find_commit(),
        "command": " ".join(["scripts/bench-gpu", *sys.argv[1:]]),
    }
    figures = measure(names, options.runs, about["limits"])
    if options.json:
        print(json.dumps({**about, "rows": {name: figure.describe() for name, figure in figures.items()}}))
    else:
        print(write_section(about, list(figures.values())))
    if {*names} == {*NAMES}:
        DOCS.write_text(replace_section(DOCS.read_text(), write_section(about, list(figures.values()))))
    return 0 if all(figure.is_met for figure in figures.values()) else 1


def gpus_of(name: str) -> int:
    """The GPUs that a row needs."""
    return SUMS[name][0] if name in SUMS else getattr(find_row(name), "num_gpus", 1)


def find_row(name: str) -> Row | Start | None:
    return ROWS.get(name) or STARTS.get(name)


def with_compared(names: Sequence[str]) -> list[str]:
    """Rows, and ahead of them those that they are held against."""
    found = dict.fromkeys(names)
    for name in names:
        while (row := find_row(name)) and (name := row.than):
            found[name] = None
    return sorted(found, key=NAMES.index)


def alone(work: Callable[..., Any], *given: Any) -> Any:
    """Run a function in a process of its own, whose end frees all GPU memory; its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def measure_machine() -> dict[str, Any]:
    """The GPU's name, the software's versions, and the ceilings: bytes/s read, FLOP/s of bf16 products."""
    import torch
    import triton

    from atom.jobs.bench.job import describe_device
    from atom.jobs.bench.roofline import measure_limits

    versions = {"atom": atom.__version__, "torch": str(torch.__version__), "triton": triton.__version__}
    limits = measure_limits("cuda", "bf16", ["fp8"])
    return {"hardware": describe_device("cuda"), "versions": versions, "limits": limits.measured()}


def measure(names: Sequence[str], runs: int, limits: dict[str, float]) -> dict[str, Figure]:
    """Measure a figure for each row; an error is shown, and the other rows are still measured."""
    figures = {name: Figure(row.title, f"{row.counted} tok/s", row.before, row.target) for name, row in ROWS.items()}
    figures[GRAPHS] = Figure("Qwen3-8B, CUDA graphs of a server", "s", None, 3.0)
    engines = {name: row.engine for name, row in ROWS.items()} | {GRAPHS: (LARGE_MODEL, ())}
    for engine in dict.fromkeys(engines.values()):
        chosen = [name for name in names if engines.get(name) == engine]
        if chosen:
            with reported(", ".join(chosen)):
                figures |= alone(measure_model, engine[0], {name: figures[name] for name in chosen}, runs, limits)
    figures = {name: figure for name, figure in figures.items() if name in names}
    for name, figure in figures.items():
        if name in ROWS and (than := ROWS[name].than):
            figure.target = ROWS[name].target * compared_with(figure, figures[than], by_share=ROWS[name].by_share)
    for name in filter(SUMS.__contains__, names):
        num, target = SUMS[name]
        sizes = [2 * rows * SUM_WIDTH // 1024 for rows in SUM_ROWS]
        sums = {f"{name}-{size}k": Figure(f"a sum of {size} KB among {num} GPUs", "µs", None, target) for size in sizes}
        with reported(name):
            for figure, times in zip(sums.values(), alone(measure_sums, num, runs), strict=True):
                figure.values = times
                print_figure(figure.title, figure)
        figures |= sums
    for name in filter(STARTS.__contains__, names):
        start, what = STARTS[name], f"{STARTS[name].title}, process start to first token"
        starts = {f"{name}-{kind}": Figure(f"{what}, {kind}", "s", *figure) for kind, figure in start.figures.items()}
        with reported(name):
            measure_starts(start, list(starts.values()), runs)
        for kind in start.figures if start.than else ():
            other = figures[f"{start.than}-{kind}"]
            starts[f"{name}-{kind}"].target += compared_with(starts[f"{name}-{kind}"], other, by_share=False)
        figures |= starts
    if PACKED_START in names:
        figures[PACKED_START] = Figure("Qwen3-8B fp8, start to first token, packed before", "s", None, 6.0)
        with reported(PACKED_START):
            measure_packed_starts(figures[PACKED_START], runs)
    if LOAD in names:
        with reported(LOAD):
            figures[LOAD] = alone(measure_load, runs)
            print_figure(LOAD, figures[LOAD])
    return figures


def compared_with(figure: Figure, other: Figure, *, by_share: bool) -> float:
    """What another row has of its figure, or of this one's limit as much as that one has of its own; NaN: unknown."""
    if not other.values or not by_share:
        return other.median if other.values else math.nan
    return other.median / other.limit * figure.limit if other.limit and figure.limit else math.nan


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Show an exception, and go on."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        print(f"bench-gpu: {what} failed", file=sys.stderr, flush=True)


def measure_model(model: str, figures: dict[str, Figure], runs: int, limits: dict[str, float]) -> dict[str, Figure]:
    """Measure one model's rows in one engine; after a row that raises, the others are left unmeasured."""
    from atom.assemble import open_engine
    from atom.checkpoint import RichProgress
    from atom.compiler import compile_graph
    from atom.config.load import load
    from atom.jobs.bench.experts_read import count_experts, describe_experts
    from atom.jobs.bench.roofline import Limits, read_costs
    from atom.jobs.bench.workload import open_workload

    timed = timing(RichProgress)()
    with checkpoint(model) as folder:
        configs = {name: load(ROWS[name].overrides(folder)) for name in figures if name in ROWS}
        config = next(iter(configs.values()), None) or load([f"checkpoint={folder}", "job=bench", "load_dummy=true"])
        costs, engine = read_costs(compile_graph(config)), open_engine(config, timed)
    if GRAPHS in figures:
        figures[GRAPHS].values = [timed.seconds["capturing CUDA graphs"]]
        print_figure(GRAPHS, figures[GRAPHS])
    with reported(model):
        for name in configs:
            measure_row(figures[name], ROWS[name].counted, engine, configs[name], runs, costs, Limits(**limits))
            print_figure(name, figures[name])
        for name in configs:  # behind all rows, as it drops the CUDA graphs
            if counts := count_experts(engine, open_workload(configs[name])(engine), configs[name]):
                figures[name].details["experts_read"] = counts.describe()
                print(f"{name}: {describe_experts(counts.describe())}", file=sys.stderr, flush=True)
    return figures


def timing(kind: type[Any]) -> type[Any]:
    """A subclass of a progress that records the seconds of each task."""

    class Timing(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: dict[str, float] = {}

        @contextmanager
        def task(self, description: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
            started = time.perf_counter()
            with super().task(description, *args, **kwargs) as task:
                yield task
            self.seconds[description] = time.perf_counter() - started

    return Timing


def measure_row(
    figure: Figure, counted: str, engine: Engine, config: Config, runs: int, costs: dict[str, Costs], limits: Limits
) -> None:
    from atom.jobs.bench.job import answer, compare, measure
    from atom.jobs.bench.workload import open_workload
    from atom.process.gc_utils import settle

    draw = open_workload(config)
    answer(engine, draw(engine), config)  # warm-up
    settle()
    told = [answer(engine, draw(engine), config) for _ in range(runs)]
    failed = [output.error for run in told for output in run.outputs if not output.success]
    assert not failed, failed[0]
    compared = compare(told, costs, limits)
    counts = [sum(count_tokens(output, counted) for output in run.outputs) for run in told]
    figure.values = [count / run.seconds for count, run in zip(counts, told, strict=True)]
    figure.limit = sum(counts) / compared["phases"]["all"]["limit_seconds"]
    figure.details = {**measure(told), "phases": compared["phases"]}


def count_tokens(output: Any, counted: str) -> int:
    return int(output.prompt_len if counted == "input" else output.output_tokens)


@contextmanager
def checkpoint(model: str) -> Iterator[Path]:
    """A folder with a config.json and no weights; those of its drafts are in folders there."""
    with tempfile.TemporaryDirectory() as name:
        for path in CONFIGS.glob(f"{model}*.json"):
            folder = Path(name) if path.stem == model else Path(name, path.stem)
            folder.mkdir(exist_ok=True)
            shutil.copy(path, folder / "config.json")
        yield Path(name)


def measure_load(runs: int) -> Figure:
    """Measure the loading of some layers of the large model from the page cache, GB/s; the limit is reading alone."""
    import torch

    from atom import weights
    from atom.checkpoint import SILENT, open_checkpoint
    from atom.compiler import compile_graph
    from atom.config.load import load

    with checkpoint(LARGE_MODEL) as folder:
        stated = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LOAD_LAYERS}
        (folder / "config.json").write_text(json.dumps(stated))
        path = write_weights(folder)
        graph, opened = compile_graph(load([f"checkpoint={folder}"])), open_checkpoint(str(folder))
        size = sum(leaf.type.num_bytes for leaf in graph.stored().values()) / 1e9
        loads, reads = [], []
        for _ in range(runs + 1):
            reads.append(size / time_reads(path))
            started = time.perf_counter()
            loaded = weights.load(graph.recipes(), opened, SILENT, "cuda")
            torch.cuda.synchronize()
            loads.append(size / (time.perf_counter() - started))
            del loaded
        opened.close()
    limit = statistics.median(reads[1:])
    title = f"Qwen3-8B, {size:.1f} GB of its weights from the page cache to the GPU"
    return Figure(title, "GB/s", None, LOAD_SHARE * limit, loads[1:], limit)


def write_weights(folder: Path) -> Path:
    """Write a file of ones beside a config.json; its path."""
    import torch
    from safetensors.torch import save_file

    from atom.compiler import compile_graph
    from atom.config.load import load
    from atom.graph import TORCH_DTYPES

    stored, path = compile_graph(load([f"checkpoint={folder}", "level=0"])).stored(), folder / "model.safetensors"
    types = {name: leaf.type for name, leaf in stored.items()}
    save_file({name: torch.ones(type.shape, dtype=TORCH_DTYPES[type.dtype]) for name, type in types.items()}, path)
    return path


def time_reads(path: Path) -> float:
    """Seconds that the weights' readers take to read a file into their pinned buffers alone."""
    import torch

    from atom.weights.stream import BUFFER, MAX_READERS, READER_BUFFERS

    readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
    buffers = torch.empty(readers * READER_BUFFERS, BUFFER, dtype=torch.uint8, pin_memory=True).numpy()
    places = range(0, path.stat().st_size, BUFFER)

    def read(reader: int) -> None:
        for place, buffer in zip(places[reader::readers], itertools.cycle(buffers[reader::readers]), strict=False):
            os.preadv(file, [buffer], place)

    file = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(readers) as pool:
            started = time.perf_counter()
            list(pool.map(read, range(readers)))
            return time.perf_counter() - started
    finally:
        os.close(file)


def measure_sums(num: int, runs: int) -> list[list[float]]:
    """The µs of a sum in each run, by size, measured on the first of so many GPUs."""
    from atom.config.load import load
    from atom.config.parallel import devices_of
    from atom.runtime.ranks.links import RankProcess, Ranks

    with checkpoint(LARGE_MODEL) as model:  # whose heads such numbers divide
        parallel = load([f"checkpoint={model}", "load_dummy=true", f"parallel=tp{num}", "device=cuda"]).parallel
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts.bench_gpu import sum_as_one; sum_as_one(link)"
    with tempfile.TemporaryDirectory() as folder:
        channels = [RankProcess(code, device) for device in devices_of(parallel)[1:]]
        ranks = Ranks(channels, [json.dumps([rank, num, runs, folder]).encode() for rank in range(1, num)])
        try:
            return time_sums(ranks.exchange, 0, num, runs, folder)
        finally:
            ranks.close()


def sum_as_one(link: RankLink) -> None:
    """Be another rank of `measure_sums`."""
    time_sums(link.exchange, *json.loads(link.receive()))
    link.receive()  # which ends this process, once the driver does


def time_sums(
    exchange: Callable[[bytes], list[bytes]], rank: int, num: int, runs: int, folder: str
) -> list[list[float]]:
    import torch

    from atom.graph import Mesh
    from atom.kernels import Rendezvous, connect_rank

    communicator = connect_rank("cuda", Rendezvous(rank, Mesh(tensor=num), "127.0.0.1", exchange, Path(folder)))
    found, stream = [], torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for rows in SUM_ROWS:
        x, graph = torch.ones(rows, SUM_WIDTH, dtype=torch.bfloat16, device="cuda"), torch.cuda.CUDAGraph()
        communicator.all_reduce(x, axis="tensor")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(GRAPH_SUMS):
                communicator.all_reduce(x, axis="tensor")
            graph.capture_end()
        times = []
        for _ in range(runs):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            graph.replay()  # at whose end no rank is ahead
            began.record()
            for _ in range(GRAPH_REPLAYS):
                graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / (GRAPH_SUMS * GRAPH_REPLAYS))
        found.append(times)
    exchange(b"")  # others write into its memory until then
    return found


def measure_starts(start: Start, figures: Sequence[Figure], runs: int) -> None:
    """Measure cold and warm starts in turns."""
    with checkpoint(start.model) as model:
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                for figure in figures:
                    figure.values.append(time_start(model, Path(folder), ("load_dummy=true", *start.setup)))
    for figure in figures:
        print_figure(figure.title, figure)


def measure_packed_starts(figure: Figure, runs: int) -> None:
    """Measure starts that read what a start ahead of them has packed in fp8; all files are in the page cache."""
    with checkpoint(LARGE_MODEL) as model, tempfile.TemporaryDirectory() as folder:
        alone(write_weights, model)
        time_start(model, Path(folder), FP8)
        figure.values = [time_start(model, Path(folder), FP8) for _ in range(runs)]
    print_figure(figure.title, figure)


def time_start(model: Path, folder: Path, setup: Sequence[str]) -> float:
    """Seconds from exec to the first token on stdout, with all caches in this folder. setup: more overrides"""
    command = [
        sys.executable, "-m", "atom.cli", "job=generate", f"checkpoint={model}", *setup, f"cache={folder}/cache",
        f"prompts={[PROMPT]}", "sampling.temperature=0", "sampling.ignore_eos=true", "sampling.max_tokens=8",
    ]  # fmt: skip
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(temporary), "TRITON_HOME": str(folder)}
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env, cwd=ROOT) as process:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            seconds = time.perf_counter() - started
            process.stdout.read()
        if not first or process.returncode:
            log.seek(0)
            raise RuntimeError(f"a start ended with {process.returncode}: {log.read().decode()}")
    return seconds


def print_figure(name: str, figure: Figure) -> None:
    """Print a figure to stderr as soon as it is measured."""
    values = ", ".join(map(number, figure.values))
    limit = "" if figure.limit is None else f", limit {number(figure.limit)}"
    phases = figure.details.get("phases", {})
    shares = [f"{phase} {about['share_of_limit']:.0%} of its limit" for phase, about in phases.items()]
    print("; ".join([f"{name}: {values} {figure.unit}{limit}", *shares]), file=sys.stderr, flush=True)


def find_commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def write_section(about: dict[str, Any], figures: Sequence[Figure]) -> str:
    """Write the table in Markdown, with the machine and the versions."""
    limits, versions = about["limits"], ", ".join(f"{name} {each}" for name, each in about["versions"].items())
    return (
        f"{about['hardware']}, {about['date']}; {versions}, commit {about['commit']}; `{about['command']}`. "
        f"Measured in the same run: {limits['bandwidth'] / 1e12:.2f} TB/s read, "
        f"{limits['flops'] / 1e12:.0f} TFLOP/s of bf16 products, {limits['fp8'] / 1e12:.0f} of fp8.\n\n"
        "| | | vLLM 0.26 | limit | atom, median (best) | of the limit | to reach | reached |\n"
        "|---|---|---|---|---|---|---|---|\n" + "".join(f"| {' | '.join(cells(figure))} |\n" for figure in figures)
    )


def cells(figure: Figure) -> list[str]:
    ours, share, off = "failed", "-", ""
    if figure.values:
        ours = f"{number(figure.median)} ({number(figure.best)})"
        share = "-" if figure.limit is None else f"{figure.median / figure.limit:.0%}"
        off = f", {abs(figure.median / figure.target - 1):.0%} {'more' if figure.is_time else 'less'}"
    limit = "-" if figure.limit is None else number(figure.limit)
    reached = "yes" if figure.is_met else f"no{off}"
    before = "-" if figure.before is None else number(figure.before)
    return [figure.title, figure.unit, before, limit, ours, share, number(figure.target), reached]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def replace_section(text: str, section: str) -> str:
    """Replace the section between its marks in a text."""
    assert text.count(BEGIN) == text.count(END) == 1, f"the text has no place between {BEGIN!r} and {END!r}"
    return re.sub(f"(?<={BEGIN}).*(?={END})", lambda _: f"\n{section}\n", text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())

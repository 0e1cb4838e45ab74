"""Benchmark models on a GPU, and write the GPU tables of docs/performance.md.

Rows that were measured replace those in docs/results/gpu; docs/benchmarks.md says what a row measures. The rows of a
model and its formats share a process and an engine. A row that is compared with another (drafts with none) is measured
together with it. Exits with 1 if a row misses its target.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import atom
from atom.devices import count_devices, find_device
from atom.jobs.forked_load import end_with
from scripts.bench_results import Origin, Result, find_origin, is_less_better, number, save, shorten
from scripts.bench_rows import (
    AGENTS,
    FP8,
    FP8_TITLE,
    GRAPHS,
    LARGE_MODEL,
    LOAD,
    MIN_CACHED,
    NAMES,
    PACKED_START,
    PHOTOS,
    ROWS,
    STARTS,
    SUMS,
    Agents,
    Photos,
    Row,
    Start,
    gpus_of,
    with_compared,
)
from scripts.image_prompts import draw_prompt_with_images

if TYPE_CHECKING:
    from atom import LLMEngine
    from atom.config import Config
    from atom.graph import Graph
    from atom.jobs.bench.roofline import Costs, Limits
    from atom.runtime.engine import Engine
    from atom.runtime.ranks.links import RankLink

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "configs"
PROMPT = list(range(100, 228))  # of a start
SUM_ROWS, SUM_WIDTH = (1, 2, 8), 4096  # numbers of bf16: 8, 16 and 64 KB
GRAPH_SUMS, GRAPH_REPLAYS = 100, 10
LOAD_LAYERS, LOAD_SHARE = 4, 0.8  # layers of the large model; the target, as a share of the rate of only reading
MIN_EXPERTS_READ = 0.95  # of those that uniform routing reads: a router with fewer makes a mixture look faster


@dataclass
class Figure:
    """A row as measured. title, load, unit: as in `bench_results`."""

    title: str
    load: str
    unit: str
    target: float
    values: list[float] = field(default_factory=list)  # of the runs; empty if it could not be measured
    limit: float | None = None  # by this run's ceilings
    compared: dict[str, float] = field(default_factory=dict)  # other figures of the same run or of others, by name
    details: dict[str, Any] = field(default_factory=dict)  # latencies and phases, as `job=bench` reports them

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return (min if is_less_better(self.unit) else max)(self.values)

    @property
    def share(self) -> float | None:
        return self.median / self.limit if self.limit else None

    @property
    def is_valid(self) -> bool:
        return bool(self.values) and self.details.get("experts_read", {}).get("share", 1.0) >= MIN_EXPERTS_READ

    @property
    def is_met(self) -> bool:
        if not self.is_valid:
            return False
        return self.median <= self.target if is_less_better(self.unit) else self.median >= self.target

    def describe(self) -> dict[str, Any]:
        if not self.values:
            return vars(self) | {"is_met": False}
        found = {"median": self.median, "best": self.best, "share_of_limit": self.share, "is_met": self.is_met}
        return vars(self) | found

    def as_result(self, origin: Origin) -> Result:
        row: Result = {
            "model": self.title, "load": self.load, "value": shorten(self.median), "unit": self.unit, **origin
        }  # fmt: skip
        if self.share is not None:
            row["share_of_limit"] = round(self.share, 4)
        if self.compared:
            row["compared"] = {name: shorten(value) for name, value in self.compared.items()}
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in NAMES if gpus_of(name) <= count_devices()]
    parser.add_argument("--only", default=",".join(here), help="some of these")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--commit", help="what is measured, without git")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"unknown row {unknown[0]} (rows: {', '.join(NAMES)})")
    names = with_compared(names)
    if find_device() == "cpu":
        print("bench-gpu: torch finds no GPU", file=sys.stderr)
        return 2
    hardware, versions, limits = run_isolated(measure_machine)
    origin = find_origin(versions, options.commit)
    figures = measure(names, options.runs, limits)
    save("gpu", hardware, {name: each.as_result(origin) for name, each in figures.items() if each.is_valid})
    if options.json:
        about = {"hardware": hardware, "limits": limits, **origin}
        print(json.dumps({**about, "rows": {name: figure.describe() for name, figure in figures.items()}}))
    else:
        print("\n".join(describe_figure(name, figure) for name, figure in figures.items()))
    return 0 if all(figure.is_met for figure in figures.values()) else 1


def run_isolated(work: Callable[..., Any], *given: Any) -> Any:
    """Run a function in a process, which frees all GPU memory when it ends."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=end_with, initargs=(os.getpid(),)) as pool:
        return pool.submit(work, *given).result()


def measure_machine() -> tuple[str, dict[str, str], dict[str, float]]:
    """The GPU's name, versions of the software, and the ceilings: bytes/s read, FLOP/s of large matmuls by dtype."""
    import torch
    import triton

    from atom.jobs.bench.job import describe_device
    from atom.jobs.bench.roofline import measure_limits

    versions = {"atom": atom.__version__, "torch": str(torch.__version__), "triton": triton.__version__}
    limits = measure_limits("cuda", "bf16", ["fp8"])
    return describe_device("cuda"), versions, limits.measured()


def measure(names: Sequence[str], runs: int, limits: dict[str, float]) -> dict[str, Figure]:
    """Measure a figure for each row; an error is shown, and the other rows are still measured."""
    figures = {name: Figure(row.title, row.load, "tok/s", row.target) for name, row in ROWS.items()}
    figures[GRAPHS] = Figure("Qwen3-8B bf16", "CUDA graphs of a server", "s", 3.0)
    engines = {name: row.engine for name, row in ROWS.items()} | {GRAPHS: (LARGE_MODEL, ())}
    for engine in dict.fromkeys(engines.values()):
        chosen = {name: figures[name] for name in names if engines.get(name) == engine}
        if chosen:
            with reported(", ".join(chosen)):
                figures |= run_isolated(measure_model, engine[0], chosen, runs, limits)
    figures = {name: figure for name, figure in figures.items() if name in names}
    for name, figure in figures.items():
        if name in ROWS and ROWS[name].than:
            compare_row(ROWS[name], figure, figures[ROWS[name].than])
    for engine in dict.fromkeys(row.engine for row in AGENTS.values()):
        rows = {name: AGENTS[name] for name in names if name in AGENTS and AGENTS[name].engine == engine}
        if rows:
            made = {name: agents_figures(name, row) for name, row in rows.items()}
            figures |= {name: figure for each in made.values() for name, figure in each.items()}
            with reported(", ".join(rows)):
                for name, talks in run_isolated(measure_agents, rows, runs).items():
                    take_talks(name, made[name], talks)
    for name in filter(AGENTS.__contains__, names):
        if AGENTS[name].than:
            cached = figures[AGENTS[name].than].details.get("cached_shares")
            figures[f"{name}-cached"].target = 100 * MIN_CACHED * (statistics.median(cached) if cached else math.nan)
    for name in filter(PHOTOS.__contains__, names):
        row = PHOTOS[name]
        figures[name] = Figure(row.title, row.load, "requests/s", math.nan)
        with reported(name):
            figures[name].values, limit = run_isolated(measure_photos, row, runs, limits)
            figures[name].limit, figures[name].target = limit, row.share * limit
            print_figure(name, figures[name])
    for name in filter(SUMS.__contains__, names):
        num, target = SUMS[name]
        sizes = [2 * rows * SUM_WIDTH // 1024 for rows in SUM_ROWS]
        sums = {f"{name}-{size}k": Figure(f"sum among {num} GPUs", f"{size} KB", "µs", target) for size in sizes}
        with reported(name):
            for (each, figure), times in zip(sums.items(), run_isolated(measure_sums, num, runs), strict=True):
                figure.values = times
                print_figure(each, figure)
        figures |= sums
    for name in filter(STARTS.__contains__, names):
        start = STARTS[name]
        starts = {
            f"{name}-{kind}": Figure(start.title, f"start to first token, {kind}", "s", target)
            for kind, target in start.targets.items()
        }
        with reported(name):
            measure_starts(start, starts, runs)
        for kind in start.targets if start.than else ():
            other = figures[f"{start.than}-{kind}"]
            starts[f"{name}-{kind}"].target += compared_with(starts[f"{name}-{kind}"], other, by_share=False)
        figures |= starts
    if PACKED_START in names:
        figures[PACKED_START] = Figure(FP8_TITLE, "start to first token, packed before", "s", 6.0)
        with reported(PACKED_START):
            measure_packed_starts(figures[PACKED_START], runs)
    if LOAD in names:
        with reported(LOAD):
            figures[LOAD] = run_isolated(measure_load, runs)
            print_figure(LOAD, figures[LOAD])
    return figures


def compare_row(row: Row, figure: Figure, other: Figure) -> None:
    """Set the target of a row that is compared with another."""
    figure.target = row.target * compared_with(figure, other, by_share=row.by_share)
    if other.values and row.engine != ROWS[row.than].engine and not row.by_share:
        figure.compared["without drafts"] = other.median


def compared_with(figure: Figure, other: Figure, *, by_share: bool) -> float:
    """What another row has of its figure, or of this one's limit as much as that one has of its own; NaN: unknown."""
    if not other.values or not by_share:
        return other.median if other.values else math.nan
    return other.median / other.limit * figure.limit if other.limit and figure.limit else math.nan


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Print an exception, and go on."""
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
        for name in configs:  # after all rows, as it drops the CUDA graphs
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
    answered = [answer(engine, draw(engine), config) for _ in range(runs)]
    failed = [output.error for run in answered for output in run.outputs if not output.success]
    assert not failed, failed[0]
    compared = compare(answered, costs, limits)
    counts = [sum(count_tokens(output, counted) for output in run.outputs) for run in answered]
    figure.values = [count / run.seconds for count, run in zip(counts, answered, strict=True)]
    figure.limit = sum(counts) / compared["phases"]["all"]["limit_seconds"]
    figure.details = {**measure(answered), "phases": compared["phases"]}


def count_tokens(output: Any, counted: str) -> int:
    return int(output.prompt_len if counted == "input" else output.output_tokens)


class Talks(NamedTuple):
    """A run of conversations."""

    seconds: list[float]  # of each turn
    cached_share: float  # of prompt tokens, in the prefix cache


def agents_figures(name: str, row: Agents) -> dict[str, Figure]:
    """Of all turns and of the first one, and of what is cached if it is held against a dense model."""
    total, first = (
        Figure(row.title, f"{row.load}{turn}", "s", row.targets[at]) for at, turn in enumerate(("", ", first turn"))
    )
    for rival, (seconds, first_seconds) in row.compared.items():
        total.compared[rival], first.compared[rival] = seconds, first_seconds
    figures = {name: total, f"{name}-first": first}
    return figures | ({f"{name}-cached": Figure(row.title, f"{row.load}, cached", "%", math.nan)} if row.than else {})


def take_talks(name: str, figures: Mapping[str, Figure], talks: Sequence[Talks]) -> None:
    total, cached = figures[name], figures.get(f"{name}-cached")
    total.values, figures[f"{name}-first"].values = (
        [sum(run.seconds) for run in talks],
        [run.seconds[0] for run in talks],
    )
    total.details |= {"turns": [run.seconds for run in talks], "cached_shares": [run.cached_share for run in talks]}
    if cached:
        cached.values = [100 * run.cached_share for run in talks]
    for each, figure in figures.items():
        print_figure(each, figure)


def measure_agents(rows: Mapping[str, Agents], runs: int) -> dict[str, list[Talks]]:
    """Runs of the rows of one engine, each after one that warms it up."""
    from atom import LLMEngine
    from atom.config.load import load
    from atom.process.gc_utils import settle

    first = next(iter(rows.values()))
    with checkpoint(first.model) as folder:
        engine = LLMEngine.from_config(load(first.overrides(folder)))
    found = {}
    for name, row in rows.items():
        talk(engine, row, 0)
        settle()
        found[name] = [talk(engine, row, seed) for seed in range(1, runs + 1)]
    engine.close()
    return found


def talk(engine: LLMEngine, row: Agents, seed: int) -> Talks:
    """Hold new conversations; their seconds are those of the engine only."""
    from atom import SamplingParams

    chance, vocab = random.Random(seed), engine.config.model.vocab

    def draw(num: int) -> list[int]:
        return [chance.randrange(vocab) for _ in range(num)]

    params = SamplingParams(temperature=0, max_tokens=row.output_len, ignore_eos=True)
    shared, seconds, num_prompt = draw(row.shared_len), list[float](), 0
    histories, before = [shared] * row.num_sessions, engine.metrics.scheduler.num_prefix_hit_tokens
    for _ in range(row.num_turns):
        histories = [[*each, *draw(row.new_len)] for each in histories]
        num_prompt += sum(map(len, histories))
        started = time.perf_counter()
        answers = engine.generate(histories, params)
        seconds.append(time.perf_counter() - started)
        histories = [[*each, *answer["token_ids"]] for each, answer in zip(histories, answers, strict=True)]
    return Talks(seconds, (engine.metrics.scheduler.num_prefix_hit_tokens - before) / num_prompt)


def measure_photos(row: Photos, runs: int, limits: dict[str, float]) -> tuple[list[float], float]:
    """Requests/s of some runs, after one that warms up, and what operations of encoder and prompts allow."""
    from atom import LLMEngine
    from atom.compiler import compile_graph
    from atom.config.load import load
    from atom.jobs.bench.roofline import Limits, min_seconds, read_costs
    from atom.jobs.bench.workload import Step
    from atom.process.gc_utils import settle

    with checkpoint(row.model) as folder:
        config = load(row.overrides(folder))
        graph, engine = compile_graph(config), LLMEngine.from_config(config)
    seconds = []
    for seed in range(runs + 1):
        settle()
        seconds.append(answer_photos(engine, row, seed))
    engine.close()
    vision, rates = config.model.vision, Limits(**limits)
    assert vision is not None, "the row's model reads images"
    num_rows = (row.side // (vision.patch * vision.merger.side)) ** 2
    prompt = Step(0.0, array("q"), [(0, num_rows + row.input_len)], 1)
    least = min_seconds(read_costs(graph), prompt, rates) + encoder_flops(graph, num_rows) / rates.flops
    return [row.num_requests / each for each in seconds[1:]], 1 / least


def answer_photos(engine: LLMEngine, row: Photos, seed: int) -> float:
    """The seconds in which new requests are answered."""
    from atom import SamplingParams
    from atom.runtime.types import RequestOptions

    model, inner = engine.config.model, engine._engine
    assert model.vision is not None, "the row's model reads images"
    params = SamplingParams(temperature=0, max_tokens=row.output_len, ignore_eos=True)
    num_patches, asked = row.side // model.vision.patch, []
    for each in range(row.num_requests):
        grids = [(num_patches, num_patches)]
        tokens, images = draw_prompt_with_images(grids, seed * row.num_requests + each, model, row.input_len)
        asked += inner.prepare(tokens, params, RequestOptions(images=images))
    before, started = engine.metrics.num_encoded_images, time.perf_counter()
    for sequence in asked:
        inner.submit([sequence])
    while inner.has_work:
        inner.step()
    seconds = time.perf_counter() - started
    failed = [sequence.error for sequence in asked if sequence.error is not None]
    assert not failed, failed[0]
    num_encoded = engine.metrics.num_encoded_images - before
    assert num_encoded == row.num_requests, f"{num_encoded} encodings of {row.num_requests} images"
    return seconds


def encoder_flops(graph: Graph, num_rows: int) -> float:
    """The operations on one image that becomes so many rows; the text counts its patches in multiples of these."""
    from atom.graph import VISION, Recipe, ops
    from atom.graph.graph import node_leaves, type_of
    from atom.jobs.bench.roofline import find_matmuls

    flops = 0.0
    for node in graph.programs[VISION].nodes:
        weights = [leaf for leaf in node_leaves(node) if isinstance(leaf, Recipe)]
        matmuls = find_matmuls(node, weights)
        if matmuls or node.target is ops.segment_attention:
            rows, *dims = type_of(node.args[0]).shape
            num = num_rows * int(str(rows).rpartition("*")[0] or 1)
            flops += sum(matmul.work(num).flops for matmul in matmuls)
            if node.target is ops.segment_attention:
                flops += 4.0 * num**2 * math.prod(map(int, dims))
    return flops


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
    """Measure the loading of some layers of the large model from the page cache, GB/s; the limit is only reading."""
    import torch

    from atom import weights
    from atom.checkpoint import SILENT, open_checkpoint
    from atom.compiler import compile_graph
    from atom.config.load import load

    with checkpoint(LARGE_MODEL) as folder:
        hf_config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LOAD_LAYERS}
        (folder / "config.json").write_text(json.dumps(hf_config))
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
    return Figure("Qwen3-8B bf16", "weights, page cache to GPU", "GB/s", LOAD_SHARE * limit, loads[1:], limit)


def write_weights(folder: Path) -> Path:
    """Write a file of ones next to a config.json; its path."""
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
    """Seconds that the weights' readers take to read a file into their pinned buffers, and nothing else."""
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


def measure_starts(start: Start, figures: Mapping[str, Figure], runs: int) -> None:
    """Measure cold and warm starts in turns."""
    with checkpoint(start.model) as model:
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                for figure in figures.values():
                    figure.values.append(time_start(model, Path(folder), ("load_dummy=true", *start.setup)))
    for name, figure in figures.items():
        print_figure(name, figure)


def measure_packed_starts(figure: Figure, runs: int) -> None:
    """Measure starts that read what a start ahead of them has packed in fp8; all files are in the page cache."""
    with checkpoint(LARGE_MODEL) as model, tempfile.TemporaryDirectory() as folder:
        run_isolated(write_weights, model)
        time_start(model, Path(folder), FP8)
        figure.values = [time_start(model, Path(folder), FP8) for _ in range(runs)]
    print_figure(PACKED_START, figure)


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
        ends_with_this = partial(end_with, os.getpid())
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=env, cwd=ROOT, preexec_fn=ends_with_this
        ) as process:
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


def describe_figure(name: str, figure: Figure) -> str:
    """A line with the figure, its share of the limit, and whether it reaches its target."""
    if not figure.values:
        return f"{name}: failed"
    off = abs(figure.median / figure.target - 1)
    verdict = f"{number(figure.target)} is {'reached' if figure.is_met else f'missed by {off:.0%}'}"
    share = "" if figure.limit is None else f", {figure.median / figure.limit:.0%} of the limit"
    return f"{name}: {number(figure.median)} {figure.unit}{share}; {verdict}"


if __name__ == "__main__":
    sys.exit(main())

"""`job=bench`: measure a workload's throughput and latencies against this machine's limit.

atom-run job=bench checkpoint=/models/qwen3 job.num_prompts=32 job.input_len=1024 job.output_len=256
atom-run job=bench load_dummy=true job.input_len=100-1024 job.output_len=100-1024 sampling.temperature=0.6
atom-run job=bench job.dataset_path=ShareGPT.json job.num_prompts=200 job.output=json
atom-run job=bench job.num_prompts=32 job.output=html > page.html     # the latencies as curves
atom-run -m job=bench level=1,2 job.num_prompts=1,16
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
from rich.console import Console

import atom
from atom.assemble import compile_with, open_engine, settle_formats
from atom.checkpoint import RichProgress
from atom.compiler import Compiled, compile_graph, mesh_of
from atom.config import Config
from atom.config.overrides import hide_secret
from atom.jobs.bench.experts_read import count_experts, describe_experts
from atom.jobs.bench.page import make_page
from atom.jobs.bench.roofline import MATMULS, Costs, Limits, acts_of, measure_limits, min_seconds, read_costs
from atom.jobs.bench.workload import Draw, Step, WorkloadRequest, open_workload, recording, submit
from atom.jobs.tables import make_table
from atom.measurement.cores import core_seconds, warn_of
from atom.measurement.hardware import describe_cpus
from atom.measurement.metrics import METRICS, RequestFuncOutput, calculate_metrics, finish_outputs, flatten_metrics
from atom.process.gc_utils import settle
from atom.process.messages import say
from atom.runtime.engine import Engine

PERCENTILES = (50, 90, 99)
OF_PHASE = (
    "steps",
    "tokens",
    "seconds",
    "tokens_per_second",
    "limit_seconds",
    "limit_tokens_per_second",
    "share_of_limit",
)
# the numbers that job.objective may choose
OBJECTIVES = (
    *flatten_metrics(calculate_metrics([], 1.0, PERCENTILES, {})),
    "num_preemptions",
    "num_prefix_hit_tokens",
    "output_throughput_limit",
    "share_waited_for_cores",
    *(f"phases.{phase}.{name}" for phase in ("prefill", "decode", "all") for name in OF_PHASE),
)


class Run(NamedTuple):
    """One run of all requests, from the first submission to the last token."""

    started: float  # seconds
    steps: list[Step]
    outputs: list[RequestFuncOutput]

    @property
    def seconds(self) -> float:
        return self.steps[-1].at - self.started


def run(config: Config, report: Callable[[Mapping[str, Any]], None] = lambda numbers: None) -> int:
    """Print a table or, with job.output=json, an object; the exit code is 1 if a request failed.

    report: is called with the numbers of OBJECTIVES.
    """
    draw, compiled, costs, limits, engine = open_warm(config)
    settle()
    before, cores = engine.stats().scheduler, core_seconds()
    runs = [answer(engine, draw(engine), config) for _ in range(config.job.num_iters)]
    waited, counts = core_seconds().share_waited(cores), engine.metrics.scheduler
    result = {
        **describe_run(config, compiled.level),
        **measure(runs),
        "num_preemptions": counts.num_preemptions - before.num_preemptions,
        "num_prefix_hit_tokens": counts.num_prefix_hit_tokens - before.num_prefix_hit_tokens,
        "share_waited_for_cores": waited,
        "warnings": warn_of(waited),
        **compare(runs, costs, limits),
    }
    if experts := count_experts(engine, draw(engine), config):
        result["experts_read"] = experts.describe()
    by_phase = result["phases"].items()
    phases = {f"phases.{phase}.{name}": value for phase, each in by_phase for name, value in each.items()}
    report({**result, **phases})
    if config.job.output == "json":
        print(json.dumps(result))
    elif config.job.output == "html":
        print(make_page(result, [output for run in runs for output in run.outputs]))
    else:
        show(result)
    for warning in result["warnings"]:
        say(warning)
    if result["failed"]:
        failed = next(output.error for run in runs for output in run.outputs if not output.success)
        say(f"{result['failed']} requests failed, the first one with {failed}")
    return 1 if result["failed"] else 0


def open_warm(config: Config) -> tuple[Draw, Compiled, dict[str, Costs], Limits, Engine]:
    """The workload, the model, its costs, the machine's limits, and an engine that is warmed up."""
    draw, progress = open_workload(config), RichProgress()
    config = settle_formats(config, progress)
    compiled = compile_with(config, progress)
    # stages take a step one after the other: it costs as much as that of one
    whole = replace(config, parallel=replace(config.parallel, pipeline=1))
    costs = read_costs(compiled.graph if whole == config else compile_graph(whole))
    limits = measure_limits(config.device, config.dtype, acts_of(costs))  # before an engine takes the memory
    if config.device == "cpu":  # which ranks share
        limits = limits.of_each(mesh_of(config).ranks_per_stage)
    engine = open_engine(config, progress, compiled)
    for _ in range(config.job.num_warmups):
        answer(engine, draw(engine), config)
    return draw, compiled, costs, limits, engine


def answer(engine: Engine, requests: list[WorkloadRequest], config: Config) -> Run:
    """Answer all requests, with nothing cached before; times count from the submission of the first."""
    engine.scheduler.drop_kv()
    with recording(engine) as record:
        started = time.perf_counter()
        submit(engine, requests, config)
        ended = []
        while engine.has_work:
            ended += engine.step()
    outputs, times_of = [], record.times()
    for sequence in ended:
        times = times_of.get(sequence, [])
        output = RequestFuncOutput(
            success=sequence.error is None and bool(times),
            error=sequence.error or "",
            prompt_len=0 if sequence.index else len(sequence.prompt),  # n answers share one prompt
            output_tokens=len(times),
        )
        if times:
            output.ttft, output.latency = times[0] - started, times[-1] - started
            output.itl = [after - before for before, after in itertools.pairwise(times)]
        outputs.append(output)
    finish_outputs(outputs, None)
    last = max((times[-1] for times in times_of.values()), default=math.inf)
    return Run(started, [step for step in record.steps if step.at <= last], outputs)


def describe_run(config: Config, level: int) -> dict[str, Any]:
    """Describe the workload, the model and the device."""
    versions = {"atom": atom.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "job": config.job.kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe_device(config.device),
        "versions": versions,
        "model": config.model.name,
        "dtype": config.dtype,
        "device": config.device,
        "level": level,
        "num_prompts": config.job.num_prompts,
        "overrides": [hide_secret(text) for text in config.overrides],
    }


def describe_device(device: str) -> str:
    return describe_cpus() if device == "cpu" else str(torch.get_device_module(device).get_device_name())


def measure(runs: Sequence[Run]) -> dict[str, Any]:
    """Compute throughput and latencies (milliseconds) over all runs, named as in `atom.benchmarks`' results."""
    outputs = [output for run in runs for output in run.outputs]
    metrics = flatten_metrics(calculate_metrics(outputs, sum(run.seconds for run in runs), PERCENTILES, {}))
    rates = [sum(output.output_tokens or 0 for output in run.outputs) / run.seconds for run in runs]
    return {**metrics, "output_throughputs": rates}


def compare(runs: Sequence[Run], costs: dict[str, Costs], limits: Limits) -> dict[str, Any]:
    """Compare with the limits, by phase and in all: steps, tokens, seconds, and the min seconds possible."""
    timed = [(step, seconds) for run in runs for step, seconds in step_seconds(run)]
    by_phase = {"prefill": [(s, t) for s, t in timed if s.chunks], "decode": [(s, t) for s, t in timed if not s.chunks]}
    phases = {name: compare_steps(steps, costs, limits) for name, steps in {**by_phase, "all": timed}.items() if steps}
    num_output = sum(output.output_tokens or 0 for run in runs for output in run.outputs)
    return {
        "limits": limits.measured(),
        "phases": phases,
        "output_throughput_limit": num_output / phases["all"]["limit_seconds"],
    }


def step_seconds(run: Run) -> Iterator[tuple[Step, float]]:
    """Each step with the time since the previous commit, so that no time is left out."""
    before = run.started
    for step in run.steps:
        yield step, step.at - before
        before = step.at


def compare_steps(timed: Iterable[tuple[Step, float]], costs: dict[str, Costs], limits: Limits) -> dict[str, Any]:
    timed = list(timed)
    seconds = sum(each for _, each in timed)
    limit_seconds = sum(min_seconds(costs, step, limits) for step, _ in timed)
    num_tokens = sum(step.num_tokens for step, _ in timed)
    return {
        "steps": len(timed),
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "limit_seconds": limit_seconds,
        "limit_tokens_per_second": num_tokens / limit_seconds,
        "share_of_limit": limit_seconds / seconds,
    }


def show(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(f"{result['model']}, {result['dtype']}, level {result['level']}, on {result['hardware']}; {versions}")
    console.print(
        f"{result['completed']} request{'s' * (result['completed'] != 1)}, {result['total_input_tokens']:,} tokens in, "
        f"{result['total_output_tokens']:,} out, {result['duration']:.2f} s\n"
    )
    rates = make_table("output tokens/s", "all tokens/s", "requests/s", "of the limit")
    names = ("output_throughput", "total_token_throughput", "request_throughput")
    share = f"{result['phases']['all']['share_of_limit']:.1%} of {result['output_throughput_limit']:,.1f}"
    rates.add_row(*(f"{result[name]:,.2f}" for name in names), share)
    console.print(rates, "")
    times = make_table("ms", "mean", *(f"p{rank}" for rank in PERCENTILES), left=("ms",))
    for name, label in METRICS.items():
        values = [result[f"mean_{name}_ms"], *(result[f"p{rank}_{name}_ms"] for rank in PERCENTILES)]
        times.add_row(label, *("-" if value is None else f"{value:,.2f}" for value in values))
    console.print(times, "")
    phases = make_table("phase", "steps", "tokens", "s", "tokens/s", "limit", "share", left=("phase",))
    for name, phase in result["phases"].items():
        shown = [f"{phase['steps']:,}", f"{phase['tokens']:,}", f"{phase['seconds']:.2f}"]
        shown += [f"{phase[key]:,.1f}" for key in ("tokens_per_second", "limit_tokens_per_second")]
        phases.add_row(name, *shown, f"{phase['share_of_limit']:.1%}")
    console.print(phases, "")
    if experts := result.get("experts_read"):
        console.print(f"{describe_experts(experts)}\n")
    limits = result["limits"]
    console.print(
        f"limits measured in this run: {limits['bandwidth'] / 1e9:,.1f} GB/s read, "
        f"{limits['flops'] / 1e12:,.2f} TFLOP/s of matmuls"
        + "".join(f", {limits[act] / 1e12:,.2f} in {act}" for act in MATMULS if act in limits)
    )

"""Estimate all candidates, and order those that fit by cost.

plan = make_plan(config, gpu, load)
plan.options[0].name                # "tp4", the cheapest that fits and gives what is wanted
plan.refused                        # ["tp8: its heads cannot be divided", …]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from atom.checkpoint import SILENT, Progress
from atom.config import Config, GPUConfig
from atom.config.schema import ParallelConfig
from atom.errors import CapacityError, UnsupportedError
from atom.jobs.plan.candidates import Format, engine_layouts, find_formats
from atom.jobs.plan.engines import Engine, Run, Task, Tried, try_layout, try_layouts
from atom.jobs.plan.estimate import Estimate
from atom.jobs.plan.load import Load
from atom.jobs.plan.shares import Shares, find_shares
from atom.jobs.recipe import layout_of
from atom.kernels import Target

SECONDS_PER_HOUR = 3600
MILLION = 1e6
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # requests of an engine, of the page's plot


@dataclass(frozen=True)
class Option:
    """A layout and format that fits, with its estimate."""

    parallel: ParallelConfig  # of one engine
    format: Format
    engine: Engine
    run: Run
    usable_bytes: int  # of a GPU's memory
    load: Load

    @property
    def layout(self) -> str:
        return name_layout(self.parallel, self.replicas)

    @property
    def left_bytes(self) -> list[int]:
        """Of a rank of each stage, besides its weights."""
        return [self.usable_bytes - size for size in self.engine.weights_bytes]

    @property
    def replicas(self) -> int:
        return self.run.replicas

    @property
    def estimate(self) -> Estimate:
        """Of one engine."""
        return self.run.estimate

    @property
    def sequences(self) -> int:
        """Of the context, in all engines."""
        return self.engine.sequences * self.replicas

    @property
    def requests(self) -> int:
        """At a time, in all engines."""
        return self.load.requests if self.load.rate is None else self.run.requests * self.replicas

    @property
    def num_gpus(self) -> int:
        return self.parallel.num_ranks * self.replicas

    @property
    def overrides(self) -> list[str]:
        """What chooses this layout and format."""
        sizes = {name: getattr(self.parallel, name) for name in ("tensor", "data", "experts", "pipeline")}
        sizes["replicas"] = self.replicas
        return [*self.format.overrides, *(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)]

    @property
    def limit_rate(self) -> float:
        """Tokens/s of all requests at the limits."""
        return self.tokens_per_second * self.estimate.seconds / self.estimate.limit_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.requests * self.user_rate

    @property
    def user_rate(self) -> float:
        """Tokens/s of each request, from its arrival to its last token."""
        return self.load.output_len / self.estimate.seconds

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds for a million tokens of answers."""
        done = self.tokens_per_second if self.load.mean_rate is None else self.load.mean_rate * self.load.output_len
        return MILLION * self.num_gpus / done

    def describe_format(self) -> str:
        return f"quant={self.format.quant}, {self.format.kv} KV"

    def cost(self, price_per_hour: float) -> float:
        """For a million tokens of answers."""
        return self.gpu_seconds / SECONDS_PER_HOUR * price_per_hour


@dataclass
class Plan:
    shares: Shares
    options: list[Option] = field(default_factory=list)  # that fit and give what is wanted, the cheapest first
    tried: list[tuple[ParallelConfig, Format, Engine]] = field(default_factory=list)
    short: list[Option] = field(default_factory=list)  # that fit, but are slower than is wanted
    refused: list[tuple[str, str]] = field(default_factory=list)  # layout or format, and why not


@dataclass
class Shortage:
    """What lacks, of the candidates that come nearest to fitting."""

    gpus: int | None = None  # the fewest that hold the weights
    sequences: int = 0  # of the context, the most that fit
    where: str = ""  # the layout of these

    def add_weights(self, num_bytes: int, gpu: GPUConfig) -> None:
        """Take into account that a format's weights have so many bytes."""
        gpus = ceil(num_bytes / gpu.memory)
        self.gpus = gpus if self.gpus is None else min(self.gpus, gpus)


def make_plan(config: Config, gpu: GPUConfig, load: Load, target: Target, progress: Progress = SILENT) -> Plan:
    """Estimate all layouts and formats. CapacityError that says what would do if none fits or none is as fast."""
    formats, refused = find_formats(config, gpu, load)
    usable = replace(gpu, memory=int(gpu.memory * config.serve.gpu_memory_utilization))
    plan, shortage = Plan(find_shares(str(config.job.gpu), gpu), refused=refused), Shortage()
    by_quant: dict[str, list[Format]] = {}
    for each in formats:
        by_quant.setdefault(each.quant, []).append(each)
    common = (config.job.gpus, usable, load, plan.shares, target, BATCHES if config.job.output == "html" else ())
    single = [Task(ParallelConfig(), each, *common) for each in by_quant.values()]
    tried = list(map(try_layout, single))
    others = list[Task]()
    for task, whole in zip(single, tried, strict=True):
        size = whole.engines[0].weights_bytes[0] if whole.engines else 0
        if whole.engines:
            shortage.add_weights(size, usable)
        mixtures = [mlp for mlp in task.formats[0].config.model.mlps if mlp.kind == "moe"]
        layouts = engine_layouts(config.job.gpus, min((mlp.experts or 0 for mlp in mixtures), default=0))
        # no rank has less than its part
        others += [Task(each, *task[1:]) for each in layouts if size <= usable.memory * each.num_ranks]
    for task, result in [*zip(single, tried, strict=True), *zip(others, try_layouts(others, progress), strict=True)]:
        add_options(plan, shortage, task, result, config)
    if not plan.tried:
        reason = next(each.refusal for each in tried if each.refusal is not None)
        raise UnsupportedError(f"no layout runs on {config.job.gpu}: {reason}")
    if not plan.options:
        raise too_slow(config, plan.short) if plan.short else nothing_fits(config, load, shortage)
    plan.options.sort(key=order)
    plan.short.sort(key=order)
    return plan


def add_options(plan: Plan, shortage: Shortage, task: Task, tried: Tried, config: Config) -> None:
    """Add what was found of a layout."""
    if tried.refusal is not None:
        name = f"{layout_of(task.parallel)}, quant={task.formats[0].quant}"
        plan.refused.append((name, tried.refusal))
    for fmt, engine in zip(task.formats, tried.engines, strict=False):
        plan.tried.append((task.parallel, fmt, engine))
        most = task.num_gpus // task.parallel.num_ranks
        if engine.sequences * most > shortage.sequences:
            shortage.sequences, shortage.where = engine.sequences * most, name_layout(task.parallel, most)
        for run in engine.runs:
            option = Option(task.parallel, fmt, engine, run, task.gpu.memory, task.load)
            (plan.options if is_wanted(option, config) else plan.short).append(option)


def name_layout(parallel: ParallelConfig, replicas: int) -> str:
    """The name of a layout, as parallel= takes it; of several engines with data groups, their number and that."""
    name = layout_of(replace(parallel, replicas=replicas))
    is_grouped = parallel.data > 1 or parallel.experts > 1
    return f"{replicas} x {name}" if replicas > 1 and is_grouped else name


def order(option: Option) -> tuple[bool, float, float]:
    """The cheapest first, of equals the fastest; those whose collectives are not known come last."""
    return option.estimate.collective_seconds is None, option.gpu_seconds, -option.user_rate


def is_wanted(option: Option, config: Config) -> bool:
    """Whether each request is as fast as is asked for."""
    job = config.job
    is_fast = job.min_user_rate is None or option.user_rate >= job.min_user_rate
    return is_fast and (job.max_ttft is None or option.estimate.ttft_seconds <= job.max_ttft)


def nothing_fits(config: Config, load: Load, shortage: Shortage) -> CapacityError:
    """What would fit: more GPUs for the weights, fewer or shorter requests for the KV."""
    job = config.job
    gpus = f"job.gpus={job.gpus} of {job.gpu}"
    if shortage.gpus is not None and shortage.gpus > job.gpus:
        enough = 1 << (shortage.gpus - 1).bit_length()
        return CapacityError(
            f"{gpus} do not hold the weights, which need {shortage.gpus} at least: set job.gpus={enough}"
        )
    if shortage.sequences == 0:
        return CapacityError(
            f"{gpus} hold no sequence of {load.max_len:,} tokens besides the weights: raise job.gpus, or lower "
            f"job.input_len or job.output_len"
        )
    if load.rate is not None:
        return CapacityError(
            f"{gpus} do not keep up with the {load.rate:.3g} requests/s of the busiest minute of job.trace: raise "
            "job.gpus"
        )
    if shortage.sequences >= load.requests:
        return CapacityError(
            f"job.num_prompts={load.requests:,} is more than engines take at a time: raise "
            f"serve.max_num_seqs={config.serve.max_num_seqs:,}"
        )
    return CapacityError(
        f"{gpus} hold {shortage.sequences:,} sequences of {load.max_len:,} tokens at most ({shortage.where}), not "
        f"{load.requests:,}: raise job.gpus, or lower job.num_prompts, job.input_len or job.output_len"
    )


def too_slow(config: Config, short: Sequence[Option]) -> CapacityError:
    """What is the fastest, if it is not fast enough."""
    user, first = max(short, key=lambda each: each.user_rate), min(short, key=lambda each: each.estimate.ttft_seconds)
    asked, best = list[str](), list[str]()
    if config.job.min_user_rate is not None:
        asked.append(f"job.min_user_rate={config.job.min_user_rate:g}")
        best.append(f"{user.user_rate:.4g} tokens/s a user ({user.layout}, {user.describe_format()})")
    if config.job.max_ttft is not None:
        asked.append(f"job.max_ttft={config.job.max_ttft:g}")
        best.append(f"a TTFT of {first.estimate.ttft_seconds:.3g} s ({first.layout}, {first.describe_format()})")
    return CapacityError(
        f"none of {len(short)} layouts that fit reaches {' and '.join(asked)}: estimated are at best "
        f"{' and '.join(best)}; raise job.gpus, or ask for less"
    )

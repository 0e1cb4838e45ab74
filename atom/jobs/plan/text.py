"""Print a plan as a table, with what its figures follow from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console

from atom.config import Config, GPUConfig
from atom.jobs.plan.candidates import AS_GIVEN, AS_STORED, Format
from atom.jobs.plan.load import Load
from atom.jobs.plan.measure import Measured
from atom.jobs.plan.ranking import Option, Plan
from atom.jobs.tables import make_table

MAX_ROWS = 16  # of the table; the others are in job.output=json and on the page
TABLE_WIDTH, WIDTH = 160, 118  # columns of the table, and of the lines below it
LEFT = ("layout", "weights", "KV")


def print_text(
    plan: Plan, load: Load, gpu: GPUConfig, config: Config, measured: Sequence[Measured | None] = ()
) -> None:
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, TABLE_WIDTH))
    console.print(
        f"{config.checkpoint or config.model.name} on {config.job.gpus} x {config.job.gpu}: {describe_load(load)}\n"
    )
    head, *rows = table_rows(plan.options[:MAX_ROWS], load, config, measured)
    table = make_table(*head, left=LEFT)
    for row in rows:
        table.add_row(*row)
    console.print(table, "")
    hidden = len(plan.options) - len(rows)
    further = [f"{hidden} more fit, at a higher cost: job.output=json and html have them."] if hidden else []
    for line in [*further, *explain_figures(plan, gpu, config)]:
        console.print(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def describe_load(load: Load) -> str:
    lengths = f"{load.input_len:,} tokens in, {load.output_len:,} out"
    if load.rate is not None:
        return f"{load.rate:.3g} requests/s in the busiest minute, {load.mean_rate:.3g} on average, of {lengths}"
    return f"{load.requests:,} request{'s' * (load.requests != 1)} at a time, {lengths}"


def table_rows(
    options: Sequence[Option], load: Load, config: Config, measured: Sequence[Measured | None] = ()
) -> list[list[str]]:
    """The table, its header first. Memory is that of a rank, of stages the least and the most."""
    price = config.job.price_per_hour
    cost = "GPU-s/M tokens" if price is None else "cost/M tokens"
    head = [*LEFT, "GPUs", "weights GiB", "left GiB", "MiB/sequence", "sequences"]
    head += ["at a time"] if load.rate is not None else []
    head += ["tok/s a user", "tok/s", "(limit)", "TTFT ms", "(limit)", cost, *(["measured tok/s"] if measured else [])]
    rows = [head]
    for at, each in enumerate(options):
        mark = "" if each.estimate.collective_seconds is not None else "*"
        shown = [each.layout, name_quant(each.format), each.format.kv, str(each.num_gpus)]
        shown += [_span(each.engine.weights_bytes, 2**30), _span(each.left_bytes, 2**30)]
        shown += [_span(each.engine.sequence_bytes, 2**20), f"{each.sequences:,}"]
        shown += [f"{each.requests:,}"] if load.rate is not None else []
        shown += [
            f"{each.user_rate:,.1f}{mark}",
            f"{each.tokens_per_second:,.0f}{mark}",
            f"{each.limit_rate:,.0f}{mark}",
        ]
        ttfts = (each.estimate.ttft_seconds, each.estimate.ttft_limit_seconds)
        shown += [f"{seconds * 1e3:,.0f}{mark}" for seconds in ttfts]
        shown.append(f"{each.gpu_seconds:,.0f}{mark}" if price is None else f"{each.cost(price):,.3f}{mark}")
        if measured:
            result = measured[at] if at < len(measured) else None
            shown.append(f"{result.tokens_per_second:,.0f}" if result else "")
        rows.append(shown)
    return rows


def _span(sizes: Sequence[int], unit: int) -> str:
    """The smallest and the largest size, or one of equal ones."""
    least, most = f"{min(sizes) / unit:,.1f}", f"{max(sizes) / unit:,.1f}"
    return least if least == most else f"{least}-{most}"


def name_quant(fmt: Format) -> str:
    return "as stored" if fmt.quant == AS_STORED else fmt.quant


def explain_figures(plan: Plan, gpu: GPUConfig, config: Config) -> Iterator[str]:
    """What the figures are, what of the first option they follow from, and what is left out."""
    best, job = plan.options[0], config.job
    estimate = best.estimate
    rows, prompts = " and ".join(estimate.share.rows), " and ".join(estimate.prompt_share.rows)
    yield (
        "Estimates: limits by conf/gpu, times the shares of limits that docs/performance.md has measured for such "
        f"shapes on {plan.shares.measured_on}. Of the first line: decodes reach {estimate.share.value:.0%} ({rows}), "
        f"prompts {estimate.prompt_share.value:.0%} ({prompts}); {_describe_sums(best)}."
    )
    yield (
        f"Memory is that of a rank, of stages from the least to the most. Of a GPU's {gpu.memory / 2**30:,.1f} GiB "
        f"{config.serve.gpu_memory_utilization:.0%} count; what weights leave is for KV and what a step needs, which "
        "is not known. A sequence has as many tokens as the context; sequences are those of all GPUs."
    )
    cost = "" if job.price_per_hour is None else f", at {job.price_per_hour:g} an hour of a GPU"
    yield (
        "tok/s count answers, and the time of prompts too; TTFT is that of a single prompt; M tokens are a million of "
        f"answers{cost}."
    )
    if any(each.format.quant not in (AS_STORED, AS_GIVEN) or each.format.kv == "fp8" for each in plan.options):
        yield "Formats other than as stored, and KV in fp8, change answers a little: job=compare measures by how much."
    if any(each.estimate.collective_seconds is None for each in plan.options):
        yield f"*: without collectives, for which conf/gpu has no times of {job.gpu}; such layouts come last."
    if plan.short:
        yield f"{len(plan.short)} more fit, but are slower than is asked for."
    reasons = dict.fromkeys(reason for _, reason in plan.refused)
    for reason in reasons:
        yield f"left out: {'; '.join(name for name, why in plan.refused if why == reason)}: {reason}"


def _describe_sums(option: Option) -> str:
    seconds = option.estimate.collective_seconds
    if option.parallel.num_ranks == 1:
        return "one rank has no collectives"
    if seconds is None:
        return "collectives do not count"
    return f"collectives are {seconds / option.estimate.seconds:.0%} of the time"

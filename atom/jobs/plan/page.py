"""Write the page of `job=plan job.output=html`: table, frontier, memory."""

from __future__ import annotations

from collections.abc import Sequence

from atom.config import Config, GPUConfig
from atom.jobs.plan.load import Load
from atom.jobs.plan.measure import Measured
from atom.jobs.plan.ranking import Plan, name_layout
from atom.jobs.plan.text import MAX_ROWS, describe_load, explain_figures, name_quant, table_rows
from atom.measurement import page
from atom.measurement.page import Bar, Dot

MAX_BARS = 16  # options whose memory is shown


def make_page(plan: Plan, load: Load, gpu: GPUConfig, config: Config, measured: Sequence[Measured | None] = ()) -> str:
    lengths = f"{load.input_len:,} tokens in, {load.output_len:,} out"
    head, *rows = table_rows(plan.options, load, config, measured)
    further = [page.fold(f"{len(rows) - MAX_ROWS} more", page.table([head, *rows[MAX_ROWS:]]))]
    parts = [
        page.paragraph(f"Estimated for {describe_load(load)}; the cheapest first."),
        page.table([head, *rows[:MAX_ROWS]]),
        *(further if len(rows) > MAX_ROWS else []),
        page.heading("Throughput against speed of a user"),
        page.frontier(
            find_dots(plan, load),
            (f"tokens/s of a user, {lengths}", "tokens/s of a GPU"),
            least=config.job.min_user_rate,
        ),
        page.paragraph(
            "Each point is an engine with 1 to 512 requests at a time, which is the last number of its name; the line "
            "joins the best ones."
        ),
        page.heading("Memory of a rank"),
        show_memory(plan, config, gpu),
        page.heading("What the figures are"),
        *(page.paragraph(line) for line in explain_figures(plan, gpu, config)),
    ]
    title = f"{config.checkpoint or config.model.name} on {config.job.gpus} x {config.job.gpu}"
    return page.write_page(title, parts)


def find_dots(plan: Plan, load: Load) -> list[Dot]:
    """Each engine with each number of requests; engines side by side are at the same place."""
    return [
        Dot(
            load.output_len / run.estimate.seconds,
            run.requests * load.output_len / run.estimate.seconds / parallel.num_ranks,
            f"{name_layout(parallel, 1)} {name_quant(fmt)}, {fmt.kv} KV, {run.requests}",
        )
        for parallel, fmt, engine in plan.tried
        for run in engine.curve
    ]


def show_memory(plan: Plan, config: Config, gpu: GPUConfig) -> str:
    """The weights of the largest rank, and a line where the memory that engines use ends."""
    shown = dict[str, Bar]()
    for option in plan.options:
        label, size = (
            f"{name_layout(option.parallel, 1)}, {name_quant(option.format)}",
            max(option.engine.weights_bytes),
        )
        shown.setdefault(label, Bar(label, size, f"{size / 2**30:,.1f} GiB of weights"))
    usable = gpu.memory * config.serve.gpu_memory_utilization
    return page.bars([*shown.values()][:MAX_BARS], limit=usable)

"""Report the results of a sweep: table, CSV, JSON, page with plots.

    report_results(results, Path("multirun/2026-01-31/12-00-00"))

Jobs are sorted by `job.objective`, the best first. A plot has throughput against interactivity, and a line for each
variant: jobs that differ in nothing but `job.num_prompts`. Each pair of input and output lengths has its own plot.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from atom.jobs.start import is_objective
from atom.jobs.sweep.job import Result
from atom.jobs.tables import make_table, with_error
from atom.measurement import page
from atom.measurement.cores import warn_of
from atom.measurement.plot import Measured, Plot, Point, Series, draw_measured, write_html
from atom.process.messages import say

LOWER_IS_BETTER = re.compile(
    r".*(_ms|seconds|_bytes|_error|perplexity|perplexity_ratio|bits_per_byte)|(max_)?kl|duration|failed|num_preemptions"
    r"|share_waited_for_cores|phases\.\w+\.steps"
)
COLUMNS = (  # of the table, if the jobs have them
    *("perplexity", "perplexity_ratio", "kl", "agreement", "tasks.*"),
    *("output_throughput", "median_tpot_ms", "mean_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "phases.all.share_of_limit"),
    *("tokens_per_second", "first_token_seconds", "load_seconds"),
    *("decode_limit", "decode_limit_per_gpu", "prefill_limit", "prefill_limit_per_gpu"),
    *("fits", "kv_tokens", "kv_sequences", "weights_bytes", "active_weights_bytes"),
)
FITS = "fits"  # 1 or 0
ERROR = "_error"  # numbers that are the standard errors of others
PER_GPU = "_per_gpu"  # numbers that equal others on one GPU
QUALITY = ("kl", "perplexity", "tasks.*")  # the first that jobs have is plotted
LABELS = {"kl": "KL divergence of the reference, nats"}
LOAD = "job.num_prompts"  # the points of a line differ in it
LENGTHS = ("job.input_len", "job.output_len")  # plots differ in them


def report_results(results: Sequence[Result], folder: Path) -> None:
    """Print the table, and write results.csv, results.json and results.html; nothing if no job has a number."""
    if not any(result.numbers for result in results):
        return
    ordered = sort_results(results)
    rows = make_rows(ordered)
    width = None if sys.stdout.isatty() else 1000  # lines are not cut in a pipe
    is_object = any(result.output == "json" for result in results)  # stdout has an object a line
    console = Console(width=width, stderr=is_object, markup=False, emoji=False, highlight=False)
    num_names = len(differing(results)) + 1
    table = make_table(*rows[0], left=rows[0][:num_names])
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    write_csv(ordered, folder / "results.csv")
    (folder / "results.json").write_text(json.dumps([asdict(result) for result in ordered], indent=1))
    written = "results.csv, results.json and results.html"
    try:
        write_page(ordered, rows, folder / "results.html")
    except ModuleNotFoundError as error:
        written = f"results.csv and results.json; no page: {error}"
    say(f"{folder}: {written}")


def sort_results(results: Sequence[Result]) -> list[Result]:
    """The best by the objective first, then those that do not fit on their GPU, then those that failed."""
    name = table_numbers(results)[0]
    sign = 1 if LOWER_IS_BETTER.fullmatch(name) else -1

    def rank(result: Result) -> tuple[bool, bool, float, int]:
        value = result.numbers.get(name, math.inf * sign)
        return bool(result.code), result.numbers.get(FITS) == 0, sign * value, result.number

    return sorted(results, key=rank)


def table_numbers(results: Sequence[Result]) -> list[str]:
    """The names of the numbers in the table: the objective, or a throughput if none is set, and others."""
    objectives = [result.objective_name for result in results if result.objective_name]
    has_ranks = any(result.num_ranks > 1 for result in results)
    columns = [name for name in COLUMNS if has_ranks or not name.endswith(PER_GPU)]
    found = dict.fromkeys(name for result in results for name in result.numbers)
    shown = [name for name in found if not name.endswith(ERROR)]
    listed = [name for each in columns for name in shown if is_objective(name, [each])]
    return list(dict.fromkeys([*(name for name in objectives if name in found), *listed]))


def overrides_of(result: Result) -> dict[str, str]:
    """A job's overrides by key."""
    return {key: value for key, _, value in (text.partition("=") for text in result.overrides)}


def differing(results: Sequence[Result]) -> list[str]:
    """The keys of the overrides in which jobs differ."""
    each = [overrides_of(result) for result in results]
    keys = dict.fromkeys(key for overrides in each for key in overrides)
    return [key for key in keys if len({overrides.get(key) for overrides in each}) > 1]


def make_rows(results: Sequence[Result]) -> list[list[str]]:
    """Make the table with its header: a row for each job, with the overrides in which jobs differ, and its numbers."""
    keys, names = differing(results), table_numbers(results)
    rows = [["job", *keys, *names]]
    for result in results:
        overrides = overrides_of(result)
        numbers = [format_number(name, result.numbers) for name in names]
        numbers[0] = "failed" if result.code else numbers[0]
        rows.append([str(result.number), *(overrides.get(key, "") for key in keys), *numbers])
    return rows


def format_number(name: str, numbers: Mapping[str, float]) -> str:
    """Format with its standard error, or else 4 significant digits; no decimals from 1,000 up."""
    value, error = numbers.get(name), numbers.get(f"{name}{ERROR}")
    if value is None:
        return "-"
    if error is not None:
        return with_error(value, error)
    if name == FITS:
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write_csv(results: Sequence[Result], path: Path) -> None:
    """A line for each job: its overrides, and all its numbers."""
    keys = list(dict.fromkeys(key for result in results for key in overrides_of(result)))
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["number", *keys, "code", "seconds", *names])
        for result in results:
            overrides = overrides_of(result)
            own = [overrides.get(key, "") for key in keys], [result.numbers.get(name, "") for name in names]
            writer.writerow([result.number, *own[0], result.code, result.seconds, *own[1]])


def write_page(results: Sequence[Result], rows: Sequence[Sequence[str]], path: Path) -> None:
    """Write a page that needs nothing else: plots, and the table."""
    same = [text for text in results[0].overrides if text.partition("=")[0] not in differing(results)]
    title = f"Sweep of {' '.join(same)}"
    if plots := make_plots(results):
        drawn = f'<div class="plot">{draw_measured(plots)}</div>'
        path.write_text(page.write_page(title, [page.notes(describe(results)), drawn, page.table(rows)]), "utf-8")
        return
    is_gpu = any(result.device == "cuda" for result in results)
    write_html(
        make_series(results),
        rows,
        title,
        describe(results),
        path,
        unit="output tokens/s of a GPU" if is_gpu else "output tokens/s",
    )


def describe(results: Sequence[Result]) -> list[str]:
    """Describe the numbers: where they were measured or computed, and which jobs were slowed by others or failed."""
    measured = {describe_hardware(each) for each in results if each.job != "explain"}
    gpus = sorted({each.gpu or "this machine" for each in results if each.job == "explain"})
    notes = []
    if measured:
        notes.append(f"Measured on {' and on '.join(sorted(measured))}, {results[0].sweep[:16].replace('T', ' ')}.")
    if gpus:
        notes.append(f"Computed for {' and '.join(gpus)} from config.json, not measured: no run exceeds a limit.")
    waited = [(result.number, result.numbers.get("share_waited_for_cores")) for result in results]
    notes += [f"Job {number}: {warning}." for number, share in waited for warning in warn_of(share)]
    return notes + [f"Job {result.number} failed: {result.error}" for result in results if result.code]


def describe_hardware(result: Result) -> str:
    return f"{result.hardware} with torch {result.versions['torch']}"


def make_series(results: Sequence[Result]) -> list[Series]:
    """Make a line for each variant, its points by the number of prompts."""
    keys, lines = differing(results), dict[tuple[str, str], list[tuple[float, Point]]]()
    for result in results:
        tpot, throughput = result.numbers.get("median_tpot_ms"), result.numbers.get("output_throughput")
        if not tpot or throughput is None:
            continue
        overrides = overrides_of(result)
        own = {key: overrides.get(key, "") for key in keys}
        load = own.pop(LOAD, "")
        lengths = [f"{key}={own.pop(key)}" for key in LENGTHS if key in own]
        panel = ", ".join([*lengths, *([f"points by {LOAD}"] if load else [])])
        num_gpus = result.num_ranks if result.device == "cuda" else 1
        point = Point(1000 / tpot, throughput / num_gpus, load)
        label = " ".join(f"{key}={value}" for key, value in own.items()) or "all jobs"
        lines.setdefault((panel, label), []).append((result.numbers.get("completed", 0.0), point))
    return [Series(*at, tuple(point for _, point in sorted(points))) for at, points in lines.items()]


def make_plots(results: Sequence[Result]) -> list[Plot]:
    """Make the plots of what `job=eval` has measured: quality against bytes, and against speed."""
    done = [result for result in results if result.job == "eval" and not result.code]
    names = [name for name in table_numbers(done) if is_objective(name, QUALITY)]
    quality = next((name for name in QUALITY if name in names), next(iter(names), None))
    points = [result for result in done if quality in result.numbers]
    if quality is None or not points:
        return []
    keys = differing(results)

    def plot(name: str, across: str, unit: float) -> Plot:
        return Plot(
            across,
            LABELS.get(quality, quality),
            tuple(
                Measured(
                    result.numbers[name] / unit,
                    result.numbers[quality],
                    result.numbers.get(f"{quality}{ERROR}"),
                    " ".join(f"{key}={value}" for key, value in overrides_of(result).items() if key in keys),
                )
                for result in points
            ),
        )

    return [plot("weights_bytes", "weights, GB", 1e9), plot("output_throughput", "output tokens/s", 1.0)]

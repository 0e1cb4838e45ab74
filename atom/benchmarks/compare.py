"""Compare two sets of results, or show one: a table and a plot.

    python -m atom.benchmarks.compare results/before results/after --output before_after
    python -m atom.benchmarks.compare a.json b.json
    python -m atom.benchmarks.compare results/before                    # one set: no ratios
    python -m atom.benchmarks.compare results/public results/clean      # results/public_tp8_….json: prefixes

Results are matched by their names without the prefix or the date. The table goes to stdout, and before_after.png and
before_after.html show throughput against interactivity. Notes below the table say why numbers may not be comparable.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from atom.benchmarks.benchmark_utils import BenchmarkError, FlagParser, UsageError, report, say
from atom.measurement.plot import Point, Series, draw_png, write_html

NAME = re.compile(r"(?:(?P<prefix>.*)_)?(?P<key>tp(?P<tp>\d+)_isl(?P<isl>\d+)_osl(?P<osl>\d+)_conc(?P<conc>\d+))")
DATE = re.compile(r"-\d{8}-\d{6}(-\d+)?$")  # at the end of the names that benchmark_serving makes
UNIT = "output tokens/s (a GPU, if tp is known)"
COLUMNS = (  # key of a result, title
    ("output_throughput", "output tok/s"),
    ("median_ttft_ms", "median TTFT ms"),
    ("median_tpot_ms", "median TPOT ms"),
    ("median_first_turn_ttft_ms", "first turn TTFT ms"),
    ("median_later_turns_ttft_ms", "later turns TTFT ms"),
)
NUM_ALWAYS = 3  # columns of every table; others are of conversations


@dataclass(frozen=True)
class Results:
    label: str
    by_key: Mapping[str, Mapping[str, Any]]  # the content of each result file, by its name without prefix or date


def make_parser() -> FlagParser:
    description = "Shows the results of two measurements, or of two folders of them, side by side; or those of one."
    parser = FlagParser("compare", description, usage="A [B] [--output NAME]")
    about = "a folder of results, a result file, or the beginning of several files' names: folder/prefix"
    parser.add_argument("a", metavar="A", help=about)
    parser.add_argument("b", metavar="B", nargs="?", help="the same; ratios are B / A")
    parser.add_argument("--output", default="compare", help="NAME.png and NAME.html are written")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return report("compare", lambda: run(make_parser().read(argv)))


def run(args: argparse.Namespace) -> int:
    show([read_results(args.a)] if args.b is None else read_pair(args.a, args.b), Path(args.output))
    return 0


def show(sets: Sequence[Results], output: Path) -> None:
    """Print the table of one set of results or two, and draw what they have in common. BenchmarkError, UsageError.

    output: without the suffixes .png and .html
    """
    keys = sorted(set[str].intersection(*(set(each.by_key) for each in sets)), key=sort_key)
    if not keys:
        names = " and ".join(each.label for each in sets)
        raise UsageError(f"{names} have no result in common: names without prefix and date have to be equal")
    checks = (note_failures, note_cached, note_undrawn, note_hardware)
    notes = [note for find_note in checks if (note := find_note(sets, keys))]
    rows = make_rows(sets, keys)
    print("\n".join([*format_rows(rows), *notes]))
    for each in sets:
        if unmatched := sorted(each.by_key.keys() - {*keys}, key=sort_key):
            say(f"only in {each.label}: {', '.join(unmatched)}")
    series = [line for each in sets for line in make_series(each, keys)]
    output.parent.mkdir(parents=True, exist_ok=True)
    png, html = Path(f"{output}.png"), Path(f"{output}.html")
    try:
        draw_png(series, png, unit=UNIT)
        write_html(series, rows, " against ".join(each.label for each in reversed(sets)), notes, html, unit=UNIT)
    except ModuleNotFoundError as error:
        raise BenchmarkError(str(error)) from None
    say(f"wrote {png} and {html}")


def read_pair(first: str, second: str) -> tuple[Results, Results]:
    """Read both sets of results; two single files are matched whatever their names are."""
    a, b = read_results(first), read_results(second)
    if Path(first).is_file() and Path(second).is_file():
        key = next(iter(a.by_key))
        b = Results(b.label, {key: next(iter(b.by_key.values()))})
    return (a, b) if a.label != b.label else (Results(first, a.by_key), Results(second, b.by_key))


def read_results(where: str) -> Results:
    """Read the results of a file, of a folder, or of the files with this prefix."""
    path = Path(where)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(path.glob("*.json"))
    else:
        files = sorted(path.parent.glob(f"{path.name}_*.json"))
    found: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for file in files:
        if (result := read_result(file, is_named=path.is_file())) is None:
            continue
        key = name_key(file.stem)
        if key in found:
            raise UsageError(
                f"{found[key][0]} and {file} are both {key}: name the file, or its prefix as in {file.parent}/PREFIX"
            )
        found[key] = (file, result)
    if not found:
        raise UsageError(f"{where}: no such file, folder or prefix with results")
    return Results(path.stem if path.is_file() else path.name or where, {key: found[key][1] for key in found})


def read_result(path: Path, *, is_named: bool) -> Mapping[str, Any] | None:
    """Read a result file; None for another JSON file of a folder. UsageError if it cannot be read."""
    try:
        result = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is no JSON file ({error})") from None
    if isinstance(result, dict) and "output_throughput" in result:
        return result
    if is_named:
        raise UsageError(f"{path} is not a result of benchmark_serving: it has no output_throughput")
    return None


def name_key(stem: str) -> str:
    match = NAME.fullmatch(stem)
    return match["key"] if match else DATE.sub("", stem)


def sort_key(key: str) -> tuple[Any, ...]:
    """tp, input and output length, concurrency; names of another kind come last."""
    match = NAME.fullmatch(key)
    return (0, *(int(match[name]) for name in ("tp", "isl", "osl", "conc"))) if match else (1, key)


def note_failures(sets: Sequence[Results], keys: Sequence[str]) -> str:
    """A note if requests failed, which are in no number; else an empty text."""
    counts = [(f"{each.label} {key}", each.by_key[key].get("failed")) for each in sets for key in keys]
    parts = [f"{num} of {name}" for name, num in counts if num]
    return f"Requests failed, and the numbers leave them out: {', '.join(parts)}." if parts else ""


def note_cached(sets: Sequence[Results], keys: Sequence[str]) -> str:
    """A note if a server did not compute all prompts; else an empty text."""
    counts = [(f"{each.label} {key}", each.by_key[key].get("total_cached_tokens")) for each in sets for key in keys]
    parts = [f"{num} of {name}" for name, num in counts if num]
    return f"Prompt tokens that came from a prefix cache: {', '.join(parts)}." if parts else ""


def note_undrawn(sets: Sequence[Results], keys: Sequence[str]) -> str:
    """A note on the results that are in no plot; else an empty text."""
    parts = [f"{each.label} {key}" for each in sets for key in keys if not is_drawable(each.by_key[key])]
    return f"Not drawn, since they have no median TPOT: {', '.join(parts)}." if parts else ""


def note_hardware(sets: Sequence[Results], keys: Sequence[str]) -> str:
    """A note if two ran on different or unknown hardware; else an empty text."""
    if len(sets) == 1:
        return ""
    named = [sorted({str(each.by_key[key].get("hardware") or "") for key in keys}) for each in sets]
    if any("" in each for each in named):
        return "The results do not all say what hardware they ran on: the ratios may compare machines."
    if named[0] != named[1]:
        parts = [f"{each.label} on {', '.join(names)}" for each, names in zip(sets, named, strict=True)]
        return f"The hardware differs, so the ratios compare machines too: {'; '.join(parts)}."
    return ""


def make_rows(sets: Sequence[Results], keys: Sequence[str]) -> list[list[str]]:
    """Make the table with its header: a row for each key; of each column A and, with a second set, B and B / A."""
    given = {name for each in sets for key in keys for name, value in each.by_key[key].items() if value is not None}
    columns = [(name, title) for at, (name, title) in enumerate(COLUMNS) if at < NUM_ALWAYS or name in given]
    others = [each.label for each in sets[1:]] + ["ratio"] * len(sets[1:])
    first = f" {sets[0].label}" if others else ""
    rows = [["config", *(text for _, title in columns for text in (f"{title}{first}", *others))]]
    for key in keys:
        cells = [key]
        for name, _ in columns:
            values = [each.by_key[key].get(name) for each in sets]
            ratios = [other / values[0] if values[0] and other is not None else None for other in values[1:]]
            cells += [*("-" if each is None else f"{each:.1f}" for each in values)]
            cells += [f"{ratio:.3f}" if ratio else "-" for ratio in ratios]
        rows.append(cells)
    return rows


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(cells) for cells in lines]


def is_drawable(result: Mapping[str, Any]) -> bool:
    return bool(result.get("median_tpot_ms"))  # interactivity is its inverse


def make_series(results: Results, keys: Sequence[str]) -> list[Series]:
    """Make a series for each tensor-parallel size and pair of lengths, its points by concurrency.

    Results whose names have none of these are one series.
    """
    lines: dict[tuple[str, str], list[tuple[int, Point]]] = {}
    for key in keys:
        result, match = results.by_key[key], NAME.fullmatch(key)
        if not is_drawable(result):
            continue
        gpus = int(match["tp"]) if match else int(result.get("tensor_parallel_size") or 1)
        panel = f"input {match['isl']}, output {match['osl']}" if match else "all"
        label = f"{results.label} tp{gpus}" if match else results.label
        limit = match["conc"] if match else result.get("max_concurrency")
        interactivity, throughput = 1000 / result["median_tpot_ms"], result["output_throughput"] / gpus
        point = Point(interactivity, throughput, f"c{limit}" if limit else key)
        lines.setdefault((panel, label), []).append((int(limit or 0), point))
    return [
        Series(panel, label, tuple(point for _, point in sorted(points, key=itemgetter(0))))
        for (panel, label), points in lines.items()
    ]


if __name__ == "__main__":
    sys.exit(main())

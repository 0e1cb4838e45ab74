"""Keep benchmark figures as JSON, and render docs/performance.md from it.

A file of docs/results/gpu or docs/results/cpu holds the rows of one kind of machine, each with its date, commit and
versions. A run replaces the rows that it measured; figures of others that it did not measure (vLLM's) stay.

    save("gpu", "NVIDIA H200", {"8b-1": row})   # docs/results/gpu/nvidia_h200.json, and the page
    render("gpu")                               # a table for each file of docs/results/gpu
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NotRequired, TypedDict

from atom.measurement.hardware import find_commit

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "performance.md"


class Origin(TypedDict):
    """Where a figure comes from."""

    date: str
    commit: str  # empty: not known
    versions: dict[str, str]


class Result(Origin):
    """A measured row."""

    model: str
    load: str
    value: float
    unit: str  # a rate such as tok/s, a share in %, or a time or a size, of which less is better
    share_of_limit: NotRequired[float]
    compared: NotRequired[dict[str, float]]  # the figure of others, by name


class Machine(TypedDict):
    hardware: str
    rows: dict[str, Result]


def save(kind: str, hardware: str, rows: dict[str, Result]) -> None:
    """Replace rows in the file of a machine, and the section of its kind on the page."""
    path = RESULTS / kind / f"{re.sub(r'[^a-z0-9]+', '_', hardware.lower()).strip('_')}.json"
    old = read(path)["rows"] if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write({"hardware": hardware, "rows": old | {name: merge(old, name, rows[name]) for name in rows}}))
    PAGE.write_text(replace_section(PAGE.read_text(), kind, render(kind)))


def merge(old: dict[str, Result], name: str, row: Result) -> Result:
    """A new row with the figures of others that only the old one has."""
    compared = old.get(name, row).get("compared", {}) | row.get("compared", {})
    return {**row, "compared": compared} if compared else row


def read(path: Path) -> Machine:
    machine: Machine = json.loads(path.read_text())
    return machine


def write(machine: Machine) -> str:
    """A machine as JSON, one row a line, sorted as on the page."""
    rows = sorted(machine["rows"].items(), key=lambda item: order(item[1]))
    lines = [f"  {json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in rows]
    return f'{{\n "hardware": {json.dumps(machine["hardware"])},\n "rows": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def render(kind: str) -> str:
    """The tables of all machines of a kind, in Markdown; the machine with the most rows is first."""
    machines = [read(path) for path in sorted((RESULTS / kind).glob("*.json"))]
    return "\n".join(map(render_machine, sorted(machines, key=lambda machine: -len(machine["rows"]))))


def render_machine(machine: Machine) -> str:
    rows = sorted(machine["rows"].values(), key=order)
    rates, others = ([row for row in rows if (row["unit"] == "tok/s") == is_rate] for is_rate in (True, False))
    tables = [render_table(title, part) for title, part in (("tok/s", rates), ("measured", others)) if part]
    return f"### {machine['hardware']}\n{describe_versions(rows)}.\n\n" + "\n".join(tables)


def order(row: Result) -> tuple[list[str | int], list[str | int]]:
    """Sort by model, then by load, with numbers in them by value."""
    model, load = (re.split(r"(\d+)", row[key].lower()) for key in ("model", "load"))
    return [int(part) if part.isdigit() else part for part in model], [int(p) if p.isdigit() else p for p in load]


def describe_versions(rows: Iterable[Result]) -> str:
    """As in "torch 2.11, triton 3.6": to the second number, all that the rows have."""
    found = {(name, ".".join(version.split(".")[:2])) for row in rows for name, version in row["versions"].items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(found))


def render_table(title: str, rows: Sequence[Result]) -> str:
    """A table of rows sorted by model. title: their unit, or another word if units differ"""
    rivals = list(dict.fromkeys(rival for row in rows for rival in row.get("compared", {})))
    limited = ["of the limit"] if any("share_of_limit" in row for row in rows) else []
    head = ["model", "load", title, *limited, *(f"{rival} (×)" for rival in rivals), "date, commit"]
    lines = [render_line(head), "|---" * len(head) + "|\n"]
    for before, row in zip((None, *rows), rows, strict=False):
        model = "" if before and before["model"] == row["model"] else row["model"]
        value = number(row["value"]) if title == row["unit"] else f"{number(row['value'])} {row['unit']}"
        shares = [f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else "" for _ in limited]
        origin = ", ".join(filter(None, (row["date"], row["commit"])))
        compared = [compare(row, rival) for rival in rivals]
        lines.append(render_line([model, row["load"], value, *shares, *compared, origin]))
    return "".join(lines)


def render_line(cells: Iterable[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def compare(row: Result, rival: str) -> str:
    """The figure of another, and how many times better ours is."""
    if (theirs := row.get("compared", {}).get(rival)) is None:
        return ""
    ratio = theirs / row["value"] if is_less_better(row["unit"]) else row["value"] / theirs
    return f"{number(theirs)} ({ratio:.2f})"


def is_less_better(unit: str) -> bool:
    return "/" not in unit and unit != "%"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def shorten(value: float) -> float:
    """To the digits that a table shows, and one more."""
    return round(value) if value >= 100 else round(value, 2)


def replace_section(page: str, kind: str, section: str) -> str:
    """Replace the text between the markers of a kind of machine."""
    begin, end = f"<!-- scripts/bench-{kind} -->\n", f"<!-- end of scripts/bench-{kind} -->\n"
    assert page.count(begin) == page.count(end) == 1, f"the page has no place between {begin!r} and {end!r}"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{section}\n{end}{rest.split(end)[1]}"


def find_origin(versions: dict[str, str], commit: str | None = None) -> Origin:
    """Now, and the checkout's commit if none is given."""
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit or find_commit(ROOT) or "", "versions": versions}

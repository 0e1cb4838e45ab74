"""Write the page of `job=profile job.output=html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atom.jobs.profile.trace import KINDS, Event, kind_of
from atom.measurement import page
from atom.measurement.page import Bar, Box

COLORS = {kind: at for at, kind in enumerate((*KINDS, "piece", "other"))}
MIN_SHARE = 0.001  # of a row that has a bar


def make_page(result: dict[str, Any], windows: Mapping[str, Sequence[Event]]) -> str:
    """windows: of each phase, the events of about one step, sorted by their start."""
    about = f"level {result['level']}, on {result['hardware']}, {result['date']}"
    parts = [page.paragraph(about), page.notes(result["warnings"]), page.legend(COLORS)]
    for phase, about in result["phases"].items():
        each = about["timeline_seconds"] / about["steps"]
        parts.append(page.heading(f"{phase}: {each * 1e3:,.3f} ms a step on the {about['timeline']}'s timeline"))
        steps = "1 step" if about["steps"] == 1 else f"{about['steps']:,} steps; below, the one in the middle"
        parts.append(page.paragraph(f"{about['tokens']:,} tokens in {steps}"))
        boxes = make_boxes(windows[phase])
        parts.append(page.timeline(boxes, max(box.stop for box in boxes)))
        rows = [*about["kinds"], *about["products"], *(row for row in about["rows"] if row["share"] >= MIN_SHARE)]
        parts.append(page.bars([make_bar(row, about["steps"]) for row in rows if row["seconds"]]))
        parts.append(
            page.paragraph(
                "Times are of a step, as a mean of all. A mark, if there is one, is the shortest time that this "
                "machine's limits allow."
            )
        )
    return page.write_page(f"Profile of {result['model']}, {result['dtype']}", parts)


def make_boxes(events: Sequence[Event]) -> list[Box]:
    """The events as boxes; those inside others are in lanes below."""
    boxes: list[Box] = []
    ends: list[float] = []  # of the events that are open
    for event in events:
        while ends and ends[-1] <= event.start:
            ends.pop()
        boxes.append(Box(event.name, event.start / 1e6, event.stop / 1e6, len(ends), COLORS[color_of(event.name)]))
        ends.append(event.stop)
    return boxes


def color_of(name: str) -> str:
    return kind_of(name) or ("piece" if name.startswith("piece ") else "other")


def make_bar(row: Mapping[str, Any], num_steps: int) -> Bar:
    """The bar of a row of all steps: of one, as a mean."""
    seconds, limit = row["seconds"] / num_steps, row.get("limit_seconds")
    text = f"{seconds * 1e3:,.3f} ms, {row['share']:.1%}"
    if limit is not None:
        text += f"; {describe_share(row['share_of_limit'])} its limit"
    return Bar(row["name"], seconds, text, COLORS[kind_of_row(row)], limit and limit / num_steps)


def kind_of_row(row: Mapping[str, Any]) -> str:
    """The name in COLORS of a kernel, a piece, a weight's matmuls, or a kind itself."""
    name: str = row["name"]
    return row.get("kind") or (name if name in COLORS else "matrix" if name.startswith("weight ") else color_of(name))


def describe_share(share: float) -> str:
    """Of a limit, which other kernels were measured to reach: what exceeds it shows how far that can be wrong."""
    return f"{share:.0%} of" if share <= 1 else "no slower than"

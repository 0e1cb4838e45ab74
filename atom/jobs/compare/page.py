"""Write the page of `job=compare job.output=html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atom.jobs.compare.text import before, bisection, choices, outputs, place_of, summary, where
from atom.measurement import page

NUM_LISTED = 50  # findings in the table


def make_page(result: dict[str, Any]) -> str:
    """The page of a comparison, as `describe` gives it: errors by layer, what is beyond the bound, outputs, prompts."""
    parts = [*map(page.paragraph, (*summary(result), *choices(result))), page.heading("Error by layer")]
    parts += [page.legend(["error", "allowed"]), plot(result["layers"])]
    if result["findings"]:
        parts += [page.heading("Where they part"), *first_finding(result["findings"][0])]
    if "bisect" in result:
        parts.append(page.notes(filter(None, bisection(result))))
    if result["findings"]:
        parts.append(page.table(finding_rows(result["findings"]), has_text=True))
    if (more := len(result["findings"]) - NUM_LISTED) > 0:
        parts.append(page.paragraph(f"and {more} more"))
    parts += [page.heading("Outputs"), *map(page.paragraph, outputs(result))]
    parts.append(page.fold("all layers", page.table(layer_rows(result["layers"]))))
    verdict = "agree" if result["agree"] else "part"
    return page.write_page(f"The two sides {verdict}", parts)


def plot(layers: Sequence[dict[str, Any]]) -> str:
    """The largest error of each layer, and what it may be."""
    columns = ([each[key] for each in layers] for key in ("layer", "error", "allowed"))
    places, errors, allowed = columns
    return page.log_curve([str(place) for place in places], errors, allowed, "layer")


def first_finding(finding: dict[str, Any]) -> list[str]:
    """The first value beyond the bound, and the calls that it may come from."""
    passes = f"made or changed by {', '.join(finding['passes'])}" if finding["passes"] else "as it was written"
    parts = [page.notes([where(finding)]), page.code(line_of(finding)), page.paragraph(passes)]
    if calls := before(finding):
        parts.append(page.paragraph("It may come from a call before it, whose result was not compared:"))
        parts.append(page.code("\n".join(map(line_of, calls))))
    return parts


def line_of(line: dict[str, Any]) -> str:
    return f"{line['line']:>4}  {line['text']}"


def finding_rows(findings: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [
        (
            str(each["line"]),
            each["program"] if each["layer"] is None else f"layer {each['layer']}",
            each["value"],
            each["kernel"],
            f"{each['error']:.2g}",
            f"{each['allowed']:.2g}",
            place_of(each),
            ", ".join(each["passes"]),
        )
        for each in findings[:NUM_LISTED]
    ]
    return [("line", "in", "value", "kernel", "off by", "allowed", "most at", "made or changed by"), *rows]


def layer_rows(layers: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [
        (
            str(each["layer"]),
            str(each["values"]),
            f"{each['error']:.2g}",
            f"{each['allowed']:.2g}",
            each["value"],
            str(each["line"]),
        )
        for each in layers
    ]
    return [("layer", "values", "largest error", "allowed", "of", "line"), *rows]

"""Write the page of `job=compare job.output=html`."""

from __future__ import annotations

from typing import Any

from atom.jobs.compare.text import bisection, choices, first_finding, outputs, summary, where
from atom.measurement import page

NUM_LISTED = 50  # findings in the table


def make_page(result: dict[str, Any]) -> str:
    """The page of a comparison, as `describe` gives it: errors by layer, what is beyond the bound, outputs, prompts."""
    parts = [*map(page.paragraph, (*summary(result), *choices(result)))]
    layers = result["layers"]
    curves = {"error": [each["error"] for each in layers], "allowed": [each["allowed"] for each in layers]}
    parts += [page.heading("Error by layer"), page.legend(curves)]
    parts.append(page.log_curves([str(each["layer"]) for each in layers], curves, "layer"))
    if result["findings"]:
        parts += [page.heading("Where they part"), page.code("\n".join(first_finding(result)).strip())]
        parts.append(page.table(finding_rows(result), has_text=True))
    if "bisect" in result:
        parts.append(page.paragraph("; ".join(filter(None, bisection(result)))))
    parts += [page.heading("Outputs"), *map(page.paragraph, outputs(result))]
    parts.append(page.fold("all layers", page.table(layer_rows(result))))
    verdict = "agree" if result["agree"] else "part"
    return page.write_page(f"The two sides {verdict}", parts)


def finding_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        (str(each["line"]), each["text"], ", ".join(each["passes"]), where(each))
        for each in result["findings"][:NUM_LISTED]
    ]
    return [("line", "call", "made or changed by", "how far it is off"), *rows]


def layer_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        (
            str(each["layer"]),
            str(each["values"]),
            f"{each['error']:.2g}",
            f"{each['allowed']:.2g}",
            each["value"],
            str(each["line"]),
        )
        for each in result["layers"]
    ]
    return [("layer", "values", "largest error", "allowed", "of", "line"), *rows]

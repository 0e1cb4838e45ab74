"""Write the page of `job=bench job.output=html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atom.measurement import page
from atom.measurement.metrics import METRICS, RequestFuncOutput
from atom.measurement.page import Bar


def make_page(result: dict[str, Any], outputs: Sequence[RequestFuncOutput]) -> str:
    """outputs: of all requests, of which those that failed are left out."""
    done = [output for output in outputs if output.success]
    seconds = {
        "ttft": [each.ttft for each in done if each.ttft is not None],
        "tpot": [each.tpot for each in done if each.tpot is not None],
        "itl": [time for each in done for time in each.itl],
        "e2el": [each.latency for each in done],
    }
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    names = ("completed", "failed", "total_input_tokens", "total_output_tokens", "duration", "output_throughput")
    parts = [
        page.paragraph(f"level {result['level']}, on {result['hardware']}, {result['date']}; {versions}"),
        page.paragraph(" ".join(result["overrides"])),
        page.notes(result["warnings"]),
        page.table([names, [f"{result[name]:,.6g}" for name in names]]),
        page.heading("Tokens a second of each phase, and a mark at this machine's limit"),
        page.bars([make_bar(name, phase) for name, phase in result["phases"].items()]),
    ]
    for name, label in METRICS.items():
        if seconds[name]:
            parts.append(page.heading(f"{label}: the share that took no longer"))
            parts.append(page.curves({name: [each * 1e3 for each in seconds[name]]}, "ms"))
            shown = {key: result[f"{key}_{name}_ms"] for key in ("mean", "p50", "p90", "p99")}
            parts.append(page.paragraph(", ".join(f"{key} {value:,.2f} ms" for key, value in shown.items())))
    return page.write_page(f"Benchmark of {result['model']}, {result['dtype']}", parts)


def make_bar(name: str, phase: dict[str, Any]) -> Bar:
    rate, limit = phase["tokens_per_second"], phase["limit_tokens_per_second"]
    text = f"{rate:,.1f}, {phase['share_of_limit']:.1%} of the limit"
    return Bar(name, rate, text, 0, limit, f"limit {limit:,.1f}")

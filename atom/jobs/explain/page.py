"""Write the page of `job=explain job.output=html`."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from typing import Any

from atom.config import Config
from atom.graph import Graph
from atom.jobs.explain import changes, picture
from atom.jobs.explain.changes import Stage, draw_passes
from atom.jobs.explain.picture import draw_model
from atom.measurement import page
from atom.measurement.page import Bar

STYLE = """
.bars { list-style: none; padding: 0; margin: .3rem 0; max-width: 48rem; font-size: 13px }
.bars li { display: flex; flex-wrap: wrap; justify-content: space-between; margin-bottom: .45rem }
.bars div { position: relative; width: 100%; height: .8rem; background: var(--tint) }
.bars i { display: block; height: 100%; min-width: 1px; background: var(--c) }
.bars u { position: absolute; top: -2px; bottom: -2px; border-left: 2px solid var(--bad) }
.kernels { font-size: 13px; width: 100%; max-width: 48rem }
.kernels tbody th { font-weight: 600 } .kernels :is(th, td) { border: 0; text-align: left }
.kernels :is(th, td):last-child:not([colspan]) { text-align: right }
.kernels tbody { border-top: 1px solid var(--line) } .kernels .quiet td { padding: 0 .6rem .25rem 1.4rem }
"""


def make_page(
    graph: Graph,
    stages: Sequence[Stage],
    result: dict[str, Any],
    lines: Sequence[tuple[str, str]],
    config: Config,
) -> str:
    """The page of a model.

    lines: the sizes in words
    """
    parts = [draw_model(graph)]
    parts += [page.heading("Sizes"), page.table([("", ""), *(each for each in lines if any(each))], has_text=True)]
    parts += [page.heading("Memory of each rank" if "ranks" in result else "Memory"), memory(result)]
    if gpu := result.get("gpu"):
        parts += [page.heading(f"Limits on {gpu['name']}"), limits(gpu), *layouts(gpu)]
    parts += [page.heading("Passes"), draw_passes(stages)]
    parts += [page.heading("Kernels"), draw_kernels(graph)]
    if pieces := result.get("distinct_pieces"):
        parts += [page.heading("Pieces"), page.table(piece_rows(pieces), has_text=True)]
    title = f"{config.checkpoint or config.model.name}, {config.dtype}, on {config.device}"
    return page.write_page(title, parts, picture.STYLE + changes.STYLE + STYLE)


def memory(result: dict[str, Any]) -> str:
    """Weights by format and the KV pool as bars, and where the GPU's memory ends."""
    held = {fmt: each["held_bytes"] for fmt, each in result["formats"].items() if each["held_bytes"]}
    shown = [Bar(f"weights in {fmt}", size, gib(size)) for fmt, size in held.items()]
    shown.append(Bar("all weights", result["weights_bytes"], gib(result["weights_bytes"])))
    gpu = result.get("gpu")
    pool = result["kv_pool_bytes"] if gpu is None else max(gpu["memory_bytes"] - result["weights_bytes"], 0)
    label = "KV pool" if gpu is None else "left for KV"
    shown.append(Bar(label, pool, gib(pool), 1))
    drawn = draw_bars(shown, limit=gpu and gpu["memory_bytes"])
    return drawn + (
        page.paragraph(f"The line is where the GPU's memory ends: {gib(gpu['memory_bytes'])}.") if gpu else ""
    )


def limits(gpu: dict[str, Any]) -> str:
    """Max tokens/s, as bars."""
    rates = {f"decode of {each['requests']}": each["tokens_per_second"] for each in gpu["decode"]}
    if gpu["prefill_tokens_per_second"]:
        rates["prefill"] = gpu["prefill_tokens_per_second"]
    return draw_bars([Bar(name, rate, f"at most {rate:,.0f} tokens/s", 2) for name, rate in rates.items()])


def layouts(gpu: dict[str, Any]) -> list[str]:
    """The weights of a rank for several GPUs, as bars."""
    held = [(each["name"], each["weights_bytes"]) for each in gpu.get("layouts", ()) if "weights_bytes" in each]
    if not held:
        return []
    drawn = draw_bars([Bar(name, size, gib(size)) for name, size in held], limit=gpu["memory_bytes"])
    return [page.heading("Weights of each GPU, for several"), drawn]


def draw_kernels(graph: Graph) -> str:
    """The kernels of all calls, and under each why those before it in the order refused."""
    counts = Counter(
        (node.target.name, node.meta.get("kernel", "reference"), tuple(node.meta.get("notes", ())))
        for program in graph.programs.values()
        for node in program.nodes
    )
    bodies = []
    for (op, kernel, reasons), times in counts.most_common():
        line = f'<tr><th scope="rowgroup">{html.escape(op)}</th><td>{html.escape(kernel)}</td><td>{times:,}</td></tr>'
        notes = [f'<tr class="quiet"><td colspan="3">{html.escape(reason)}</td></tr>' for reason in reasons]
        bodies.append(f"<tbody>{line}{''.join(notes)}</tbody>")
    head = '<thead><tr><th scope="col">op, and why kernels before its own refused</th><th scope="col">kernel</th>'
    return f'<table class="kernels">{head}<th scope="col">calls</th></tr></thead>{"".join(bodies)}</table>'


def draw_bars(shown: Sequence[Bar], *, limit: float | None = None) -> str:
    """Bars from one zero under their texts, as wide as the page, and a line where the limit of all is."""
    largest = max([limit or 0.0, *(each.value for each in shown)]) or 1.0
    line = "" if limit is None else f'<u style="left:{limit / largest:.2%}"></u>'
    rows = (
        f'<li class="c{each.color}"><span>{html.escape(each.label)}</span><span>{html.escape(each.text)}</span>'
        f'<div><i style="width:{each.value / largest:.2%}"></i>{line}</div></li>'
        for each in shown
    )
    return f'<ul class="bars">{"".join(rows)}</ul>'


def piece_rows(pieces: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [
        (
            each["key"][:8],
            each["name"],
            f"{each['times']:,}",
            each["fault"] or ("cached" if each["cached"] else "not cached"),
        )
        for each in pieces
    ]
    return [("key", "calls", "times", "in the cache folder"), *rows]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / 2**20:,.1f} MiB"

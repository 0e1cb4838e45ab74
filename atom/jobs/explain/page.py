"""Write the page of `job=explain job.output=html`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from atom.config import Config
from atom.graph import Graph
from atom.measurement import page
from atom.measurement.page import Bar


def make_page(
    graph: Graph,
    passes: Sequence[tuple[str, list[str]]],
    texts: tuple[str, str],
    result: dict[str, Any],
    lines: Sequence[tuple[str, str]],
    config: Config,
) -> str:
    """The page of a model.

    passes: what each one did, and its diff
    texts: before all of them, and after
    lines: the sizes in words
    """
    parts = [page.table([("", ""), *(each for each in lines if any(each))], has_text=True)]
    parts += [page.heading("Memory of each rank" if "ranks" in result else "Memory"), memory(result)]
    if gpu := result.get("gpu"):
        parts += [page.heading(f"Limits on {gpu['name']}"), limits(gpu), *layouts(gpu)]
    parts.append(page.heading("Passes"))
    parts.append(page.fold("the text before", page.code(texts[0])))
    for summary, diff in passes:
        parts.append(page.fold(summary, page.diff(diff)) if diff else page.paragraph(summary))
    parts.append(page.fold("the text after", page.code(texts[1])))
    parts += [page.heading("Kernels"), page.table(kernels(graph), has_text=True)]
    if pieces := result.get("distinct_pieces"):
        parts += [page.heading("Pieces"), page.table(piece_rows(pieces), has_text=True)]
    return page.write_page(f"{config.checkpoint or config.model.name}, {config.dtype}, on {config.device}", parts)


def memory(result: dict[str, Any]) -> str:
    """Weights by format and the KV pool as bars, and where the GPU's memory ends."""
    held = {fmt: each["held_bytes"] for fmt, each in result["formats"].items() if each["held_bytes"]}
    shown = [Bar(f"weights in {fmt}", size, gib(size)) for fmt, size in held.items()]
    shown.append(Bar("all weights", result["weights_bytes"], gib(result["weights_bytes"])))
    gpu = result.get("gpu")
    pool = result["kv_pool_bytes"] if gpu is None else max(gpu["memory_bytes"] - result["weights_bytes"], 0)
    label = "KV pool" if gpu is None else "left for KV"
    shown.append(Bar(label, pool, gib(pool), 1))
    drawn = page.bars(shown, limit=gpu and gpu["memory_bytes"])
    return drawn + (
        page.paragraph(f"The line is where the GPU's memory ends: {gib(gpu['memory_bytes'])}.") if gpu else ""
    )


def limits(gpu: dict[str, Any]) -> str:
    """Max tokens/s, as bars."""
    rates = {f"decode of {each['requests']}": each["tokens_per_second"] for each in gpu["decode"]}
    if gpu["prefill_tokens_per_second"]:
        rates["prefill"] = gpu["prefill_tokens_per_second"]
    return page.bars([Bar(name, rate, f"at most {rate:,.0f} tokens/s", 2) for name, rate in rates.items()])


def layouts(gpu: dict[str, Any]) -> list[str]:
    """The weights of a rank for several GPUs, as bars."""
    held = [(each["name"], each["weights_bytes"]) for each in gpu.get("layouts", ()) if "weights_bytes" in each]
    if not held:
        return []
    drawn = page.bars([Bar(name, size, gib(size)) for name, size in held], limit=gpu["memory_bytes"])
    return [page.heading("Weights of each GPU, for several"), drawn]


def kernels(graph: Graph) -> list[tuple[str, ...]]:
    """The kernels of all calls, and why those before them in the order refused."""
    counts = Counter(
        (node.target.name, node.meta.get("kernel", "reference"), "; ".join(node.meta.get("notes", ())))
        for program in graph.programs.values()
        for node in program.nodes
    )
    rows = [(op, kernel, f"{times:,}", reasons) for (op, kernel, reasons), times in counts.most_common()]
    return [("op", "kernel", "calls", "refused"), *rows]


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

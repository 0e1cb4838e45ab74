"""`job=explain`: what the passes make of a model, and what it takes to hold it. Reads no weights, compiles nothing.

atom-run job=explain                                  # each pass: changes, time, diff of the text; then sizes
atom-run job=explain job.stage=fuse_qkv > graph.py    # the whole text at that point, which job.graph=graph.py runs
atom-run job=explain job.output=json
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from atom.compiler import compile_graph, semantic_graph
from atom.config import Config
from atom.errors import ConfigError
from atom.graph import Graph, show
from atom.llm import cache_kinds, plan_kv
from atom.passes import PassReport


class Stage(NamedTuple):
    """The text behind one pass."""

    name: str
    num_changes: int
    seconds: float
    text: str


def run(config: Config) -> int:
    """Print the stages and the sizes, or one stage's whole text."""
    stages = [Stage("semantic", 0, 0.0, show(semantic_graph(config)))]

    def watch(report: PassReport) -> None:
        stages.append(Stage(report.name, report.num_changes, report.seconds, show(report.graph)))

    graph = compile_graph(config, watch)
    if config.job.stage is not None:
        sys.stdout.write(_find(stages, config.job.stage).text)
    elif config.job.output == "json":
        passes = [{"name": s.name, "changes": s.num_changes, "seconds": s.seconds} for s in stages[1:]]
        print(json.dumps({"passes": passes, **sizes(graph, config)}))
    else:
        for before, after in itertools.pairwise(stages):
            print(f"{after.name}: {after.num_changes} changes, {after.seconds * 1e3:.1f} ms")
            for line in folded_diff(before.text, after.text):
                print(f"  {line}")
            print()
        for name, value in sizes(graph, config).items():
            print(f"{name.replace('_', ' '):<22}{_human(name, value)}")
    return 0


def _find(stages: list[Stage], name: str) -> Stage:
    for stage in stages:
        if stage.name == name:
            return stage
    raise ConfigError(f"job.stage={name}: there is no such stage; stages: {', '.join(stage.name for stage in stages)}")


def folded_diff(before: str, after: str) -> Iterator[str]:
    """The lines that changed, each kind of line once: layers differ in their numbers only."""
    old, new = (
        ["    ".join(line.split("    ")[:-1]) if "    #" in line else line for line in text.splitlines()]
        for text in (before, after)
    )
    seen: set[str] = set()
    num_folded = 0
    for line in difflib.unified_diff(old, new, n=0, lineterm=""):
        if line.startswith(("---", "+++", "@@")):
            continue
        kind = re.sub(r"_\d+\b|\d+", "", line)
        if kind in seen:
            num_folded += 1
            continue
        seen.add(kind)
        yield line
    if num_folded:
        yield f"… and {num_folded} lines like these"


def sizes(graph: Graph, config: Config) -> dict[str, Any]:
    """Parameters, bytes of weights, KV bytes a token by cache kind, and what the KV pool holds."""
    kinds = cache_kinds(graph)
    num_blocks = plan_kv(kinds, config)
    return {
        "parameters": sum(leaf.type.num_elements for leaf in graph.stored().values()),
        "weights_bytes": sum(recipe.type.num_bytes for recipe in graph.recipes()),
        "kv_bytes_per_token": {kind.name: kind.bytes_per_token for kind in kinds},
        "kv_pool_bytes": sum(num_blocks[kind.name] * config.serve.block_size * kind.bytes_per_token for kind in kinds),
        "kv_tokens": {kind.name: (num_blocks[kind.name] - 1) * config.serve.block_size for kind in kinds},
    }


def _human(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_human(name, item)}" for key, item in value.items())
    return f"{value:,} ({value / 2**20:,.1f} MiB)" if name.endswith("bytes") else f"{value:,}"

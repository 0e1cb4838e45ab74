"""From a configuration to the graph that runs: the frontend writes it, the passes lower it, or a saved text is read.

graph = compile_graph(load(["model=auto", "checkpoint=/models/qwen3"]))
print(show(graph))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from atom.config import Config
from atom.errors import ConfigError, PassError
from atom.frontend import build
from atom.graph import Graph, ops, parse, verify
from atom.kernels import Target, find_target
from atom.passes import PassReport, lower


def semantic_graph(config: Config) -> Graph:
    """What the frontend writes of the model."""
    return build(config.model, config.dtype, config.serve.kv_cache_dtype)


def compile_graph(
    config: Config, watch: Callable[[PassReport], Any] = lambda _: None, target: Target | None = None
) -> Graph:
    """The lowered graph; `watch` gets a report after each pass. A text saved before lowering is lowered too.

    The target is this machine, unless another is given.
    """
    assert config.level is not None, "config.load resolves it"
    graph = semantic_graph(config) if config.job.graph is None else _saved_graph(Path(config.job.graph))
    if graph.find(ops.attention):
        return lower(graph, config.level, target or find_target(config.device), watch)
    return graph


def _saved_graph(path: Path) -> Graph:
    try:
        graph = parse(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"job.graph={path}: {error.strerror}") from None
    try:
        verify(graph, ops.SEMANTIC if graph.find(ops.attention) else ops.LOWERED)
        missing = {"body", "head"} - set(graph.programs)
        if missing:
            raise PassError(f"it has no function {', '.join(sorted(missing))}")
    except PassError as error:
        raise ConfigError(f"job.graph={path}: {error}") from None
    return graph

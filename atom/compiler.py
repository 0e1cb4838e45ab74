"""From a configuration to the graph that runs: the frontend writes it, the passes lower it, or a saved text is read.

graph = compile_graph(load(["model=auto", "checkpoint=/models/qwen3"]))
print(show(graph))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import Node

from atom.config import Config
from atom.errors import ConfigError, PassError
from atom.frontend import build
from atom.graph import Graph, Shuffle, ops, parse, verify
from atom.kernels import Target, find_kernel, find_target
from atom.passes import PassReport, lower
from atom.runtime.types import INPUTS, INPUTS_BY_KIND


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
    target = target or find_target(config.device)
    if config.job.graph is None:
        return lower(semantic_graph(config), config.level, target, watch)
    graph = _saved_graph(Path(config.job.graph))
    is_semantic = _level(graph) == ops.SEMANTIC
    if is_semantic or not any("kernel" in node.meta for node in _nodes(graph)):
        graph = lower(graph, config.level, target, watch, first="fuse_qkv" if is_semantic else "select_kernels")
    _check_runnable(graph, config.job.graph)
    return graph


def _nodes(graph: Graph) -> list[Node]:
    return [node for program in graph.programs.values() for node in program.nodes]


def _level(graph: Graph) -> str:
    """semantic, where a call is that only such a graph may have."""
    is_lowered = all(ops.LOWERED in node.target.levels for node in _nodes(graph) if isinstance(node.target, ops.Op))
    return ops.LOWERED if is_lowered else ops.SEMANTIC


def _saved_graph(path: Path) -> Graph:
    try:
        graph = parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job.graph={path}: {getattr(error, 'strerror', error)}") from None
    try:
        verify(graph, _level(graph))
    except PassError as error:
        raise ConfigError(f"job.graph={path}: {error}") from None
    return graph


def _check_runnable(graph: Graph, path: str) -> None:
    """ConfigError where a saved text asks for an input, a kernel or a layout that nothing provides."""
    kinds = {cache.kind for cache in graph.caches()}
    provided = {"body": {*INPUTS, *(f"{name}{kind}" for name in INPUTS_BY_KIND for kind in kinds)}, "head": {"hidden"}}
    if missing := provided.keys() - graph.programs.keys():
        raise ConfigError(f"job.graph={path}: it has no function {', '.join(sorted(missing))}")
    for name, inputs in provided.items():
        for node in graph.programs[name].inputs:
            if node.name not in inputs:
                raise ConfigError(
                    f"job.graph={path}: {name} has an input {node.name}; there are: {', '.join(sorted(inputs))}"
                )
    for node in _nodes(graph):
        backend = node.meta.get("kernel", "reference")
        wanted = find_kernel(node.target, backend).layout
        given = next((arg.layout for arg in node.args if isinstance(arg, Shuffle)), None)
        if given != wanted:
            rule = f'shuffle(…, "{wanted}")' if wanted else "its weight as it is, without shuffle"
            raise ConfigError(f"job.graph={path}: {node.name}: {backend}.{node.target.name} takes {rule}")

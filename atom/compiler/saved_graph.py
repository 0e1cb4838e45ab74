"""A text that was saved (`job.stage=NAME > graph.py`), edited perhaps, and is to run in place of what the passes make.

graph = read_saved(Path("graph.py"))                                    # any stage of the passes
graph = lower(graph, level, target, watch, first=first_pass(graph))     # what is left to do
check_runnable(graph, "graph.py")
"""

from __future__ import annotations

from pathlib import Path

from torch.fx import Node

from atom.errors import ConfigError, PassError
from atom.graph import Graph, Shuffle, ops, parse, verify
from atom.kernels import Target, find_kernel
from atom.passes.pipeline import PIPELINE
from atom.passes.select_kernels import type_of
from atom.runtime.types import INPUTS, INPUTS_BY_KIND


def read_saved(path: Path) -> Graph:
    """The graph of a text. ConfigError where the file cannot be read or is no graph."""
    try:
        graph = parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job.graph={path}: {getattr(error, 'strerror', error)}") from None
    try:
        verify(graph, _level(graph))
    except PassError as error:
        raise ConfigError(f"job.graph={path}: {error}") from None
    return graph


def first_pass(graph: Graph) -> str:
    """The name of the pass that goes on where the text was saved."""
    if _level(graph) == ops.SEMANTIC:
        return PIPELINE[0][0].__name__
    return "split_pieces" if any("kernel" in node.meta for node in _nodes(graph)) else "select_kernels"


def check_runnable(graph: Graph, path: str, target: Target) -> None:
    """ConfigError where a saved text asks for an input, a kernel or a layout that nothing provides."""
    kinds = {cache.kind for cache in graph.caches()}
    provided = {*INPUTS, *(f"{name}{kind}" for name in INPUTS_BY_KIND for kind in kinds)}
    if missing := {"body", "head"} - graph.programs.keys():
        raise ConfigError(f"job.graph={path}: it has no function {', '.join(sorted(missing))}")
    body, head = graph.programs["body"], graph.programs["head"]
    for node in body.inputs:
        if node.name not in provided:
            raise ConfigError(
                f"job.graph={path}: body has an input {node.name}; there are: {', '.join(sorted(provided))}"
            )
    returned, taken = (", ".join(str(node.meta["type"].row) for node in nodes) for nodes in (body.results, head.inputs))
    if returned != taken:
        raise ConfigError(f"job.graph={path}: head takes rows of {taken} where body returns rows of {returned}")
    for node in _nodes(graph):
        backend = node.meta.get("kernel", "reference")
        kernel = find_kernel(node.target, backend)
        wanted = kernel.layout
        given = next((arg.layout for arg in node.args if isinstance(arg, Shuffle)), None)
        if given != wanted:
            rule = f'shuffle(…, "{wanted}")' if wanted else "its weight as it is, without shuffle"
            raise ConfigError(f"job.graph={path}: {node.name}: {backend}.{node.target.name} takes {rule}")
        if reason := kernel.accepts(target, *map(type_of, node.args), **node.kwargs):
            raise ConfigError(f"job.graph={path}: {node.name}: {backend}.{node.target.name}: {reason}")


def _level(graph: Graph) -> str:
    """semantic, where a call is that only such a graph may have."""
    is_lowered = all(ops.LOWERED in node.target.levels for node in _nodes(graph) if isinstance(node.target, ops.Op))
    return ops.LOWERED if is_lowered else ops.SEMANTIC


def _nodes(graph: Graph) -> list[Node]:
    return [node for program in graph.programs.values() for node in program.nodes]

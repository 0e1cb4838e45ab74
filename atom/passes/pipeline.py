"""Run the passes in order; time, count and verify each.

graph = lower(graph, level=1, target=Target("cpu"))
graph = lower(graph, level=1, target=Target("cpu"), watch=print)      # a PassReport after each pass
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from atom.errors import PassError
from atom.graph import Graph, Mesh, ops, show, verify
from atom.graph.mesh import ALONE
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.fuse_gate_up import fuse_gate_up
from atom.passes.fuse_linear_gate import fuse_linear_gate
from atom.passes.fuse_norm_linear import fuse_norm_linear
from atom.passes.fuse_norm_residual import fuse_norm_residual
from atom.passes.fuse_norm_rope_attention import fuse_norm_rope_attention
from atom.passes.fuse_qkv import fuse_qkv
from atom.passes.lower_attention import lower_attention
from atom.passes.lower_moe import lower_moe
from atom.passes.quantize import quantize
from atom.passes.select_kernels import select_kernels
from atom.passes.shard import shard
from atom.passes.sink_into_head import sink_into_head
from atom.passes.split_pieces import split_pieces

# (pass, the level from which it runs, the level of ops that is legal behind it)
PIPELINE: tuple[tuple[Callable[..., Graph], int, str], ...] = (
    (shard, 0, ops.SEMANTIC),
    (sink_into_head, 1, ops.SEMANTIC),
    (fuse_qkv, 1, ops.SEMANTIC),
    (fuse_gate_up, 1, ops.SEMANTIC),
    (fuse_norm_residual, 1, ops.SEMANTIC),
    (lower_moe, 0, ops.SEMANTIC),
    (lower_attention, 0, ops.LOWERED),
    (quantize, 0, ops.LOWERED),
    (fuse_linear_gate, 1, ops.LOWERED),
    (fuse_norm_linear, 1, ops.LOWERED),
    (fuse_norm_rope_attention, 1, ops.LOWERED),
    (select_kernels, 0, ops.LOWERED),
    (split_pieces, 2, ops.LOWERED),
)


@dataclass(frozen=True)
class PassReport:
    """What one pass did. `graph` is live: to keep it, show it as text."""

    name: str
    num_changes: int
    seconds: float
    graph: Graph


def lower(
    graph: Graph,
    level: int,
    target: Target,
    watch: Callable[[PassReport], Any] = lambda _: None,
    first: str = PIPELINE[0][0].__name__,
    mesh: Mesh = ALONE,
    *,
    keeps_act: bool = False,
) -> Graph:
    """Run the passes of a level, from the first one named. keeps_act: see `PassContext`.

    PassError names the pass whose graph is wrong, the passes before it, and the file with the text.
    """
    done: list[str] = []
    context = PassContext.of(target, level, mesh, keeps_act=keeps_act)
    names = [rewrite.__name__ for rewrite, _, _ in PIPELINE]
    for rewrite, from_level, graph_level in PIPELINE[names.index(first) :]:
        if level < from_level:
            continue
        before, started = graph.num_rewrites, time.perf_counter()
        graph = rewrite(graph, context) if "context" in signature(rewrite).parameters else rewrite(graph)
        seconds = time.perf_counter() - started
        name = rewrite.__name__
        try:
            verify(graph, graph_level)
        except PassError as error:
            with tempfile.NamedTemporaryFile("w", prefix=f"atom-{name}-", suffix=".py", delete=False) as dump:
                dump.write(show(graph))
            raise PassError(f"{name} (after {', '.join(done) or 'no pass'}): {error}; its text: {dump.name}") from None
        done.append(name)
        watch(PassReport(name, graph.num_rewrites - before, seconds, graph))
    return graph

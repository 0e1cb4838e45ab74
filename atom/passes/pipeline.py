"""Run the passes in order; time, count and verify each.

graph = lower(graph, level=1, target=Target("cpu"))
graph = lower(graph, level=1, target=Target("cpu"), watch=print)      # a PassReport after each pass
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from traceback import extract_tb
from typing import Any

from atom.config import PassesConfig
from atom.config.spelling import did_you_mean
from atom.errors import ConfigError, PassError
from atom.graph import Graph, Mesh, ops, show, verify
from atom.graph.check_bodies import check_bodies
from atom.graph.mesh import SINGLE
from atom.kernels import Target
from atom.passes.add_lora import add_lora
from atom.passes.context import PassContext
from atom.passes.fuse_gate_quant import fuse_gate_quant
from atom.passes.fuse_gate_up import fuse_gate_up
from atom.passes.fuse_gated_delta import fuse_gated_delta
from atom.passes.fuse_linear_activate import fuse_linear_activate
from atom.passes.fuse_linear_gate import fuse_linear_gate
from atom.passes.fuse_lora import fuse_lora
from atom.passes.fuse_norm_linear import fuse_norm_linear
from atom.passes.fuse_norm_residual import fuse_norm_residual
from atom.passes.fuse_norm_rope_attention import fuse_norm_rope_attention
from atom.passes.fuse_norm_router import fuse_norm_router
from atom.passes.fuse_qkv import fuse_qkv
from atom.passes.fuse_shared_experts import fuse_shared_experts
from atom.passes.fuse_sibling_linears import fuse_sibling_linears
from atom.passes.lower_attention import lower_attention
from atom.passes.lower_moe import lower_moe
from atom.passes.offload_tables import offload_tables
from atom.passes.quantize import quantize
from atom.passes.select_kernels import select_kernels
from atom.passes.shard import shard
from atom.passes.sink_into_head import sink_into_head
from atom.passes.split_pieces import split_pieces
from atom.passes.split_stages import split_stages
from atom.plugins import PASSES, find_function, naming
from atom.process.messages import say

# (pass, the level from which it runs, the level of ops that is legal after it)
PIPELINE: tuple[tuple[Callable[..., Graph], int, str], ...] = (
    (split_stages, 0, ops.SEMANTIC),
    (shard, 0, ops.SEMANTIC),
    (sink_into_head, 1, ops.SEMANTIC),
    (fuse_qkv, 1, ops.SEMANTIC),
    (fuse_gate_up, 1, ops.SEMANTIC),
    (add_lora, 0, ops.SEMANTIC),
    (fuse_shared_experts, 1, ops.SEMANTIC),
    (fuse_norm_residual, 1, ops.SEMANTIC),
    (lower_moe, 0, ops.SEMANTIC),
    (lower_attention, 0, ops.LOWERED),
    (quantize, 0, ops.LOWERED),
    (offload_tables, 0, ops.LOWERED),
    (fuse_lora, 1, ops.LOWERED),
    (fuse_sibling_linears, 1, ops.LOWERED),
    (fuse_linear_gate, 1, ops.LOWERED),
    (fuse_linear_activate, 1, ops.LOWERED),
    (fuse_norm_linear, 1, ops.LOWERED),
    (fuse_norm_router, 1, ops.LOWERED),
    (fuse_norm_rope_attention, 1, ops.LOWERED),
    (fuse_gated_delta, 1, ops.LOWERED),
    (select_kernels, 0, ops.LOWERED),
    (fuse_gate_quant, 1, ops.LOWERED),
    (split_pieces, 2, ops.LOWERED),
)
PIECES = split_pieces.__name__  # at every level of batch_invariant=true, whose kernels of rows exist in them only


Step = tuple[Callable[..., Graph], int, str]
FIRST = PIPELINE[0][0].__name__
LAST = select_kernels.__name__  # ahead of which users' passes run, unless they name another


def steps_of(passes: PassesConfig, first: str = FIRST) -> list[Step]:
    """The passes from after the one that precedes `first` on: users' added, those left out removed.

    ConfigError if there is no such pass, or two of one name.
    """
    steps: list[Step] = list(PIPELINE)
    names = [rewrite.__name__ for rewrite, _, _ in PIPELINE]
    for extra in passes.extra:
        spec, _, follower = extra.partition("@")
        with naming(f"passes.extra: {extra}"):
            rewrite = find_function(spec, PASSES)
        if follower and follower not in names:
            hint = did_you_mean(follower, names)
            raise ConfigError(f"passes.extra: {extra}: there is no pass {follower}{hint}; passes: {', '.join(names)}")
        own = [each.__name__ for each, _, _ in steps]
        if rewrite.__name__ in own:
            raise ConfigError(f"passes.extra: {extra}: there is a pass {rewrite.__name__} already; rename it")
        place = own.index(follower or LAST)
        steps.insert(place, (functools.wraps(rewrite)(_checked(rewrite)), 0, steps[max(place - 1, 0)][2]))
    own = [each.__name__ for each, _, _ in steps]
    start = own.index(names[names.index(first) - 1]) + 1 if first != FIRST else 0
    return [step for step in steps[start:] if step[0].__name__ not in passes.left_out]


def _checked(rewrite: Callable[..., Any]) -> Callable[..., Graph]:
    """A user's pass, whose errors are ours."""

    def run(graph: Graph, **context: Any) -> Graph:
        before = show(graph)
        try:
            made = rewrite(graph, **context)
        except Exception as error:
            raise PassError(f"{rewrite.__name__}: {type(error).__name__}: {error}{place_of(error)}") from error
        if not isinstance(made, Graph):
            raise PassError(f"{rewrite.__name__} returned {type(made).__name__}, not the graph")
        try:
            check_bodies(made)
        except PassError as error:
            raise PassError(f"{rewrite.__name__}: {error}") from None
        if show(made) == before:
            say(f"passes.extra: {rewrite.__name__} changed nothing; …@PASS runs it before that pass")
        return made

    return run


def place_of(error: Exception) -> str:
    """The place where a user's function failed: the innermost line of the file that it is in."""
    frames = extract_tb(error.__traceback__)[1:]  # the first called it
    inside = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""


@dataclass(frozen=True)
class PassReport:
    """The report of one pass. `graph` is live: to keep it, show it as text."""

    name: str
    num_changes: int
    seconds: float
    graph: Graph


def lower(
    graph: Graph,
    level: int,
    target: Target,
    watch: Callable[[PassReport], Any] = lambda _: None,
    first: str = FIRST,
    mesh: Mesh = SINGLE,
    *,
    stage: int = 0,
    keeps_act: bool = False,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    lora_experts: bool = False,
    dispatches: bool = False,
    cpu_offload_params: Sequence[str] = (),
    batch_invariant: bool = False,
    passes: PassesConfig | None = None,
    verifies_each: bool = True,
) -> Graph:
    """Run the passes of a level, from the first one named.

    stage, keeps_act, max_loras, max_lora_rank, lora_experts, dispatches, cpu_offload_params, batch_invariant: see
      `PassContext`.
    passes: users' passes and those left out; None: the built-in pipeline.
    verifies_each: verify the graph after each pass; else after the last one, in a fifth less time.

    PassError names the pass whose graph is wrong, the passes before it, and the file with the text.
    """
    done: list[str] = []
    context = PassContext.of(target, level, mesh, stage=stage, keeps_act=keeps_act, batch_invariant=batch_invariant)
    context = replace(
        context,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        lora_experts=lora_experts,
        dispatches=dispatches,
        cpu_offload_params=tuple(cpu_offload_params),
    )
    runs = steps_of(passes or PassesConfig(), first)
    steps = [each for each in runs if level >= each[1] or (batch_invariant and each[0].__name__ == PIECES)]
    for rewrite, _, graph_level in steps:
        before, started = graph.num_rewrites, time.perf_counter()
        graph = rewrite(graph, context=context) if "context" in signature(rewrite).parameters else rewrite(graph)
        seconds = time.perf_counter() - started
        name = rewrite.__name__
        try:
            if verifies_each or rewrite is steps[-1][0]:
                verify(graph, graph_level)
        except PassError as error:
            with tempfile.NamedTemporaryFile("w", prefix=f"atom-{name}-", suffix=".py", delete=False) as dump:
                dump.write(show(graph))
            raise PassError(f"{name} (after {', '.join(done) or 'no pass'}): {error}; its text: {dump.name}") from None
        done.append(name)
        watch(PassReport(name, graph.num_rewrites - before, seconds, graph))
    return graph

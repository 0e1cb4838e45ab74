"""Compile the model; first refuse what cannot run."""

from __future__ import annotations

from contextlib import ExitStack

from atom import weights
from atom.assemble.checks import check_weights
from atom.assemble.kv_blocks import fit_limits, plan_kv, state_kinds
from atom.assemble.loading import open_checked
from atom.cache import Cache, digest
from atom.checkpoint import Checkpoint, Progress
from atom.compiler import Compiled, compile_model
from atom.config import Config
from atom.config.checkpoint import is_here
from atom.errors import UnsupportedError
from atom.graph import Graph, show
from atom.passes.quantize import leaves_act
from atom.process.messages import say
from atom.runtime import memory


def compile_with(config: Config, progress: Progress, checkpoint: Checkpoint | None = None, stage: int = 0) -> Compiled:
    """Compile the model, or a stage of its pipeline, and report the time and the cache's warnings on stderr.

    A checkpoint on this disk is checked against the configuration first.
    """
    cache, opened = Cache(config.cache_folder), ExitStack()

    def check(graph: Graph) -> None:  # refuse what cannot run before anything is compiled or downloaded
        weights.refuse_packed(graph)
        refuse_act(graph, config)
        left = None if config.device == "cpu" else memory.left_for_kv(graph, config.serve)
        kinds = state_kinds(graph, config.serve.block_size)
        num_ranks = config.parallel.num_ranks
        plan_kv(kinds, config.serve, fit_limits([kinds], config.serve, config.limits, num_ranks, left), num_ranks, left)
        if checkpoint is not None:
            check_weights(graph, checkpoint, config)

    try:
        if checkpoint is None and is_here(config):
            checkpoint = open_checked(config, progress, opened)
        compiled = compile_model(config, progress, cache, check=check, stage=stage)
        for line in left_plain(compiled.graph, config):
            say(f"quant.act={config.quant.act}: {line}")
        return compiled
    finally:
        opened.close()
        for line in cache.warnings:
            say(line)
        cache.close()


def refuse_act(graph: Graph, config: Config) -> None:
    """Raise UnsupportedError if no kernel multiplies activations in the format that quant.act asks for."""
    for node in (node for program in graph.programs.values() for node in program.nodes):
        if "act" in node.kwargs and node.meta.get("kernel") == "reference" and config.level != 0:
            reasons = "; ".join(dict.fromkeys(node.meta["notes"]))
            raise UnsupportedError(f"quant.act={config.quant.act}: {reasons}; leave quant.act out")


def left_plain(graph: Graph, config: Config) -> list[str]:
    """What quant.act asks for and experts do not get, in words: their kernels multiply fp8 in blocks of 128 x 128."""
    nodes = (node for program in graph.programs.values() for node in program.nodes)
    return [*dict.fromkeys(filter(None, map(leaves_act, nodes)))] if config.quant.requires_act else []


def digest_of(graph: Graph) -> str:
    """The digest of a text without its comments, which an artifact does not keep."""
    return digest("\n".join(line.partition("    # ")[0] for line in show(graph).splitlines()))

"""Reserve memory for an engine with sleep mode, and open its sleeper."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from atom.assemble.checks import check_weights
from atom.assemble.loading import load_weights, open_checked
from atom.checkpoint import SILENT
from atom.config import Config
from atom.graph import Graph, Recipe
from atom.kernels.stable_memory import StableMemory
from atom.runtime.sleep import CPUSleeper, GPUSleeper, Sleeper
from atom.runtime.step.runner import Runner
from atom.weights.evaluate import Loaded, Place


def stable_memories(config: Config) -> tuple[StableMemory, StableMemory] | tuple[None, None]:
    """GPU memory for weights and for KV that an engine can release; none on a CPU and without sleep mode."""
    if not config.serve.enable_sleep_mode or config.device == "cpu":
        return None, None
    _, total = torch.cuda.mem_get_info()
    return StableMemory(total), StableMemory(total)


def open_sleeper(
    runner: Runner,
    graph: Graph,
    tensors: dict[Recipe, Loaded],
    config: Config,
    num_blocks: Mapping[str, int],
    memory: StableMemory | None,
    kv_memory: StableMemory | None,
) -> Sleeper | None:
    """The sleeper of an engine; None without serve.enable_sleep_mode.

    memory, kv_memory: of a GPU, for weights and for KV; None on a CPU
    """
    if not config.serve.enable_sleep_mode:
        return None

    def load(place: Place | None) -> dict[Recipe, Loaded]:
        with ExitStack() as opened:
            checkpoint = open_checked(config, SILENT, opened)
            check_weights(graph, checkpoint, config)
            return load_weights(graph, checkpoint, config, SILENT, place=place)

    if memory is None or kv_memory is None:
        return CPUSleeper(runner, load, tensors, num_blocks)
    return GPUSleeper(runner, load, tensors, memory, kv_memory)

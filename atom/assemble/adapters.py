"""Make room for LoRA adapters beside the weights, and load those of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atom.assemble.ranks import RankModel
from atom.compiler import mesh_of
from atom.config import Config
from atom.graph import Graph, Recipe
from atom.runtime.ranks.driver import Driver
from atom.runtime.requests.loras import Loras
from atom.runtime.sleep import Sleeper
from atom.weights.evaluate import Loaded
from atom.weights.lora import LoraWeights


def open_adapters(graph: Graph, tensors: Mapping[Recipe, Loaded], config: Config, rank: int = 0) -> LoraWeights | None:
    """A rank's room for adapters; None where the model is served without any."""
    serve, mesh = config.serve, mesh_of(config)
    if not serve.enable_lora:
        return None
    coordinates = mesh.coordinates(rank) if mesh.num_ranks > 1 else None
    return LoraWeights(graph, tensors, serve.max_loras, serve.max_lora_rank, coordinates)


def open_loras(
    adapters: LoraWeights | None,
    stages: Sequence[RankModel],
    driver: Driver | None,
    sleeper: Sleeper | None,
    config: Config,
) -> Loras | None:
    """Load the adapters of serve.lora_modules; None where the model is served without any. stages: of a pipeline"""
    if adapters is None:
        return None
    for stage in stages:
        adapters.modules.update(stage.modules)
    loras = Loras(adapters, None if driver is None else driver.load_adapter, sleeper)
    for name, path in config.serve.lora_modules.items():
        loras.load(name, loras.read(path))
    return loras

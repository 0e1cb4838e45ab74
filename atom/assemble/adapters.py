"""Reserve memory for LoRA adapters, and load those of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atom.assemble.ranks import RankModel
from atom.config import ServeConfig
from atom.graph import Graph, Mesh, Recipe
from atom.runtime.ranks.driver import Driver
from atom.runtime.requests.loras import Loras
from atom.runtime.sleep import Sleeper
from atom.weights.evaluate import Loaded
from atom.weights.lora import LoraWeights


def open_adapters(
    graph: Graph, tensors: Mapping[Recipe, Loaded], serve: ServeConfig, mesh: Mesh, rank: int = 0
) -> LoraWeights | None:
    """A rank's memory for adapters; None if the model is served without any."""
    if not serve.enable_lora:
        return None
    coordinates = mesh.coordinates(rank) if mesh.num_ranks > 1 else None
    return LoraWeights(graph, tensors, serve.max_loras, serve.max_lora_rank, coordinates)


def open_loras(
    adapters: LoraWeights | None,
    stages: Sequence[RankModel],
    driver: Driver | None,
    sleeper: Sleeper | None,
    modules: Mapping[str, str],
) -> Loras | None:
    """Load adapters by their names; None if the model is served without any.

    stages: the models of a pipeline's stages
    modules: the folder of each adapter, by the name that requests use
    """
    if adapters is None:
        return None
    for stage in stages:
        adapters.modules.update(stage.modules)
    loras = Loras(adapters, None if driver is None else driver.load_adapter, sleeper)
    for name, path in modules.items():
        loras.load(name, loras.read(path))
    return loras

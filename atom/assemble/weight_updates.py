"""Open what updates the weights of an engine in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from atom.assemble.calibration import find_calibrated
from atom.assemble.checks import check_values, left_out, models_of
from atom.assemble.loading import open_checked
from atom.checkpoint import SILENT, Checkpoint
from atom.compiler import mesh_of, whole_graph
from atom.config import Config
from atom.config.stored_names import stacked_parts
from atom.graph import Graph, Recipe
from atom.runtime.ranks.driver import Driver
from atom.runtime.weight_updates import RankWeights, WeightUpdates
from atom.weights.evaluate import Loaded


def open_rank_weights(graph: Graph, tensors: Mapping[Recipe, Loaded], config: Config, rank: int = 0) -> RankWeights:
    """A rank's weights, to be updated."""
    mesh = mesh_of(config)

    def open_stored() -> Checkpoint:
        with ExitStack() as opened:
            checkpoint = open_checked(config, SILENT, opened)
            opened.pop_all()  # it is closed by who reads it
        return checkpoint

    return RankWeights(
        list(graph.recipes()),
        tensors,
        config.device,
        stacked_parts(config.model),
        None if config.load_dummy else open_stored,
        lambda: check_values(tensors, config),
        rank,
        mesh.coordinates(rank) if mesh.num_ranks > 1 else None,
        find_tied(config),
    )


def open_updates(
    graph: Graph,
    tensors: Mapping[Recipe, Loaded],
    config: Config,
    rename: Callable[[str], str | None],
    driver: Driver | None,
    *,
    is_one_host: bool,
) -> WeightUpdates:
    """What updates the weights of all ranks.

    rename: see `Checkpoint.name_of`
    is_one_host: whether all ranks are on this host
    """

    def find_recipes() -> Sequence[Recipe]:
        return list(whole_graph(graph, config).recipes())

    own, ignored = open_rank_weights(graph, tensors, config), left_out(config)
    obstacle = find_obstacle(graph, config)
    return WeightUpdates(own, find_recipes, rename, ignored, driver, obstacle, is_one_host=is_one_host)


def find_tied(config: Config) -> list[tuple[str, str]]:
    """The stored names of each model's embedding and of a head that is the same, which a trainer may send too."""
    return [
        tuple(f"{prefix}{model.weights[role]}.weight" for role in ("embedding", "head"))  # type: ignore[misc]
        for prefix, model in models_of(config).items()
        if model.tied and {"embedding", "head"} <= model.weights.keys()
    ]


def find_obstacle(graph: Graph, config: Config) -> str:
    """Why these weights cannot be updated in place; "": they can."""
    if config.classifies:
        return "the weights of a model that classifies are not updated: what scores its labels is read at the start"
    if not config.load_dummy and (formats := find_calibrated(graph, config)):
        instead = "set quant.calibration=none, which rounds to the nearest"
        return f"weights of {formats[0]} are rounded by a text that the model reads at the start: {instead}"
    return ""

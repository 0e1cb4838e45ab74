"""Open a checkpoint and load a rank's weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from atom import weights
from atom.assemble.calibration import plan_calibration
from atom.assemble.checks import check_values, models_of
from atom.cache import Cache
from atom.checkpoint import Checkpoint, JoinedCheckpoint, Progress, Tokenizer, stop_ids
from atom.compiler import mesh_of
from atom.config import Config
from atom.config.checkpoint import open_with_draft
from atom.config.tied_head import settle_head
from atom.graph import Graph, Recipe
from atom.pieces import sources_of
from atom.process.messages import say
from atom.weights.evaluate import Loaded, Place

WEIGHT_SOURCES = ("dtypes.py", "checkpoint", "graph", "kernels/cpp", "weights")  # what makes tensors of files


def open_checked(config: Config, progress: Progress, opened: ExitStack) -> Checkpoint:
    """Open the checkpoint and check its header against the configuration; the stack closes it."""
    checkpoint = open_with_draft(config, progress)
    opened.callback(checkpoint.close)
    if not config.load_dummy:
        weights.check_counts(config.model, checkpoint.tensors)
        if isinstance(checkpoint, JoinedCheckpoint) and config.draft and not config.draft.eagle3:
            weights.check_counts(config.draft, checkpoint.other.tensors)
    stop_ids(checkpoint, None)
    return checkpoint


def settle_heads(config: Config, checkpoint: Checkpoint) -> Config:
    """The configuration with the heads that the checkpoint, opened with its weights, decides on; see `settle_head`."""
    if config.load_dummy:
        return config
    other = checkpoint.other if isinstance(checkpoint, JoinedCheckpoint) else None
    draft = None if config.draft is None else settle_head(config.draft, other)
    return replace(config, model=settle_head(config.model, checkpoint, config.overrides), draft=draft)


def has_own_heads(config: Config) -> list[bool]:
    """Whether the model, and its draft model if there is one, have a head that is not the embedding."""
    return [not model.tied for model in models_of(config).values()]


def load_weights(
    graph: Graph,
    checkpoint: Checkpoint,
    config: Config,
    progress: Progress,
    rank: int = 0,
    place: Place | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[Recipe, Loaded]:
    """Load a rank's tensors of the graph's recipes, stored or random.

    place: as in `weights.load`
    tokenizer: the checkpoint's, if it is open already
    """
    mesh = mesh_of(config)
    coordinates = mesh.coordinates(rank) if mesh.num_ranks > 1 else None
    if config.load_dummy:
        return weights.load_dummy(graph.recipes(), config.seed, config.device, coordinates, place)
    cache = Cache(config.cache_folder)
    sources = sources_of(*WEIGHT_SOURCES)
    calibration = plan_calibration(graph, checkpoint, config, cache, sources, tokenizer)
    tensors = weights.load(
        graph.recipes(),
        checkpoint,
        progress,
        config.device,
        cache,
        coordinates,
        place,
        sources=sources,
        calibration=calibration,
    )
    for line in cache.warnings:
        say(line)
    check_values(tensors, config)
    return tensors

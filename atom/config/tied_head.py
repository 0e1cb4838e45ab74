"""Decide whether a tied head is the embedding, by what is stored.

    model = settle_head(model, checkpoint)
    model.tied      # False: the checkpoint stores another head, which is used

As in transformers 5, a stored head counts unless it equals the embedding. One that is left out is in `model.ignore`.
If only one of the two is stored, it is both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from atom.checkpoint import Checkpoint
from atom.checkpoint.stacked import unstack
from atom.config.schema import ModelConfig
from atom.config.stored_names import stacked_parts
from atom.process.messages import say


def settle_head(model: ModelConfig, checkpoint: Checkpoint | None, overrides: Iterable[str] = ()) -> ModelConfig:
    """Untie the model if its checkpoint stores a head that differs from the embedding; a line on stderr says so.

    checkpoint: None, or without tensors on this disk: config.json decides
    overrides: model.tied among them decides
    """
    head, embedding = (f"{model.weights[role]}." if role in model.weights else "" for role in ("head", "embedding"))
    if checkpoint is None or not model.tied or not head or f"{head}weight" in model.ignore:
        return model
    opened = checkpoint.with_tensors()
    opened = opened and unstack(opened, stacked_parts(model))  # an embedding may be stored under another name
    stored = [name for name in (opened.tensors if opened else ()) if name.startswith(head) and name != f"{head}bias"]
    if opened is None or not stored:
        return model
    is_plain = stored == [f"{head}weight"]  # others are of a packed one
    if is_plain and not any(name.startswith(embedding) for name in opened.tensors):
        return replace(model, weights={**model.weights, "embedding": model.weights["head"]})
    is_set = any(text.lstrip("+").startswith("model.tied=") for text in overrides)
    if is_set or (is_plain and opened.is_same(stored[0], f"{embedding}weight")):
        return replace(model, ignore=[*model.ignore, *stored])
    why = f"config.json ties {stored[0]} to {embedding}weight, but another head is stored"
    say(f"{checkpoint.location}: {why}: it is used (model.tied=true leaves it out)")
    return replace(model, tied=False)

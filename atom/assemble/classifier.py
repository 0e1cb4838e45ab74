"""Read what scores labels: a classifier's weight, or two rows of the head.

read_classifier(config)         # fp32[C, H]; None if the model has no labels
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from atom.checkpoint import Checkpoint
from atom.checkpoint.progress import SILENT
from atom.config import Config, ModelConfig
from atom.config.checkpoint import open_for
from atom.errors import CheckpointError, ConfigError, UnsupportedError
from atom.graph import TORCH_DTYPES

OPTION = "serve.pooler_config.classifier_from_token"


def read_classifier(config: Config) -> npt.NDArray[np.float32] | None:
    """The rows that labels are scored with. ConfigError or CheckpointError if they cannot be."""
    model, tokens = config.model, config.serve.pooler_config.classifier_from_token
    if not config.classifies:
        return None
    checkpoint = open_for(config, SILENT)
    try:
        if tokens is not None:
            return _difference(config, checkpoint, _ids(config, checkpoint, tokens))
        if "tokens" in config.cross_encoder:
            return _difference(config, checkpoint, config.cross_encoder["tokens"])
        assert model.classifier is not None, "one of the two is there"
        if config.load_dummy:
            return np.zeros((len(config.hf.get("id2label") or "ab"), model.hidden), np.float32)  # two by default
        return _read(checkpoint, f"{model.classifier}.weight", model).numpy()
    finally:
        checkpoint.close()


def _ids(config: Config, checkpoint: Checkpoint, tokens: list[str]) -> list[int | None]:
    tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
    if tokenizer is None or len(tokens) not in (1, 2):
        raise ConfigError(f"{OPTION}={tokens}: give two tokens, as [no, yes], or one, of a checkpoint with a tokenizer")
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in tokens]
    if wrong := next((token for token, found in zip(tokens, ids, strict=True) if len(found) != 1), None):
        raise ConfigError(f"{OPTION}: {wrong!r} is not one token of the vocabulary")
    return [*([None] if len(ids) == 1 else []), *(id for (id,) in ids)]


def _difference(config: Config, checkpoint: Checkpoint, tokens: Sequence[int | None]) -> npt.NDArray[np.float32]:
    """The head's row of the second token less that of the first, whose product is the log of their odds.

    tokens: ids; the first one None: only the second one's row
    """
    model = config.model
    if any((model.logits_softcap, model.logits_divisor, model.logits_scale, model.head_bias, model.channel_scales)):
        raise UnsupportedError(f"the logits of model={model.name} are more than the head's; two tokens make no score")
    if config.load_dummy:
        return np.zeros((1, model.hidden), np.float32)
    rows = _read(checkpoint, f"{model.weights['embedding' if model.tied else 'head']}.weight", model)
    no, yes = tokens
    if yes is None or max(yes, no or 0) >= len(rows):
        raise CheckpointError(f"a score is made of the tokens {no} and {yes}, and the vocabulary has {len(rows)}")
    return (rows[yes] if no is None else rows[yes] - rows[no])[None].numpy()


def _read(checkpoint: Checkpoint, name: str, model: ModelConfig) -> torch.Tensor:
    """A plain matrix of H columns, in fp32."""
    if name not in checkpoint.tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name}, which scores labels; is it whole?")
    stored = checkpoint.tensors[name]
    if stored.dtype not in ("fp32", "bf16", "fp16") or len(stored.shape) != 2 or stored.shape[1] != model.hidden:
        given = f"tensor {name} is {stored.dtype} {list(stored.shape)}"
        raise CheckpointError(f"{given}; labels are scored by a plain matrix of {model.hidden} columns")
    data = torch.frombuffer(bytearray(checkpoint.read(name)), dtype=TORCH_DTYPES[stored.dtype])
    return data.reshape(tuple(stored.shape)).float()

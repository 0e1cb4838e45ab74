"""Read what scores labels: a classifier's weight, or two rows of the head.

read_classifier(config)         # fp32[C, H]; None if the model has no labels
"""

from __future__ import annotations

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
    if model.classifier is None and tokens is None:
        return None
    checkpoint = open_for(config, SILENT)
    try:
        if tokens is not None:
            return _difference(config, checkpoint, tokens)
        assert model.classifier is not None, "one of the two is there"
        if config.load_dummy:
            return np.zeros((len(config.hf.get("id2label") or "ab"), model.hidden), np.float32)  # two by default
        return _read(checkpoint, f"{model.classifier}.weight", model).numpy()
    finally:
        checkpoint.close()


def _difference(config: Config, checkpoint: Checkpoint, tokens: list[str]) -> npt.NDArray[np.float32]:
    """The head's row of the second token less that of the first, whose product is the log of their odds."""
    model, tokenizer = config.model, checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
    if tokenizer is None or len(tokens) != 2:
        raise ConfigError(f"{OPTION}={tokens}: give two tokens, as [no, yes], of a checkpoint with a tokenizer")
    if any((model.logits_softcap, model.logits_divisor, model.logits_scale, model.head_bias, model.channel_scales)):
        raise UnsupportedError(f"{OPTION}: the logits of model={model.name} are more than the head's; leave it out")
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in tokens]
    if wrong := next((token for token, found in zip(tokens, ids, strict=True) if len(found) != 1), None):
        raise ConfigError(f"{OPTION}: {wrong!r} is not one token of the vocabulary")
    if config.load_dummy:
        return np.zeros((1, model.hidden), np.float32)
    rows = _read(checkpoint, f"{model.weights['embedding' if model.tied else 'head']}.weight", model)
    return (rows[ids[1][0]] - rows[ids[0][0]])[None].numpy()


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

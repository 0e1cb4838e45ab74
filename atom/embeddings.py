"""Embeddings, the similarities of pairs, and probabilities of labels.

pooling = pooling_of(config)                           # "MEAN"
describe_embedding(sequence, config)["embedding"]      # [0.01, -0.2, …], once the sequence has ended
similarities([first, second], num_first=1)             # [0.31]
probabilities(scores, config)                          # [0.1, 0.9], of a classifier's scores
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import numpy as np
import numpy.typing as npt

from atom.config import Config
from atom.errors import AtomError, RequestError
from atom.runtime.types import Sequence
from atom.sampling_params import SamplingParams

POOLED = SamplingParams(max_tokens=1, temperature=0)  # of a prompt that is embedded


def pooling_of(config: Config) -> str:
    """Which tokens an embedding is made of. RequestError if the model makes none."""
    pooling = config.serve.pooler_config.pooling_type
    if pooling is None:
        raise RequestError("this model makes no embeddings; set serve.pooler_config.pooling_type=LAST, or MEAN")
    return pooling


def embedding_of(sequence: Sequence) -> npt.NDArray[np.float32]:
    """The embedding of a prompt, not normalized. AtomError if there is none."""
    if sequence.embedding is None:
        raise AtomError(f"a prompt could not be embedded: {sequence.error or sequence.finish_reason}")
    return sequence.embedding


def describe_embedding(sequence: Sequence, config: Config) -> dict[str, Any]:
    """The dict of an embedded prompt, see `LLMEngine.embed`."""
    vector = embedding_of(sequence)
    if config.serve.pooler_config.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return {"embedding": vector.tolist(), "num_tokens_input": len(sequence.prompt)}


def similarities(embeddings: List[npt.NDArray[np.float32]], num_first: int) -> list[float]:
    """The cosine similarities of the first embeddings, or of the only first one, with the others."""
    vectors = np.stack(embeddings).astype(np.float64)
    left, right = vectors[:num_first], vectors[num_first:]
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    scores: list[float] = ((left * right).sum(axis=1) / np.maximum(lengths, 1e-8)).tolist()
    return scores


def num_labels(config: Config) -> int:
    """How many labels a classifier has, by transformers' defaults."""
    if config.serve.pooler_config.classifier_from_token is not None or "tokens" in config.cross_encoder:
        return 1
    named, number = config.hf.get("id2label"), config.hf.get("num_labels")
    return len(named) if named else 2 if number is None else int(number)


def check_labels(config: Config, count: int | None = None) -> None:
    """RequestError unless the model has labels. count: as many are needed"""
    if not config.classifies:
        raise RequestError("this model has no labels: its checkpoint is no classifier, and embeddings have none")
    if count is not None and num_labels(config) != count:
        raise RequestError(f"this model has {num_labels(config)} labels, and a pair is scored by one; call classify")


def label_of(config: Config, index: int) -> str | None:
    """The name of a label; None if the checkpoint has no names."""
    names = config.hf.get("id2label") or {}
    return names.get(str(index), names.get(index))


def probabilities(scores: npt.NDArray[np.float32], config: Config) -> npt.NDArray[np.float64]:
    """The probabilities of labels, by config.json's problem_type, as transformers trains them.

    regression: the scores themselves; one label, or several that exclude none: of each; else they sum up to 1. The
    activation that sentence-transformers' files name goes before that.
    """
    exact, kind = scores.astype(np.float64), config.hf.get("problem_type")
    activation = None if config.serve.pooler_config.classifier_from_token else config.cross_encoder.get("activation")
    if activation == "Identity" or (kind == "regression" and activation is None):
        return exact
    if activation == "Sigmoid" or kind == "multi_label_classification" or len(exact) == 1:
        ones: npt.NDArray[np.float64] = 1 / (1 + np.exp(-exact))
        return ones
    powers = np.exp(exact - exact.max())
    shares: npt.NDArray[np.float64] = powers / powers.sum()
    return shares


def describe_labels(scores: npt.NDArray[np.float32], config: Config) -> dict[str, Any]:
    """The label of a text: label, probs and num_classes, as vLLM's /classify has them."""
    probs = probabilities(scores, config)
    label = label_of(config, int(probs.argmax()))
    return {"label": label, "probs": probs.tolist(), "num_classes": len(probs)}

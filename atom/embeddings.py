"""Embeddings of the Python engines, and scores of pairs of them.

pooling = pooling_of(config)                           # "MEAN"
describe_embedding(sequence, config)["embedding"]      # [0.01, -0.2, …], once the sequence has ended
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

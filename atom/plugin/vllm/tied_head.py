"""Leave out an arriving head that equals the embedding it is tied to.

    tensors = without_copy(tensors, config.model)

vLLM may download the weights after the model is compiled: only then it shows that another head is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from atom.config import ModelConfig
from atom.errors import CheckpointError


def without_copy(tensors: Iterable[tuple[str, Tensor]], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors without the copy of the embedding. CheckpointError if the head differs from the embedding."""
    head, embedding = (f"{model.weights.get(role)}.weight" for role in ("head", "embedding"))
    if not model.tied or head == embedding:
        yield from tensors
        return
    digests = set[bytes]()
    for name, tensor in tensors:
        if name in (head, embedding):
            digests.add(digest_of(tensor))
        if len(digests) > 1:
            raise CheckpointError(
                f"config.json ties {head} to {embedding}, but another head is stored, which was not on this disk when "
                "the model was compiled: start vLLM again, on the folder that it was downloaded to"
            )
        if name != head:
            yield name, tensor


def digest_of(tensor: Tensor) -> bytes:
    """A digest of a tensor's bytes, since whoever reads it may use its memory again."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data).digest()

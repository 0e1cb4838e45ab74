"""Hidden states of transformers' models, and their layers' outputs with vectors added, by forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Vectors = dict[str, torch.Tensor]
FIRST, SECOND, LAST = "model.layers.0", "model.layers.1", "model.layers.2"


def states_of(model: Any, layer: str, tokens: list[int]) -> npt.NDArray[np.float32]:
    """What a layer gives of each token, [tokens, H] or of several streams [tokens, S, H].

    transformers norms what it returns of the last one.
    """
    found: list[torch.Tensor] = []
    is_steered = bool(model.get_submodule(layer)._forward_hooks)
    hook = model.get_submodule(layer).register_forward_hook(lambda *call: found.append(call[2]))
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    given = found[0][0] if isinstance(found[0], tuple) else found[0]
    number = int(layer.rpartition(".")[2])
    if number + 2 < len(states) and not is_steered:
        assert torch.equal(given, states[number + 1]), "they are transformers' hidden states, of the next number"
    if given.dim() == 4 and len(given) > 1:  # of Gemma 3n: the streams come first
        given = given.movedim(0, 2)
    hidden = model.config.hidden_size
    if given.shape[-1] > hidden:  # of Qwen4: they are side by side
        given = given.unflatten(-1, (-1, hidden))
    made: npt.NDArray[np.float32] = given[0].numpy()
    return made


def added(given: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """given with a vector [H], that each of its streams takes, or [S, H]."""
    if vector.dim() == 2 and given.dim() == 4 and len(given) > 1:
        return given + vector[:, None, None]
    if given.dim() == 3 and given.shape[-1] > vector.shape[-1]:
        return (given.unflatten(-1, (-1, vector.shape[-1])) + vector).flatten(-2)
    return given + vector


@contextmanager
def steered(model: Any, vectors: Vectors, scale: float) -> Iterator[Any]:
    """The model with vectors added to what layers give."""

    def add(vector: torch.Tensor) -> Callable[..., Any]:
        def hook(module: Any, args: Any, given: Any) -> Any:
            is_tuple = isinstance(given, tuple)
            return (added(given[0], scale * vector), *given[1:]) if is_tuple else added(given, scale * vector)

        return hook

    hooks = [model.get_submodule(layer).register_forward_hook(add(vector)) for layer, vector in vectors.items()]
    try:
        yield model
    finally:
        for each in hooks:
            each.remove()


def pooled(states: npt.NDArray[np.float32], pool: str, num_prompt: int) -> npt.NDArray[np.float32]:
    prompt = states[:num_prompt]
    return {"last": prompt[-1], "mean": prompt.mean(0), "all": states}[pool]

"""Recipes to tensors: the one place where weights are read, joined and made.

    check(graph, checkpoint.tensors, ignore=config.model.ignore)      # missing, left over, misshapen: a CheckpointError
    weights = load(graph.recipes(), checkpoint, progress)             # {recipe: tensor}; equal recipes are one tensor

Tensors are streamed: each stored one is read, converted to the dtype that the graph computes in, and put in its place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint, Progress, StoredTensor
from atom.errors import CheckpointError, UnsupportedError
from atom.graph import TORCH_DTYPES, Cat, Graph, Recipe, RopeFreqs, Shuffle, W
from atom.graph.recipes import leaves
from atom.kernels import shuffle

NUM_READERS = 2  # threads that read and convert


def check(graph: Graph, stored: Mapping[str, StoredTensor], ignore: Iterable[str] = ()) -> None:
    """Hold the checkpoint against the graph: every tensor there, of the right shape, and none left over."""
    needed = [leaf for recipe in graph.recipes() for leaf in leaves(recipe)]
    missing = [leaf.name for leaf in needed if leaf.name not in stored]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no tensor {_some(missing)}; is it whole, and is model= the right one?"
        )
    for leaf in needed:
        shape = tuple(stored[leaf.name].shape)
        if shape != leaf.type.shape:
            raise CheckpointError(f"tensor {leaf.name} is {list(shape)}, the model expects {list(leaf.type.shape)}")
    names = {leaf.name for leaf in needed}
    patterns = tuple(ignore)
    surplus = [name for name in stored if name not in names and not any(fnmatch(name, pattern) for pattern in patterns)]
    if surplus:
        raise CheckpointError(
            f"the model does not use tensor {_some(surplus)}; name it in model.ignore if it may be left out"
        )


def load(recipes: Iterable[Recipe], checkpoint: Checkpoint, progress: Progress) -> dict[Recipe, Tensor]:
    """Every recipe's tensor, on the CPU."""
    ordered = sorted(recipes, key=lambda recipe: -recipe.type.num_bytes)  # the readers end together
    with progress.task("weights", sum(recipe.type.num_bytes for recipe in ordered)) as task:

        def fill(leaf: W, target: Tensor) -> None:
            target.copy_(_stored(checkpoint, leaf.name))
            task.advance(target.nbytes)

        with ThreadPoolExecutor(NUM_READERS) as readers, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
            return dict(zip(ordered, readers.map(lambda recipe: _make(recipe, fill), ordered), strict=True))


def load_dummy(recipes: Iterable[Recipe], seed: int) -> dict[Recipe, Tensor]:
    """Weights of normal(0, 0.02) in place of stored ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        recipe: _make(recipe, lambda _, target: target.normal_(0.0, 0.02, generator=generator)) for recipe in recipes
    }


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


@torch.inference_mode()
def _make(recipe: Recipe, fill: Callable[[W, Tensor], Any]) -> Tensor:
    """A recipe's tensor; `fill` writes each leaf into its place."""
    if isinstance(recipe, RopeFreqs):
        return rope_freqs(recipe)
    if isinstance(recipe, Shuffle):
        return shuffle(_make(recipe.part, fill), recipe.layout)
    tensor = torch.empty([int(dim) for dim in recipe.type.shape], dtype=TORCH_DTYPES[recipe.type.dtype])
    for leaf, place in _places(recipe, tensor):
        fill(leaf, place)
    return tensor


def _places(recipe: Recipe, target: Tensor) -> Iterator[tuple[W, Tensor]]:
    """The leaves of a recipe and the part of its tensor that each one fills."""
    if isinstance(recipe, W):
        yield recipe, target
    elif isinstance(recipe, Cat):
        start = 0
        for part in recipe.parts:
            size = int(part.type.shape[recipe.dim])
            yield from _places(part, target.narrow(recipe.dim, start, size))
            start += size


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    stored = checkpoint.tensors[name]
    if stored.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"tensor {name} is stored as {stored.dtype}, which atom cannot load yet")
    data = checkpoint.read(name)
    if not data:
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)


def rope_freqs(recipe: RopeFreqs) -> Tensor:
    """fp32[dim / 2] in radians a token. default: Su et al. 2021; linear: Chen et al. 2023; llama3: by wavelength, as in
    Llama 3.1; yarn: Peng et al. 2023; factors: divisors that the checkpoint states."""
    exponents = torch.arange(0, recipe.dim, 2, dtype=torch.float32) / recipe.dim
    freqs = 1.0 / recipe.theta**exponents
    match recipe.kind:
        case "linear":
            return freqs / recipe.factor
        case "llama3":
            return _llama3(recipe, freqs)
        case "yarn":
            share = _yarn_share(recipe)
            return freqs / recipe.factor * (1 - share) + freqs * share
        case "factors":
            return freqs / torch.tensor(recipe.factors, dtype=torch.float32)
    return freqs


def _llama3(recipe: RopeFreqs, freqs: Tensor) -> Tensor:
    """Short wavelengths stay, long ones stretch by the factor, those between are blended."""
    assert recipe.original_max_position is not None, "the frontend checks it"
    turns = recipe.original_max_position * freqs / (2 * math.pi)  # in the original context
    low, high = recipe.low_freq_factor, recipe.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * freqs / recipe.factor + blend * freqs


def _yarn_share(recipe: RopeFreqs) -> Tensor:
    """By frequency, the share that is left as it was: 1 where it turns more than beta_fast times, 0 below beta_slow."""
    assert recipe.original_max_position is not None, "the frontend checks it"

    def dim_of(turns: float) -> float:
        ratio = recipe.original_max_position / (turns * 2 * math.pi)  # type: ignore[operator]
        return recipe.dim * math.log(ratio) / (2 * math.log(recipe.theta))

    low, high = dim_of(recipe.beta_fast), dim_of(recipe.beta_slow)
    if recipe.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, recipe.dim - 1)
    ramp = (torch.arange(recipe.dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    return 1 - ramp.clamp(0, 1)

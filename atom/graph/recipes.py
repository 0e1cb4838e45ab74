"""Weights as data: how each tensor that a graph names is made of what a checkpoint stores.

    W("model.layers.0.mlp.up_proj.weight", bf16[1536, 576])     a stored tensor, in the dtype that the graph computes in
    cat([W(…), W(…)])                                           tensors joined
    shuffle(W(…), "onednn")                                     a tensor in a kernel's own layout
    rope_freqs(64, 10000.0)                                     a constant
    KV("model.layers.0", bf16[2, 3, 64])                        no weight: the state that a layer keeps for each token

They are values: equal recipes are one tensor. Passes rewrite them beside the nodes, only `atom.weights` evaluates them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atom.graph.types import Type


@dataclass(frozen=True)
class W:
    """A stored tensor."""

    name: str  # in the checkpoint
    type: Type  # shape as stored, dtype as computed
    fmt: str | None = None  # stored format, where it is not a plain tensor


@dataclass(frozen=True)
class Cat:
    """Tensors joined along one dim."""

    parts: tuple[Recipe, ...]
    dim: int = 0

    @property
    def type(self) -> Type:
        first = self.parts[0].type
        shape = list(first.shape)
        shape[self.dim] = sum(int(part.type.shape[self.dim]) for part in self.parts)
        return Type(first.dtype, tuple(shape))


@dataclass(frozen=True)
class Shuffle:
    """A tensor in the layout that a kernel wants."""

    part: Recipe
    layout: str  # a layout of `atom.kernels`

    @property
    def type(self) -> Type:
        return self.part.type


@dataclass(frozen=True)
class RopeFreqs:
    """Rotary frequencies fp32[dim / 2], radians a token; `atom.weights.rope_freqs` has the kinds and their sources."""

    dim: int  # rotated dims of a head
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] | None = None

    @property
    def type(self) -> Type:
        return Type("fp32", (self.dim // 2,))


@dataclass(frozen=True)
class KV:
    """What one layer keeps for each token of a sequence; `type` is the entry of one token."""

    name: str
    type: Type
    window: int | None = None  # tokens that a query sees, itself included; None: all

    @property
    def kind(self) -> str:
        return "full" if self.window is None else f"window_{self.window}"


Recipe = W | Cat | Shuffle | RopeFreqs

# the names that recipes have in the text
TEXT_NAMES: dict[str, type[Recipe | KV]] = {"W": W, "cat": Cat, "shuffle": Shuffle, "rope_freqs": RopeFreqs, "KV": KV}


def leaves(recipe: Recipe) -> Iterator[W]:
    """The stored tensors that a recipe reads, in order."""
    if isinstance(recipe, W):
        yield recipe
    elif isinstance(recipe, Cat | Shuffle):
        for part in recipe.parts if isinstance(recipe, Cat) else (recipe.part,):
            yield from leaves(part)

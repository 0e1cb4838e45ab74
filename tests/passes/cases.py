"""What the pass tests share: texts in, texts out, and equal numbers."""

from __future__ import annotations

import torch

from atom.graph import TORCH_DTYPES, Cat, Full, Graph, Host, Recipe, Slice, Stack, W, interpret, parse, show
from atom.graph.recipes import LoraStack
from atom.kernels import Target, find_backend
from atom.passes.context import PassContext

Rewrite = object


def context_of(target: Target, *backends: str) -> PassContext:
    return PassContext(target, tuple(map(find_backend, backends)))


def text_of(graph: Graph) -> str:
    """The text without comments."""
    return "\n".join(line.split("    #")[0] for line in show(graph).splitlines())


def random_weight(recipe: Recipe) -> torch.Tensor:
    """A tensor that depends only on the stored names, so that fused and separate weights agree."""
    if isinstance(recipe, Cat):
        return torch.cat([random_weight(part) for part in recipe.parts], recipe.dim)
    if isinstance(recipe, Slice):
        return random_weight(recipe.part).narrow(recipe.dim, recipe.start, recipe.stop - recipe.start)
    if isinstance(recipe, Stack):
        return torch.stack([random_weight(recipe.of(expert)) for expert in range(recipe.start, recipe.stop)])
    if isinstance(recipe, Host):
        return random_weight(recipe.part)
    if isinstance(recipe, Full):
        return torch.full(recipe.type.shape, recipe.value, dtype=TORCH_DTYPES[recipe.type.dtype])
    assert isinstance(recipe, W | LoraStack)
    generator = torch.Generator().manual_seed(sum(map(ord, recipe.name)))
    return torch.randn(recipe.type.shape, generator=generator, dtype=torch.float32).to(TORCH_DTYPES[recipe.type.dtype])


def run(text: str, **inputs: torch.Tensor) -> torch.Tensor:
    return interpret(parse(text), "f", inputs, random_weight)

"""Write adapters into the stacks of a loaded text, in place.

    loras = LoraWeights(graph, tensors, max_loras=8, max_rank=16)
    loras.check(adapter)                # of `checkpoint.lora`: all modules are there, all shapes fit
    loras.write(3, adapter)             # as adapter number 3

A smaller rank is padded with zeros, and the scale goes into b. Of several ranks, each writes its own parts of the
factors of its stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from atom.checkpoint.lora import AdapterFiles, Factor
from atom.errors import CheckpointError, ConfigError
from atom.graph import TORCH_DTYPES, Graph, Recipe, Slice
from atom.graph.recipes import LoraStack, lora_stack_of
from atom.weights.evaluate import Loaded, split_recipe
from atom.weights.localize import localize

A, B = ".lora_A", ".lora_B"  # how the names of factors end


class Sizes(NamedTuple):
    """The features of a module, of all ranks."""

    outputs: int
    inputs: int


class LoraWeights:
    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[Recipe, Loaded],
        max_loras: int,
        max_rank: int,
        coordinates: Mapping[str, int] | None = None,
    ) -> None:
        """coordinates: of the rank whose tensors these are; None: there is one rank"""
        self.max_loras, self.max_rank = max_loras, max_rank
        self.modules: dict[str, Sizes] = {}  # that may have adapters; `check` knows those that are added, too
        self._stacks: list[tuple[LoraStack, tuple[int, int], Tensor]] = []  # the place in it where the tensor begins
        self._dtype = torch.float32  # of the stacks
        sizes: dict[str, int] = {}
        for recipe in graph.recipes():
            tensor = tensors[recipe]
            if not isinstance(tensor, Tensor):
                continue
            for part, view in split_recipe(localize(recipe, coordinates) if coordinates else recipe, tensor):
                if (stack := lora_stack_of(part)) is not None:
                    self._dtype = view.dtype
                    self._stacks.append((stack, begin_of(part), view))
                    sizes[stack.name] = int(stack.type.shape[stack.name.endswith(A)])
        for name in filter(lambda name: name.endswith(A), sizes):
            module = name.removesuffix(A)
            self.modules[module] = Sizes(sizes[module + B], sizes[name])

    def check(self, adapter: AdapterFiles) -> None:
        """Raise CheckpointError or ConfigError, which name the tensor, where an adapter does not fit the model."""
        for module, factors in adapter.factors.items():
            sizes, rank = self.modules.get(module), factors.a.stored.shape[0]
            if sizes is None:
                raise CheckpointError(
                    f"{adapter.path}: tensor {factors.a.name} is of {module}, which is no linear of a layer here: "
                    "embeddings, the head, routers and experts have no adapters"
                )
            if rank > self.max_rank:
                raise ConfigError(f"{adapter.path}: {factors.a.name} has rank {rank}: set serve.max_lora_rank={rank}")
            for factor, expected in ((factors.a, (rank, sizes.inputs)), (factors.b, (sizes.outputs, rank))):
                if factor.stored.shape != expected:
                    is_of = f"is {list(factor.stored.shape)}, the model expects {list(expected)}"
                    raise CheckpointError(f"{adapter.path}: tensor {factor.name} {is_of}")
                if not self._scaled(factor, factors.scale).isfinite().all():  # it would spoil other requests' rows
                    raise CheckpointError(f"{adapter.path}: tensor {factor.name} has values that {self._dtype} lacks")

    @torch.inference_mode()
    def write(self, number: int, adapter: AdapterFiles) -> None:
        """Write an adapter that `check` has passed; modules that it leaves out get zeros."""
        first, last = number * self.max_rank, (number + 1) * self.max_rank
        for stack, (row, column), tensor in self._stacks:
            is_a = stack.name.endswith(A)
            own = tensor[first:last] if is_a else tensor[:, first:last]
            own.zero_()
            if (factors := adapter.factors.get(stack.name.removesuffix(A if is_a else B))) is None:
                continue
            if is_a:
                a = matrix(factors.a)[:, column : column + own.shape[1]]
                own[: len(a)].copy_(a)
            else:
                b = self._scaled(factors.b, factors.scale)[row : row + len(own)]
                own[:, : b.shape[1]].copy_(b)

    def _scaled(self, factor: Factor, scale: float) -> Tensor:
        return (matrix(factor).float() * scale).to(self._dtype)


def begin_of(recipe: Recipe) -> tuple[int, int]:
    """The row and the column where a part of a matrix begins."""
    begin = [0, 0]
    while isinstance(recipe, Slice):
        begin[recipe.dim] += recipe.start
        recipe = recipe.part
    return begin[0], begin[1]


def matrix(factor: Factor) -> Tensor:
    """A stored factor; it is only read."""
    return torch.frombuffer(bytearray(factor.data), dtype=TORCH_DTYPES[factor.stored.dtype]).view(factor.stored.shape)

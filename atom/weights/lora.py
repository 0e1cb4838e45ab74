"""Write adapters into the stacks of a loaded text, in place.

    loras = LoraWeights(graph, tensors, max_loras=8, max_rank=16)
    loras.check(adapter)                # of `checkpoint.lora`: all modules are there, all shapes fit
    loras.write(3, adapter)             # as adapter number 3

A smaller rank is padded with zeros, and the scale goes into b.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atom.checkpoint.lora import AdapterFiles, Factor
from atom.errors import CheckpointError, ConfigError
from atom.graph import TORCH_DTYPES, Graph, Recipe, Slice
from atom.graph.recipes import LoraStack
from atom.weights.evaluate import Loaded, split_recipe


class LoraWeights:
    def __init__(self, graph: Graph, tensors: Mapping[Recipe, Loaded], max_loras: int, max_rank: int) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self._stacks: list[tuple[LoraStack, int, Tensor]] = []  # the first row of it that the tensor has
        self._dtype = torch.float32  # of the stacks
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # by module: of A and B without the rank
        for recipe in graph.recipes():
            tensor = tensors[recipe]
            if not isinstance(tensor, Tensor):
                continue
            for part, view in split_recipe(recipe, tensor):
                whole = part.part if isinstance(part, Slice) else part
                if isinstance(whole, LoraStack):
                    self._dtype = view.dtype
                    self._stacks.append((whole, part.start if isinstance(part, Slice) else 0, view))
                    module, _, factor = whole.name.rpartition(".lora_")
                    rows, columns = map(int, whole.type.shape)
                    self._shapes.setdefault(module, {})[factor] = (columns,) if factor == "A" else (rows,)

    def check(self, adapter: AdapterFiles) -> None:
        """Raise CheckpointError or ConfigError, which name the tensor, where an adapter does not fit the model."""
        for module, factors in adapter.factors.items():
            shapes, rank = self._shapes.get(module), factors.a.stored.shape[0]
            if shapes is None:
                raise CheckpointError(
                    f"{adapter.path}: tensor {factors.a.name} is of {module}, which is no linear of a layer here: "
                    "embeddings, the head, routers and experts have no adapters"
                )
            if rank > self.max_rank:
                raise ConfigError(f"{adapter.path}: {factors.a.name} has rank {rank}: set serve.max_lora_rank={rank}")
            for factor, expected in ((factors.a, (rank, *shapes["A"])), (factors.b, (*shapes["B"], rank))):
                if factor.stored.shape != expected:
                    is_of = f"is {list(factor.stored.shape)}, the model expects {list(expected)}"
                    raise CheckpointError(f"{adapter.path}: tensor {factor.name} {is_of}")
                if not self._scaled(factor, factors.scale).isfinite().all():  # it would spoil other requests' rows
                    raise CheckpointError(f"{adapter.path}: tensor {factor.name} has values that {self._dtype} lacks")

    @torch.inference_mode()
    def write(self, number: int, adapter: AdapterFiles) -> None:
        """Write an adapter that `check` has passed; modules that it leaves out get zeros."""
        first, last = number * self.max_rank, (number + 1) * self.max_rank
        for stack, start, tensor in self._stacks:
            module, _, name = stack.name.rpartition(".lora_")
            own = tensor[first:last] if name == "A" else tensor[:, first:last]
            own.zero_()
            if (factors := adapter.factors.get(module)) is None:
                continue
            if name == "A":
                a = matrix(factors.a)
                own[: len(a)].copy_(a)
            else:
                b = self._scaled(factors.b, factors.scale)[start : start + len(own)]
                own[:, : b.shape[1]].copy_(b)

    def _scaled(self, factor: Factor, scale: float) -> Tensor:
        return (matrix(factor).float() * scale).to(self._dtype)


def matrix(factor: Factor) -> Tensor:
    """A stored factor; it is only read."""
    return torch.frombuffer(bytearray(factor.data), dtype=TORCH_DTYPES[factor.stored.dtype]).view(factor.stored.shape)

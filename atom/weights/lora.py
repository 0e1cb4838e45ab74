"""Write adapters into the stacked LoRA weights of a loaded text, in place.

    loras = LoraWeights(graph, tensors, max_loras=8, max_rank=16)
    adapter = loras.read(Path("/adapters/sql"))
    loras.check(adapter)                # all modules are there, all shapes fit
    loras.write(3, adapter)             # as adapter number 3

A smaller rank is padded with zeros, and the scale goes into b. Of several ranks, each writes its own parts of the
factors of its stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atom.checkpoint.folder import text_name
from atom.checkpoint.lora import AdapterFiles, ExpertFactors, Factor, Factors, read_adapter
from atom.errors import CheckpointError, ConfigError
from atom.graph import TORCH_DTYPES, Graph, Recipe, Slice
from atom.graph.recipe_contents import lora_stack_of
from atom.weights.evaluate import Loaded, split_recipe
from atom.weights.localize import localize

A, B = ".lora_A", ".lora_B"  # how the names of factors end


class Sizes(NamedTuple):
    """The features of a module, of all ranks."""

    outputs: int
    inputs: int
    experts: int | None = None  # None: it is one linear


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
        self._parts: list[tuple[Recipe, Tensor]] = []  # of stacks
        self._dtype = torch.float32  # of the stacks
        shapes: dict[str, list[int]] = {}  # of stacks
        for recipe in graph.recipes():
            tensor = tensors[recipe]
            if not isinstance(tensor, Tensor):
                continue
            for part, view in split_recipe(localize(recipe, coordinates) if coordinates else recipe, tensor):
                if (stack := lora_stack_of(part)) is not None:
                    self._dtype = view.dtype
                    self._parts.append((part, view))
                    shapes[stack.name] = list(map(int, stack.type.shape))
        for name, shape in shapes.items():
            if name.endswith(A):
                module, of_experts = name.removesuffix(A), shape[:1] if len(shape) == 4 else []
                self.modules[module] = Sizes(shapes[module + B][-2], shape[-1], *of_experts)

    def read(self, path: str) -> AdapterFiles:
        """Read an adapter, its modules by their names here. CheckpointError or UnsupportedError say what is wrong.

        PEFT's differ if the text model is within another, or has no head around it.
        """
        adapter = read_adapter(Path(path))
        adapter.factors = {self._named(name): factors for name, factors in adapter.factors.items()}
        adapter.experts = {self._named(name): parts for name, parts in adapter.experts.items()}
        return adapter

    def _named(self, module: str) -> str:
        names = module, text_name(module), f"model.{module}"
        return next((name for name in names if name in self.modules), module)

    def check(self, adapter: AdapterFiles) -> None:
        """Raise CheckpointError or ConfigError, which name the tensor, if an adapter does not fit the model."""
        for module, factors in adapter.factors.items():
            if (sizes := self.modules.get(module)) is None:
                raise CheckpointError(
                    f"{adapter.path}: tensor {factors.a.name} is of {module}, which is no linear of a layer here: "
                    "embeddings, the head and routers have no adapters"
                )
            self._check_rank(factors.rank, factors, adapter.path)
            self._check(factors, (factors.rank, sizes.inputs), (sizes.outputs, factors.rank), adapter.path)
        for module, parts in adapter.experts.items():
            first = parts[0].factors
            if (sizes := self.modules.get(module)) is None:
                has = "has no room: set serve.lora_experts=true, if the model has experts"
                raise ConfigError(f"{adapter.path}: tensor {first.a.name} is of experts, whose adapter {has}")
            assert sizes.experts is not None
            self._check_rank(rank_of(parts), first, adapter.path)
            num_halves = 1 + module.endswith("gate_up")
            for part in parts:
                factors, rank, outputs = part.factors, part.factors.rank, sizes.outputs
                if part.expert is None:
                    rank *= sizes.experts
                else:
                    outputs //= num_halves
                    if part.expert >= sizes.experts:
                        fault = f"is of expert {part.expert}, the model has {sizes.experts}"
                        raise CheckpointError(f"{adapter.path}: tensor {factors.a.name} {fault}")
                self._check(factors, (rank, sizes.inputs), (outputs, rank), adapter.path)

    def _check(self, factors: Factors, a: tuple[int, int], b: tuple[int, int], path: str) -> None:
        for factor, expected in ((factors.a, a), (factors.b, b)):
            if factor.stored.shape != expected:
                is_of = f"is {list(factor.stored.shape)}, the model expects {list(expected)}"
                raise CheckpointError(f"{path}: tensor {factor.name} {is_of}")
            if not scaled(factor, factors.scale, self._dtype).isfinite().all():  # it would spoil other requests' rows
                raise CheckpointError(f"{path}: tensor {factor.name} has values that {self._dtype} lacks")

    def _check_rank(self, rank: int, factors: Factors, path: str) -> None:
        if rank > self.max_rank:
            raise ConfigError(f"{path}: {factors.a.name} has rank {rank}: set serve.max_lora_rank={rank}")

    @torch.inference_mode()
    def write(self, number: int, adapter: AdapterFiles) -> None:
        """Write an adapter that `check` has passed; modules that it leaves out get zeros."""
        made: dict[str, tuple[Tensor, Tensor]] = {}  # both factors by module
        for part, tensor in self._parts:
            stack = lora_stack_of(part)
            assert stack is not None, "it is a part of one"
            is_a, of_experts = stack.name.endswith(A), tensor.ndim == 4
            module = stack.name.removesuffix(A if is_a else B)
            if of_experts:
                own = tensor[:, 1 + number]
            else:
                own = tensor.narrow(0 if is_a else 1, number * self.max_rank, self.max_rank)
            own.zero_()
            if module not in made and module in adapter.experts:
                made[module] = join_experts(adapter.experts[module], self.modules[module], self._dtype)
            if module not in made and module in adapter.factors:
                factors = adapter.factors[module]
                made[module] = matrix(factors.a), scaled(factors.b, factors.scale, self._dtype)
            if module in made:
                factor = take(part, made[module][not is_a].unsqueeze(1) if of_experts else made[module][not is_a])
                factor = factor[:, 0] if of_experts else factor
                rank_dim = -2 if is_a else -1
                own.narrow(rank_dim, 0, factor.shape[rank_dim]).copy_(factor)


def take(recipe: Recipe, factor: Tensor) -> Tensor:
    """Take the part of a factor that goes into a part of a stack."""
    if not isinstance(recipe, Slice):
        return factor
    places = slice(recipe.start, recipe.stop, recipe.step)
    return take(recipe.part, factor)[(slice(None),) * recipe.dim + (places,)]


def rank_of(parts: Sequence[ExpertFactors]) -> int:
    """The rank of the parts of experts' adapters together: the gate's and the up projection's stand side by side."""
    ranks = {half: max((part.factors.rank for part in parts if part.half == half), default=0) for half in (0, 1)}
    return sum(ranks.values())


def join_experts(parts: Sequence[ExpertFactors], sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors of all experts, a [E, r, I] and b [E, O, r]."""
    assert sizes.experts is not None
    rank = rank_of(parts)
    a = torch.zeros(sizes.experts, rank, sizes.inputs, dtype=dtype)
    b = torch.zeros(sizes.experts, sizes.outputs, rank, dtype=dtype)
    for part in parts:
        own_a, own_b = matrix(part.factors.a), scaled(part.factors.b, part.factors.scale, dtype)
        if part.expert is None:
            return own_a.view(sizes.experts, rank, -1), own_b.view(-1, rank, sizes.experts).permute(2, 0, 1)
        num_outputs, num = own_b.shape
        row = sizes.outputs - num_outputs if part.half else 0
        first = rank - num if part.half else 0
        a[part.expert, first : first + num] = own_a
        b[part.expert, row : row + num_outputs, first : first + num] = own_b
    return a, b


def scaled(factor: Factor, scale: float, dtype: torch.dtype) -> Tensor:
    return (matrix(factor).float() * scale).to(dtype)


def matrix(factor: Factor) -> Tensor:
    """A stored factor; it is only read."""
    return torch.frombuffer(bytearray(factor.data), dtype=TORCH_DTYPES[factor.stored.dtype]).view(factor.stored.shape)

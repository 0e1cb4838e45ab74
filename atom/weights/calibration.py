"""Calibrate 4-bit weights: quantize them by the inputs of their linears over a prompt.

    calibration = Calibration(graph, formats, tokens, checkpoint, cache, sources)
    checkpoint = calibration.open(weights, device, progress)      # of the rounded weights, made by the first start
    parts = calibration.find(quantize(W("up"), "int4[1, 128]"))   # recipes of its parts; None: it has none

The graph is that of the plain model, run by the reference bodies; a weight is loaded when its linear runs, rounded, and
dropped after it. A linear's is rounded by the moment of its inputs, the mean of x xᵀ (`gptq.py`); experts, of which
some see few tokens, only by the mean squares of their columns. What is made is a packed checkpoint, whose tensors are
whole stored tensors [.., O, I]: recipes take ranges of them and join them as they do with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from atom.cache import Cache, digest, key_of
from atom.cache.files import WEIGHTS
from atom.checkpoint import Checkpoint, Progress
from atom.errors import ArtifactError, naming_a_lack_of_memory
from atom.graph import (
    BODY,
    HEAD,
    Cat,
    Dequantize,
    Full,
    Graph,
    Mesh,
    Quantize,
    Recipe,
    Slice,
    Stack,
    Transpose,
    Type,
    W,
    ops,
    show,
)
from atom.graph.formats import FormatError, block_of
from atom.graph.interpret import Weights, interpret_ranks
from atom.graph.parts import parts_of
from atom.graph.recipes import leaves
from atom.process.messages import say
from atom.weights.gptq import ColumnOrder, plan_order
from atom.weights.packed_file import PackedFile
from atom.weights.packed_store import describe_file
from atom.weights.quantize import part_types, quantize

MAX_TOKENS = 4096  # of the prompt
MAX_LENGTH = 1024  # tokens of a sequence of it
MAX_COLUMNS = 1 << 14  # of a linear that is rounded by the whole moment, whose size is their square
PRIOR_ROWS = 4.0  # of the mean over all experts, added to an expert's own
PREFIX = "rounded:"  # ahead of the names of rounded tensors

Visit = Callable[[Recipe, Tensor, Tensor], None]


def measure_moments(graph: Graph, tokens: Sequence[int], weights: Weights, visit: Visit, device: str = "cpu") -> None:
    """Run a plain graph over a prompt, in sequences of MAX_LENGTH tokens.

    visit: gets each linear's weight, as recipe and tensor, between them its inputs' moment, fp32[I, I], or of experts
    the mean squares, fp32[E, 1, I]; linears of the same input get the same moment, one after the other
    weights: loads a recipe's tensor
    """
    sequences = [tokens[start : start + MAX_LENGTH] for start in range(0, len(tokens), MAX_LENGTH)]
    calls: list[Sequence[Any]] = []  # arguments of a call, by sequence
    last: tuple[Tensor | None, Tensor | None] = (None, None)  # an input of the first sequence, and the moment of all

    def watch(node: Node, args: Sequence[Any]) -> None:
        nonlocal last
        calls.append(args)
        if len(calls) < len(sequences):
            return
        if node.target is ops.linear:
            moment = last[1] if last[0] is calls[0][0] else None
            if moment is None:
                moment = _moment([x for x, *_ in calls])
                last = calls[0][0], moment
            visit(node.args[1], moment, args[1])
        elif node.target is ops.grouped_linear:
            visit(node.args[1], _by_expert([(x, ends.tolist()) for x, _, ends, *_ in calls]), args[1])
        calls.clear()

    num_sequences = len(sequences)
    of_each = [lru_cache(2)(weights)] * num_sequences  # a call's weights are loaded once
    inputs = [
        {"tokens": torch.tensor(each, device=device), "positions": torch.arange(len(each), device=device)}
        for each in sequences
    ]
    with torch.inference_mode():
        hidden = interpret_ranks([graph], BODY, inputs, of_each, Mesh(num_sequences), watch=watch)
        if HEAD in graph.programs:
            rows = [{"hidden": each} for each in hidden]
            interpret_ranks([graph], HEAD, rows, of_each, Mesh(num_sequences), watch=watch)


def _moment(inputs: Sequence[Tensor]) -> Tensor:
    """x [T, I] of each sequence -> fp32[I, I], or its diagonal fp32[1, I] if that is too large"""
    x = torch.cat([*inputs]).float()
    return x.square().mean(0, keepdim=True) if x.shape[1] > MAX_COLUMNS else x.T @ x / len(x)


def _by_expert(calls: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
    """x [P, I] of each sequence, sorted by expert, and its experts' ends -> fp32[E, 1, I]

    An expert of few rows has more of the mean over all.
    """
    of_calls = []
    for x, ends in calls:
        squares = x.float().square()
        of_calls.append([squares[start:stop] for start, stop in zip([0, *ends], ends, strict=False)])
    of_experts = [torch.cat(rows) for rows in zip(*of_calls, strict=True)]
    mean = torch.cat(of_experts).mean(0)
    return torch.stack([(rows.sum(0) + PRIOR_ROWS * mean) / (len(rows) + PRIOR_ROWS) for rows in of_experts])[:, None]


def units_of(
    recipe: Recipe, moment: Tensor, tensor: Tensor | None = None
) -> Iterator[tuple[str, Recipe, Tensor, Tensor | None]]:
    """The stored tensors of a linear's weight: name, recipe [.., O, I], moment, and the tensor itself, a view of the
    weight's; None if the weight has not all of it.

    Those of which a weight has some of the columns are left out.
    """
    match recipe:
        case W(name) | Dequantize(W(name)) | Transpose(W(name), -2):
            yield name, recipe, moment, tensor
        case Cat(parts, dim) if dim < len(recipe.type.shape) - 1:
            start = 0
            for part in parts:
                size = int(part.type.shape[dim])
                is_of_rows = dim == len(recipe.type.shape) - 2
                own = None if tensor is None else tensor.narrow(dim, start, size)
                yield from units_of(part, moment if is_of_rows else moment.narrow(dim, start, size), own)
                start += size
        case Stack():
            for at, expert in enumerate(range(recipe.start, recipe.stop)):
                yield from units_of(recipe.of(expert), moment[at], None if tensor is None else tensor[at])
        case Slice(part, dim=dim) if dim == len(recipe.type.shape) - 2:
            yield from units_of(part, moment)
        case Transpose(Slice(part, dim=dim), -2) if dim == len(recipe.type.shape) - 1:
            yield from units_of(Transpose(part), moment)


def read_built_in_text() -> str:
    """Prose, verse, dialogue and code; what is quoted is in the public domain."""
    return Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8")


class Calibration:
    """The rounded weights of a model, kept by the checkpoint's files, the prompt and the formats."""

    def __init__(
        self,
        graph: Graph,
        formats: Mapping[str, str],
        tokens: Sequence[int],
        checkpoint: Checkpoint,
        cache: Cache,
        sources: str = "",
    ) -> None:
        """formats: of stored tensors, by name.
        sources: a digest of what makes tensors.
        """
        self._graph, self._tokens, self._cache = graph, tokens, cache
        self.formats = {*formats.values()}
        self._types = {  # of what is rounded, by name
            name: replace(unit.type, fmt=formats[name])
            for weight, moment in _weights_of(graph)
            for name, unit, *_ in units_of(weight, moment)
            if name in formats and int(unit.type.shape[-1]) % block_of(replace(unit.type, fmt=formats[name]))[-1] == 0
        }
        ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files())),
            "reading": digest(checkpoint.reading),
            "model": digest(show(graph)),
            "formats": digest(repr(sorted(self._types.items()))),
            "prompt": digest(" ".join(map(str, tokens))),
            "sources": sources,
        }
        self.key = key_of(ingredients)
        about = {
            "name": f"calibrated {', '.join(dict.fromkeys(formats.values()))} of {checkpoint.location}",
            "ingredients": ingredients,
        }
        self._parts = {name: parts_of(W(name, type)) for name, type in self._types.items()}
        parts = [next(leaves(part)) for each in self._parts.values() for part in each.values()]
        self._file = PackedFile(parts, cache, self.key, about)

    def find(self, recipe: Recipe) -> Mapping[str, Recipe] | None:
        """The parts of a weight that is packed while it loads, as recipes of the rounded tensors; None: it has none."""
        if not isinstance(recipe, Quantize):
            return None
        match recipe.part:
            case Cat((part, Full(0, padding)), dim):  # as of the last rank's part of a head
                kept = self._find(part, str(recipe.fmt))
                zeros = part_types(replace(padding, fmt=recipe.fmt))
                is_of_blocks = int(part.type.shape[dim]) % block_of(replace(part.type, fmt=recipe.fmt))[dim] == 0
                if kept is None or not is_of_blocks:
                    return None
                return {name: Cat((own, Full(0, zeros[name])), dim) for name, own in kept.items()}
            case part:
                return self._find(part, str(recipe.fmt))

    def _find(self, part: Recipe, fmt: str) -> Mapping[str, Recipe] | None:
        whole = _packed(part, self._types)
        if whole is None or whole.type.fmt != fmt:
            return None
        with suppress(FormatError):  # blocks are cut
            return parts_of(whole)
        return None

    def find_obstacle(self) -> str | None:
        """Why the rounded weights cannot be kept; None: they are, or can be."""
        if self._cache.holds(WEIGHTS, self.key):
            return None
        try:
            return None if self._file.begin() else f"{self._cache.folder} takes no files"
        except OSError as error:
            return str(error)
        finally:
            self._file.discard()

    def open(self, weights: Weights, device: str, progress: Progress) -> Checkpoint:
        """The rounded weights that are kept, or else made; of several processes one makes them, and the others wait.

        weights: loads a recipe's tensor to the device. ArtifactError if they cannot be kept
        """
        kept = self._file.open()
        if kept is None:
            with self._cache.lock(WEIGHTS, self.key):
                kept = self._file.open() or self._make(weights, device, progress)
        return kept

    def _make(self, weights: Weights, device: str, progress: Progress) -> Checkpoint:
        try:
            if not self._file.begin():
                raise OSError(self._cache.warnings[-1])
            with naming_a_lack_of_memory(
                f"device={device} has no room to calibrate in, which takes two plain weights and, for the widest "
                f"linear, 4 matrices of its columns by its columns in fp32: set quant.calibration=none"
            ):
                self._round(weights, device, progress)
            if device != "cpu":
                torch.cuda.empty_cache()  # of moments and activations
            self._file.publish()
        except OSError as error:
            fix = "set cache= to a folder with more room, or quant.calibration=none"
            raise ArtifactError(f"calibrated weights cannot be kept in {self._cache.folder}: {error}; {fix}") from None
        finally:
            self._file.discard()
        say(f"calibrated {len(self._types)} weights on {len(self._tokens)} tokens")
        if (kept := self._file.open()) is None:
            raise ArtifactError(f"calibrated weights are gone from {self._cache.folder}; start again")
        return kept

    def _round(self, weights: Weights, device: str, progress: Progress) -> None:
        """Round every tensor once, after the first linear that multiplies it."""
        missing = {*self._types}
        last: tuple[Tensor | None, ColumnOrder | None] = (None, None)  # a moment, and its plan

        def visit(weight: Recipe, moment: Tensor, tensor: Tensor) -> None:
            nonlocal last
            for name, unit, own, plain in units_of(weight, moment, tensor):
                if name not in missing:
                    continue
                by: Tensor | ColumnOrder = own
                if own.dim() == 2 and len(own) > 1:
                    if last[0] is not own:
                        last = own, plan_order(own, len(self._tokens))
                    by = last[1] or own.diagonal()[None]
                made = quantize(self._types[name].fmt or "", weights(unit) if plain is None else plain, by)
                self._file.write({next(leaves(part)).name: made[key] for key, part in self._parts[name].items()})
                missing.remove(name)
                task.advance(1)

        with progress.task("calibrating", len(missing), in_bytes=False) as task:
            measure_moments(self._graph, self._tokens, weights, visit, device)
        assert not missing, f"{missing} are of no linear that ran"


def _weights_of(graph: Graph) -> Iterator[tuple[Recipe, Tensor]]:
    """The weights of a graph's linears, with moments of the right dims that have no numbers."""
    for node in (node for program in graph.programs.values() for node in program.nodes):
        if node.target in (ops.linear, ops.grouped_linear):
            *experts, _, columns = map(int, node.args[1].type.shape)
            yield node.args[1], torch.empty(*experts, 1, columns, device="meta")


def _packed(recipe: Recipe, types: Mapping[str, Type], is_transposed: bool = False) -> Recipe | None:
    """The rounded tensors of a plain recipe [.., O, I], or [.., I, O] if it is transposed; None without them."""

    def dim_of(dim: int) -> int:
        last = len(recipe.type.shape) - 1
        return 2 * last - 1 - dim if is_transposed and dim >= last - 1 else dim

    match recipe:
        case W(name) | Dequantize(W(name)):
            return W(PREFIX + name, types[name]) if name in types else None
        case Transpose(part, -2):
            return _packed(part, types, not is_transposed)
        case Slice(part, start, stop, dim, step):
            whole = _packed(part, types, is_transposed)
            return None if whole is None else Slice(whole, start, stop, dim_of(dim), step)
        case Cat(parts, dim):
            every = [_packed(part, types, is_transposed) for part in parts]
            known = tuple(part for part in every if part is not None)
            return Cat(known, dim_of(dim)) if len(known) == len(parts) else None
        case Stack(part, start, stop):
            of_experts = dict(types)
            for leaf in leaves(part):
                names = (leaf.name.replace("{expert}", str(expert)) for expert in range(start, stop))
                found = {types.get(name) for name in names}
                if len(found) == 1 and (type := found.pop()) is not None:
                    of_experts[leaf.name] = type
            stacked = _packed(part, of_experts, is_transposed)
            return None if stacked is None else Stack(stacked, start, stop)
    return None

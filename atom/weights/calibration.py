"""Measure the mean squares of what linears multiply, by column, over a prompt.

    moments = measure_moments(graph, tokens, weights)     # {name of a stored tensor: fp32}
    importance = importance_of(recipe, moments)           # of the columns of a recipe's tensor

They weight the errors of numbers of 4 bits (`quantize.py`): a column that is multiplied with large numbers is rounded
with less error, at the cost of others. The graph is that of the plain model, run by the reference bodies; a weight is
loaded when its linear runs, and dropped behind it. A moment has the dims of its tensor with one row, bf16[1536, 576]
has fp32[1, 576], so that recipes rearrange both alike. Weighting errors so is a diagonal of what GPTQ minimizes
(Frantar et al. 2023).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from atom.cache import Cache, digest, key_of
from atom.cache.files import WEIGHTS
from atom.checkpoint import Checkpoint, Progress
from atom.errors import ArtifactError
from atom.graph import BODY, HEAD, Cat, Dequantize, Full, Graph, Recipe, Shift, Slice, Stack, Transpose, W, ops, show
from atom.graph.interpret import Weights, interpret
from atom.weights.packed_store import describe_file

VERSION = 1
MAX_TOKENS = 512  # of the prompt
PRIOR_ROWS = 4.0  # of the mean over all experts, added to an expert's own
FILE = "moments.npz"

Moments = Mapping[str, Tensor]


def measure_moments(graph: Graph, tokens: Sequence[int], weights: Weights, device: str = "cpu") -> dict[str, Tensor]:
    """The moments of a plain graph's linears, by the names of their weights' stored tensors.

    weights: loads a recipe's tensor
    """
    moments: dict[str, Tensor] = {}

    def watch(node: Node, args: Sequence[Any]) -> None:
        if node.target is ops.linear:
            moment = args[0].float().square().mean(0, keepdim=True)
        elif node.target is ops.grouped_linear:
            moment = _by_expert(args[0], args[2])
        else:
            return
        _assign(node.args[1], moment.cpu(), moments)

    inputs = {"tokens": torch.tensor(tokens, device=device), "positions": torch.arange(len(tokens), device=device)}
    with torch.inference_mode():
        hidden = interpret(graph, BODY, inputs, weights, watch=watch)
        if HEAD in graph.programs:
            interpret(graph, HEAD, {"hidden": hidden}, weights, watch=watch)
    return moments


def _by_expert(x: Tensor, ends: Tensor) -> Tensor:
    """x [P, I], sorted by expert -> fp32[E, 1, I]; an expert of few rows has more of the mean over all."""
    squares, stops = x.float().square(), ends.tolist()
    mean = squares[: stops[-1]].mean(0)
    of_experts = [squares[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    return torch.stack([(rows.sum(0) + PRIOR_ROWS * mean) / (len(rows) + PRIOR_ROWS) for rows in of_experts])[:, None]


def _assign(recipe: Recipe, moment: Tensor, moments: dict[str, Tensor]) -> None:
    """Give a moment to the stored tensors of a weight. Those of which a weight has some of the columns get none."""
    match recipe:
        case W(name):
            moments[name] = moment.clone(memory_format=torch.contiguous_format)
        case Cat(parts, dim):
            start = 0
            for part in parts:
                size = int(part.type.shape[dim])
                _assign(part, moment if moment.shape[dim] == 1 else moment.narrow(dim, start, size), moments)
                start += size
        case Stack():
            for at, expert in enumerate(range(recipe.start, recipe.stop)):
                _assign(recipe.of(expert), moment[at], moments)
        case Slice(part, dim=dim) if moment.shape[dim] == 1:
            _assign(part, moment, moments)
        case Transpose(part, dim):
            _assign(part, moment.transpose(dim, dim + 1), moments)
        case Dequantize(part) | Shift(part):
            _assign(part, moment, moments)


def importance_of(recipe: Recipe, moments: Moments) -> Tensor | None:
    """The moments of a recipe's columns, in its dims with one row; None where one is not known."""
    match recipe:
        case W(name):
            return moments.get(name)
        case Full():
            return torch.zeros(*map(int, recipe.type.shape[:-2]), 1, int(recipe.type.shape[-1]))
        case Stack():
            return _joined([importance_of(recipe.of(each), moments) for each in range(recipe.start, recipe.stop)], None)
        case Cat(parts, dim):
            found = [(part, importance_of(part, moments)) for part in parts]
            if dim >= len(recipe.type.shape) - 2 and all(each is None or each.shape[dim] == 1 for _, each in found):
                return next((each for part, each in found if not isinstance(part, Full)), None)  # rows, of one input
            return _joined([each for _, each in found], dim)
        case Slice(part, start, stop, dim, step):
            whole = importance_of(part, moments)
            if whole is None or whole.shape[dim] == 1:
                return whole
            return whole[(slice(None),) * dim + (slice(start, stop, step),)]
        case Transpose(part, dim):
            whole = importance_of(part, moments)
            return None if whole is None else whole.transpose(dim, dim + 1)
        case Dequantize(part) | Shift(part):
            return importance_of(part, moments)
    return None


def _joined(found: Sequence[Tensor | None], dim: int | None) -> Tensor | None:
    """Moments along a dim, or along a new first one; None where one is not known."""
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return torch.stack(known) if dim is None else torch.cat(known, dim)


class Calibration:
    """The moments of a plain graph's linears over a prompt, kept in the cache folder by the checkpoint's files."""

    def __init__(self, graph: Graph, tokens: Sequence[int], checkpoint: Checkpoint, cache: Cache) -> None:
        self._graph, self._tokens, self._cache = graph, tokens, cache
        ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files())),
            "model": digest(show(graph)),
            "prompt": digest(" ".join(map(str, tokens))),
            "calibration": str(VERSION),
        }
        self.key = key_of(ingredients)
        self._about = {"name": f"inputs of linears of {checkpoint.location}", "ingredients": ingredients}

    def moments(self, weights: Weights, device: str, progress: Progress) -> Moments:
        """The moments that are kept, or else measured; of several processes one measures, and the others wait.

        weights: loads a recipe's tensor to the device
        """
        if kept := self._read():
            return kept
        with progress.task("calibrating"), self._cache.lock(WEIGHTS, self.key):
            if kept := self._read():
                return kept
            moments = measure_moments(self._graph, self._tokens, weights, device)
            with suppress(ArtifactError):  # without room for it, the next start measures again
                self._cache.publish(WEIGHTS, self.key, {FILE: _to_bytes(moments)}, self._about)
        print(f"atom-run: calibrated {len(moments)} weights on {len(self._tokens)} tokens", file=sys.stderr)
        return moments

    def _read(self) -> Moments:
        """Those that are kept; empty without any, or where they cannot be read."""
        folder = self._cache.find(WEIGHTS, self.key)
        try:
            return {} if folder is None else read_moments(folder / FILE)
        except (OSError, ValueError, EOFError, BadZipFile):
            return {}


def _to_bytes(moments: Moments) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{name: moment.numpy() for name, moment in moments.items()})  # type: ignore[arg-type]
    return file.getvalue()


def read_moments(path: Path) -> Moments:
    with np.load(path, allow_pickle=False) as kept:
        return {name: torch.from_numpy(kept[name]) for name in kept}

"""Compile a piece's text for a device, and check its results.

files = compile_piece(text, "cpu")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Node

from atom.cache.temporary import temporary_folder
from atom.errors import PassError, first_line
from atom.graph import TORCH_DTYPES, Program, ops, parse
from atom.kernels import find_piece_compiler
from atom.kernels.registry import tensor_type, trace_calls
from atom.pieces.piece import NAME

ROWS = (1, 2, 17)  # numbers of rows to check code at: compilers assume open dims of 2 or more
LARGE = 1 << 24  # elements of a weight that get random values when a piece is checked


def compile_piece(text: str, device: str = "cpu") -> dict[str, bytes]:
    """Compile a piece for open dims from 1 on; the files of its code. PassError if its ops assume more.

    The code is run to check it, if this machine has such a device.
    """
    files = find_piece_compiler(device).compile(text)
    if device == "cpu" or torch.cuda.is_available():
        _check(parse(text, NAME).programs[NAME], files, device, device)
    return files


@torch.inference_mode()
def _check(program: Program, files: dict[str, bytes], device: str, run_on: str) -> None:
    """Compare the results of the code for a device with its traces, computed on the device `run_on`."""
    draw, used = _Draw(program, run_on), ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
    weights = {node: draw(node) for node in program.inputs if _is_closed(node)}
    with temporary_folder() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        run = find_piece_compiler(device).load(Path(folder))
        for rows in ROWS:
            inputs = [weights[node] if node in weights else draw(node, rows) for node in program.inputs]
            try:
                results = run(*inputs)
            except RuntimeError as failure:
                if device != "cpu":  # a GPU may have no memory left, which is no fault of the piece
                    raise
                raise PassError(
                    f"a compiled piece of {used} does not run at {rows} rows: {first_line(failure)}"
                ) from failure
            for ours, theirs in zip(results, trace_calls(program)(*inputs), strict=True):
                allowed = 1e-4 if theirs.dtype is torch.float32 else 2e-2
                error = _relative_error(ours.float(), theirs.float()) if ours.shape == theirs.shape else math.inf
                if not error <= allowed:
                    raise PassError(f"a compiled piece of {used} is {error:.2g} off at {rows} rows")


class _Draw:
    """Draws a piece's inputs so that all its values are of order 1, as in a model: fp16 ends at 65504."""

    def __init__(self, program: Program, device: str) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._multiplied = {node.args[ops.linear.weight] for node in program.nodes if node.target is ops.linear}

    def __call__(self, node: Node, rows: int = 0) -> Tensor:
        """Draw an input of this many rows, or a weight, which has no open dims."""
        type = tensor_type(node)
        shape = [rows if isinstance(dim, str) else dim for dim in type.shape]
        if type.dtype == "i64":
            return torch.arange(math.prod(shape), device=self._device).view(shape) % 2
        if type.dtype == "i32":  # rows of another input, -1 for none
            return torch.arange(math.prod(shape), dtype=torch.int32, device=self._device).view(shape) % 2 - 1
        if type.dtype == "u8":  # a packed weight: two bytes are a bf16 scale, of either sign and about 0.02
            drawn = torch.randint(2, shape, generator=self._generator, device=self._device, dtype=torch.uint8)
            return drawn.mul_(0x80).add_(0x3C)
        dtype, scale = TORCH_DTYPES[type.dtype], shape[-1] ** -0.5 if node in self._multiplied else 1.0
        if math.prod(shape) <= LARGE:
            return (self._normal(shape) * scale).to(dtype)
        if self._device != "cpu":
            num_rows, width = shape  # each row is the previous one, shifted by one
            return (self._normal([num_rows + width]) * scale).to(dtype).as_strided((num_rows, width), (1, 1))
        drawn = torch.zeros(shape, dtype=dtype)  # pages past its first rows are never touched
        first = drawn[: max(LARGE // math.prod(shape[1:]), 2)]
        first.copy_(self._normal(first.shape) * scale)
        return drawn

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)


def _is_closed(node: Node) -> bool:
    return not any(isinstance(dim, str) for dim in node.meta["type"].shape)


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, without what is the same inf or nan in both; nan if only one is."""
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(is_same, 0.0, ours - theirs)
    finite = torch.where(theirs.isfinite(), theirs, 0.0)
    return float(difference.norm() / finite.norm().clamp(min=1e-6))

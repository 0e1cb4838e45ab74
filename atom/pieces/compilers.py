"""Compile a piece's text for a device, and hold the code against what its ops say.

files = compile_piece(text, "cpu")
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from atom.errors import PassError
from atom.graph import TORCH_DTYPES, Program, Type, parse
from atom.kernels import find_piece_compiler
from atom.kernels.registry import trace_calls
from atom.pieces.piece import NAME

ROWS = (1, 2, 17)  # at which code is held against its traces: compilers take open dims for 2 or more
LARGE = 1 << 24  # elements of a weight that does not get values of its own to check a piece


def compile_piece(text: str, device: str = "cpu") -> dict[str, bytes]:
    """The files of a piece's code, for sizes of its open dims from 1 on. PassError where its ops assume more.

    The code is run here to be checked, where there is such a device.
    """
    files = find_piece_compiler(device).compile(text)
    if device == "cpu" or torch.cuda.is_available():
        _check(parse(text, NAME).programs[NAME], files, device, device)
    return files


@torch.inference_mode()
def _check(program: Program, files: dict[str, bytes], device: str, place: str) -> None:
    """Hold the code for a device against its traces, in a place where it runs."""
    generator = torch.Generator(place).manual_seed(0)

    def example(type: Type, rows: int) -> Tensor:
        shape = [rows if isinstance(dim, str) else dim for dim in type.shape]
        if type.dtype == "i64":
            return torch.arange(math.prod(shape), device=place).view(shape) % 2
        if math.prod(shape) <= LARGE:
            return torch.randn(shape, generator=generator, device=place).to(TORCH_DTYPES[type.dtype])
        if place == "cpu":
            return torch.zeros(shape, dtype=TORCH_DTYPES[type.dtype])  # pages that nobody touches
        first = torch.randn(shape[1:], generator=generator, device=place)
        return first.to(TORCH_DTYPES[type.dtype]).expand(shape)

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        run = find_piece_compiler(device).load(Path(folder))
        for rows in ROWS:
            inputs = [example(node.meta["type"], rows) for node in program.inputs]
            for ours, theirs in zip(run(*inputs), trace_calls(program)(*inputs), strict=True):
                allowed = 1e-4 if theirs.dtype is torch.float32 else 2e-2
                error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6)
                if ours.shape != theirs.shape or not error <= allowed:
                    used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
                    raise PassError(f"a compiled piece of {used} is {error:.2g} off at {rows} rows")

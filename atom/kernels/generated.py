"""The backend `generated`: ops that become Triton source within pieces.

`atom/kernels/triton/compile/codegen.py` writes the source.

These ops work on each row separately. Linears and attention do not, so pieces lie between them. Outside a piece, such a
kernel is the op's own body.
"""

from __future__ import annotations

from typing import Any

from atom.graph.types import Type
from atom.kernels.backend import Backend, Target, on_device
from atom.kernels.reference import body_kernel
from atom.kernels.triton.compile.codegen import NORMS, RULES
from atom.kernels.triton.compile.piece_compiler import TritonCompiler

MAX_WIDTH = 1 << 16  # elements of a row that a norm holds at once


def accepts(target: Target, first: Type, *types: Any, **_attributes: Any) -> str | None:
    """rows of a fixed size"""
    if isinstance((first.shape or ("",))[0], int):  # a table, which rows choose from
        first = next((each for each in types if isinstance(each, Type)), first)
    rows, *dims = first.shape or (1,)
    if not isinstance(rows, str) or any(isinstance(dim, str) for dim in dims):
        return f"{first} is not of rows of a fixed size"
    return None


def accepts_norm(target: Target, first: Type, *types: Any, **attributes: Any) -> str | None:
    """rows of up to 65,536 elements"""
    reason = accepts(target, first, *types, **attributes)
    if reason is None and (len(first.shape) < 2 or int(first.shape[-1]) > MAX_WIDTH):
        reason = f"{first} is not of rows of up to {MAX_WIDTH} elements"
    return reason


KERNELS = tuple(
    body_kernel(op, "generated", on_device("cuda", accepts_norm if op in NORMS else accepts), batch_invariant=True)
    for op in RULES  # a program has one row
)

BACKEND = Backend("generated", KERNELS, piece_compiler=TritonCompiler())

"""The backend `inductor`: ops that Inductor compiles within pieces.

What lies between two stateful ops becomes one loop nest or a few.

A linear within a piece is left to torch, whose packed weights are faster than the products that Inductor writes. Called
outside of a piece, such a kernel is the op's own body.
"""

from __future__ import annotations

from typing import Any

from atom.graph import ops
from atom.kernels.backend import Backend, Kernel, Target, plain
from atom.kernels.inductor.piece_compiler import InductorCompiler, find_versions
from atom.kernels.reference import COMPILED


def accepts(target: Target, *_types: Any, **_attributes: Any) -> str | None:
    return None if target.device == "cpu" else f"compiles for a cpu, not for {target.device}"


KERNELS: tuple[Kernel, ...] = tuple(
    Kernel(op, "inductor", plain(accepts), lambda _, op=op: op.body, trace=op.body)  # type: ignore[misc]
    for op in ops.OPS.values()
    if op in COMPILED and op is not ops.linear
)

BACKEND = Backend("inductor", KERNELS, find_versions=find_versions, piece_compiler=InductorCompiler())

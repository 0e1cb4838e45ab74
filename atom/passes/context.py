"""The context of a pass: target and backends.

context = PassContext.of(Target("cuda"), level=2)
if context.takes(ops.gated_linear):
    ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom.graph.ops import Op
from atom.kernels import Backend, PieceCompiler, Target, backends_of, candidates


@dataclass(frozen=True)
class PassContext:
    target: Target
    backends: tuple[Backend, ...]  # backends whose kernels a text may name, the preferred first

    @classmethod
    def of(cls, target: Target, level: int) -> PassContext:
        return cls(target, backends_of(target.device, level))

    @property
    def piece_compiler(self) -> PieceCompiler | None:
        return next((each.piece_compiler for each in self.backends if each.piece_compiler is not None), None)

    def takes(self, op: Op, *types: Any, **attributes: Any) -> bool:
        """Whether a kernel other than the reference accepts this op with first arguments of these types."""
        kernels = (kernel for kernel in candidates(op, self.backends) if kernel.backend != "reference")
        return any(kernel.accepts(self.target, *types, **attributes) is None for kernel in kernels)

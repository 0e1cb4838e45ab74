"""The context of a pass: target, backends and mesh.

context = PassContext.of(Target("cuda"), level=2)
if context.takes(ops.gated_linear):
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atom.graph.mesh import SINGLE, Mesh
from atom.graph.ops import Op
from atom.kernels import Backend, Kernel, PieceCompiler, Target, backends_of, candidates


@dataclass(frozen=True)
class PassContext:
    target: Target
    backends: tuple[Backend, ...]  # backends whose kernels a text may name, the preferred first
    mesh: Mesh = SINGLE
    stage: int = 0  # of the mesh's pipeline, whose text this is
    keeps_act: bool = False  # the format of activations was asked for: it stays even if no kernel takes it
    max_loras: int = 0  # adapters that can be loaded; 0: none
    max_lora_rank: int = 0  # of each of them
    dispatches: bool = False  # groups with tokens of their own send them only to the ranks of their experts
    lora_experts: bool = False  # for the linears of experts, too
    cpu_offload_params: tuple[str, ...] = ()  # names of tables that stay in host memory
    batch_invariant: bool = False  # kernels that lack this property are not taken, nor is the reference

    @classmethod
    def of(
        cls, target: Target, level: int, mesh: Mesh = SINGLE, *, stage: int = 0, keeps_act: bool = False,
        batch_invariant: bool = False,
    ) -> PassContext:  # fmt: skip
        backends = backends_of(target.device, level, batch_invariant=batch_invariant)
        known = tuple(each for each in backends if each.vendor is None or each.vendor in target.features)
        return cls(target, known, mesh, stage, keeps_act, batch_invariant=batch_invariant)

    @property
    def piece_compiler(self) -> PieceCompiler | None:
        return next((each.piece_compiler for each in self.backends if each.piece_compiler is not None), None)

    def candidates(self, op: Op) -> Iterator[Kernel]:
        """The kernels of an op that may be taken, in their order."""
        return (each for each in candidates(op, self.backends) if each.batch_invariant or not self.batch_invariant)

    def takes(self, op: Op, *types: Any, **attributes: Any) -> bool:
        """Whether a kernel other than the reference accepts this op with first arguments of these types."""
        return any(reason is None for _, reason in self._answers(op, *types, **attributes))

    def refusals(self, op: Op, *types: Any, **attributes: Any) -> list[str]:
        """Why kernels other than the reference do not accept this op: a reason for each that there is."""
        return [f"{backend}: {reason}" for backend, reason in self._answers(op, *types, **attributes) if reason]

    def _answers(self, op: Op, *types: Any, **attributes: Any) -> Iterator[tuple[str, str | None]]:
        for kernel in self.candidates(op):
            if kernel.backend != "reference":
                yield kernel.backend, kernel.accepts(self.target, *types, **attributes)

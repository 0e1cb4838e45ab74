"""The backend `inductor`: ops that Inductor compiles within pieces.

The ops between two stateful ones become one loop nest or a few.

A linear within a piece is left to torch, whose packed weights are faster than Inductor's GEMMs. Outside a piece, such a
kernel is the op's own body.
"""

from __future__ import annotations

from atom.graph import ops
from atom.kernels.backend import Backend, on_device
from atom.kernels.inductor.piece_compiler import InductorCompiler, find_versions
from atom.kernels.reference import COMPILED, body_kernel

KERNELS = tuple(body_kernel(op, "inductor", on_device("cpu")) for op in COMPILED - {ops.linear})

BACKEND = Backend("inductor", KERNELS, find_versions=find_versions, piece_compiler=InductorCompiler())

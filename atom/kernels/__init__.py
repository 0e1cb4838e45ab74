"""Kernels: implementations of ops, by backend.

kernel = find_kernel(ops.paged_attention, "torch")
attend = kernel.load(LoadContext())
"""

from atom.kernels.backend import (
    Backend,
    Communicator,
    Kernel,
    LoadContext,
    PieceCode,
    PieceCompiler,
    Rendezvous,
    Target,
    Tuner,
    on_device,
)  # fmt: skip
from atom.kernels.registry import (
    backends_of,
    building_kernels,
    candidates,
    compile_launches,
    connect_rank,
    find_backend,
    find_kernel,
    find_piece_compiler,
    find_step_kernels,
    find_target,
    find_tuners,
    find_versions,
    highest_level,
    keep_binaries,
    layout_type,
    shuffle,
)  # fmt: skip

__all__ = [
    "Backend",
    "Communicator",
    "Kernel",
    "LoadContext",
    "PieceCode",
    "PieceCompiler",
    "Rendezvous",
    "Target",
    "Tuner",
    "backends_of",
    "building_kernels",
    "candidates",
    "compile_launches",
    "connect_rank",
    "find_backend",
    "find_kernel",
    "find_piece_compiler",
    "find_step_kernels",
    "find_target",
    "find_tuners",
    "find_versions",
    "highest_level",
    "keep_binaries",
    "layout_type",
    "on_device",
    "shuffle",
]  # fmt: skip

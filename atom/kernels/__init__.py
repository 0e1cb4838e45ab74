"""Implementations of ops, by backend.

kernel = find_kernel(ops.paged_attention, "torch")
attend = kernel.load(LoadContext())
"""

from atom.kernels.registry import Kernel, LoadContext, Target, candidates, find_kernel, find_target, shuffle

__all__ = ["Kernel", "LoadContext", "Target", "candidates", "find_kernel", "find_target", "shuffle"]

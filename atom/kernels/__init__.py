"""Implementations of ops, by backend.

kernel = find_kernel(ops.paged_attention, "torch")
attend = kernel.load()
"""

from atom.kernels.registry import Kernel, Target, candidates, find_kernel, find_target, shuffle

__all__ = ["Kernel", "Target", "candidates", "find_kernel", "find_target", "shuffle"]

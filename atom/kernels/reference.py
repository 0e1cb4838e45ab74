"""The backend `reference`: the ops' own bodies, which accept every call.

It is the last in every order.
"""

from __future__ import annotations

from atom.graph import ops
from atom.kernels.backend import Accepts, Backend, Kernel, accepts_all

# ops whose bodies a compiler can trace: no state, no shape that depends on data
COMPILED = frozenset({
    ops.embedding, ops.linear, ops.rms_norm, ops.layer_norm, ops.add, ops.mul, ops.scale, ops.softcap, ops.activate,
    ops.gated_activate, ops.add_rms_norm, ops.split, ops.split_heads, ops.merge_heads, ops.rotary, ops.rope,
    ops.local_tokens, ops.mask_rows, ops.sum_squares, ops.scale_by_rms,
})  # fmt: skip


def body_kernel(op: ops.Op, backend: str = "reference", accepts: Accepts = accepts_all) -> Kernel:
    """The kernel that is an op's body, which a piece has compiled where that can be traced."""
    return Kernel(op, backend, accepts, lambda _: op.body, trace=op.body if op in COMPILED else None)


BACKEND = Backend("reference", tuple(body_kernel(op) for op in ops.OPS.values() if not op.is_collective))

"""The backend `reference`: the ops' own bodies, which accept every call.

It is the last in every order.
"""

from __future__ import annotations

from atom.graph import ops
from atom.kernels.backend import Backend, Kernel

# ops whose bodies a compiler can trace: no state, no shape that depends on data
COMPILED = frozenset({
    ops.embedding, ops.linear, ops.rms_norm, ops.layer_norm, ops.add, ops.mul, ops.scale, ops.softcap, ops.activate,
    ops.gated_activate, ops.add_rms_norm, ops.split, ops.split_heads, ops.merge_heads, ops.rotary, ops.rope,
})  # fmt: skip


def _kernel(op: ops.Op) -> Kernel:
    trace = op.body if op in COMPILED else None
    return Kernel(op, "reference", lambda *_args, **_attributes: None, lambda _: op.body, trace=trace)


BACKEND = Backend("reference", tuple(map(_kernel, ops.OPS.values())))

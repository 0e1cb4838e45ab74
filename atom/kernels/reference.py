"""The backend `reference`: the ops' own bodies, which accept every call.

It is last in every order.
"""

from __future__ import annotations

from typing import NoReturn

from atom.errors import UnsupportedError
from atom.graph import ops
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, accepts_all

# ops whose bodies a compiler can trace: no state, no data-dependent shape
COMPILED = frozenset({
    ops.embedding, ops.linear, ops.rms_norm, ops.layer_norm, ops.add, ops.mul, ops.scale, ops.softcap, ops.clamp,
    ops.activate, ops.xielu, ops.gated_activate, ops.add_rms_norm, ops.join, ops.pad, ops.split, ops.split_heads,
    ops.merge_heads, ops.rotary, ops.rope, ops.local_tokens, ops.mask_rows, ops.sum_squares, ops.scale_by_rms,
    ops.time_step, ops.ssm_decay, ops.group_rms_norm, ops.scale_by_expert, ops.mix_streams, ops.match_rms,
    ops.gaussian_topk, ops.sum_moments, ops.affine, ops.rotary_sections, ops.place_rows, ops.normalize_pixels,
    ops.interpolate_table, ops.stream_logits, ops.stream_gate, ops.sinkhorn, ops.attend_residuals, ops.run_tokens,
    ops.steer, ops.scale_by_position,
})  # fmt: skip
# ops whose bodies move data, or round each number once as IEEE 754 says: so torch gives the same bits for any shape
BATCH_INVARIANT = frozenset({
    ops.embedding, ops.add, ops.mul, ops.scale, ops.affine, ops.steer, ops.clamp, ops.join, ops.pad, ops.split,
    ops.split_heads, ops.merge_heads, ops.local_tokens, ops.mask_rows, ops.scale_by_expert, ops.group,
})  # fmt: skip


def body_kernel(
    op: ops.Op, backend: str = "reference", accepts: Accepts = accepts_all, *, batch_invariant: bool = False
) -> Kernel:
    """An op's body as its kernel; pieces compile it if it can be traced."""
    trace = op.body if op in COMPILED else None
    return Kernel(op, backend, accepts, lambda _: op.body, trace=trace, batch_invariant=batch_invariant)


def _no_collective(context: LoadContext) -> NoReturn:
    raise UnsupportedError("collectives run on a communicator: name the kernels of gloo, or of nccl")


def _kernel(op: ops.Op) -> Kernel:
    if op.is_collective:  # its body takes the tensors of all ranks
        return Kernel(op, "reference", lambda *_, **__: "runs on a communicator", _no_collective)
    return body_kernel(op, batch_invariant=op in BATCH_INVARIANT)


BACKEND = Backend("reference", tuple(map(_kernel, ops.OPS.values())))

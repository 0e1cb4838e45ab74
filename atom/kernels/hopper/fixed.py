"""The backend `fixed_hopper`: batch-invariant GEMMs by packed weights in the layout wgmma.

    y = FixedLinears().linear(x, shuffle(weight))     # [T, I] by [O, I] -> [T, O]
    out = FixedExperts().experts(h, weights, ids, gate_up, down, kind="silu")

One kernel, packed_linear.py, for any number of rows, with 128 columns in a stage, unsplit: only how many rows a program
takes follows from T. They are 16 at least, since fewer are multiplied by another instruction.
"""

from __future__ import annotations

from typing import Any

from atom.graph import ops
from atom.graph.types import Type
from atom.kernels import hopper, triton
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, Target, gpu_kernel

KINDS = ("scaled", "int4", "mxfp4")


def accepts_linear(target: Target, x: Type, weight: Type, *types: Type | None, act: str | None = None) -> str | None:
    """bf16 by weights in the layout wgmma: int4 by 128 columns, mxfp4, fp8 by row or by 128; activations as they are"""
    return _refuse(target, x, weight) or triton.accepts_linear(target, x, weight, *types, act=act)


def accepts_grouped(target: Target, x: Type, weight: Type, *types: Any) -> str | None:
    """as linear"""
    return _refuse(target, x, weight) or triton.accepts_grouped(target, x, weight, *types)


def accepts_experts(
    target: Target, x: Type, weights: Type, ids: Type, gate_up: Type, down: Type, *more: Type | None, **attributes: Any
) -> str | None:
    """as linear"""
    known = triton.accepts_experts(target, x, weights, ids, gate_up, down, *more, **attributes)
    return _refuse(target, x, gate_up) or _refuse(target, x, down) or known


def _refuse(target: Target, x: Type, weight: Type) -> str | None:
    if hopper.GLUON not in target.features:
        return "runs on NVIDIA's Hopper only"
    return hopper.refuse_layout(weight) or hopper.refuse_dtype(x)


def _load(context: LoadContext) -> Any:
    from atom.kernels.hopper.fixed_gemms import FixedExperts, FixedLinears

    return context.share(FixedExperts), context.share(FixedLinears)


def _kernel(op: ops.Op, accepts: Accepts) -> Kernel:
    def load(context: LoadContext) -> object:
        experts, linears = _load(context)
        return linears if op is ops.linear else experts

    options: dict[str, Any] = {"packed": KINDS, "packed_layout": hopper.layout_of, "batch_invariant": True}
    return gpu_kernel(op, "fixed_hopper", load, accepts, is_for_packed=op is ops.linear, **options)


KERNELS = (
    _kernel(ops.linear, accepts_linear),
    _kernel(ops.grouped_linear, accepts_grouped),
    _kernel(ops.experts, accepts_experts),
)

BACKEND = Backend("fixed_hopper", KERNELS, vendor=hopper.GLUON)

"""The backend `fixed_triton`: GPU kernels whose bits do not depend on the batch.

    linear        tiles of more rows for more rows of x, but the same steps through the columns: one sum for each number
    paged_attention    a query walks the keys that it sees from the first on, in tiles that begin at fixed positions,
                       whether it is of a prompt or a decode
    experts, router    one kernel each for any number of tokens, by tiles of the weight's shape and format

A tensor core's sum of a row and a column does not depend on what else is in its tile, as long as the instruction is the
same: the weight's rows are its M, at least 64 of them, so that from sm_90 on all GEMMs are by wgmma. Nothing is
split by columns. Of activations none are quantized, which kernels do for many rows only.
"""

from __future__ import annotations

from typing import Any

from atom.graph import ops
from atom.graph.types import Type
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, Target, gpu_kernel
from atom.kernels.fixed import all_reduce_kernel
from atom.kernels.triton import PACKED, accepts_attention, accepts_experts, accepts_grouped, accepts_linear


def _on_nvidia(accepts: Accepts) -> Accepts:
    """`accepts`, but only on the GPUs on which equal bits were shown."""

    def accepts_there(target: Target, *types: Any, **attributes: Any) -> str | None:
        if "nvidia" not in target.features:
            return "its bits were compared on NVIDIA's GPUs only"
        return accepts(target, *types, **attributes)

    accepts_there.__doc__ = accepts.__doc__
    return accepts_there


def accepts_fixed_linear(target: Target, x: Type, *types: Any, act: str | None = None) -> str | None:
    """as linear of triton, packed weights in bf16 and fp16; activations as they are"""
    is_packed = any(isinstance(each, Type) and each.fmt is not None for each in types)
    if is_packed and x.dtype == "fp32":
        return "unpacks no weights in fp32"
    return accepts_linear(target, x, *types, act=act)


def accepts_visible(
    target: Target, q: Type, cache: Any, batch: Any, sinks: Type | None = None, k_scale: Type | None = None,
    v_scale: Type | None = None, slopes: Type | None = None, ends: Type | None = None, selected: Type | None = None,
    *, chunked: bool = False, **_attributes: Any,
) -> str | None:  # fmt: skip
    """heads of up to 512 dims, without ends, chunks, choice; a cache in fp8 from sm_89 on"""
    given = {"ends": ends, "a choice": selected, "chunks": chunked or None}
    lacking = [name for name, value in given.items() if value is not None]
    return f"has no {lacking[0]}" if lacking else accepts_attention(target, q, cache, batch)


def accepts_router(_target: Target, *_types: Any, **_attributes: Any) -> str | None:
    """all calls"""
    return None


def _load_linears(context: LoadContext) -> object:
    from atom.kernels.triton.linear.fixed import FixedLinears

    return context.share(FixedLinears)


def _load_attention(_context: LoadContext) -> object:
    from atom.kernels.triton.attention import fixed

    return fixed


def _load_experts(context: LoadContext) -> object:
    from atom.kernels.triton.experts.fixed import FixedExperts

    return context.share(FixedExperts)


def _load_grouping(_context: LoadContext) -> object:
    from atom.kernels.triton.experts import fixed

    return fixed


def _kernel(op: ops.Op, load: Any, accepts: Accepts, **options: Any) -> Kernel:
    return gpu_kernel(op, "fixed_triton", load, _on_nvidia(accepts), batch_invariant=True, **options)


KERNELS = (
    _kernel(ops.linear, _load_linears, accepts_fixed_linear, packed=PACKED),
    _kernel(ops.paged_attention, _load_attention, accepts_visible),
    _kernel(ops.router, _load_grouping, accepts_router),
    _kernel(ops.grouped_linear, _load_experts, accepts_grouped, packed=PACKED),
    _kernel(ops.experts, _load_experts, accepts_experts, packed=PACKED),
    _kernel(ops.combine, _load_grouping, accepts_router),
    all_reduce_kernel("fixed_triton", "cuda"),
)

BACKEND = Backend("fixed_triton", KERNELS)

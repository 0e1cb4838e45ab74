"""The backend `hopper`: kernels in Gluon for NVIDIA's Hopper, above those of `triton`.

    h, s = hopper.add_norm_linear(x, r, W("n", …), W("gate_up", …), eps=1e-06, kind="silu")
    y = hopper.linear(h, shuffle(W("y", …), "wgmma"))

Its classes are subclasses of `triton`'s: for each call they choose by its sizes between a kernel in Gluon and one of
`triton`. It accepts the calls that a kernel in Gluon may take; `triton` has the others.

Packed weights of some formats are laid out for the tensor cores (shuffle.py); others stay as `triton` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, update_wrapper, wraps
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch

from atom.graph import KV, ops
from atom.graph.formats import act_of, block_of, parse_format, rounded_act_of
from atom.graph.gguf_blocks import TYPES
from atom.graph.ops import Op
from atom.graph.types import Type
from atom.kernels import triton
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, Target, Tuner, gpu_kernel
from atom.kernels.hopper.shuffle import LAYOUT, shuffle
from atom.kernels.triton import ACTS, GIVEN, PACKED, SPAN

GLUON = "gluon"  # the feature of a GPU that runs our kernels in Gluon
GATES = (("silu", False), ("swigluoai", True))  # of experts whose activations are in fp8, and whether they have a limit
# that share a scale, by kind in our layout
SCALED_COLUMNS = {
    "int4": (128,),
    "mxfp4": (32,),
    "scaled": (None, 128),
    **dict.fromkeys(("q4_k", "q5_k", "q6_k"), (256,)),
}
HEAD_DIMS = (64, 128, 256)
TOWER_DIMS = range(64, 129, 8)  # of a head without a cache
STATE_DIMS = (64, 128)  # of keys and values of a delta rule
INDEX_HEADS, INDEX_DIM = (16, 32, 64, 128), 128  # of an indexer
LATENT_DIMS = (128, 64, 128)  # of a head: of keys without and with position, and of values


@cache
def knows_gluon() -> bool:
    """Whether our kernels in Gluon, which is experimental and changes, compile with this version of Triton."""
    return (3, 6) <= tuple(map(int, version("triton").split(".")[:2])) < (3, 10)


def find_features() -> frozenset[str]:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return frozenset()
    return frozenset({GLUON} if torch.cuda.get_device_capability(0) == (9, 0) and knows_gluon() else ())


def accepts_linear(target: Target, x: Type, weight: Type, *types: Type | None, **attributes: Any) -> str | None:
    """bf16 by weights that have the layout wgmma: int4 by 128 columns, mxfp4, fp8 by row or by 128, q4_k to q6_k"""
    known = triton.accepts_linear(target, x, weight, *types, **_own_acts(weight, attributes))
    return refuse_layout(weight) or refuse_dtype(x) or known


def accepts_gated_linear(place: int, target: Target, *types: Any, **attributes: Any) -> str | None:
    """as linear; with a silu gate plain and other packed weights, too

    place: of the weight among the types
    """
    weight, biases = types[place], types[place + 1 :]
    refused = _refuse_weight(weight, _refuse_gate(weight, biases, **attributes))
    known = triton.accepts_linear(target, *types, **_own_acts(weight, attributes))
    return refused or refuse_dtype(types[0]) or known


def _own_acts(weight: Type, attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a linear, without the formats of activations if its weight is rounded for them."""
    act = attributes.get("act")
    if act is None or weight.fmt is None or rounded_act_of(weight.fmt) != act:
        return attributes
    return {name: value for name, value in attributes.items() if name not in ("act", "gives")}


def accepts_attention(target: Target, q: Type, *types: Any, **attributes: Any) -> str | None:
    """heads of 64, 128 or 256 dims in bf16 or fp16, a cache in that dtype or in fp8"""
    if (dim := int(q.shape[-1])) not in HEAD_DIMS:
        return f"heads have {dim} dims, not {', '.join(map(str, HEAD_DIMS))}"
    return _refuse_cache(q, types) or triton.accepts_attention(target, q, *types, **attributes)


def accepts_segments(target: Target, q: Type, *types: Any, **attributes: Any) -> str | None:
    """heads of 64 to 128 dims, a multiple of 8, in bf16"""
    if (dim := int(q.shape[-1])) not in TOWER_DIMS:
        return f"heads have {dim} dims, not a multiple of 8 from 64 to 128"
    return refuse_dtype(q) or triton.accepts_heads(target, q, *types, **attributes)


def accepts_latent(target: Target, q_nope: Type, q_rope: Type, kv_b: Type, *types: Any,
                   **attributes: Any) -> str | None:  # fmt: skip
    """heads of 128 + 64 dims and values of 128 in bf16 or fp16, a cache in that dtype or in fp8"""
    plain, rotated = int(q_nope.shape[2]), int(q_rope.shape[2])
    dims = plain, rotated, int(kv_b.shape[0]) // int(q_nope.shape[1]) - plain
    if dims != LATENT_DIMS:
        return "heads have {} + {} dims and values of {}, not {} + {} and {}".format(*dims, *LATENT_DIMS)
    return _refuse_cache(q_nope, types) or triton.accepts_latent(target, q_nope, q_rope, kv_b, *types, **attributes)


def accepts_tokens(target: Target, q: Type, *types: Any, every: int = 1, **attributes: Any) -> str | None:
    """single tokens by 16, 32, 64 or 128 index heads of 128 dims in bf16 or fp16, a cache in that dtype"""
    if every > 1:
        return "chooses single tokens, not runs of them"
    heads, dim = map(int, q.shape[1:])
    if heads not in INDEX_HEADS or dim != INDEX_DIM:
        return f"{heads} index heads have {dim} dims"
    kept = [each.type.dtype for each in types if isinstance(each, KV) and each.type.dtype != q.dtype]
    if kept:
        return f"the cache is in {kept[0]}, not in {q.dtype}"
    return _refuse_cache(q, types) or triton.accepts_tokens(target, q, *types, **attributes)


def accepts_grouped(target: Target, x: Type, weight: Type, *types: Any) -> str | None:
    """bf16 by plain weights, by those that have the layout wgmma, as in linear, and other packed ones"""
    refused = _refuse_weight(weight, _refuse_many(weight))
    return refused or refuse_dtype(x) or triton.accepts_grouped(target, x, weight, *types)


def accepts_experts(
    target: Target, x: Type, weights: Type, ids: Type, gate_up: Type, down: Type, *more: Type | None,
    kind: str, limit: float | None = None, act: str | None = None, **attributes: Any,
) -> str | None:  # fmt: skip
    """as grouped_linear; in fp8 by rows and by 128 x 128, and of 4 bits, with activations in fp8, too"""
    refused = refuse_layout(gate_up) or refuse_layout(down)
    if act is not None:
        gate = f"{kind} gate" if limit is None else f"{kind} gate with a limit"
        has_biases = any(each is not None for each in more[:2]) and act != "fp8[1, *]"
        has_gate = (kind, limit is not None) in GATES and not has_biases
        refused = refused or _refuse_act(act, gate_up) or _refuse_act(act, down)
        refused = refused or (None if has_gate else f"has no biases and no {gate} with activations in {act}")
    elif _refuse_many(gate_up, num_parts=2) is None or _refuse_many(down) is None:
        refused = None
    known = triton.accepts_experts(target, x, weights, ids, gate_up, down, *more, **attributes)
    return refused or refuse_dtype(x) or known


def accepts_delta_net(target: Target, qkv: Type, *types: Any, **attributes: Any) -> str | None:
    """bf16; keys and values of 64 or 128 dims"""
    _, dim, width = types[4].type.shape
    if not {dim, width} <= {*STATE_DIMS}:
        return f"a head's state is {dim} x {width}, not of 64 or 128"
    return refuse_dtype(qkv) or triton.accepts_delta_net(target, qkv, *types, **attributes)


def accepts_adapters(_target: Target, _y: Type, x: Type, a: Type, b: Type, *_types: Any) -> str | None:
    """bf16"""
    return refuse_dtype(x) or (_refuse_many(a) and _refuse_many(b))


def _refuse_weight(weight: Type, other: str | None) -> str | None:
    """Why a weight is taken in no way. other: why not plain or as stored"""
    reason = refuse_layout(weight)
    return other and (other if weight.fmt is None else reason)


def refuse_layout(weight: Type) -> str | None:
    """Why a weight [O, I] or [E, O, I] is not laid out; None: it is."""
    if weight.fmt is None:
        return "has no layout of plain weights"
    known, (out, inner) = parse_format(weight.fmt), map(int, weight.shape[-2:])
    rows, columns = known.block
    is_known = columns in SCALED_COLUMNS.get(known.kind, ())
    is_plain = known.parts.keys() <= {"values", "scales", "zeros"} and not known.has_order
    if not is_known or not is_plain or known.parts["values"].dtype == "i8" or (known.is_whole and rows != 1):
        return f"has no layout of {weight.fmt}"
    if weight.dtype != "bf16":
        return f"multiplies in bf16, not in {weight.dtype}"
    is_even = out % 16 == 0 and inner % (32 if known.bits == 4 else 64) == 0 and out % (rows or out) == 0
    return None if is_even else f"has no layout of {out} x {inner}"


def _refuse_gate(weight: Type, biases: Sequence[Type | None], kind: str | None = None, act: str | None = None,
                 **_attributes: Any) -> str | None:  # fmt: skip
    """Why gated_linear.py does not take a weight, plain or unpacked; None: it does, of many rows."""
    if kind != "silu" or act is not None or any(each is not None for each in biases):
        return "takes plain weights with a silu gate and without a bias only"
    out, inner = map(int, weight.shape)
    return None if inner > 64 and inner % 8 == out // 2 % 8 == 0 else f"has no silu gate of {out} x {inner}"


def _refuse_many(weight: Type, num_parts: int = 1) -> str | None:
    """Why grouped_linear.py does not take a weight [..., O, I], plain or unpacked; None: it does, of many rows.

    num_parts: 2 for gate and up projections
    """
    out, inner = map(int, weight.shape[-2:])
    if weight.fmt is not None:
        has_factor = not parse_format(weight.fmt).parts.keys().isdisjoint(("factor", "divisor"))
        if has_factor or out % block_of(weight)[-2]:
            return f"does not unpack experts in {weight.fmt}"
    return None if out // num_parts % 8 == inner % 8 == 0 else f"has no kernel for experts of {out} x {inner}"


def _refuse_act(act: str, weight: Type) -> str | None:
    """Why experts' activations in this format are not multiplied by this weight; None: they are."""
    out, inner = map(int, weight.shape[-2:])
    block = None if weight.fmt is None or act_of(weight.fmt) != act else parse_format(weight.fmt).block
    is_rounded = weight.fmt is not None and rounded_act_of(weight.fmt) == act
    is_taken = is_rounded or block == (1, None) or (block == (SPAN, SPAN) and out % SPAN == inner % SPAN == 0)
    return None if is_taken else f"activations in {act} are not multiplied by {weight}"


def refuse_dtype(x: Type) -> str | None:
    return None if x.dtype == "bf16" else f"multiplies in bf16, not in {x.dtype}"


def _refuse_cache(q: Type, types: Sequence[Any]) -> str | None:
    """Why queries of this dtype do not attend to a cache; None: they do."""
    if q.dtype not in ("bf16", "fp16"):
        return f"multiplies in bf16 and fp16, not in {q.dtype}"
    kept = [each.type.dtype for each in types if isinstance(each, KV) and each.type.dtype not in (q.dtype, "fp8_e4m3")]
    return f"the cache is in {kept[0]}, not in {q.dtype} or fp8_e4m3" if kept else None


def layout_of(*weights: Type) -> str | None:
    return LAYOUT if not any(map(refuse_layout, weights)) else None


def _layout_of_linears(weight: Type) -> str | None:
    return layout_of(weight) or triton.layout_of_linears(weight)


def find_tuners(device: torch.device) -> list[Tuner]:
    """Those of this backend's classes and `triton`'s, which share tables."""
    if GLUON not in find_features():
        return []
    from atom.kernels.hopper.experts import Experts
    from atom.kernels.hopper.linear import Linears
    from atom.kernels.triton.experts import grouped_tune
    from atom.kernels.triton.linear import tune

    return [
        tune.LinearTuner(device, {**tune.KINDS, "hopper": Linears}),
        grouped_tune.ExpertsTuner(device, {**grouped_tune.KINDS, "hopper": Experts}),
    ]


def _load_linears(context: LoadContext) -> object:
    from atom.kernels.hopper.linear import Linears

    return context.share(Linears)


def _load_attention(context: LoadContext) -> object:
    from atom.kernels.hopper.attention import NormRopeAttention, PagedAttention

    paged, roped = context.share(PagedAttention), context.share(NormRopeAttention)
    return SimpleNamespace(paged_attention=paged, norm_rope_attention=roped)


def _load_segments(_context: LoadContext) -> object:
    from atom.kernels.hopper import segment_attention

    return segment_attention


def _load_latent(context: LoadContext) -> object:
    from atom.kernels.hopper.latent import PagedLatentAttention

    return SimpleNamespace(paged_mla_attention=context.share(PagedLatentAttention))


def _load_index(_context: LoadContext) -> object:
    from atom.kernels.hopper import index_scores

    return index_scores


def _load_delta_net(_context: LoadContext) -> object:
    from atom.kernels.hopper import delta_net

    return delta_net


def _load_experts(context: LoadContext) -> object:
    from atom.kernels.hopper.experts import Experts

    return context.share(Experts)


def _load_lora(_context: LoadContext) -> object:
    from atom.kernels.hopper import experts

    return experts


def _kernel(op: Op, load: Callable[[LoadContext], object], accepts: Accepts, **options: Any) -> Kernel:
    @wraps(accepts)
    def accepts_here(target: Target, *types: Any, **attributes: Any) -> str | None:
        if GLUON not in target.features:
            return "runs on NVIDIA's Hopper only"
        return accepts(target, *types, **attributes)

    return gpu_kernel(op, "hopper", load, accepts_here, **options)


def _linear(op: Op) -> Kernel:
    options = {"packed": (*SCALED_COLUMNS,), "acts": ACTS, "packed_layout": layout_of, "is_for_packed": True}
    return _kernel(op, _load_linears, accepts_linear, **options)


def _gated_linear(op: Op) -> Kernel:
    accepts = update_wrapper(partial(accepts_gated_linear, op.weights[0]), accepts_gated_linear)
    kinds = (*PACKED, *TYPES)
    return _kernel(op, _load_linears, accepts, packed=kinds, acts=ACTS, gives=GIVEN, packed_layout=_layout_of_linears)


KERNELS: tuple[Kernel, ...] = (
    _linear(ops.linear),
    *map(_gated_linear, (ops.gated_linear, ops.norm_linear, ops.add_norm_linear)),
    _kernel(ops.paged_attention, _load_attention, accepts_attention, reads_prefixes_once=True),
    _kernel(ops.norm_rope_attention, _load_attention, accepts_attention, reads_prefixes_once=True),
    _kernel(ops.segment_attention, _load_segments, accepts_segments),
    _kernel(ops.paged_mla_attention, _load_latent, accepts_latent),
    _kernel(ops.paged_index_topk, _load_index, accepts_tokens),
    _kernel(ops.gated_delta_net, _load_delta_net, accepts_delta_net),
    _kernel(ops.grouped_linear, _load_experts, accepts_grouped, packed=PACKED, packed_layout=layout_of),
    _kernel(ops.experts, _load_experts, accepts_experts, packed=PACKED, acts=GIVEN, packed_layout=layout_of),
    _kernel(ops.grouped_lora, _load_lora, accepts_adapters),
)

BACKEND = Backend(
    "hopper", KERNELS, layouts={LAYOUT: shuffle}, find_features=find_features, find_tuners=find_tuners, vendor=GLUON
)

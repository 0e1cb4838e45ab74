"""The backend `aiter`: AMD's own kernels for its CDNA GPUs, from the package amd-aiter.

AITER is imported when a kernel is first called. What the installed version lacks is found by reading its sources, and
becomes a feature of the target, so that a text says why a call is left to `triton`.

    h = aiter.add_rms_norm(x, r, W("norm", …), eps=1e-06)
    y = aiter.linear(h, shuffle(W("y", …, fmt="fp8[1, *]"), "aiter"), act="fp8[1, *]")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from typing import Any

import torch

from atom.graph import KV, ops
from atom.graph.formats import act_of, parse_format
from atom.graph.ops import Op
from atom.graph.types import Type
from atom.kernels.aiter.functions import (
    FUNCTIONS,
    MISSING,
    MXFP4,
    Aiter,
    Refused,
    find_place,
    find_root,
    find_version,
)
from atom.kernels.aiter.shuffle import FNUZ, LAYOUT, shuffle
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, Target, kinds_in, on_device

VENDOR = "amd"
AITER = "aiter"  # the feature of a machine that has amd-aiter
LACKS = "no aiter."  # begins a feature that says what its version lacks: "no aiter.attention: there is none"
FP4_ARCH = "gfx950"  # its matrix cores multiply FP4; AITER tests its MXFP4 GEMMs on no older ones
ARCHES = (FNUZ, FP4_ARCH)  # that AITER has kernels for
DTYPES = ("bf16", "fp16")
MAX_NORM = 8192  # columns of a row that norms keep in registers
MAX_HEAD_DIM = 256
LATENT_DTYPE = "bf16"  # of entries that hold latents, and of their queries
MIN_DIM, MAX_RANK = 16, 512  # of a GEMM tile; of latents, which a program holds whole
ROWS, SPAN = 16, 128  # of fp8 weights: rows of a tile; columns that share a scale, never cut by a GEMM
EXPERT_BLOCKS = {None: 128, "fp8[1, *]": 256, "fp8[1, 128]": 256}  # whole ones of experts' dims, by activations
GROUPS = {False: (1, 2, 4, 8), True: (1, 8)}  # of experts, that AITER chooses from; with a correction
MAX_TOP_K = 64  # a thread of a wave for each
FP8 = "fp8_e4m3"


def find_features() -> frozenset[str]:
    """Features of a machine with AMD's GPUs: whether AITER is there, and which functions its version lacks."""
    root = None if torch.version.hip is None else find_root()
    if root is None:
        return frozenset()
    answers = {name: find_place(function, root) for name, function in FUNCTIONS.items()}
    lacking = {f"{LACKS}{name}: {each}" for name, each in answers.items() if isinstance(each, Refused)}
    return frozenset({AITER, *lacking})


def find_versions() -> dict[str, str]:
    """The version of AITER, if this machine may run its kernels."""
    found = None if torch.version.hip is None else find_version()
    return {} if found is None else {AITER: found}


def refuse_target(target: Target, *functions: str) -> str | None:
    """Why a machine cannot call these functions; None: it can."""
    if not target.features & {*ARCHES}:
        return f"runs only on {' and '.join(ARCHES)}"
    if AITER not in target.features:
        return f"{MISSING}: the extra amd brings it"
    lacking = (f"{LACKS}{name}: " for name in functions)
    found = (each for start in lacking for each in sorted(target.features) if each.startswith(start))
    return next((f"this version of AITER lacks {each.removeprefix(LACKS)}" for each in found), None)


def _calls(*functions: str, then: Accepts) -> Accepts:
    """What a kernel accepts that calls these functions, and that `then` accepts."""

    @wraps(then)
    def accepts(target: Target, *types: Any, **attributes: Any) -> str | None:
        return refuse_target(target, *functions) or then(target, *types, **attributes)

    return accepts


def _accepts_norm(_target: Target, x: Type, *types: Any, **_attributes: Any) -> str | None:
    """bf16 and fp16, rows of up to 8,192 columns

    types: the norm's weight is the last
    """
    if types[-1].dtype != x.dtype:
        return f"norms {x.dtype} by a weight in it, not in {types[-1].dtype}"
    return _refuse_dtype(x) or (f"rows have {x.shape[-1]} columns, more than {MAX_NORM}"
                                if int(x.shape[-1]) > MAX_NORM else None)  # fmt: skip


def _refuse_gate(kind: str, limit: float | None) -> str | None:
    if kind != "silu":
        return f"has only silu gates, not {kind}"
    return None if limit is None else "has no gates with a limit"


def _refuse_dtype(x: Type) -> str | None:
    return None if x.dtype in DTYPES else f"computes in {' and '.join(DTYPES)}, not in {x.dtype}"


def _accepts_gate(_target: Target, x: Type, *, kind: str, limit: float | None = None,
                  **_attributes: Any) -> str | None:  # fmt: skip
    """silu gates in bf16 and fp16"""
    if (reason := _refuse_gate(kind, limit)) is not None:
        return reason
    return _refuse_dtype(x) or (f"gates have {int(x.shape[-1]) // 2} columns, no multiple of 8"
                                if int(x.shape[-1]) % 16 else None)  # fmt: skip


def _accepts_linear(place: int, target: Target, x: Type, *types: Any, kind: str | None = None, act: str | None = None,
                    eps: float | None = None) -> str | None:  # fmt: skip
    """plain weights in bf16 and fp16; fp8 by row or 128 x 128 with activations

    Of linears, maybe after a norm (eps) and before gates (kind). place: of the weight, among the types after x
    """
    if len(x.shape) != 2:
        return "takes rows in two dims"
    weight: Type = types[place]
    reason = _refuse_dtype(x) if weight.fmt is None and act is None else _refuse_packed(target, x, weight, act)
    if reason is None and kind is not None:
        reason = refuse_target(target, "silu_and_mul") or _accepts_gate(target, x.with_last(weight.shape[0]), kind=kind)
    return reason or (None if eps is None else _accepts_norm(target, x, types[place - 1]))


def _refuse_packed(target: Target, x: Type, weight: Type, act: str | None) -> str | None:
    """Why AITER has no GEMM of activations in this format by this weight; None: it has one."""
    if (reason := _refuse_format(x, weight, act)) is not None:
        return reason
    (rows, _), (out, inner) = parse_format(str(weight.fmt)).block, map(int, weight.shape)
    if out % (ROWS if rows == 1 else SPAN) or inner % SPAN:
        return f"has no layout of {out} x {inner}"
    return refuse_target(
        target, *(("quantize_tokens", "linear_by_token") if rows == 1 else ("quantize_spans", "linear_by_block"))
    )


def _refuse_format(x: Type, weight: Type, act: str | None) -> str | None:
    if weight.fmt is None:
        return "multiplies quantized activations only by packed weights"
    known = parse_format(weight.fmt)
    if known.kind != "scaled" or known.parts["values"].dtype != FP8 or known.parts.keys() != {"values", "scales"}:
        return f"has no layout of {weight.fmt}"
    if act is None or act_of(weight.fmt) != act:
        return f"weights in {weight.fmt} are multiplied only by activations in {act_of(weight.fmt)}, not in {act or x}"
    if known.block not in ((1, None), (SPAN, SPAN)):
        return f"has no scales of blocks as in {weight.fmt}"
    return None if x.dtype == "bf16" else f"GEMMs of {act} give bf16, not {x.dtype}"


def _accepts_experts(
    target: Target, x: Type, _weights: Type, _ids: Type, gate_up: Type, down: Type, *more: Type | None, kind: str,
    limit: float | None = None, act: str | None = None, **_attributes: Any,
) -> str | None:  # fmt: skip
    """silu gates without biases, plain or in fp8 with activations; mxfp4 on gfx950

    more: biases, then the first expert that is here
    """
    if gate_up.fmt in MXFP4 and down.fmt in MXFP4:
        if act is not None or x.dtype != "bf16":
            return f"weights in {gate_up.fmt} are multiplied only by activations in bf16, not in {act or x.dtype}"
        if FP4_ARCH not in target.features:
            return f"multiplies {gate_up.fmt} only on {FP4_ARCH}"
        return refuse_target(target, "expert_matmuls", "expert_tiles", "routing_data")
    if (reason := refuse_target(target, "experts")) is not None:
        return reason
    if (reason := _refuse_gate(kind, limit)) is not None:
        return reason
    if more[:2] not in ((), (None,), (None, None)):
        return "adds no biases of experts"
    for weight in (gate_up, down):
        reason = _refuse_dtype(x) if weight.fmt is None and act is None else _refuse_format(x, weight, act)
        if reason is not None:
            return reason
    block, (hidden, width) = EXPERT_BLOCKS[act], map(int, down.shape[1:])
    return f"experts have {hidden} x {width} dims, no multiples of {block}" if hidden % block or width % block else None


def _accepts_router(target: Target, _x: Type, weight: Type, _bias: Type | None = None, correction: Type | None = None,
                    *, top_k: int, method: str = "greedy", score: str = "softmax", groups: int = 1,
                    ranks: str = "scores", gated: bool = False, **_rule: Any) -> str | None:  # fmt: skip
    """up to 64 experts a token, softmax or corrected sigmoid; no gate of shared experts"""
    if gated:
        return "has no gate of shared experts"
    if ranks != "scores":
        return f"chooses by scores, not by {ranks}"
    experts, has_correction = int(weight.shape[0]), correction is not None
    groups = 1 if method == "greedy" else groups
    if top_k > MAX_TOP_K:
        return f"chooses at most {MAX_TOP_K} experts, not {top_k}"
    if score == "softmax" and groups == 1 and not has_correction:
        return refuse_target(target, "topk_softmax")
    if has_correction and score != "sigmoid":
        return f"corrects only sigmoid scores, not {score}"
    if groups > 1 and has_correction != (method == "noaux_tc"):
        return f"has no {method} {'with' if has_correction else 'without'} a correction"
    if groups not in GROUPS[has_correction] or experts % (4 * groups):
        return f"does not choose from {groups} groups of {experts} experts"
    return refuse_target(target, "topk_with_correction" if has_correction else "topk_of_groups")


def _accepts_norm_router(
    target: Target, a: Type, _b: Type, norm: Type, *types: Any, eps: float, **rule: Any
) -> str | None:
    """as router, norms in bf16 and fp16"""
    return _accepts_router(target, a, *types, **rule) or _accepts_norm(target, a, norm)


def _accepts_attention(target: Target, q: Type, *types: Any, chunked: bool = False, **_attributes: Any) -> str | None:
    """heads of up to 256 dims in bf16 and fp16, without slopes, ends, chunks, choice; a cache in fp8 on gfx950"""
    place, cache = next((n, each) for n, each in enumerate(types) if isinstance(each, KV))
    dim = int(q.shape[-1])
    if chunked:
        return "attends no chunks"
    slopes, ends, selected = [*types[place + 5 :], None, None, None][:3]
    if slopes is not None:
        return "lowers no scores by distance"
    if ends is not None:
        return "lets no query see later tokens"
    if selected is not None:
        return "attends to all blocks, not to those that an indexer chooses"
    if dim > MAX_HEAD_DIM:
        return f"heads have {dim} dims, more than {MAX_HEAD_DIM}"
    if cache.type.dtype == FP8 and FNUZ in target.features:
        return f"a cache of {FP8} is read on later GPUs than {FNUZ}, which has e4m3fnuz"
    return _refuse_dtype(q)


def _accepts_latent(_target: Target, _q_nope: Type, q_rope: Type, kv_b: Type, cache: KV, _batch: Any,
                    _k_scale: Type | None = None, selected: Type | None = None, sinks: Type | None = None, *,
                    window: int | None = None, **_attributes: Any) -> str | None:  # fmt: skip
    """latents in bf16, of powers of two, all of them"""
    if selected is not None:
        return "attends to all entries, not to those that an indexer chooses"
    if sinks is not None or window is not None:
        return "attends to latents without sinks and windows"
    if cache.type.dtype == FP8:
        return f"reads latents and rotated keys of one dtype, not of a cache in {FP8}"
    if q_rope.dtype != LATENT_DTYPE:
        return f"attends latents in {LATENT_DTYPE}, not in {q_rope.dtype}"
    dims = int(kv_b.shape[1]), int(q_rope.shape[2])
    if any(dim & (dim - 1) or dim < MIN_DIM for dim in dims):
        return f"entries have {dims[0]} + {dims[1]} dims, no powers of two of at least {MIN_DIM}"
    return None if dims[0] <= MAX_RANK else f"latents have {dims[0]} dims, more than {MAX_RANK}"


def _accepts_write(target: Target, q: Type, k: Type, _v: Type, cos: Type | None, _sin: Type | None,
                   q_norm: Type | None, k_norm: Type | None, cache: KV, *_types: Any,
                   **_attributes: Any) -> str | None:  # fmt: skip
    """rope of all dims with q and k norms both or neither, in bf16"""
    dim = int(q.shape[-1])
    if cos is None:
        return "writes only rotated keys"
    if 2 * int(cos.shape[-1]) != dim:
        return f"rotates all {dim} dims of a head, not {2 * int(cos.shape[-1])}"
    if dim & (dim - 1):
        return f"heads have {dim} dims, no power of two"
    if (q_norm is None) != (k_norm is None):
        return "norms q and k both or neither"
    if cache.type.dtype != k.dtype:
        return f"does not bound entries of {cache.type.dtype}"
    if q.dtype != "bf16":  # newer versions take no other
        return f"writes bf16, not {q.dtype}"
    return None if q_norm is None else refuse_target(target, "rms_norm") or _accepts_norm(target, q, q_norm)


def _accepts_both(target: Target, *types: Any, **attributes: Any) -> str | None:
    """as norm_rope_write and paged_attention"""
    return _accepts_write(target, *types, **attributes) or _accepts_attention(target, *types, **attributes)


def _load_linears() -> object:
    from atom.kernels.aiter import linear

    return linear


def _load_experts() -> object:
    from atom.kernels.aiter import moe

    return moe


def _load_attention() -> object:
    from atom.kernels.aiter import attention

    return attention


def _load_latent() -> object:
    from atom.kernels.aiter import latent

    return latent


def _kernel(op: Op, find: Callable[[], object], accepts: Accepts, *functions: str, acts: tuple[str, ...] = (),
            layout: str | None = None, stored: tuple[str, ...] = ()) -> Kernel:  # fmt: skip
    """A kernel that calls these functions of AITER, by a function that takes an `Aiter` first.

    acts: formats of activations that it multiplies
    layout: of a plain weight; None: as stored
    stored: kinds of packed weights that it reads as they are stored
    """

    def load(context: LoadContext) -> Callable[..., Any]:
        return partial(getattr(find(), op.name), context.share(Aiter))

    laid_out = ("scaled",) if acts else ()
    accepts = on_device("cuda", _calls(*functions, then=accepts), packed=(*laid_out, *stored), acts=acts)
    packed_layout = kinds_in(LAYOUT, laid_out) if acts else None
    return Kernel(op, "aiter", accepts, load, layout=layout, packed_layout=packed_layout)


def _linear(op: Op, *functions: str) -> Kernel:
    accepts = update_wrapper(partial(_accepts_linear, op.weights[0] - 1), _accepts_linear)
    return _kernel(op, _load_linears, accepts, "linear", *functions, acts=("fp8",))


KERNELS = (
    _kernel(ops.rms_norm, _load_linears, _accepts_norm, "rms_norm"),
    _kernel(ops.add_rms_norm, _load_linears, _accepts_norm, "add_rms_norm"),
    _kernel(ops.gated_activate, _load_linears, _accepts_gate, "silu_and_mul"),
    _linear(ops.linear),
    _linear(ops.gated_linear),
    _linear(ops.norm_linear, "rms_norm", "rms_norm_quantize"),
    _linear(ops.add_norm_linear, "add_rms_norm", "add_rms_norm_quantize"),
    _kernel(ops.router, _load_experts, _accepts_router),
    _kernel(ops.add_norm_router, _load_experts, _accepts_norm_router, "add_rms_norm"),
    _kernel(ops.experts, _load_experts, _accepts_experts, acts=("fp8",), layout=LAYOUT, stored=("mxfp4",)),
    _kernel(ops.norm_rope_write, _load_attention, _accepts_write, "rope_and_write"),
    _kernel(ops.paged_attention, _load_attention, _accepts_attention, "attention"),
    _kernel(ops.norm_rope_attention, _load_attention, _accepts_both, "rope_and_write", "attention"),
    _kernel(ops.paged_mla_attention, _load_latent, _accepts_latent, "latent_decode", "latent_prefill"),
)

BACKEND = Backend(
    "aiter",
    KERNELS,
    layouts={LAYOUT: shuffle},
    find_features=find_features,
    find_versions=find_versions,
    vendor=VENDOR,
)

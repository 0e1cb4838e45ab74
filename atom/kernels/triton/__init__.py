"""The backend `triton`: kernels for GPUs of all vendors.

    for kernel in BACKEND.kernels:
        reason = kernel.accepts(find_target("cuda"), *types)     # None: yes
        run = kernel.load(LoadContext())                         # a callable with the op's signature

Nothing here imports triton before a kernel is loaded: `_load_linears` and so on import a module each, and give it
or the program's one object of a class, whose functions have the names of ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from atom.cache import Cache
from atom.errors import UnsupportedError
from atom.graph import KV, State, ops
from atom.graph.formats import act_of, parse_format
from atom.graph.gguf_blocks import SPLIT, TYPES
from atom.graph.ops import Op
from atom.graph.ops.attention import FP8
from atom.graph.types import Type
from atom.kernels.backend import Backend, Kernel, LoadContext, Target, Tuner, gpu_kernel, kinds_in, on_device
from atom.kernels.step import StepKernels
from atom.kernels.triton.linear.split_blocks import split_blocks

MAX_HEAD_DIM = 512
MAX_TOWER_DIM = 256  # of heads of a vision tower
NARROW = ("nvfp4", *TYPES)  # kinds in which linears take groups of 16 columns
PACKED = ("scaled", "int4", "int8", "mxfp4", "nvfp4")  # kinds that the kernels of linears unpack
FP8_CAPABILITY = 89  # of NVIDIA's GPUs, from which they convert fp8_e4m3
MAX_RANK, MAX_ROTATED = 512, 64  # of latent entries
MAX_WIDE_RANK = 1024  # of those in 16 bits
MAX_INDEX_HEADS, MAX_INDEX_DIM, MAX_TOP_K = 128, 256, 8192
MAX_TAPS = 33  # of a convolution: the first tile of a prompt reads what was before
MAX_SUMS = 16  # of blocks, to which others attend
MAX_STATE_DIM = 256  # of keys, or of a channel's state: registers hold so many times 32
FP4 = ("mxfp4", "nvfp4")  # kinds of packed weights with numbers of 4 bits in floating point
ACTS = ("fp8", "int8")  # of activations that the library multiplies
GIVEN = ("fp8",)  # formats in which gates give the rows that it multiplies next
SPAN = 128  # rows and columns of blocks in fp8 that the library multiplies
MAX_SLICES = 3  # of a linear with adapters: q, k and v
MIN_COLUMNS = 32  # that share a scale, in other packed weights of experts


def find_features() -> frozenset[str]:
    """The vendor and the architecture of the GPU that this process sees first. UnsupportedError without one."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device=cuda: torch finds no GPU here; take device=cpu, or job=explain job.gpu= to ask about one"
        )
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return frozenset({"amd", properties.gcnArchName.partition(":")[0], properties.name})
    return frozenset({"nvidia", f"sm_{properties.major}{properties.minor}", properties.name})


def find_versions() -> dict[str, str]:
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


@contextmanager
def keep_binaries(cache: Cache) -> Iterator[None]:
    """Keep binaries in a cache folder. `cache.warnings` says what was ignored there, after this context stderr."""
    from atom.kernels.triton.compile.binary_cache import keep_in

    own = Cache(cache.folder)  # it must stay open while Triton compiles
    own.warnings = cache.warnings
    binaries = keep_in(own)
    try:
        yield
    finally:
        binaries.print_warnings()


def compile_launches(pool: Executor) -> AbstractContextManager[None]:
    from atom.kernels.triton.compile import precompile

    return precompile.compile_launches(pool)


def find_tuners(device: torch.device) -> list[Tuner]:
    from atom.kernels.triton.experts.grouped_tune import ExpertsTuner
    from atom.kernels.triton.linear.tune import LinearTuner

    return [LinearTuner(device), ExpertsTuner(device)]


def load_step_kernels() -> StepKernels:
    from atom.kernels.triton.step import blocks, prepare_inputs, sampling, speculation

    return StepKernels.of(prepare_inputs, sampling, speculation, blocks)


def accepts_attention(target: Target, q: Type, *types: Any, **_attributes: Any) -> str | None:
    """heads of up to 512 dims; a cache in fp8 from sm_89 on"""
    dim = int(q.shape[-1])
    if dim > MAX_HEAD_DIM:
        return f"heads have {dim} dims, more than {MAX_HEAD_DIM}"
    return accepts_cache(target, *types)


def accepts_blocks(target: Target, q: Type, *types: Any, **_attributes: Any) -> str | None:
    """index heads of up to 256 dims, a multiple of 4; a cache in fp8 from sm_89 on"""
    dim = int(q.shape[-1])
    if dim > MAX_TOWER_DIM or dim % 4:
        return f"index heads have {dim} dims, not a multiple of 4 up to {MAX_TOWER_DIM}"
    return accepts_cache(target, *types)


def accepts_heads(_target: Target, q: Type, *_types: Any, **_attributes: Any) -> str | None:
    """heads of up to 256 dims"""
    dim = int(q.shape[-1])
    return None if dim <= MAX_TOWER_DIM else f"heads have {dim} dims, more than {MAX_TOWER_DIM}"


def accepts_cache(target: Target, *types: Any, **_attributes: Any) -> str | None:
    """a cache in fp8 from sm_89 on"""
    is_fp8 = any(isinstance(each, KV) and each.type.dtype == FP8 for each in types)
    older = [name for name in target.features if name.startswith("sm_") and int(name[3:]) < FP8_CAPABILITY]
    return f"{FP8} needs sm_{FP8_CAPABILITY}, not {older[0]}" if is_fp8 and older else None


def accepts_linear(
    target: Target, x: Type, *types: Any, kind: str | None = None, act: str | None = None, gives: str | None = None,
    **_attributes: Any,
) -> str | None:  # fmt: skip
    """x of two dims; not swigluoai gates; groups of 32 columns or multiples, or 16 in nvfp4 and GGUF's"""
    if kind == "swigluoai":
        return "has no swigluoai gate"
    if len(x.shape) != 2:
        return "takes rows in two dims"
    if gives is not None and act is None:
        return f"gives rows in {gives} after linears of such activations only"
    weight = next((type for type in types if isinstance(type, Type) and type.fmt is not None), None)
    if weight is None:
        return None if act is None else "multiplies quantized activations by packed weights only"
    return _refuse_packed(weight) or (None if act is None else _refuse_act(target, act, weight))


def _refuse_act(target: Target, act: str, weight: Type) -> str | None:
    """Why the library does not multiply activations in this format by this weight; None: it does."""
    out, inner = map(int, weight.shape)
    rows, columns = parse_format(str(weight.fmt)).block
    is_whole = rows == 1 and columns in (None, inner)
    if act_of(str(weight.fmt)) != act:
        return f"activations in {act} are not multiplied by weights in {weight.fmt}"
    if act.startswith("int8"):
        feature, is_taken = "nvidia", is_whole and out % 8 == inner % 8 == 0
    else:
        is_in_blocks = (rows, columns) == (SPAN, SPAN) and out % SPAN == inner % SPAN == 0
        feature, is_taken = "sm_90", is_in_blocks or (is_whole and out % 16 == inner % 16 == 0)
        if weight.dtype != "bf16":
            return f"activations in {act} are multiplied in bf16, not in {weight.dtype}"
    if feature not in target.features:
        return f"activations in {act} are multiplied on {feature} only"
    return None if is_taken else f"activations in {act} are not multiplied by {weight}"


def _refuse_packed(weight: Type) -> str | None:
    """Why the kernels of linears do not unpack this weight; None: they do."""
    known = parse_format(str(weight.fmt))
    (rows, columns), inner = known.block, int(weight.shape[-1])
    has_minima, blocks = "mins" in known.parts, TYPES.get(known.kind)
    if blocks is not None:
        has_minima, columns = blocks.has_mins, blocks.group
    if len(weight.shape) != 2:
        return f"takes weights of two dims, not {weight}"
    if known.has_order:
        return f"its columns are not in the order of their blocks: {weight.fmt}"
    if has_minima and columns == inner:
        return f"rows of {weight.fmt} are one block, with a minimum"
    if rows != 1 and known.kind != "scaled":
        return f"blocks of {weight.fmt} have several rows"
    if columns is not None and columns < inner and columns % 32 and known.kind not in NARROW:
        return f"blocks of {weight.fmt} are no multiple of 32 columns"
    return f"{inner} columns are odd" if known.bits == 4 and inner % 2 else None


def accepts_by_head(_target: Target, _x: Type, weight: Type, *_types: Any, heads: int) -> str | None:
    """packed weights as linear, of a multiple of 128 rows by head"""
    if weight.fmt is None:
        return None
    rows = int(weight.shape[0]) // heads
    whole = None if rows % SPAN == 0 else f"a head has {rows} rows of its weight, no multiple of {SPAN}"
    return _refuse_packed(weight) or whole


def accepts_activated(target: Target, x: Type, *_types: Any, kind: str, **_attributes: Any) -> str | None:
    """gelu_tanh in bf16 and fp16 on NVIDIA, x of two dims"""
    if kind != "gelu_tanh" or x.dtype not in ("bf16", "fp16"):
        return f"has no epilogue with {kind} in {x.dtype}"
    if len(x.shape) != 2:
        return "takes rows in two dims"
    return None if "nvidia" in target.features else "calls a library of NVIDIA's"


def accepts_lora(
    _target: Target, *_types: Any, sizes: Sequence[int], kind: str | None = None, **_attributes: Any
) -> str | None:
    """up to 3 slices of outputs; not swigluoai gates"""
    if kind == "swigluoai":
        return "has no swigluoai gate"
    if kind is not None and len(sizes) > 1 and (len(sizes) != 2 or sizes[0] != sizes[1]):
        return f"slices {list(sizes)} are not gate and up"
    return None if len(sizes) <= MAX_SLICES else f"takes {MAX_SLICES} slices, not {len(sizes)}"


def accepts_latent(target: Target, _q_nope: Type, q_rope: Type, kv_b: Type, *types: Any,
                   **_attributes: Any) -> str | None:  # fmt: skip
    """latents of up to 1024 dims (fp32: 512), rotated keys of up to 64; one choice for all heads; fp8 from sm_89 on"""
    rank, rotated = int(kv_b.shape[1]), int(q_rope.shape[2])
    selected = next((each for each in types if isinstance(each, Type) and each.dtype == "i32"), None)
    if selected is not None and int(selected.shape[1]) != 1:
        return f"takes one choice for all heads, not {selected}"
    max_rank = MAX_RANK if q_rope.dtype == "fp32" else MAX_WIDE_RANK
    if rank <= max_rank and rotated <= MAX_ROTATED:
        return accepts_cache(target, *types)
    return f"entries have {rank} + {rotated} dims, more than {max_rank} + {MAX_ROTATED}"


def accepts_tokens(target: Target, q: Type, *types: Any, top_k: int = 1, **_attributes: Any) -> str | None:
    """up to 128 index heads of up to 256 dims, in fp8 of multiples of 4; up to 8192 chosen; fp8 from sm_89 on"""
    heads, dim = map(int, q.shape[1:])
    if heads > MAX_INDEX_HEADS or dim > MAX_INDEX_DIM:
        return f"{heads} index heads have {dim} dims, more than {MAX_INDEX_HEADS} of {MAX_INDEX_DIM}"
    if top_k > MAX_TOP_K:
        return f"top_k={top_k} are more than {MAX_TOP_K}"
    if dim % 4 and any(isinstance(each, KV) and each.type.dtype == FP8 for each in types):
        return f"the scale of a key in {FP8} of {dim} dims is not aligned"
    return accepts_cache(target, *types)


def accepts_grouped(_target: Target, x: Type, weight: Type, *_types: Any) -> str | None:
    """groups of 32 columns or multiples; FP4 not in fp16"""
    if weight.fmt is None:
        return None
    known = parse_format(weight.fmt)
    rows, columns = known.block
    if known.has_order:
        return "the columns of its weight that share a scale are not neighbours"
    if known.is_whole and rows != 1:
        return f"its weight is stored transposed, as {weight.fmt}"
    if known.kind in FP4:
        return "fp16 does not hold the numbers of its weight" if x.dtype == "fp16" else None
    if columns is not None and columns < int(weight.shape[-1]) and columns % MIN_COLUMNS:
        return f"{columns} columns of its weight share a scale, no multiple of {MIN_COLUMNS}"
    return None


def accepts_experts(
    target: Target, x: Type, _weights: Type, _ids: Type, gate_up: Type, down: Type, *_more: Type | None,
    **_attributes: Any,
) -> str | None:  # fmt: skip
    """groups of 32 columns or multiples; FP4 not in fp16"""
    return accepts_grouped(target, x, gate_up) or accepts_grouped(target, x, down)


def accepts_delta(_target: Target, q: Type, *_types: Any, **_attributes: Any) -> str | None:
    """keys of up to 256 dims"""
    dim = int(q.shape[-1])
    return None if dim <= MAX_STATE_DIM else f"keys have {dim} dims, more than {MAX_STATE_DIM}"


def accepts_conv(_target: Target, _x: Type, state: State, *_types: Any, **_attributes: Any) -> str | None:
    """up to 33 taps"""
    taps = int(state.type.shape[0]) + 1
    return None if taps <= MAX_TAPS else f"has {taps} taps, more than {MAX_TAPS}"


def accepts_ngrams(_target: Target, _tokens: Type, state: State, *_types: Any, **_attributes: Any) -> str | None:
    """n-grams of up to 33 tokens"""
    size = int(state.type.shape[0]) + 1
    return None if size <= MAX_TAPS else f"has n-grams of {size} tokens, more than {MAX_TAPS}"


def accepts_delta_net(
    target: Target, qkv: Type, _z: Type, _a: Type, _b: Type, conv: State, state: State, *_types: Any,
    **_attributes: Any,
) -> str | None:  # fmt: skip
    """keys and values of up to 256 dims, up to 33 taps"""
    dim = max(map(int, state.type.shape[1:]))
    known = None if dim <= MAX_STATE_DIM else f"a head has {dim} dims, more than {MAX_STATE_DIM}"
    return known or accepts_conv(target, qkv, conv)


def accepts_residuals(_target: Target, _norm: Type, _query: Type, *sums: Type, **_attributes: Any) -> str | None:
    """up to 16 sums"""
    return None if len(sums) <= MAX_SUMS else f"attends to {MAX_SUMS} sums, not to {len(sums)}"


def accepts_scan(_target: Target, _x: Type, _dt: Type, b: Type, *_types: Any) -> str | None:
    """channels of up to 256 numbers of state"""
    size = int(b.shape[-1])
    return None if size <= MAX_STATE_DIM else f"a channel's state has {size} numbers, more than {MAX_STATE_DIM}"


def _load_linears(context: LoadContext) -> object:
    from atom.kernels.triton.linear.linear import Linears

    return context.share(Linears)


def _load_epilogue(_context: LoadContext) -> object:
    from atom.kernels.triton.linear import epilogue

    return epilogue


def _load_residuals(_context: LoadContext) -> object:
    from atom.kernels.triton.attention import residuals

    return residuals


def _load_rope(_context: LoadContext) -> object:
    from atom.kernels.triton.attention import rope

    return rope


def _load_attention(context: LoadContext) -> object:
    from atom.kernels.triton.attention.paged import NormRopeAttention, PagedAttention

    paged, roped = context.share(PagedAttention), context.share(NormRopeAttention)
    return SimpleNamespace(paged_attention=paged, norm_rope_attention=roped)


def _load_blocks(_context: LoadContext) -> object:
    from atom.kernels.triton.attention import block_sparse

    return block_sparse


def _load_segments(_context: LoadContext) -> object:
    from atom.kernels.triton.attention import segments

    return segments


def _load_compressed(_context: LoadContext) -> object:
    from atom.kernels.triton.attention import compressed

    return compressed


def _load_latent(context: LoadContext) -> object:
    from atom.kernels.triton.attention.latent import PagedLatentAttention, norm_rope_write_latent

    attention = context.share(PagedLatentAttention)
    return SimpleNamespace(norm_rope_write_latent=norm_rope_write_latent, paged_mla_attention=attention)


def _load_index(_context: LoadContext) -> object:
    from atom.kernels.triton.attention.index_scores import write_index
    from atom.kernels.triton.attention.top_k import paged_index_topk

    return SimpleNamespace(write_index=write_index, paged_index_topk=paged_index_topk)


def _load_router(context: LoadContext) -> object:
    from atom.kernels.triton.experts.router import Router

    return context.share(Router)


def _load_grouping(_context: LoadContext) -> object:
    from atom.kernels.triton.experts import grouping

    return grouping


def _load_experts(context: LoadContext) -> object:
    from atom.kernels.triton.experts.moe import Experts

    return context.share(Experts)


def _load_streams(_context: LoadContext) -> object:
    from atom.kernels.triton import streams

    return streams


def _load_speculation(_context: LoadContext) -> object:
    from atom.kernels.triton.step import speculation

    return speculation


def _load_lora(_context: LoadContext) -> object:
    from atom.kernels.triton.linear import lora

    return lora


def _load_conv(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import causal_conv

    return causal_conv


def _load_ngrams(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import ngrams

    return ngrams


def _load_delta(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import gated_delta

    return gated_delta


def _load_delta_net(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import delta_net

    return delta_net


def _load_lightning(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import lightning

    return lightning


def _load_scan(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import selective_scan

    return selective_scan


def _load_ssd(_context: LoadContext) -> object:
    from atom.kernels.triton.recurrent import ssd

    return ssd


def _kernel(op: Op, *args: Any, **options: Any) -> Kernel:
    return gpu_kernel(op, "triton", *args, **options)


def _linear(op: Op) -> Kernel:
    gives, kinds = () if op is ops.linear else GIVEN, (*PACKED, *TYPES)
    options = {"acts": ACTS, "gives": gives, "packed_layout": layout_of_linears}
    return _kernel(op, _load_linears, accepts_linear, packed=kinds, **options)


def _by_torch(op: Op) -> Kernel:
    return Kernel(op, "triton", on_device("cuda"), lambda _: op.body)


layout_of_linears = kinds_in(SPLIT, TYPES)
KERNELS: tuple[Kernel, ...] = (
    *map(_linear, (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear)),
    _kernel(
        ops.linear_by_head, _load_linears, accepts_by_head, packed=(*PACKED, *TYPES), packed_layout=layout_of_linears
    ),
    _kernel(ops.linear_activate, _load_epilogue, accepts_activated),
    _kernel(ops.norm_rope, _load_rope, accepts_attention, batch_invariant=True),
    _kernel(ops.norm_rope_write, _load_rope, accepts_attention, batch_invariant=True),
    _kernel(ops.paged_index_blocks, _load_blocks, accepts_blocks),
    _kernel(ops.paged_attention, _load_attention, accepts_attention, reads_prefixes_once=True),
    _kernel(ops.norm_rope_attention, _load_attention, accepts_attention, reads_prefixes_once=True),
    _kernel(ops.norm_rope_write_latent, _load_latent, accepts_cache),
    _kernel(ops.paged_mla_attention, _load_latent, accepts_latent),
    _kernel(ops.write_index, _load_index, accepts_tokens),
    _kernel(ops.paged_index_topk, _load_index, accepts_tokens),
    _kernel(ops.segment_attention, _load_segments, accepts_heads),
    _kernel(ops.paged_compress, _load_compressed),
    _kernel(ops.run_tokens, _load_compressed),
    _by_torch(ops.write_mqa),
    _kernel(ops.paged_mqa_attention, _load_compressed, accepts_attention),
    _kernel(ops.attend_residuals, _load_residuals, accepts_residuals),
    _kernel(ops.OPS["batched_causal_conv"], _load_conv, accepts_conv),
    _kernel(ops.OPS["batched_ngrams"], _load_ngrams, accepts_ngrams),
    _kernel(ops.OPS["batched_gated_delta"], _load_delta, accepts_delta),
    _kernel(ops.gated_delta_net, _load_delta_net, accepts_delta_net),
    _kernel(ops.OPS["batched_lightning"], _load_lightning, accepts_delta),
    _kernel(ops.OPS["batched_selective_scan"], _load_scan, accepts_scan),
    _kernel(ops.OPS["batched_ssd"], _load_ssd, accepts_scan),
    _kernel(ops.router, _load_router),
    _kernel(ops.add_norm_router, _load_router),
    _kernel(ops.group, _load_grouping, batch_invariant=True),
    _kernel(ops.grouped_linear, _load_experts, accepts_grouped, packed=PACKED),
    _kernel(ops.combine, _load_grouping),
    _kernel(ops.gumbel_argmax, _load_speculation),
    _kernel(ops.stream_logits, _load_streams),
    _kernel(ops.sinkhorn, _load_streams),
    _kernel(ops.lora, _load_lora, accepts_lora),
    _kernel(ops.expand_lora, _load_lora, accepts_lora),
    _kernel(ops.grouped_lora, _load_lora),
    _kernel(ops.experts, _load_experts, accepts_experts, packed=PACKED),
    # a view, copies of the rows of images, reductions of a few tensors and a GEMM of small ones
    *map(_by_torch, (ops.axis_tables, ops.clip, ops.fold_rows, ops.join, ops.take_rows, ops.mean_rows)),
    *map(_by_torch, (ops.resample_table, ops.stream_gate)),
)

BACKEND = Backend(
    "triton",
    KERNELS,
    layouts={SPLIT: split_blocks},
    find_features=find_features,
    find_versions=find_versions,
    keep_binaries=keep_binaries,
    compile_launches=compile_launches,
    step_kernels=load_step_kernels,
    find_tuners=find_tuners,
)

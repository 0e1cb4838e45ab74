"""The AITER functions that atom calls, by installed version.

AITER moves functions and adds parameters between versions. So each is listed with the places where versions have it and
with the arguments that atom passes; the sources of the installed version are searched, without importing it, for the
first place whose signature accepts them.

    root = find_root()                                  # None: amd-aiter is not installed
    answer = find_place(FUNCTIONS["rms_norm"], root)    # Place("aiter.ops.rmsnorm:rmsnorm2d_fwd"), or Refused("…")
    Aiter()["rms_norm"](x, weight, eps)
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from atom.errors import UnsupportedError

PACKAGE = "amd-aiter"
MISSING = f"{PACKAGE} is not installed"
# formats whose bytes hold neighbouring columns, the first in the lower half
MXFP4 = ("mxfp4", "ct_mxfp4", "ds_mxfp4", "quark_mxfp4")


class Function(NamedTuple):
    """A function of AITER as atom calls it."""

    places: tuple[str, ...]  # module:name, that of the newest version first
    positional: tuple[str, ...]  # parameters that atom passes by position, in this order
    keywords: tuple[str, ...] = ()  # parameters that atom passes by name


class Place(str):
    """Where a function is: module:name."""


class Refused(str):
    """Why the installed version has no such function."""


ROUTING = "aiter.ops.triton.moe.moe_routing.routing"
LATENT = (
    "q", "kv_buffer", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_kv", "block_tables", "softmax_scale",
    "kv_lora_rank", "qk_rope_head_dim", "causal", "q_descale", "kv_descale",
)  # fmt: skip

FUNCTIONS = {
    # out, input, residuals [T, H] bf16 or fp16; weight [H]; quantized: out [T, H] fp8, yscale fp32[T, 1]
    "rms_norm": Function(("aiter.ops.rmsnorm:rmsnorm2d_fwd",), ("input", "weight", "epsilon")),
    "add_rms_norm": Function(
        ("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",),
        ("out", "input", "residual_in", "residual_out", "weight", "epsilon"),
    ),
    "rms_norm_quantize": Function(
        ("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_dynamicquant",), ("out", "input", "yscale", "weight", "epsilon")
    ),
    "add_rms_norm_quantize": Function(
        ("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add_dynamicquant",),
        ("out", "input", "residual_in", "residual_out", "yscale", "weight", "epsilon"),
    ),
    # out [T, W], input [T, 2 W], gate before up
    "silu_and_mul": Function(("aiter.ops.activation:silu_and_mul",), ("out", "input")),
    # x [T, I] -> values fp8[T, I], scales fp32[T, 1] or [T, I / 128], in whose memory the tokens are the faster dim
    "quantize_tokens": Function(("aiter.ops.quant:per_token_quant_hip",), ("x",), ("quant_dtype",)),
    "quantize_spans": Function(
        ("aiter.ops.quant:per_group_quant_hip",), ("x",), ("quant_dtype", "group_size", "transpose_scale")
    ),
    # A [T, I], B [O, I], bias [O] -> [T, O]
    "linear": Function(("aiter.tuned_gemm:gemm_a16w16",), ("A", "B", "bias")),
    # XQ fp8[T, I], WQ fp8[O, I] shuffled 16x16, x_scale fp32[T, 1], w_scale fp32[O, 1] -> [T, O]
    "linear_by_token": Function(
        ("aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle",), ("XQ", "WQ", "x_scale", "w_scale"), ("dtype",)
    ),
    # the same with scales of 128 columns, x_scale as quantize_spans gives it, w_scale fp32[O / 128, I / 128]
    "linear_by_block": Function(
        ("aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale_bpreshuffle",), ("XQ", "WQ", "x_scale", "w_scale"), ("dtype",)
    ),
    # q [T, N, D], k and v [T, K, D], caches [blocks, block size, K, D] of any strides, cos and sin [positions, D / 2]
    "rope_and_write": Function(
        (
            "aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache",
            "aiter.ops.triton.fused_kv_cache:fused_qk_rope_reshape_and_cache",
        ),
        ("q", "k", "v", "key_cache", "value_cache", "slot_mapping", "pos", "cos", "sin", "k_scale", "v_scale",
         "is_neox", "flash_layout"),
        ("output_zeros",),
    ),
    # q and out [T, N, D], k and v as the caches above, block_table i32[S, M], sequences' ends and lengths i32
    "attention": Function(
        (
            "aiter.ops.triton.attention.unified_attention:unified_attention",
            "aiter.ops.triton.unified_attention:unified_attention",
        ),
        ("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal",
         "window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale"),
        ("sinks",),
    ),
    # q [T, N, L + R], kv_buffer [pages, page size, 1, L + R], out [T, N, L]; of decodes, each with as many queries
    "latent_decode": Function(("aiter.ops.triton.attention.mla:mla_decode_fwd",), LATENT),
    "latent_prefill": Function(("aiter.ops.triton.attention.mla:mla_prefill_fwd",), LATENT),
    # gating_output fp32[T, E] -> in place, in order of weight: topk_weights fp32[T, k], topk_ids and others i32[T, k]
    "topk_softmax": Function(
        ("aiter.ops.moe_op:topk_softmax",),
        ("topk_weights", "topk_indices", "token_expert_indices", "gating_output", "need_renorm"),
    ),
    # the same of the best groups: those of the best expert, or, with a correction fp32[E], of the two best together
    "topk_of_groups": Function(
        ("aiter.ops.topk:grouped_topk",),
        ("gating_output", "topk_weights", "topk_ids", "num_expert_group", "topk_group", "need_renorm", "is_softmax",
         "routed_scaling_factor"),
    ),
    "topk_with_correction": Function(
        ("aiter.ops.topk:biased_grouped_topk_hip",),
        ("gating_output", "correction_bias", "topk_weights", "topk_ids", "num_expert_group", "topk_grp", "need_renorm",
         "routed_scaling_factor"),
    ),
    # hidden_states [T, H], w1 [E, 2 W, H] and w2 [E, H, W] shuffled 16x16, topk_weight fp32[T, k], topk_ids i32[T, k],
    # expert_mask i32[ids], 1 if an id is of one of the E in turn; scales fp32[E, O, 1] or [E, O / 128, I / 128]
    "experts": Function(
        ("aiter.fused_moe:fused_moe",),
        ("hidden_states", "w1", "w2", "topk_weight", "topk_ids"),
        ("expert_mask", "quant_type", "w1_scale", "w2_scale"),
    ),
    # x bf16[P, I] by expert, w u8[E, I / 2, O] and w_scales u8[E, I / 32, O] of which the second dim is the faster one,
    # bias fp32[E, O] -> bf16[P, O]
    "expert_matmuls": Function(
        ("aiter.ops.triton.moe.moe_op_gemm_a16w4:moe_gemm_a16w4",),
        ("x", "w", "x_scales", "w_scales"),
        ("bias", "routing_data"),
    ),
    # i32: each expert's rows [E], where they begin and the last ends [E + 1], the same of tiles, and the tiles' numbers
    "expert_tiles": Function(
        (f"{ROUTING}:ExptData",), ("hist", "token_offs_raw", "token_offs_pad", "block_pid_map")
    ),
    "routing_data": Function(
        (f"{ROUTING}:RoutingData",),
        ("block_m", "gate_scal", "expt_hist", "n_expts_tot", "n_expts_act", "expt_data"),
    ),
}  # fmt: skip

# an enum of AITER's C++: the format in which "experts" multiplies
QUANT_TYPE = Place("aiter.ops.enum:QuantType")
QUANT_TYPES = ("No", "per_Token", "per_128x128")  # those that atom passes


@cache
def find_root() -> Path | None:
    """The folder that the installed package `aiter` is in; None without amd-aiter."""
    if find_version() is None:  # another package of the index is named aiter
        return None
    spec = find_spec("aiter")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def find_version() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def find_place(function: Function, root: Path) -> Place | Refused:
    """The first place, in the sources below this folder, that accepts atom's arguments, or why there is none."""
    refusals = []
    for place in function.places:
        signature = read_signature(root, place)
        reason = "there is none" if signature is None else refuse_signature(function, signature)
        if reason is None:
            return Place(place)
        refusals.append(f"{place}: {reason}")
    return Refused("; ".join(refusals))


def read_signature(root: Path, place: str) -> str | None:
    """The parameters and defaults of a function or a dataclass, without annotations; None if it does not exist.

    A default that is no literal is written `...`.
    """
    module, _, name = place.partition(":")
    path = root.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _plain_arguments(node.args)
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ", ".join(_plain_field(each) for each in node.body if isinstance(each, ast.AnnAssign))
    return None


def _plain_field(field: ast.AnnAssign) -> str:
    """A field of a dataclass as a parameter; `field()` is no default."""
    name = ast.unparse(field.target)
    if field.value is None or ast.unparse(field.value) == "field()":
        return name
    return f"{name}={ast.unparse(_literal(field.value))}"


def _plain_arguments(arguments: ast.arguments) -> str:
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    arguments.defaults = [_literal(each) for each in arguments.defaults]
    arguments.kw_defaults = [None if each is None else _literal(each) for each in arguments.kw_defaults]
    return ast.unparse(arguments)


def _literal(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(...)
    return default


def refuse_signature(function: Function, signature: str) -> str | None:
    """Why a signature, as `read_signature` writes it, does not take what atom passes; None: it does."""
    definition = ast.parse(f"def f({signature}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    placed = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    named = {*(each.arg for each in arguments.args), *(each.arg for each in arguments.kwonlyargs)}
    passed = (*function.positional, *function.keywords)
    if tuple(placed[: len(function.positional)]) != function.positional:
        return f"it takes ({', '.join(placed)}), not ({', '.join(function.positional)})"
    if unknown := [each for each in function.keywords if each not in named]:
        return f"it has no parameter {unknown[0]}"
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = placed[: len(placed) - len(arguments.defaults)] + [each.arg for each, value in pairs if value is None]
    wanted = [each for each in required if each not in passed]
    return f"it wants {wanted[0]} too" if wanted else None


def import_place(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


class Aiter:
    """The installed version's functions, by their names in `FUNCTIONS`; each is imported on first use."""

    def __init__(self, root: Path | None = None, load: Callable[[str], Callable[..., Any]] = import_place) -> None:
        """
        root: folder of AITER's sources; None: the installed ones
        load: imports a place
        """
        self._root, self._load = root or find_root(), load
        self._found: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """UnsupportedError if this version has no such function."""
        if name not in self._found:
            answer = Refused(MISSING) if self._root is None else find_place(FUNCTIONS[name], self._root)
            if isinstance(answer, Refused):
                raise UnsupportedError(f"AITER: {name}: {answer}; install the extra: pip install 'atom-run[amd]'")
            self._found[name] = self._load(answer)
        return self._found[name]

    def quant_type(self, name: str) -> Any:
        """One of QUANT_TYPES, as AITER has it."""
        return getattr(self._load(QUANT_TYPE), name)

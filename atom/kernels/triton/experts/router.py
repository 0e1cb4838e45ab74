"""Routers of mixtures of experts in Triton.

    own = Router()
    weights, ids = own.router(h, gate, top_k=8)                                       # 2 launches, 1 for few tokens
    weights, ids, h, total = own.add_norm_router(a, b, norm, gate, eps=eps, top_k=8)  # 3 launches, 1 for few tokens

The signatures and results are those of the ops. Of few tokens each program scores some experts, whose part of the
weight is on its way before the kernel ahead has ended, and the last one of a token chooses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.activations import softplus
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.linear.row_kernels import load_total, normalize
from atom.kernels.triton.padded_alloc import new_rows

FEW_TOKENS = 8  # up to which tokens are normed, scored and choose in one launch
FEW_NUMBERS = 1 << 13  # of the weight that a program holds
MAX_COUNTED = 256  # experts that each count the better ones, which takes less time but more work; else one by one
COUNTED_TOKENS = 128  # up to which they do; a power of two, as kernels are compiled ahead for those
SMALL_TOKENS = 256  # up to which tiles of logits are the smallest
SMALL_TILE = 16, 32  # tokens and experts
AHEAD_COLUMNS = 512  # up to which a program of such a tile loads its part of the weight before its wait
WIDE, WIDE_STAGES = 128, 4  # experts of the largest tile of logits, and its stages of columns
LOWEST = tl.constexpr(-1e38)  # below any score; two of them are a float32


class Rule(NamedTuple):
    """How experts are chosen, as `ops.router` says."""

    top_k: int
    method: str
    score: str
    groups: int
    top_groups: int
    renormalize: bool
    scale: float
    shared: int
    ranks: str
    gated: bool


class Router:
    """The routers of one model, which must run one after another, since they share their counters."""

    def __init__(self) -> None:
        self._arrived: Tensor | None = None  # for good: graphs hold it

    def router(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Tensor | None = None, *, top_k: int,
        method: str = "greedy", score: str = "softmax", groups: int = 1, top_groups: int = 1,
        renormalize: bool = False, scale: float = 1.0, shared: int = 0, ranks: str = "scores", gated: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x [T, H], weight [E, H] or, if gated, [E + 1, H], bias and correction [E] -> weights fp32[T, k] and ids
        i64[T, k]; the first of equal experts is chosen"""
        rule = Rule(top_k, method, score, groups, top_groups, renormalize, scale, shared, ranks, gated)
        if 0 < len(x) <= FEW_TOKENS:
            return self._route_few(x, None, None, weight, bias, correction, 0.0, rule)[:2]
        return route(x, weight, bias, correction, rule)

    def add_norm_router(
        self, a: Tensor, b: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None,
        correction: Tensor | None = None, *, eps: float, top_k: int, method: str = "greedy", score: str = "softmax",
        groups: int = 1, top_groups: int = 1, renormalize: bool = False, scale: float = 1.0, shared: int = 0,
        ranks: str = "scores", gated: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """a and b [T, H], norm [H], the rest as of `router` -> weights and ids, rms_norm(a + b), a + b"""
        rule = Rule(top_k, method, score, groups, top_groups, renormalize, scale, shared, ranks, gated)
        if 0 < len(a) <= FEW_TOKENS:
            return self._route_few(a, b, norm, weight, bias, correction, eps, rule)
        x, total = normalize(a, b, norm, eps)
        return *route(x, weight, bias, correction, rule), x, total

    def _route_few(
        self, a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Tensor, bias: Tensor | None,
        correction: Tensor | None, eps: float, rule: Rule,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert a.stride(1) == 1 and (b is None or b.stride(1) == 1) and weight.is_contiguous(), "rows have gaps"
        if self._arrived is None:
            self._arrived = torch.zeros(FEW_TOKENS, dtype=torch.int32, device=a.device)
        (tokens, inner), rows, gpu = a.shape, len(weight), find_gpu(a.device)
        columns = next_power_of_2(inner)
        block_e = min(max(FEW_NUMBERS // columns, 1), next_power_of_2(rows))
        (weights, ids), constants = _results(a, rule), _constants(rows - rule.gated, rule, True)
        logits = a.new_empty(tokens, rows, dtype=torch.float32)
        x, total = (a, a) if norm is None else (new_rows(a, tokens, inner), a.new_empty(tokens, inner))
        _route_few_kernel[(-(-rows // block_e), tokens)](
            a, b, norm, weight, bias, correction, x, total, logits, weights, ids, self._arrived, a.stride(0),
            0 if b is None else b.stride(0), eps, rule.scale, INNER=inner, BLOCK_E=block_e, BLOCK_I=columns,
            **constants, num_warps=max(4, _warps_of(constants)), **gpu.options,
        )  # fmt: skip
        return weights, ids, x, total


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, rule: Rule, *, is_fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """router of any number of tokens, in two launches.

    is_fixed: in an order of sums that does not depend on that number
    """
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows have gaps"
    tokens, rows = len(x), len(weight)
    experts = rows - rule.gated
    if not is_fixed and is_by_library(x, weight):
        logits = _multiply_by_library(x, weight)
    else:
        logits = _multiply(x, weight, experts, is_fixed)
    (weights, ids), constants = _results(x, rule), _constants(experts, rule, is_fixed or tokens <= COUNTED_TOKENS)
    _choose_kernel[(tokens,)](
        logits, bias, correction, weights, ids, tokens, rule.scale, NUM_PARTS=len(logits), **constants,
        num_warps=_warps_of(constants), **find_gpu(x.device).options,
    )  # fmt: skip
    return weights, ids


def is_by_library(x: Tensor, weight: Tensor) -> bool:
    """Whether the vendor's library makes the logits, which is faster for many tokens; torch has it for NVIDIA only."""
    has_sums = x.is_cuda and torch.version.hip is None and x.dtype == weight.dtype and x.element_size() == 2
    return has_sums and len(x) > SMALL_TOKENS


def _multiply_by_library(x: Tensor, weight: Tensor) -> Tensor:
    """As `_multiply`, in one part."""
    logits = x.new_empty(1, len(x), _stride(len(weight)), dtype=torch.float32)
    torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits[0, :, : len(weight)])
    return logits


def _multiply(x: Tensor, weight: Tensor, experts: int, is_fixed: bool = False) -> Tensor:
    """Logits fp32[parts, T, stride], to be summed; experts: rows of the weight but for a gate's"""
    (tokens, inner), rows, gpu = x.shape, len(weight), find_gpu(x.device)
    element_size = x.element_size() if x.dtype == weight.dtype else 4
    block_t, block_e = SMALL_TILE if is_fixed else _choose_tiles(tokens, experts, element_size, gpu)
    tiles = -(-tokens // block_t), -(-rows // block_e)
    num_full = tiles[0] * -(-experts // block_e)  # a gate's own tile does not change the choice
    wanted = min(gpu.units // num_full, -(-inner // 128))
    # few values, since each is one more compilation; several of the smallest tiles share a multiprocessor
    num_parts = 4 if is_fixed else 16 if wanted >= 16 else 4 if wanted >= 4 or tokens <= SMALL_TOKENS else 1
    logits = x.new_empty(num_parts, tokens, _stride(rows), dtype=torch.float32)
    part = 64 * -(-inner // (64 * num_parts))
    is_ahead = (block_t, block_e) == SMALL_TILE and element_size == 2 and part <= AHEAD_COLUMNS
    _logits_kernel[(*tiles, num_parts)](
        x, weight, logits, tokens, x.stride(0), ROWS=rows, STRIDE=_stride(rows), INNER=inner, PART=part,
        BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_I=next_power_of_2(part) if is_ahead else 64, AHEAD=is_ahead,
        **({"num_stages": WIDE_STAGES} if block_e == WIDE else {}), **gpu.options,
    )  # fmt: skip
    return logits


def _stride(rows: int) -> int:
    """The numbers from a token's logits to the next one's: whole words of 32 bytes, which are stored as one."""
    return -(-rows // 8) * 8


def _choose_tiles(tokens: int, experts: int, element_size: int, gpu: Gpu) -> tuple[int, int]:
    """Tokens and experts of a tile of logits: as many experts as leave a tile for each multiprocessor."""
    if tokens <= SMALL_TOKENS:
        return SMALL_TILE
    has_tensor_cores = element_size == 2
    for block_e in (WIDE, 64):
        memory = WIDE_STAGES * (64 + block_e) * 64 * element_size
        num_tiles = -(-tokens // 64) * -(-experts // block_e)
        is_full = num_tiles >= gpu.units and block_e <= next_power_of_2(experts)
        if has_tensor_cores and is_full and memory <= gpu.shared_memory:
            return 64, block_e
    return 64, 32


def _results(x: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Room for weights and ids."""
    shape = len(x), rule.top_k + rule.shared
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


def _constants(experts: int, rule: Rule, is_few: bool) -> dict[str, Any]:
    """The constants of a kernel that chooses. is_few: tokens, so that time counts and not work"""
    groups = 1 if rule.method == "greedy" else rule.groups
    members = next_power_of_2(experts // groups)
    block_g = next_power_of_2(groups)
    return {
        "EXPERTS": experts, "TOP_K": rule.top_k, "SHARED": rule.shared, "GATED": rule.gated,
        "BY_LOGITS": rule.ranks == "logits", "SCORE": rule.score,
        "HAS_PAIRS": rule.method == "noaux_tc", "GROUPS": groups, "TOP_GROUPS": rule.top_groups,
        "RENORMALIZE": rule.renormalize, "BLOCK_G": block_g, "BLOCK_M": members,
        "BLOCK_S": next_power_of_2(max(rule.shared, 1)), "COUNTED": is_few and block_g * members <= MAX_COUNTED,
    }  # fmt: skip


def _warps_of(constants: dict[str, Any]) -> int:
    """Warps that count the better ones of each expert; one if they are chosen one by one."""
    num = constants["BLOCK_G"] * constants["BLOCK_M"]
    return min(max(num // 32, 1), 8) if constants["COUNTED"] else 1


@jit(do_not_specialize=["tokens"])
def _logits_kernel(x, weight, logits, tokens, x_stride, ROWS: tl.constexpr, STRIDE: tl.constexpr, INNER: tl.constexpr,
                   PART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr,
                   AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """x weight over one part of the columns: logits fp32[parts, T, STRIDE], to be summed, of which ROWS are used.

    With AHEAD all of a part's columns are loaded at once, the weight's before the preceding kernel has ended.
    """
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    x_rows = x + tl.minimum(rows, tokens - 1).to(tl.int64)[:, None] * x_stride
    weight_rows = weight + tl.minimum(experts, ROWS - 1)[:, None] * INNER
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    end = min((part + 1) * PART, INNER)
    if AHEAD:
        columns = part * PART + tl.arange(0, BLOCK_I)[None, :]
        b = tl.load(weight_rows + columns, mask=columns < end, other=0.0)
        wait_for_inputs(PDL)
        a = tl.load(x_rows + columns, mask=columns < end, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")  # products of 16-bit numbers are exact in fp32
    else:
        wait_for_inputs(PDL)
        for first in range(part * PART, end, BLOCK_I):
            columns = first + tl.arange(0, BLOCK_I)[None, :]
            a = tl.load(x_rows + columns, mask=columns < INNER, other=0.0)
            b = tl.load(weight_rows + columns, mask=columns < INNER, other=0.0)
            if a.dtype != b.dtype:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    offsets = (part * tokens + rows).to(tl.int64)[:, None] * STRIDE + experts[None, :]
    tl.store(logits + offsets, total, mask=(rows < tokens)[:, None] & (experts < STRIDE)[None, :])


@jit(do_not_specialize=["tokens"])
def _choose_kernel(logits, bias, correction, weights, ids, tokens, scale, NUM_PARTS: tl.constexpr,
                   EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
                   BY_LOGITS: tl.constexpr, SCORE: tl.constexpr, HAS_PAIRS: tl.constexpr, GROUPS: tl.constexpr,
                   TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_S: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token's experts and their weights."""
    STRIDE: tl.constexpr = (EXPERTS + GATED + 7) // 8 * 8
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    _choose(logits + token * STRIDE, tokens.to(tl.int64) * STRIDE, bias, correction, weights, ids, token, scale,
            NUM_PARTS, EXPERTS, TOP_K, SHARED, GATED, BY_LOGITS, SCORE, HAS_PAIRS, GROUPS, TOP_GROUPS,
            RENORMALIZE, BLOCK_G, BLOCK_M, BLOCK_S, COUNTED)  # fmt: skip


@jit
def _route_few_kernel(a, b, norm, weight, bias, correction, x, total, logits, weights, ids, arrived, a_stride, b_stride,
                      eps, scale, INNER: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr,
                      EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
                      BY_LOGITS: tl.constexpr, SCORE: tl.constexpr, HAS_PAIRS: tl.constexpr,
                      GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr,
                      BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, COUNTED: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """Scores of BLOCK_E experts for one token; the last of its programs to arrive chooses."""
    ROWS: tl.constexpr = EXPERTS + GATED
    part, token = tl.program_id(0), tl.program_id(1)
    experts, inner = part * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_I)
    is_inner = inner < INNER
    rows = weight + tl.minimum(experts, ROWS - 1)[:, None] * INNER
    tile = tl.load(rows + inner[None, :], mask=is_inner[None, :], other=0.0)
    if norm is not None:
        norm_weight = tl.load(norm + inner, mask=is_inner, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    row = load_total(a + token * a_stride, None if b is None else b + token * b_stride, inner, is_inner)
    if norm is not None:
        normed = row * tl.rsqrt(tl.sum(row * row) / INNER + eps) * norm_weight
        rounded = normed.to(x.dtype.element_ty)
        if part == 0:
            tl.store(total + token * INNER + inner, row.to(x.dtype.element_ty), mask=is_inner)
            tl.store(x + token * INNER + inner, rounded, mask=is_inner)
        row = rounded.to(tl.float32)
    scores = tl.sum(tile.to(tl.float32) * row[None, :], 1)
    tl.store(logits + token * ROWS + experts, scores, mask=experts < ROWS)
    tl.debug_barrier()
    if tl.atomic_add(arrived + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived + token, 0)
        _choose(logits + token * ROWS, 0, bias, correction, weights, ids, token, scale, 1, EXPERTS, TOP_K, SHARED,
                GATED, BY_LOGITS, SCORE, HAS_PAIRS, GROUPS, TOP_GROUPS, RENORMALIZE, BLOCK_G, BLOCK_M, BLOCK_S,
                COUNTED)  # fmt: skip


@jit
def _choose(logits, part_stride, bias, correction, weights, ids, token, scale, NUM_PARTS: tl.constexpr,
            EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
            BY_LOGITS: tl.constexpr, SCORE: tl.constexpr, HAS_PAIRS: tl.constexpr, GROUPS: tl.constexpr,
            TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_S: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
    """A token's experts and their weights by its logits, in parts to be summed; experts are a rectangle, a row a group.

    With GATED a logit of the shared experts comes after those of the routed ones.
    With COUNTED an expert's place among the chosen is the number of better ones.
    """
    members: tl.constexpr = EXPERTS // GROUPS
    groups = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_M)[None, :]
    is_expert = (groups[:, None] < GROUPS) & (member < members)
    experts = tl.where(is_expert, groups[:, None] * members + member, EXPERTS)

    scores = tl.zeros([BLOCK_G, BLOCK_M], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        scores += tl.load(logits + part * part_stride + experts, mask=is_expert, other=0.0, cache_modifier=".cg")
    share = tl.full([BLOCK_S], 1.0, tl.float32)  # of each shared expert
    if GATED:
        gate = tl.zeros([BLOCK_S], tl.float32)
        for part in tl.static_range(NUM_PARTS):
            gate += tl.load(logits + part * part_stride + EXPERTS, cache_modifier=".cg")
        share = tl.sigmoid(gate)
    if bias is not None:
        scores += tl.load(bias + experts, mask=is_expert, other=0.0).to(tl.float32)
    ranks = scores
    if SCORE == "softmax":
        scores = tl.where(is_expert, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores))
        scores = scores / tl.sum(scores)
    elif SCORE == "sqrtsoftplus":
        scores = tl.sqrt(softplus(scores))
    else:
        scores = tl.sigmoid(scores)

    if not BY_LOGITS:
        ranks = scores
    if correction is not None:
        ranks += tl.load(correction + experts, mask=is_expert, other=0.0).to(tl.float32)
    ranks = tl.where(is_expert, tl.maximum(ranks, LOWEST), float("-inf"))  # of NaN the lowest: an expert is still named
    if GROUPS > 1:
        best = tl.max(ranks, axis=1)
        if HAS_PAIRS and members > 1:
            first = tl.min(tl.where(ranks == best[:, None], experts, EXPERTS), axis=1)
            best += tl.max(tl.where(experts == first[:, None], float("-inf"), ranks), axis=1)
        is_kept = _count_better(best, BLOCK_G) < TOP_GROUPS
        ranks = tl.where(is_expert & (is_kept[:, None] == 0), LOWEST, ranks)

    NUM: tl.constexpr = BLOCK_G * BLOCK_M
    experts, scores, ranks = experts.reshape([NUM]), scores.reshape([NUM]), ranks.reshape([NUM])
    if COUNTED:
        places = _count_better(ranks, NUM)
    else:
        # larger for a larger rank, of equal ones for the first
        place, bits = tl.arange(0, NUM), (ranks + 0.0).to(tl.int32, bitcast=True)  # 0.0 for -0.0
        keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) + (NUM - 1 - place)
        places = tl.full([NUM], TOP_K, tl.int32)
        for choice in range(TOP_K):
            is_best = keys == tl.max(keys)
            places = tl.where(is_best, choice, places)
            keys = tl.where(is_best, -(1 << 63), keys)
    is_chosen = places < TOP_K
    if RENORMALIZE:
        scores = scores / tl.maximum(tl.sum(tl.where(is_chosen, scores, 0.0)), 1e-20)
    row = token.to(tl.int64) * (TOP_K + SHARED)
    tl.store(ids + row + places, experts.to(tl.int64), mask=is_chosen)
    tl.store(weights + row + places, scores * scale, mask=is_chosen)
    if SHARED > 0:
        common = tl.arange(0, BLOCK_S)
        tl.store(ids + row + TOP_K + common, (EXPERTS + common).to(tl.int64), mask=common < SHARED)
        tl.store(weights + row + TOP_K + common, share, mask=common < SHARED)


@jit
def _count_better(ranks, NUM: tl.constexpr):
    """How many of ranks fp32[NUM] are larger than each, or equal and before it, i32[NUM]."""
    place = tl.arange(0, NUM)
    own, others = ranks[None, :], ranks[:, None]  # a thread has others of few: sums across a warp take long
    is_better = (others > own) | ((others == own) & (place[:, None] < place[None, :]))
    return tl.sum(is_better.to(tl.int32), 0)

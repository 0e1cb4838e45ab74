"""Experts with weights in MXFP4 and activations in bf16, by AITER's Triton GEMMs.

    y = mxfp4_experts(aiter, x, weights, ids, gate_up, down, None, None, None, Gate("silu"))

The weights stay as stored: pairs of E2M1, an exponent per 32 columns. Rows are sorted by expert first, as `group`
returns them, so AITER's GEMMs are a `grouped_linear`. AITER needs the tiles of each expert numbered, which a kernel
here does. Rows of experts on other ranks come last and are in no tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.aiter.functions import Aiter
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.experts.grouped_tiles import max_tiles
from atom.kernels.triton.experts.grouping import combine_rows, group_pairs
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.linear.row_kernels import activate_gates

MIN_ROWS, MAX_ROWS = 16, 128  # of a tile
NUMBERED = 32  # tiles numbered per program


def mxfp4_experts(
    aiter: Aiter, x: Tensor, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, first: Tensor | None, gate: Gate,
) -> Tensor:  # fmt: skip
    """Shapes as in the op `experts`, x is bf16."""
    rows, _, ends, places = group_pairs(x.contiguous(), ids.contiguous(), first, gate_up.shape[0])
    routing = number_tiles(aiter, ends, len(rows))
    m = activate_gates(_multiply(aiter, rows, gate_up, gate_up_bias, routing), *gate)
    return combine_rows(_multiply(aiter, m, down, down_bias, routing), weights.contiguous(), places)


def _multiply(aiter: Aiter, x: Tensor, weight: PackedWeight, bias: Tensor | None, routing: Any) -> Tensor:
    """x [P, I], sorted by expert, weight [E, O, I], bias [E, O] -> [P, O]"""
    pairs, exponents = (weight.parts[name].flatten(2).transpose(1, 2) for name in ("values", "scales"))
    wide = None if bias is None else bias.float()
    y: Tensor = aiter["expert_matmuls"](x, pairs, None, exponents, bias=wide, routing_data=routing)
    return y


def number_tiles(aiter: Aiter, ends: Tensor, pairs: int) -> Any:
    """Where each expert's rows end, i64[E], and their number -> AITER's RoutingData; no tile has rows of two experts"""
    experts = len(ends)
    block_m = max(MIN_ROWS, min(next_power_of_2(max(1, pairs // experts)), MAX_ROWS))
    num_tiles = max_tiles(pairs, experts, block_m)
    counts, tiles, starts, tile_starts = (
        ends.new_empty(size, dtype=torch.int32) for size in (experts, num_tiles, experts + 1, experts + 1)
    )
    gpu = find_gpu(ends.device)
    _number_kernel[(-(-num_tiles // NUMBERED),)](
        ends, counts, starts, tile_starts, tiles, num_tiles, EXPERTS=experts, BLOCK_M=block_m,
        BLOCK_E=next_power_of_2(experts), BLOCK_T=NUMBERED, **gpu.options,
    )  # fmt: skip
    data = aiter["expert_tiles"](counts, starts, tile_starts, tiles)
    return aiter["routing_data"](block_m, None, counts, experts, 1, data)


@jit(do_not_specialize=["num_tiles"])
def _number_kernel(ends, counts, starts, tile_starts, tiles, num_tiles, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A tile's number is its place among its expert's, times 2 ** 16, plus the expert; -1 after the last."""
    wait_for_inputs(PDL)
    expert = tl.arange(0, BLOCK_E)
    known = expert < EXPERTS
    end = tl.load(ends + expert, mask=known, other=0).to(tl.int32)
    count = end - tl.load(ends + expert - 1, mask=known & (expert > 0), other=0).to(tl.int32)
    own = tl.where(known, (count + BLOCK_M - 1) // BLOCK_M, 0)
    tile_end = tl.cumsum(own, 0)
    if tl.program_id(0) == 0:
        tl.store(counts + expert, count, mask=known)
        tl.store(starts + expert, end - count, mask=known)
        tl.store(starts + expert + 1, end, mask=known)
        tl.store(tile_starts + expert, tile_end - own, mask=known)
        tl.store(tile_starts + expert + 1, tile_end, mask=known)
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    earlier = known[:, None] & (tile_end[:, None] <= tile[None, :])
    of = tl.sum(earlier.to(tl.int32), 0)
    place = tile - tl.sum(tl.where(earlier, own[:, None], 0), 0)
    tl.store(tiles + tile, tl.where(of < EXPERTS, place * 65536 + of, -1), mask=tile < num_tiles)

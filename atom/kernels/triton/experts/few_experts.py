"""Experts of few tokens in two launches: gate/up, then down projection.

    if suits_few(len(x), ids.shape[1], *down.shape[1:]):
        out = multiply_few(x, weights, ids, gate_up, down, Gate("silu"))     # as `moe.experts`

Tokens are not grouped by expert: each pair of token and expert reads the expert by itself.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from atom.kernels.triton.activations import Gate, activate_rounded
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

FEW_TOKENS = 4  # up to which tokens are not grouped
FEW_NUMBERS = 1 << 14, 1 << 15  # of weights that a program holds at a time: of the gate/up and of the down projection


def suits_few(tokens: int, top_k: int, hidden: int, width: int) -> bool:
    """Whether few tokens go through their experts of these sizes without being grouped."""
    largest = max(2 * next_power_of_2(hidden), top_k * next_power_of_2(width))
    return 0 < tokens <= FEW_TOKENS and largest <= 2 * FEW_NUMBERS[1]


def multiply_few(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, gate: Gate) -> Tensor:
    """experts of few tokens, whose programs hold what they read of a weight in registers"""
    assert x.stride(1) == 1 and all(each.is_contiguous() for each in (weights, ids, gate_up, down)), "rows have gaps"
    (tokens, hidden), top_k, (_, _, width), gpu = x.shape, ids.shape[1], down.shape, find_gpu(x.device)
    m, out, (kind, limit, alpha) = x.new_empty(ids.numel(), width), x.new_empty(tokens, hidden), gate
    columns, few = next_power_of_2(hidden), FEW_NUMBERS[0]
    block_o = max(2, few // columns)
    _few_gated_linear_kernel[(-(-width // (block_o // 2)), len(m))](
        x, ids, gate_up, m, x.stride(0), TOP_K=top_k, WIDTH=width, INNER=hidden, KIND=kind, LIMIT=limit,
        ALPHA=alpha, BLOCK_O=block_o, BLOCK_I=columns, num_warps=4 if block_o * columns <= few else 8, **gpu.options,
    )  # fmt: skip
    columns = next_power_of_2(width)
    block_o = max(1, FEW_NUMBERS[1] // (columns * next_power_of_2(top_k)))
    _few_down_linear_kernel[(-(-hidden // block_o), tokens)](
        m, weights, ids, down, out, TOP_K=top_k, WIDTH=hidden, INNER=width, BLOCK_O=block_o, BLOCK_I=columns,
        num_warps=8, **gpu.options,
    )  # fmt: skip
    return out


@jit
def _few_gated_linear_kernel(x, ids, weight, out, x_stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
                             INNER: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
                             ALPHA: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
                             PDL: tl.constexpr):  # fmt: skip
    """BLOCK_O gate and up projections, interleaved, of a pair of token and expert -> gated activation [k T, W]."""
    wait_for_inputs(PDL)
    pair = tl.program_id(1)
    num: tl.constexpr = BLOCK_O // 2
    first = tl.program_id(0) * num
    local = tl.arange(0, BLOCK_O)
    rows = tl.load(ids + pair) * (2 * WIDTH) + tl.minimum(first + local // 2, WIDTH - 1) + local % 2 * WIDTH
    inner = tl.arange(0, BLOCK_I)
    is_inner = inner < INNER
    tile = tl.load(weight + rows[:, None] * INNER + inner[None, :], mask=is_inner[None, :], other=0.0,
                   eviction_policy="evict_first")  # fmt: skip
    row = tl.load(x + (pair // TOP_K).to(tl.int64) * x_stride + inner, mask=is_inner, other=0.0).to(tl.float32)
    y = tl.sum(tile.to(tl.float32) * row[None, :], 1).to(out.dtype.element_ty)
    gate, up = tl.split(y.reshape([num, 2]))
    columns = first + tl.arange(0, num)
    tl.store(out + pair * WIDTH + columns, activate_rounded(gate, up, KIND, LIMIT, ALPHA), mask=columns < WIDTH)


@jit
def _few_down_linear_kernel(x, weights, ids, down, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
                            INNER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
                            PDL: tl.constexpr):  # fmt: skip
    """BLOCK_O outputs of one token: x [k T, W] by its experts, summed by their weights.

    What is read of the weight is sent for ahead of the wait: the kernel ahead, which waited before this one began, has
    not written the ids.
    """
    first_pair = tl.program_id(1) * TOP_K
    columns = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    rows = tl.minimum(columns, WIDTH - 1)
    inner = tl.arange(0, BLOCK_I)
    is_inner = inner < INNER
    tiles = ()
    for choice in tl.static_range(TOP_K):
        own = tl.load(ids + first_pair + choice, cache_modifier=".cg") * WIDTH + rows
        tile = tl.load(down + own[:, None] * INNER + inner[None, :], mask=is_inner[None, :], other=0.0,
                       eviction_policy="evict_first")  # fmt: skip
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK_O], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(x + (first_pair + choice) * INNER + inner, mask=is_inner, other=0.0).to(tl.float32)
        y = tl.sum(tiles[choice].to(tl.float32) * row[None, :], 1).to(out.dtype.element_ty)
        total += y.to(tl.float32) * tl.load(weights + first_pair + choice)
    pointers = out + tl.program_id(1) * WIDTH + columns
    tl.store(pointers, total.to(out.dtype.element_ty), mask=columns < WIDTH)

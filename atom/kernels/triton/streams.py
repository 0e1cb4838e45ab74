"""Weights of hyper-connections in Triton: a linear of all streams, and Sinkhorn's rounds.

    logits = stream_logits(x, weight, scale, bias, eps=1e-6)              # 2 launches for few tokens
    weights = sinkhorn(logits, streams=4, rounds=20, eps=1e-6)            # 1 launch

The signatures and results are those of the ops. Of few tokens, programs share the columns of each; of more, torch's
GEMM reads the weight less often.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import ops
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

FEW_TOKENS = 256  # up to which programs share the columns of a token
SPAN, COLUMNS = 2048, 256  # of a program, and of a tile
LOWEST = tl.constexpr(-1e38)  # below any logit; the difference of two is a float32


def stream_logits(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """x [T, C], weight [M, C], scale and bias [M] -> fp32[T, M]"""
    (tokens, width), num = x.shape, len(weight)
    if tokens > FEW_TOKENS or not tokens:
        made: Tensor = ops.stream_logits.body(x, weight, scale, bias, eps=eps)
        return made
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows have gaps"
    gpu, num_parts, block_m = find_gpu(x.device), -(-width // SPAN), next_power_of_2(num)
    parts = x.new_empty(tokens, num_parts, num + 1, dtype=torch.float32)  # sums, and those of squares
    out = x.new_empty(tokens, num, dtype=torch.float32)
    _sum_parts_kernel[(tokens, num_parts)](
        x, weight, parts, x.stride(0), WIDTH=width, NUM=num, BLOCK_M=block_m, SPAN=SPAN, BLOCK_C=COLUMNS, **gpu.options
    )
    _finish_logits_kernel[(tokens,)](
        parts, scale, bias, out, eps, WIDTH=width, NUM=num, NUM_PARTS=num_parts, BLOCK_M=block_m,
        BLOCK_P=next_power_of_2(num_parts), **gpu.options, num_warps=1,
    )  # fmt: skip
    return out


def sinkhorn(logits: Tensor, *, streams: int, rounds: int, eps: float) -> Tensor:
    """logits fp32[T, S S] -> weights fp32[T, S S], transposed"""
    assert logits.stride(1) == 1, "rows have gaps"
    out = logits.new_empty(logits.shape)
    if not len(logits):
        return out
    _sinkhorn_kernel[(len(logits),)](
        logits, out, logits.stride(0), eps, STREAMS=streams, ROUNDS=rounds, BLOCK=next_power_of_2(streams),
        **find_gpu(logits.device).options, num_warps=1,
    )  # fmt: skip
    return out


@jit
def _sum_parts_kernel(x, weight, parts, x_stride, WIDTH: tl.constexpr, NUM: tl.constexpr, BLOCK_M: tl.constexpr,
                      SPAN: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The sums over some columns of one token."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    outputs = tl.arange(0, BLOCK_M)
    sums, squares = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    wait_for_inputs(PDL)
    for first in range(0, SPAN, BLOCK_C):
        columns = part * SPAN + first + tl.arange(0, BLOCK_C)
        row = tl.load(x + token * x_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        mask = (outputs < NUM)[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(weight + outputs[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += tl.sum(tile * row[None, :], 1)
        squares += row * row
    at = parts + (token * tl.num_programs(1) + part) * (NUM + 1)
    tl.store(at + outputs, sums, mask=outputs < NUM)
    tl.store(at + NUM, tl.sum(squares))


@jit
def _finish_logits_kernel(parts, scale, bias, out, eps, WIDTH: tl.constexpr, NUM: tl.constexpr,
                          NUM_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    """The logits of one token of the sums over parts of its columns."""
    token, outputs, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P)
    wait_for_inputs(PDL)
    at = parts + token * NUM_PARTS * (NUM + 1) + part * (NUM + 1)
    is_output, is_part = outputs < NUM, part < NUM_PARTS
    sums = tl.sum(tl.load(at[:, None] + outputs[None, :], mask=is_part[:, None] & is_output[None, :], other=0.0), 0)
    squares = tl.sum(tl.load(at + NUM, mask=is_part, other=0.0))
    factors = tl.load(scale + outputs, mask=is_output, other=0.0).to(tl.float32)
    added = tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    logits = sums / tl.sqrt(squares / WIDTH + eps) * factors + added
    tl.store(out + token * NUM + outputs, logits, mask=is_output)


@jit
def _sinkhorn_kernel(logits, out, row_stride, eps, STREAMS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    """One token's matrix: a softmax of rows, then columns, rows and columns in turns, over their sums."""
    token, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    rows, columns = places[:, None], places[None, :]
    inside = (rows < STREAMS) & (columns < STREAMS)
    wait_for_inputs(PDL)
    shares = tl.load(logits + token * row_stride + rows * STREAMS + columns, mask=inside, other=LOWEST)
    shares = tl.where(inside, tl.exp(shares - tl.max(shares, 1)[:, None]), 0.0)
    shares = tl.where(inside, shares / tl.maximum(tl.sum(shares, 1), 1.0)[:, None] + eps, 0.0)  # 1 is of the largest
    shares = tl.where(inside, shares / (tl.sum(shares, 0)[None, :] + eps), 0.0)
    for _ in range(ROUNDS - 1):
        shares = tl.where(inside, shares / (tl.sum(shares, 1)[:, None] + eps), 0.0)
        shares = tl.where(inside, shares / (tl.sum(shares, 0)[None, :] + eps), 0.0)
    tl.store(out + token * STREAMS * STREAMS + columns * STREAMS + rows, shares, mask=inside)

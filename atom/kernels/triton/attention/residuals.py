"""Attention residuals: a softmax over the sums of earlier blocks.

    read = attend_residuals(norm, query, embedding, first, last, eps=1e-5)      # as the op

A program of a token reads each sum once, and weighs what it has read so far anew (online softmax).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.kernels.triton import MAX_SUMS
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu

WIDE = 2048  # columns, above which a row takes more warps


@jit
def _attend_residuals(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, norm, query, out, EPS: tl.constexpr,
    NUM: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))
    is_there = columns < WIDTH
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + columns
    factors = tl.load(norm + columns, mask=is_there, other=0.0).to(tl.float32)
    factors *= tl.load(query + columns, mask=is_there, other=0.0).to(tl.float32)
    sums = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    best, total = -float("inf"), 0.0
    mixed = tl.zeros(columns.shape, tl.float32)
    for number in tl.static_range(NUM):
        x = tl.load(sums[number] + offsets, mask=is_there, other=0.0).to(tl.float32)
        score = tl.sum(x * factors) * tl.rsqrt(tl.sum(x * x) / WIDTH + EPS)
        highest = tl.maximum(best, score)
        kept, share = tl.exp(best - highest), tl.exp(score - highest)
        mixed = mixed * kept + x * share
        total = total * kept + share
        best = highest
    tl.store(out + offsets, (mixed / total).to(out.dtype.element_ty), mask=is_there)


def attend_residuals(norm: Tensor, query: Tensor, *sums: Tensor, eps: float) -> Tensor:
    """Shapes as in the op."""
    rows, width = sums[0].shape
    whole = [each.contiguous() for each in sums]
    out, missing = torch.empty_like(whole[0]), [None] * (MAX_SUMS - len(sums))
    _attend_residuals[rows,](
        *whole, *missing, norm, query, out, eps, len(sums), width, num_warps=8 if width > WIDE else 4,
        **find_gpu(out.device).options,
    )  # fmt: skip
    return out

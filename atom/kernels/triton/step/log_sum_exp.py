"""Log-sum-exps of rows of logits, each by one program.

So a row's bits do not depend on the other rows.

totals = log_sum_exp(logits)     # fp32[R, V] -> fp32[R]
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.compile.jit import jit

BLOCK = 4096  # logits read at a time


def log_sum_exp(logits: Tensor) -> Tensor:
    """logits fp32[R, V], finite, whose rows are contiguous -> fp32[R]"""
    assert logits.stride(1) == 1, "rows have gaps"
    totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _sum_exponentials[(len(logits),)](logits, logits.stride(0), logits.shape[1], totals, BLOCK, num_warps=8)
    return totals


@jit
def _sum_exponentials(logits, stride, columns, totals, BLOCK: tl.constexpr):
    """The largest number of a row first, then the sum of exponentials of what is below it."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + lanes
        best = tl.maximum(best, tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")))
    peak = tl.max(best, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + lanes
        total += tl.exp(tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")) - peak)
    tl.store(totals + row, peak + tl.log(tl.sum(total, 0)))

"""GPTQ: quantize columns in order, folding each rounding error into the remaining columns.

    plan = plan_order(moment, num_tokens)                       # once for all weights that multiply the same input
    numbers = round_in_order(weight, scales, plan, nearest)     # fp32[O, I], in units of their blocks' scales

What is minimized is the squared error of the linear's outputs over a prompt, tr(E M Eᵀ) for errors E and the mean M of
x xᵀ of its inputs (Frantar et al. 2023). Columns of larger mean squares come first, with scales that are set before, so
blocks stay those of neighbours. A prompt is short, and M of it has correlations that other texts do not have: they are
shrunk towards 0 (Ledoit and Wolf 2004), the more the more columns there are. Without that, what GPTQ gains on the
prompt it loses on others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MIN_SHARE = 0.01  # lower bound of a column's importance, as a share of the mean
SHRINKAGE = 0.35  # of correlations between few columns
AT_ONCE = 128  # columns that are rounded before the remaining ones are updated


class ColumnOrder(NamedTuple):
    """The columns of a weight in the order in which they are rounded."""

    importance: Tensor  # fp32[1, I]: mean squares, as the columns are stored
    order: Tensor  # i64[I]
    shares: Tensor  # fp32[I, I], in the order: of a column's error, what each that follows takes


def plan_order(moment: Tensor, num_tokens: int) -> ColumnOrder | None:
    """The order of the columns, and how errors are folded into later ones; None if the moment is not finite.

    moment: fp32[I, I], the mean of x xᵀ over num_tokens tokens.
    """
    diagonal = moment.diagonal()
    importance = diagonal + MIN_SHARE * diagonal.mean()
    importance = torch.where(importance > 0, importance, 1)
    order = importance.argsort(descending=True, stable=True)
    root = importance[order].sqrt()
    kept = 1 - shrinkage(len(moment), num_tokens)
    matrix = moment[order[:, None], order].mul_(kept / root).div_(root[:, None])  # correlations
    matrix.fill_diagonal_(1)
    # each result in the place of the one before: of wide linears a matrix is a GiB
    matrix, failed = torch.linalg.cholesky_ex(matrix)
    if failed or not matrix.isfinite().all():
        return None
    matrix = torch.cholesky_inverse(matrix)
    matrix, failed = torch.linalg.cholesky_ex(matrix, upper=True)
    if failed:
        return None
    shares = matrix.div_(matrix.diagonal().clone()[:, None]).mul_(root[:, None]).div_(root)
    return ColumnOrder(diagonal[None], order, shares)


def shrinkage(num_columns: int, num_tokens: int) -> float:
    """The share by which correlations are shrunk."""
    return max(SHRINKAGE, num_columns / (num_columns + num_tokens))


def round_in_order(weight: Tensor, scales: Tensor, plan: ColumnOrder, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """weight fp32[O, I], scales fp32[O, B] -> fp32[O, I], numbers that `nearest` gives, in units of the scales"""
    num_columns = weight.shape[1]
    rest = weight.T[plan.order]  # [I, O]: what is to be rounded, each column in one run of memory
    block_scales, blocks = scales.T.contiguous(), (plan.order // (num_columns // scales.shape[1])).tolist()
    rounded, errors = torch.empty_like(rest), torch.empty_like(rest[:AT_ONCE])
    for start in range(0, num_columns, AT_ONCE):
        stop = min(start + AT_ONCE, num_columns)
        for at in range(start, stop):
            scale = block_scales[blocks[at]]
            rounded[at] = nearest(rest[at] / scale)
            error = torch.addcmul(rest[at], rounded[at], scale, value=-1, out=errors[at - start])
            rest[at + 1 : stop].addr_(plan.shares[at, at + 1 : stop], error, alpha=-1)
        rest[stop:].addmm_(plan.shares[start:stop, stop:].T, errors[: stop - start], alpha=-1)
    return torch.empty_like(weight).index_copy_(1, plan.order, rounded.T)

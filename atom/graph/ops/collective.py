"""Ops of several ranks: collectives, and what a rank computes of its part alone.

The body of a collective takes the tensors of all ranks, so that one process can interpret them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom.graph.ops.base import op
from atom.graph.types import Type, need


@op(lambda x: x, collective=True)
def all_reduce(xs: Sequence[Tensor]) -> Tensor:
    """x [...] of each rank -> their sum [...], in the order of the ranks"""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def _all_gather(x: Type, *, size: int) -> Type:
    need(isinstance(size, int) and int(x.shape[-1]) <= size, f"{size!r} columns of parts of {x.shape[-1]}")
    return x.with_last(size)


@op(_all_gather, collective=True)
def all_gather(xs: Sequence[Tensor], *, size: int) -> Tensor:
    """x [..., N] of each rank -> side by side in the order of the ranks, the first size columns: [..., size]"""
    return torch.cat(list(xs), -1)[..., :size]


def _local_tokens(tokens: Type, offset: Type, *, size: int) -> tuple[Type, Type]:
    need(offset == Type("i64", (1,)), f"the offset is {offset}")
    return tokens, tokens


@op(_local_tokens)
def local_tokens(tokens: Tensor, offset: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """tokens i64[T], offset i64[1] -> rows i64[T] of an embedding of size tokens from the offset on, 0 for tokens that
    it does not have; i64[T]: 1 for those that it has, else 0"""
    rows = tokens - offset
    is_here = (rows >= 0) & (rows < size)
    return rows.masked_fill(~is_here, 0), is_here.long()


def _mask_rows(x: Type, kept: Type) -> Type:
    need(kept == Type("i64", x.shape[:1]), f"the mask is {kept} for {x}")
    return x


@op(_mask_rows)
def mask_rows(x: Tensor, kept: Tensor) -> Tensor:
    """x [T, H], kept i64[T] -> [T, H], with zeros in the rows that are not kept"""
    return x.masked_fill((kept == 0).unsqueeze(-1), 0)


@op(lambda x: Type("fp32", (*x.shape[:-1], 1)))
def sum_squares(x: Tensor) -> Tensor:
    """x [..., H] -> fp32[..., 1]"""
    return x.float().square().sum(-1, keepdim=True)


def _scale_by_rms(x: Type, squares: Type, weight: Type, *, columns: int, eps: float) -> Type:
    need(weight.shape == x.shape[-1:], f"the weight is {weight} for {x}")
    need(squares == Type("fp32", (*x.shape[:-1], 1)), f"the sums of squares are {squares} for {x}")
    return x


@op(_scale_by_rms)
def scale_by_rms(x: Tensor, squares: Tensor, weight: Tensor, *, columns: int, eps: float) -> Tensor:
    """x [..., H], part of a row of so many columns whose sum of squares is fp32[..., 1], weight [H] -> [..., H], as
    rms_norm gives of the whole row"""
    return (x.float() * torch.rsqrt(squares / columns + eps) * weight).to(x.dtype)

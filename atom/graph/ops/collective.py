"""Ops of several ranks: collectives, and the partial results that they combine.

The body of a collective takes the tensors of the ranks along an axis of the mesh, and gives what each of them gets, so
that one process can interpret ranks side by side. `send` and `receive` are of two ranks, whose texts differ.

Experts that are divided among ranks with tokens of their own read the tokens of all, in one of two ways:

    rows, row_weights, row_ids = gather_tokens(h, weights, ids, axis="data", ranks=2)
    y = reduce_scatter(experts(rows, row_weights, row_ids, …), axis="data", ranks=2)

    rows, row_weights, row_ids = dispatch(h, weights, ids, first, axis="data", ranks=2, experts=4)
    y = collect(experts(rows, row_weights, row_ids, …), row_ids, first, axis="data", ranks=2, experts=4)

The second sends a token's row only to the ranks that have an expert for it. It learns which by the ids of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom.graph.ops.base import divide_rows, multiply, op
from atom.graph.types import Type, need

MEETING_AXES = ("tensor", "data")  # of the mesh, along which ranks meet in collectives
STAGES = "pipeline"  # the axis along which ranks send


def _all_reduce(x: Type, *, axis: str) -> Type:
    need(axis in MEETING_AXES, f"ranks meet along {', '.join(MEETING_AXES)}, not along {axis!r}")
    return x


@op(_all_reduce, collective=True)
def all_reduce(xs: Sequence[Tensor], *, axis: str) -> list[Tensor]:
    """x [...] of each rank -> their sum [...], in the order of the ranks"""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return [total] * len(xs)


def _all_gather(x: Type, *, axis: str, size: int) -> Type:
    need(isinstance(size, int) and int(x.shape[-1]) <= size, f"{size!r} columns of parts of {x.shape[-1]}")
    return _all_reduce(x.with_last(size), axis=axis)


@op(_all_gather, collective=True)
def all_gather(xs: Sequence[Tensor], *, axis: str, size: int) -> list[Tensor]:
    """x [..., N] of each rank -> side by side in the order of the ranks, the first size columns: [..., size]"""
    return [torch.cat(list(xs), -1)[..., :size]] * len(xs)


def _gather_tokens(x: Type, weights: Type, ids: Type, *, axis: str, ranks: int) -> tuple[Type, ...]:
    need(isinstance(ranks, int) and ranks > 0, f"the tokens of {ranks!r} ranks")
    tensors = (_all_reduce(each, axis=axis) for each in (x, weights, ids))
    return tuple(Type(each.dtype, (multiply(each.shape[0], ranks), *each.shape[1:])) for each in tensors)


@op(_gather_tokens, collective=True)
def gather_tokens(
    xs: Sequence[Tensor], weights: Sequence[Tensor], ids: Sequence[Tensor], *, axis: str, ranks: int
) -> list[tuple[Tensor, ...]]:
    """What `experts` takes: x [T, H], weights fp32[T, k] and ids i64[T, k] of each rank -> [ranks T, H],
    fp32[ranks T, k], i64[ranks T, k], one below the other in the order of the ranks"""
    return [tuple(torch.cat(list(each)) for each in (xs, weights, ids))] * len(xs)


def _reduce_scatter(x: Type, *, axis: str, ranks: int) -> Type:
    return _all_reduce(Type(x.dtype, (divide_rows(x.shape[0], ranks), *x.shape[1:])), axis=axis)


@op(_reduce_scatter, collective=True)
def reduce_scatter(xs: Sequence[Tensor], *, axis: str, ranks: int) -> list[Tensor]:
    """x [ranks T, ...] of each rank -> [T, ...]: of their sum, in the order of the ranks, the rows that
    gather_tokens took from this one"""
    (total, *_) = all_reduce(xs, axis=axis)
    return list(total.chunk(ranks))


def chooses(ids: Tensor, first: Tensor, experts: int) -> Tensor:
    """ids i64[T, k], first i64[1] -> bool[T]: whether a token chose any of this many experts from the first on"""
    return ((ids >= first) & (ids < first + experts)).any(-1)


def _dispatch(
    x: Type, weights: Type, ids: Type, first: Type, *, axis: str, ranks: int, experts: int
) -> tuple[Type, ...]:
    _need_experts(first, experts)
    return _gather_tokens(x, weights, ids, axis=axis, ranks=ranks)


def _need_experts(first: Type, experts: int) -> None:
    need(first == Type("i64", (1,)), f"the first expert is {first}")
    need(isinstance(experts, int) and experts > 0, f"there are {experts!r} experts")


@op(_dispatch, collective=True)
def dispatch(
    xs: Sequence[Tensor], weights: Sequence[Tensor], ids: Sequence[Tensor], firsts: Sequence[Tensor], *, axis: str,
    ranks: int, experts: int,
) -> list[tuple[Tensor, ...]]:  # fmt: skip
    """Like gather_tokens, but only sends a rank the tokens routed to its experts [first, first + experts); other rows
    are zero

    first: i64[1], the rank's first expert.
    experts: how many a rank has.
    """
    rows, *chosen = gather_tokens(xs, weights, ids, axis=axis, ranks=ranks)[0]
    return [(mask_rows(rows, chooses(chosen[1], first, experts).long()), *chosen) for first in firsts]


def _collect(x: Type, ids: Type, first: Type, *, axis: str, ranks: int, experts: int) -> Type:
    need(ids.shape[0] == x.shape[0], f"the ids are {ids} for {x}")
    _need_experts(first, experts)
    return _reduce_scatter(x, axis=axis, ranks=ranks)


@op(_collect, collective=True)
def collect(
    xs: Sequence[Tensor], ids: Sequence[Tensor], firsts: Sequence[Tensor], *, axis: str, ranks: int, experts: int
) -> list[Tensor]:
    """Like reduce_scatter, but a rank only sends the rows of tokens routed to its experts [first, first + experts);
    its other rows count as zero

    x: [ranks T, H]; the result is [T, H].
    ids: i64[ranks T, k], from dispatch.
    """
    each_rank = zip(xs, ids, firsts, strict=True)
    kept = [mask_rows(x, chooses(chosen, first, experts).long()) for x, chosen, first in each_rank]
    return reduce_scatter(kept, axis=axis, ranks=ranks)  # type: ignore[no-any-return]


def _send(x: Type, *, axis: str, to: int) -> Type:
    need(axis == STAGES, f"ranks send along {STAGES}, not along {axis!r}")
    return x


@op(_send, collective=True)
def send(x: Tensor, *, axis: str, to: int) -> Tensor:
    """x [...] -> itself; the rank at this place on the axis receives it"""
    return x


def _receive(like: Type, *, axis: str, source: int, columns: int | None, dtype: str) -> Type:
    return _send(Type(dtype, (like.shape[0], *row_shape(columns))), axis=axis, to=source)


def row_shape(columns: int | None) -> tuple[int, ...]:
    """The shape of a row of this many columns; None: of a number."""
    return () if columns is None else (columns,)


@op(_receive, collective=True)
def receive(sent: Tensor, *, axis: str, source: int, columns: int | None, dtype: str) -> Tensor:
    """A tensor [T, ...] of as many rows -> [T, columns], or [T] for None: what the rank at this place of the axis
    sends; the body takes what was sent"""
    return sent


def _local_tokens(tokens: Type, offset: Type, *, size: int) -> tuple[Type, Type]:
    need(offset == Type("i64", (1,)), f"the offset is {offset}")
    return tokens, tokens


@op(_local_tokens)
def local_tokens(tokens: Tensor, offset: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """tokens i64[...], offset i64[1] -> rows i64[...] of an embedding of size tokens from the offset on, 0 for tokens
    that it does not have; i64[...]: 1 for those that it has, else 0"""
    rows = tokens - offset
    is_here = (rows >= 0) & (rows < size)
    return rows.masked_fill(~is_here, 0), is_here.long()


def _mask_rows(x: Type, kept: Type) -> Type:
    need(kept == Type("i64", x.shape[:-1]), f"the mask is {kept} for {x}")
    return x


@op(_mask_rows)
def mask_rows(x: Tensor, kept: Tensor) -> Tensor:
    """x [..., H], kept i64[...] -> [..., H], with zeros in the rows that are not kept"""
    return x.masked_fill((kept == 0).unsqueeze(-1), 0)


def _sum_squares(x: Type, first: Type | None = None, *, columns: int | None = None, groups: int = 1) -> Type:
    need(first in (None, Type("i64", (1,))), f"the first column is {first}")
    need((first is None) == (columns is None), f"a group of {columns} columns, the first one is {first}")
    return Type("fp32", (*x.shape[:-1], groups))


@op(_sum_squares)
def sum_squares(x: Tensor, first: Tensor | None = None, *, columns: int | None = None, groups: int = 1) -> Tensor:
    """x [..., H] -> fp32[..., 1]

    columns: of each group of a row, of one of which x is a part, from the first i64[1] on; then -> fp32[..., groups],
    zeros but for that group
    """
    squares = x.float().square().sum(-1, keepdim=True)
    if first is None or columns is None:
        return squares
    return squares * (torch.arange(groups, device=x.device) == first // columns)


@op(lambda x: Type("fp32", (*x.shape[:-1], 2)))
def sum_moments(x: Tensor) -> Tensor:
    """x [..., W] -> fp32[..., 2], the sum of a row and that of its squares"""
    wide = x.float()
    return torch.stack((wide.sum(-1), wide.square().sum(-1)), -1)


def _scale_by_rms(x: Type, squares: Type, weight: Type, first: Type | None = None, *, columns: int, eps: float) -> Type:
    need(weight.shape == x.shape[-1:], f"the weight is {weight} for {x}")
    need(first in (None, Type("i64", (1,))), f"the first column is {first}")
    groups = squares.shape[-1] if first is not None else 1
    need(squares == Type("fp32", (*x.shape[:-1], groups)), f"the sums of squares are {squares} for {x}")
    return x


@op(_scale_by_rms)
def scale_by_rms(
    x: Tensor, squares: Tensor, weight: Tensor, first: Tensor | None = None, *, columns: int, eps: float
) -> Tensor:
    """x [..., H], part of a row of this many columns whose sum of squares is fp32[..., 1], weight [H] -> [..., H], as
    rms_norm gives of the whole row

    first i64[1]: x's first column in a row of groups of this many columns, whose sums of squares are fp32[..., G]
    """
    if first is not None:
        squares = squares.index_select(-1, first // columns)
    return (x.float() * torch.rsqrt(squares / columns + eps) * weight).to(x.dtype)

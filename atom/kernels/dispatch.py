"""Dispatch tokens to the ranks of their experts, as counted rows.

    plan = plan_rows(row_ids, first, experts, parts, place)     # on each rank, from the ids of all tokens
    rows = dispatch_rows(x, plan, exchange)                     # x [T, H] -> [ranks T, H], zeros for rows not sent
    y = collect_rows(y, plan, exchange)                         # y [ranks T, H] -> sums [T, H]

`exchange(rows, sent, taken)` is an all-to-all: rows [sum(sent), H], in the order of the ranks -> [sum(taken), H].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atom.graph import Mesh
from atom.graph.ops.collective import chooses

Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


class Plan(NamedTuple):
    """Which rows go where; ranks along an axis in their order."""

    tokens: Tensor  # i64: of this rank, those for each rank, concatenated
    sent: list[int]  # their number by rank
    rows: Tensor  # i64: places of the rows that come from each rank, concatenated
    taken: list[int]  # their number by rank


def parts_of(mesh: Mesh, ranks: Sequence[int]) -> tuple[int, ...]:
    """The part of the experts that each of these ranks has."""
    return tuple(mesh.coordinates(rank)["experts"] for rank in ranks)


def plan_rows(ids: Tensor, first: Tensor, experts: int, parts: Sequence[int], place: int) -> Plan:
    """Plan the exchange of one rank. The host waits for the device once.

    ids: i64[ranks T, k], of the tokens of all ranks
    first: i64[1], the rank's first expert
    experts: number of each rank's experts
    parts: as `parts_of` returns them
    place: of the rank along the axis
    """
    num, own = len(ids) // len(parts), ids.chunk(len(parts))[place]
    firsts = [first + (part - parts[place]) * experts for part in parts]
    sent = torch.stack([chooses(own, each, experts) for each in firsts])
    taken = chooses(ids, first, experts).view(-1, num)
    both = torch.stack((sent, taken)).cpu()
    tokens, rows = (each.flatten().nonzero().flatten().to(ids.device) for each in both)
    counts = both.sum(-1).tolist()
    return Plan(tokens % num, counts[0], rows, counts[1])


def dispatch_rows(x: Tensor, plan: Plan, exchange: Exchange) -> Tensor:
    """x [T, H] of each rank -> [ranks T, H], zeros for rows that were not sent"""
    rows = x.new_zeros(len(plan.sent) * len(x), x.shape[1])
    return rows.index_copy_(0, plan.rows, exchange(x[plan.tokens], plan.sent, plan.taken))


def collect_rows(x: Tensor, plan: Plan, exchange: Exchange) -> Tensor:
    """x [ranks T, H] -> [T, H], the sums over ranks, in their order, of the rows of this rank's tokens"""
    total = x.new_zeros(len(x) // len(plan.sent), x.shape[1])
    came = exchange(x[plan.rows], plan.taken, plan.sent)
    for tokens, part in zip(*(torch.split(each, plan.sent) for each in (plan.tokens, came)), strict=True):
        total.index_add_(0, tokens, part)
    return total

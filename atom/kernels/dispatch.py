"""Dispatch tokens to the ranks of their experts by counted rows.

    plan = plan_rows(row_ids, first, experts, parts, place)     # on each rank, of the ids of all tokens
    rows = dispatch_rows(x, plan, exchange)                     # x [T, H] -> [ranks T, H], zeros where none came
    y = collect_rows(y, plan, exchange)                         # y [ranks T, H] -> sums [T, H]

`exchange(rows, sent, taken)` sends so many rows to each rank, one part below the other, and gives those that come.
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
    """Which rows go where, of the ranks along an axis in their order."""

    tokens: Tensor  # i64: this rank's that go to each, one part below the other
    sent: list[int]  # how many of them
    rows: Tensor  # i64: the places of rows that come from each
    taken: list[int]  # how many of them


def parts_of(mesh: Mesh, ranks: Sequence[int]) -> tuple[int, ...]:
    """The part of the experts that each of some ranks has."""
    return tuple(mesh.coordinates(rank)["experts"] for rank in ranks)


def plan_rows(ids: Tensor, first: Tensor, experts: int, parts: Sequence[int], place: int) -> Plan:
    """Plan a rank's part, at this place of the axis. The host waits for a device once.

    ids: i64[ranks T, k] of the tokens of all. first: i64[1], of the rank's experts. parts: as `parts_of` gives them
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
    """x [T, H] of each rank -> [ranks T, H], with zeros where nothing came"""
    rows = x.new_zeros(len(plan.sent) * len(x), x.shape[1])
    return rows.index_copy_(0, plan.rows, exchange(x[plan.tokens], plan.sent, plan.taken))


def collect_rows(x: Tensor, plan: Plan, exchange: Exchange) -> Tensor:
    """x [ranks T, H] -> the sums [T, H] of what the ranks have of this one's tokens, in their order"""
    total = x.new_zeros(len(x) // len(plan.sent), x.shape[1])
    came = exchange(x[plan.rows], plan.taken, plan.sent)
    for tokens, part in zip(*(torch.split(each, plan.sent) for each in (plan.tokens, came)), strict=True):
        total.index_add_(0, tokens, part)
    return total

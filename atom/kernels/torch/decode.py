"""Decode attention on a CPU: all sequences at once, contexts in parts.

    decodes = Decodes(workspace, budget, cache, value_dim, table, lengths, heads, window)    # once a step
    out = decodes.attend(q, cache, rule)                                                     # each layer

Contexts are cut into parts of equal size. As many parts as the budget holds are attended together, with the N / K query
heads of a key/value head as rows of one matmul, and the parts of a sequence are merged by their log-sum-exp (flash
decoding, Dao et al. 2023). A masked position reads a visible one of its sequence, never another sequence's, which may
hold NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom.kernels.torch.softmax import Rule, kept_of_sinks, softmax_
from atom.kernels.torch.workspace import Reader, Workspace

PART = 256  # positions: about the min size of a part
MASKED = -1e30  # added to the score of a masked position


class Decodes:
    """The decodes of one step."""

    def __init__(self, workspace: Workspace, budget: int, cache: Tensor, value_dim: int, table: Tensor, lengths: Tensor,
                 heads: int, window: int | None, tail: torch.dtype | None = None,
                 chunked: bool = False) -> None:  # fmt: skip
        """budget in bytes of fp32 keys and values; cache, value_dim, tail as in Reader; table i32[S, M], lengths [S];
        chunked as in the op"""
        block_size = cache.shape[1]
        lengths = lengths.long()
        first = torch.zeros_like(lengths)
        if window is not None:
            first = ((lengths - 1) // window * window if chunked else lengths - window).clamp_(min=0)
        at_once = budget // (cache.shape[2:].numel() * 4)  # positions
        size = _part_size((lengths - first).tolist(), at_once)
        num_parts = (lengths - first + (size - 1)) // size
        first_part = num_parts.cumsum(0) - num_parts
        self._shape = len(lengths), heads, value_dim
        self._sequence = torch.repeat_interleave(num_parts)  # of each part
        self._place = torch.arange(len(self._sequence)) - first_part[self._sequence]  # of each part in its sequence

        ends = lengths[self._sequence].unsqueeze(1)
        positions = (first[self._sequence] + self._place * size).unsqueeze(1) + torch.arange(size)
        mask = torch.zeros(positions.shape).masked_fill_(positions >= ends, MASKED)
        distances = ends - 1 - positions
        positions = torch.minimum(positions, ends - 1)
        slots = table[self._sequence.unsqueeze(1), positions // block_size] * block_size + positions % block_size
        step = max(1, at_once // size)
        ranges = [slice(start, start + step) for start in range(0, len(slots), step)]
        self._groups = [
            (
                parts,
                _Group(
                    workspace,
                    Reader(workspace, cache, value_dim, slots[parts], tail),
                    mask[parts],
                    distances[parts],
                    heads,
                ),
            )
            for parts in ranges
        ]
        self._is_whole = bool((num_parts == 1).all())  # each sequence is one part

    def attend(self, q: Tensor, cache: Tensor, rule: Rule) -> Tensor:
        """q [S, N, D] -> fp32[S, N, U], maybe in the workspace; zeros for sequences without positions"""
        out = self._attend(q, cache, rule)
        return out if rule.value_scale == 1.0 else out.mul_(rule.value_scale)

    def _attend(self, q: Tensor, cache: Tensor, rule: Rule) -> Tensor:
        if not self._groups:
            return torch.zeros(self._shape)
        if self._is_whole and rule.sinks is None:
            if len(self._groups) == 1:
                return self._groups[0][1].attend(q, cache, rule)
            return torch.cat([group.attend(q[parts], cache, rule).clone() for parts, group in self._groups])
        attended = [group.attend_part(q[self._sequence[parts]], cache, rule) for parts, group in self._groups]
        sums, totals = map(torch.cat, zip(*attended, strict=True))
        if not self._is_whole:
            sums, totals = self._merge(sums, totals)
        return sums if rule.sinks is None else sums.mul_(kept_of_sinks(totals, rule.sinks))

    def _merge(self, sums: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Merge parts, fp32[I, N, U] and the log-sum-exps of their scores fp32[I, N] -> the same of sequences"""
        by_sequence = totals.new_full((self._shape[0], int(self._place.max()) + 1, self._shape[1]), -math.inf)
        by_sequence[self._sequence, self._place] = totals
        shares = by_sequence.softmax(1)[self._sequence, self._place].unsqueeze(-1)
        merged = torch.zeros(self._shape).index_add_(0, self._sequence, sums * shares)
        return merged, by_sequence.logsumexp(1)


def _part_size(lengths: list[int], at_once: int) -> int:
    """Positions of a part: those of the longest context if that wastes little on padding, else an equal share of it."""
    longest = max([1, *lengths])
    if longest <= at_once and len(lengths) * longest <= max(at_once, 2 * sum(lengths)):
        return longest
    num_parts = -(-longest // max(PART, at_once // len(lengths)))
    return -(-longest // num_parts)


class _Group:
    """I parts of C positions that are attended together, and their buffers in the workspace."""

    def __init__(self, workspace: Workspace, reader: Reader, mask: Tensor, distances: Tensor, heads: int) -> None:
        """mask fp32[I, C], added to the scores; distances i64[I, C] of the positions to the query"""
        (num, size), (rows, _, dim), value_dim = mask.shape, reader.keys.shape, reader.values.shape[2]
        kv_heads = rows // num
        self._reader = reader
        self._keys = reader.keys.mT
        self._distances = distances.view(num, 1, 1, size)
        self._mask = mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1)
        self._q, self._out = workspace.take("q", num, heads, dim), workspace.take("out", num, heads, value_dim)
        self._q_rows, self._out_rows = (each.view(rows, heads // kv_heads, -1) for each in (self._q, self._out))
        self._scores = workspace.take("scores", rows, heads // kv_heads, size)

    def attend(self, q: Tensor, cache: Tensor, rule: Rule) -> Tensor:
        """q [I, N, D] -> fp32[I, N, U], in the workspace"""
        self._score(q, cache, rule)
        torch.softmax(self._scores, -1, out=self._scores)
        return self._sum()

    def attend_part(self, q: Tensor, cache: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """q [I, N, D] -> fp32[I, N, U] and the log-sum-exp of its scores fp32[I, N]"""
        self._score(q, cache, rule)
        totals = softmax_(self._scores).view(q.shape[:2])
        return self._sum().clone(), totals

    def _score(self, q: Tensor, cache: Tensor, rule: Rule) -> None:
        self._reader.read(cache)
        self._q.copy_(q)
        scores, softcap = self._scores, rule.softcap
        if softcap is None:
            torch.baddbmm(self._mask, self._q_rows, self._keys, alpha=rule.scale, out=scores)
        else:
            torch.baddbmm(scores, self._q_rows, self._keys, beta=0, alpha=rule.scale / softcap, out=scores).tanh_()
            torch.add(self._mask, scores, alpha=softcap, out=scores)
        if rule.slopes is not None:
            num, rows, size = len(self._q), *scores.shape[1:]
            slopes = rule.slopes.view(1, -1, rows, 1)
            scores.view(num, -1, rows, size).sub_(slopes * self._distances)

    def _sum(self) -> Tensor:
        torch.bmm(self._scores, self._reader.values, out=self._out_rows)
        return self._out

"""Attention of sequences that have one query each, all at once, in memory that does not grow with their contexts.

    decodes = Decodes(workspace, budget, cache, table, lengths, heads, window)    # once a step
    decodes.attend(q, cache, scale, out)                                          # each layer

Contexts are cut into parts of one size. As many parts as the budget holds are attended together, the N / K query heads
of a key/value head as rows of one product, and the parts of a sequence are merged by their log-sum-exp (flash decoding,
Dao et al. 2023). A masked position reads a visible one of its sequence, so that nothing foreign is read, NaN or not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom.kernels.torch.workspace import Reader, Workspace

PART = 256  # positions: a context is not cut into smaller parts
MASKED = -1e30  # added to the score of a masked position


class Decodes:
    """The decodes of one step."""

    def __init__(self, workspace: Workspace, budget: int, cache: Tensor, table: Tensor, lengths: Tensor, heads: int,
                 window: int | None) -> None:  # fmt: skip
        """budget in bytes of fp32 keys and values, cache [blocks, block size, 2, K, D], table i32[S, M], lengths [S]"""
        _, block_size, _, kv_heads, dim = cache.shape
        lengths = lengths.long()
        first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0)
        at_once = budget // (2 * kv_heads * dim * 4)  # positions
        size = min(max([1, *(lengths - first).tolist()]), max(PART, at_once // max(1, len(lengths))))
        num_parts = (lengths - first + (size - 1)) // size
        first_part = num_parts.cumsum(0) - num_parts
        self._sequence = torch.repeat_interleave(num_parts)  # that a part is of
        self._place = torch.arange(len(self._sequence)) - first_part[self._sequence]  # of a part in its sequence
        self._is_whole = bool((num_parts == 1).all())  # each sequence is one part

        ends = lengths[self._sequence].unsqueeze(1)
        positions = (first[self._sequence] + self._place * size).unsqueeze(1) + torch.arange(size)
        mask = torch.zeros(positions.shape).masked_fill_(positions >= ends, MASKED)
        positions = torch.minimum(positions, ends - 1)
        slots = table[self._sequence.unsqueeze(1), positions // block_size] * block_size + positions % block_size
        step = max(1, at_once // size)
        ranges = [slice(start, start + step) for start in range(0, len(slots), step)]
        self._groups = [(parts, _Group(workspace, cache, slots[parts], mask[parts], heads)) for parts in ranges]

    def attend(self, q: Tensor, cache: Tensor, scale: float, out: Tensor) -> None:
        """q [S, N, D] -> out [S, N, D], left alone where a sequence has no positions"""
        totals, sums = [], []
        for parts, group in self._groups:
            if self._is_whole:
                group.score(q[parts], cache, scale)
                out[parts].copy_(group.attend())
            else:
                group.score(q[self._sequence[parts]], cache, scale)
                totals.append(group.total())
                sums.append(group.attend().clone())
        if totals:
            out.copy_(self._merge(torch.cat(totals), torch.cat(sums), len(out)))

    def _merge(self, totals: Tensor, sums: Tensor, num: int) -> Tensor:
        """log-sum-exp fp32[parts, N], attended fp32[parts, N, D] -> fp32[num, N, D]"""
        by_sequence = totals.new_full((num, int(self._place.max()) + 1, totals.shape[1]), -math.inf)
        by_sequence[self._sequence, self._place] = totals
        weights = by_sequence.softmax(1)[self._sequence, self._place]
        return sums.new_zeros((num, *sums.shape[1:])).index_add_(0, self._sequence, sums * weights.unsqueeze(-1))


class _Group:
    """I parts of C positions that are attended together, and their places in the workspace."""

    def __init__(self, workspace: Workspace, cache: Tensor, slots: Tensor, mask: Tensor, heads: int) -> None:
        """cache [blocks, block size, 2, K, D], slots i64[I, C], mask fp32[I, C], added to the scores"""
        kv_heads, dim = cache.shape[3:]
        num, size = slots.shape
        rows = (num * kv_heads, heads // kv_heads)
        self._reader = Reader(workspace, cache, slots)
        self._keys = self._reader.keys.mT
        self._mask = mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1)
        self._q, self._out = (workspace.take(name, num, heads, dim) for name in ("q", "out"))
        self._q_rows, self._out_rows = (tensor.view(*rows, dim) for tensor in (self._q, self._out))
        self._scores = workspace.take("scores", *rows, size)

    def score(self, q: Tensor, cache: Tensor, scale: float) -> None:
        """q [I, N, D] against the keys"""
        self._reader.read(cache)
        self._q.copy_(q)
        torch.baddbmm(self._mask, self._q_rows, self._keys, alpha=scale, out=self._scores)

    def total(self) -> Tensor:
        """log-sum-exp of the scores fp32[I, N]"""
        return self._scores.logsumexp(-1).view(self._q.shape[:2])

    def attend(self) -> Tensor:
        """The values summed by the softmax of the scores, which this overwrites: fp32[I, N, D], in the workspace."""
        torch.softmax(self._scores, -1, out=self._scores)
        torch.bmm(self._scores, self._reader.values, out=self._out_rows)
        return self._out

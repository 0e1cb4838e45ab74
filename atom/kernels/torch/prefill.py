"""Attention of one sequence's many queries, in tiles of queries over just the keys that a tile sees.

    prefill = Prefill(workspace, cache, table, tokens, length, window)    # once a step
    prefill.attend(q, cache, scale, out)                                  # each layer

A tile's keys end with its own positions, so that only the last square of its scores is masked causally, and only the
first by the window: no mask spans the context. The N / K query heads of a key/value head are rows of one product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom.kernels.torch.workspace import Reader, Workspace

TILE = 64  # queries
SCORES = 1 << 23  # most scores of a tile, so that it has fewer queries where the context is very long


class Prefill:
    """One sequence of one step."""

    def __init__(self, workspace: Workspace, cache: Tensor, table: Tensor, tokens: slice, length: int,
                 window: int | None) -> None:  # fmt: skip
        """cache [blocks, block size, 2, K, D], table i32[M]; tokens of the step are the last of `length` positions"""
        self._workspace = workspace
        self._tokens = tokens
        self._window = window
        self._start = length - (tokens.stop - tokens.start)  # position of the first query
        self._base = self._first_seen(self._start)
        block_size = cache.shape[1]
        positions = torch.arange(self._base, length)
        slots = table[positions // block_size] * block_size + positions % block_size
        self._reader = Reader(workspace, cache, slots.unsqueeze(0))

    def _first_seen(self, position: int) -> int:
        return 0 if self._window is None else max(0, position - self._window + 1)

    def attend(self, q: Tensor, cache: Tensor, scale: float, out: Tensor) -> None:
        """q [T, N, D] -> out [T, N, D], the tokens of this sequence"""
        self._reader.read(cache)
        q, out = q[self._tokens], out[self._tokens]
        most = min(TILE, max(1, SCORES // (q.shape[1] * self._reader.keys.shape[1])))
        for first in range(0, len(q), most):
            tile = slice(first, first + most)
            self._attend_tile(q[tile], self._start + first, scale, out[tile])

    def _attend_tile(self, q: Tensor, position: int, scale: float, out: Tensor) -> None:
        """q [Q, N, D] at `position` and after -> out [Q, N, D]"""
        kv_heads, _, dim = self._reader.keys.shape
        num, group = len(q), q.shape[1] // kv_heads
        low = self._first_seen(position)
        seen = slice(low - self._base, position + num - self._base)
        queries, sums = (self._workspace.take(name, kv_heads, num, group, dim) for name in ("q", "out"))
        scores = self._workspace.take("scores", kv_heads, num, group, seen.stop - seen.start)
        rows = scores.flatten(1, 2)

        queries.copy_(q.view(num, kv_heads, group, dim).transpose(0, 1)).mul_(scale)
        torch.bmm(queries.flatten(1, 2), self._reader.keys[:, seen].mT, out=rows)
        square = torch.ones(num, num, dtype=torch.bool)
        scores[..., -num:].masked_fill_(square.triu(1).unsqueeze(1), -math.inf)
        if self._window is not None:
            scores[..., :num].masked_fill_(square.tril(position - self._window - low).unsqueeze(1), -math.inf)
        torch.softmax(rows, -1, out=rows)
        torch.bmm(rows, self._reader.values[:, seen], out=sums.flatten(1, 2))
        out.view(num, kv_heads, group, dim).copy_(sums.transpose(0, 1))

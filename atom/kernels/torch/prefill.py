"""Prefill attention on a CPU, in tiles of one sequence's queries.

A tile reads only the keys that it sees.

    prefill = Prefill(workspace, cache, value_dim, table, tokens, length, window)    # once a step
    reader = prefill.reader
    reader.read(cache)                                                               # each layer
    prefill.attend(q[tokens], reader.keys, reader.values, rule, out[tokens])

A tile's keys end with its own positions, so only the last square of its scores is masked causally, and only the first
by the window: no mask spans the context. With `ends` they go on to the largest of these. The N / K query heads of a
key/value head are rows of one matmul.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom.kernels.torch.softmax import Rule, kept_of_sinks, softmax_
from atom.kernels.torch.workspace import Reader, Workspace

TILE = 64  # queries
MAX_SCORES = 1 << 23  # of a tile, which has fewer queries if the context is very long


class Prefill:
    """One sequence of one step."""

    def __init__(self, workspace: Workspace, cache: Tensor, value_dim: int, table: Tensor, tokens: slice, length: int,
                 window: int | None, tail: torch.dtype | None = None, chunked: bool = False) -> None:  # fmt: skip
        """cache, value_dim, tail as in Reader; table i32[M]; tokens of the step are the last of `length` positions;
        chunked as in the op"""
        self._workspace = workspace
        self._window, self._chunked = window, chunked
        self._start = length - (tokens.stop - tokens.start)  # position of the first query
        self._base = self._first_visible(self._start)
        block_size = cache.shape[1]
        positions = torch.arange(self._base, length)
        slots = table[positions // block_size] * block_size + positions % block_size
        self.tokens = tokens
        self.reader = Reader(
            workspace, cache, value_dim, slots.unsqueeze(0), tail
        )  # of the positions that a query sees

    def _first_visible(self, position: int) -> int:
        if self._window is None:
            return 0
        return position // self._window * self._window if self._chunked else max(0, position - self._window + 1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: Rule, out: Tensor,
               ends: Tensor | None = None) -> None:  # fmt: skip
        """q [Q, N, D], over the reader's positions keys fp32[K, C, D] and values fp32[K, C, U] -> out [Q, N, U]

        ends: i32[Q], as in the op
        """
        size = min(TILE, max(1, MAX_SCORES // (q.shape[1] * keys.shape[1])))
        first = 0
        while first < len(q):
            stop = min(first + size, len(q))
            if self._chunked and self._window is not None:  # a tile sees one chunk
                stop = min(stop, self._first_visible(self._start + first) + self._window - self._start)
            tile = slice(first, stop)
            own_ends = None if ends is None else ends[tile]
            self._attend_tile(q[tile], self._start + first, keys, values, rule, out[tile], own_ends)
            first = stop

    def _attend_tile(self, q: Tensor, position: int, keys: Tensor, values: Tensor, rule: Rule, out: Tensor,
                     ends: Tensor | None) -> None:  # fmt: skip
        """The tile of Q queries at `position` and after."""
        (num, heads, dim), (kv_heads, _, value_dim) = q.shape, values.shape
        group = heads // kv_heads
        low, high = self._first_visible(position), position + num
        if ends is not None:
            high = max(high, int(ends.max()) + 1)
        seen = slice(low - self._base, high - self._base)
        queries = self._workspace.take("q", kv_heads, num, group, dim)
        sums = self._workspace.take("out", kv_heads, num, group, value_dim)
        scores = self._workspace.take("scores", kv_heads, num, group, seen.stop - seen.start)

        cap = 1.0 if rule.softcap is None else rule.softcap
        queries.copy_(q.view(num, kv_heads, group, dim).transpose(0, 1)).mul_(rule.scale / cap)
        torch.bmm(queries.flatten(1, 2), keys[:, seen].mT, out=scores.flatten(1, 2))
        if rule.softcap is not None:
            scores.tanh_().mul_(cap)
        if rule.slopes is not None:
            distances = torch.arange(position, position + num).unsqueeze(1) - torch.arange(low, position + num)
            scores.sub_(rule.slopes.view(kv_heads, 1, group, 1) * distances.unsqueeze(1))
        square = torch.ones(num, num, dtype=torch.bool)
        if ends is None:
            scores[..., -num:].masked_fill_(square.triu(1).unsqueeze(1), -math.inf)
        else:
            last = torch.maximum(torch.arange(position, position + num), ends).unsqueeze(1)
            is_later = torch.arange(position, high) > last
            scores[..., position - low :].masked_fill_(is_later.unsqueeze(1), -math.inf)
        if self._window is not None and not self._chunked:
            scores[..., :num].masked_fill_(square.tril(position - self._window - low).unsqueeze(1), -math.inf)
        if rule.sinks is None:
            torch.softmax(scores, -1, out=scores)
            torch.bmm(scores.flatten(1, 2), values[:, seen], out=sums.flatten(1, 2))
        else:
            totals = softmax_(scores)
            torch.bmm(scores.flatten(1, 2), values[:, seen], out=sums.flatten(1, 2))
            sums.mul_(kept_of_sinks(totals, rule.sinks.view(kv_heads, 1, group)))
        if rule.value_scale != 1.0:
            sums.mul_(rule.value_scale)
        out.view(num, kv_heads, group, value_dim).copy_(sums.transpose(0, 1))

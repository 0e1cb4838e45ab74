"""Paged attention in float32 on batched matrix products, which on a CPU beat torch's flash attention and round only once.

    attend = PagedAttention()                # one object for all layers: it owns the workspace and the plan of the step
    for layer in layers:
        out = attend(q, cache, table, starts, lengths, num_decodes, scale=0.125)

Decodes: contexts are cut into parts of one size, an `index_select` reads the keys and values of as many parts as the workspace
holds, one product scores them, and the parts of a sequence are merged by their log-sum-exp (flash decoding, Dao et al. 2023).
The N / K query heads of a key/value head are rows of one product. A masked position reads a visible one of its sequence, so that
memory of others, whatever it holds, is never read. Prefills: tiles of queries, over just the keys that a tile sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PART = 256  # positions: no sequence is cut into smaller parts
TILE = 64  # queries of a prefill that are scored together
SCORES = 1 << 23  # fp32 scores that a tile may have
MASKED = -1e30  # added to the score of a masked position


@dataclass(frozen=True)
class _Group:
    """I parts of C positions that are attended together: what they read, and their places in the workspace."""

    parts: slice  # among the step's
    index: Tensor  # i32[2 I K C], rows of the cache: keys, then values
    mask: Tensor  # fp32[I K, 1, C], added to the scores
    gathered: Tensor  # [2 I K C, D] in the cache's dtype
    wide: Tensor  # the same in fp32
    keys: Tensor  # fp32[I K, D, C], a view of it
    values: Tensor  # fp32[I K, C, D], a view of it
    q: Tensor  # fp32[I, N, D]
    queries: Tensor  # fp32[I K, N / K, D], a view of it
    scores: Tensor  # fp32[I K, N / K, C]
    out: Tensor  # fp32[I, N, D]
    sums: Tensor  # fp32[I K, N / K, D], a view of it


@dataclass(frozen=True)
class _Prefill:
    """A sequence whose queries are tokens first to last of the step and the last of its `length` positions."""

    first: int
    last: int
    length: int
    base: int  # the first position that any query sees
    index: Tensor  # i32[2 K (length - base)], rows of the cache: keys, then values


@dataclass(frozen=True)
class _Plan:
    """What the layers of a step share."""

    inputs: tuple[Tensor, Tensor]  # table and starts that it was made of; held, so that no other tensor gets their ids
    groups: list[_Group]
    sequence: Tensor  # i64[parts], the decode that a part is of
    part: Tensor  # i64[parts], its number there
    is_whole: bool  # each decode is one part
    prefills: list[_Prefill]


class PagedAttention:
    """The op `paged_attention`. A step's table, starts and lengths are new tensors, not written to while its layers run."""

    def __init__(self, workspace_bytes: int = 8 << 20) -> None:
        """workspace_bytes: of the fp32 keys and values that decodes read at a time"""
        self._workspace_bytes = workspace_bytes
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._lengths: Tensor | None = None  # of the step that the plans are of
        self._plans: dict[object, _Plan] = {}  # one for each table and layout

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int, *,
                 scale: float, window: int | None = None) -> Tensor:  # fmt: skip
        """Shapes as in the op. A token of no sequence and a sequence of length 0 give zeros."""
        if lengths is not self._lengths:
            self._plans.clear()
            self._lengths = lengths
        key = (id(table), id(starts), num_decodes, window, q.shape, cache.shape, cache.dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(q, cache, table, starts, lengths, num_decodes, window)
        out = q.new_zeros(q.shape)
        if plan.is_whole:
            for group in plan.groups:
                group.q.copy_(q[group.parts])
                self._attend(group, cache, scale)
                out[group.parts].copy_(group.out)
        else:
            out[:num_decodes].copy_(self._attend_parts(plan, q[:num_decodes], cache, scale))
        for prefill in plan.prefills:
            self._attend_tiles(prefill, q, cache, scale, window, out)
        return out

    def _plan(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
              window: int | None) -> _Plan:  # fmt: skip
        _, block_size, _, kv_heads, dim = cache.shape
        prefills = _plan_prefills(table, starts, lengths, num_decodes, window, block_size, kv_heads)
        table, lengths = table[:num_decodes], lengths[:num_decodes].long()
        first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0)
        num_visible = lengths - first
        at_once = self._workspace_bytes // (2 * kv_heads * dim * 4)  # positions
        size = min(max([1, *num_visible.tolist()]), max(PART, at_once // max(1, num_decodes)))
        num_parts = (num_visible + (size - 1)) // size
        sequence = torch.repeat_interleave(num_parts)
        part = torch.arange(len(sequence)) - (num_parts.cumsum(0) - num_parts)[sequence]
        positions = (first[sequence] + part * size).unsqueeze(1) + torch.arange(size)
        ends = lengths[sequence].unsqueeze(1)
        mask = torch.zeros(positions.shape).masked_fill_(positions >= ends, MASKED)
        slots = _slots(table[sequence], torch.minimum(positions, ends - 1), block_size)
        groups = [
            self._group(slice(*bounds), slots[slice(*bounds)], mask[slice(*bounds)], q, cache)
            for bounds in _ranges(len(sequence), max(1, at_once // size))
        ]
        return _Plan((table, starts), groups, sequence, part, bool((num_parts == 1).all()), prefills)

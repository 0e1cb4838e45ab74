"""Choose entries by an indexer on a CPU, find their slots (DeepSeek-AI 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.attention import entries_of, queried
from atom.graph.ops.sparse import choose, from_index_entries, index_scores

SCORES_BYTES = 32 << 20  # of fp32 scores by head at once


def paged_index_topk(q: Tensor, weights: Tensor | None, cache: PagedCache, batch: Batch, *, top_k: int,
                     every: int = 1) -> Tensor:  # fmt: skip
    """The op of this name, some queries at a time."""
    out = torch.full((len(q), 1, top_k), -1, dtype=torch.int32)
    for row, own in queried(batch):
        keys = from_index_entries(entries_of(cache, batch, row, every=every)).float()
        queries, weighs, chosen = q[own], None if weights is None else weights[own], out[own, 0]
        first = int(batch.lengths[row]) - len(queries)  # the position of the first query
        at_once = max(1, SCORES_BYTES // (4 * q.shape[1] * max(len(keys), 1)))
        for start in range(0, len(queries), at_once):
            some = slice(start, start + at_once)
            scores = index_scores(queries[some], keys, None if weighs is None else weighs[some])
            ended = (torch.arange(len(scores)) + first + start + 1) // every
            scores.masked_fill_(torch.arange(len(keys)) >= ended.unsqueeze(1), float("-inf"))
            chosen[some] = choose(scores, top_k)
    return out


def find_slots(selected: Tensor, cache: PagedCache, batch: Batch) -> Tensor:
    """selected i32[T, k] -> i64[T, k], slots of the cache; -1 of none, and of tokens of no sequence"""
    table, size = batch.tables[cache.kind], cache.blocks.shape[1]
    tokens = torch.arange(len(selected), dtype=batch.starts.dtype)
    rows = torch.searchsorted(batch.starts, tokens, right=True) - 1
    known = (selected >= 0) & (rows < len(table)).unsqueeze(1)
    places = selected.clamp(min=0).long()
    blocks = table[rows.clamp(max=len(table) - 1)].long().gather(1, places // size)
    return torch.where(known, blocks * size + places % size, -1)

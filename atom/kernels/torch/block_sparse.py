"""Blocks that queries choose, and attention to these only, on a CPU.

    selected = paged_index_blocks(q, keys, batch, block=128, top_k=16)
    attend_blocks(q, cache, batch, selected, rule, block, out)
    table, lengths = chosen_tables(selected, cache, batch, block)    # of decodes: in place of their own

A tile of one sequence's queries reads the blocks that any of them chose, and masks what a query did not choose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.attention import cached_entries
from atom.graph.ops.block_sparse import block_scores, choose_blocks
from atom.graph.ops.sparse import from_index_entries
from atom.kernels.torch.softmax import Rule, kept_of_sinks, softmax_

TILE = 64  # queries
MAX_SCORES = 1 << 23  # of a tile, which has fewer queries if the context is very long


def paged_index_blocks(q: Tensor, cache: PagedCache, batch: Batch, *, block: int, top_k: int,
                       local: int = 1) -> Tensor:  # fmt: skip
    """The op of this name, some queries at a time."""
    selected = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32)
    for own, entries in cached_entries(cache, batch):
        if not len(entries):
            continue
        keys, queries, chosen = from_index_entries(entries).float(), q[own], selected[own]
        positions = torch.arange(len(keys) - len(queries), len(keys))
        size = max(1, MAX_SCORES // (q.shape[1] * len(keys)))
        for start in range(0, len(queries), size):
            some = slice(start, start + size)
            seen = int(positions[some][-1]) + 1
            sees = torch.arange(seen) <= positions[some].unsqueeze(1)
            scores = block_scores(queries[some], keys[:seen], sees, block)
            chosen[some] = choose_blocks(scores, positions[some] // block, top_k, local)
    return selected


def attend_blocks(q: Tensor, cache: PagedCache, batch: Batch, selected: Tensor, rule: Rule, block: int,
                  out: Tensor) -> None:  # fmt: skip
    """Attention of q [T, N, D] to the blocks selected i32[T, G, k], of `block` positions -> out [T, N, D]"""
    table, lengths = batch.tables[cache.kind], batch.lengths.tolist()
    groups, kv_heads = selected.shape[1], cache.blocks.shape[3]
    heads, keys_of = q.shape[1] // groups, kv_heads // groups
    for row, (first, last) in enumerate(itertools.pairwise(batch.starts.tolist())):
        if not lengths[row]:
            continue
        for tile in _tiles(first, last, heads * lengths[row]):
            positions = torch.arange(tile.start, tile.stop) + lengths[row] - last
            for group in range(groups):
                own = slice(group * heads, (group + 1) * heads), slice(group * keys_of, (group + 1) * keys_of)
                chosen = selected[tile, group].long()
                keys, sees = _chosen_keys(chosen, positions, block)
                sinks = None if rule.sinks is None else rule.sinks[own[0]]
                entries = _read(cache.blocks, table[row], keys, own[1])
                out[tile, own[0]] = _attend(q[tile, own[0]], entries, sees, rule._replace(sinks=sinks)).to(out.dtype)


def _tiles(first: int, last: int, scores: int) -> Iterator[slice]:
    """scores: of one query"""
    size = min(TILE, max(1, MAX_SCORES // scores))
    return (slice(start, min(start + size, last)) for start in range(first, last, size))


def _chosen_keys(chosen: Tensor, positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The keys i64[L] that queries i64[Q] see any of, by their blocks i64[Q, k], and which each of them sees."""
    blocks = torch.unique(chosen[chosen >= 0])
    keys = (blocks.unsqueeze(1) * block + torch.arange(block)).flatten()
    has_chosen = (chosen.unsqueeze(2) == blocks).any(1).repeat_interleave(block, 1)
    sees = has_chosen & (keys <= positions.unsqueeze(1))
    seen = keys <= positions[-1]
    return keys[seen], sees[:, seen]


def _read(cache: Tensor, table: Tensor, keys: Tensor, heads: slice) -> Tensor:
    """fp32[2, heads, L, D] of the positions i64[L] in a sequence's blocks"""
    size = cache.shape[1]
    slots = table[keys // size].long() * size + keys % size
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype is torch.float8_e4m3fn:  # which not every torch can index on a CPU
        return flat.view(torch.uint8)[slots, :, heads].view(cache.dtype).float().permute(1, 2, 0, 3)
    return flat[slots, :, heads].float().permute(1, 2, 0, 3)


def _attend(q: Tensor, entries: Tensor, sees: Tensor, rule: Rule) -> Tensor:
    """q [Q, N, D], entries fp32[2, K, L, D], sees bool[Q, L] -> fp32[Q, N, D]"""
    (num, heads, dim), (_, kv_heads, length, _) = q.shape, entries.shape
    queries = q.float().view(num, kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)
    scores = torch.bmm(queries, entries[0].mT).mul_(rule.scale).view(kv_heads, num, -1, length)
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores.masked_fill_(~sees.unsqueeze(1), -math.inf)
    totals = softmax_(scores)
    sums = torch.bmm(scores.flatten(1, 2), entries[1]).view(kv_heads, num, -1, dim)
    if rule.sinks is not None:
        sums.mul_(kept_of_sinks(totals, rule.sinks.float().view(kv_heads, 1, -1)))
    return sums.mul_(rule.value_scale).transpose(0, 1).reshape(num, heads, dim)


def chosen_tables(selected: Tensor, cache: PagedCache, batch: Batch, block: int) -> tuple[Tensor, Tensor]:
    """The tables i32[S K, M] and lengths i32[S K] of the blocks that decodes chose, for each key/value head.

    selected i32[S, G, k] of one query for each sequence; the cache's blocks divide those that are chosen
    """
    table, (sequences, groups, _), parts = batch.tables[cache.kind], selected.shape, block // cache.blocks.shape[1]
    count = (selected >= 0).sum(2)  # the last one is the query's own, which may not be full
    lengths = batch.lengths.unsqueeze(1)
    rest = (lengths - 1) % block + 1
    numbers = (selected.unsqueeze(3) * parts + torch.arange(parts)).clamp(0, table.shape[1] - 1)
    chosen = table.gather(1, numbers.view(sequences, -1).long()).view(sequences, groups, -1)
    kept = torch.where(count > 0, (count - 1) * block + rest, 0)
    copies = cache.blocks.shape[3] // groups
    by_head = (each.repeat_interleave(copies, 1).flatten(0, 1).int() for each in (chosen, kept))
    table, lengths = by_head
    return table.contiguous(), lengths.contiguous()

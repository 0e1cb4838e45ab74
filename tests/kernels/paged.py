"""Cases of paged attention: sequences whose tokens lie in scattered blocks, with NaN wherever nobody may look.

case = make_case(decodes=[17, 33], prefills=[(5, 40)], kv_heads=2, heads=6, dim=8)
out = attend(*case, scale=0.5)
expected = reference(case, scale=0.5)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from atom.graph import Batch, PagedCache, ops
from atom.graph.batch import PREFIX_MULTIPLE, SharedPrefixes
from atom.graph.ops.sparse import to_index_entries

NAN = float("nan")


KIND = "full"  # of every cache here


class Case(NamedTuple):
    """The arguments of paged_attention."""

    q: Tensor
    cache: PagedCache
    batch: Batch
    sinks: Tensor | None = None


class LatentCase(NamedTuple):
    """The arguments of paged_mla_attention."""

    q_nope: Tensor
    q_rope: Tensor
    kv_b: Tensor
    cache: PagedCache
    batch: Batch


class IndexCase(NamedTuple):
    """The arguments of paged_index_topk."""

    q: Tensor
    weights: Tensor
    cache: PagedCache
    batch: Batch


def cached(blocks: Tensor, slots: Tensor) -> tuple[PagedCache, Batch]:
    """What an op takes that only writes."""
    return PagedCache(blocks, KIND), Batch({}, {KIND: slots}, torch.zeros(1).int(), torch.zeros(0).int(), 0)


def make_case(decodes: Sequence[int] = (), prefills: Sequence[tuple[int, int]] = (), *, kv_heads: int = 1, heads: int = 1,
               dim: int = 8, block_size: int = 16, window: int | None = None, dtype: torch.dtype = torch.float32,
               cache_dtype: torch.dtype | None = None, foreign: float = NAN, has_sinks: bool = False,
               seed: int = 0) -> Case:  # fmt: skip
    """Decodes by their lengths, prefills by (queries, length). What no query sees holds `foreign`, as does block 0."""
    random = torch.Generator().manual_seed(seed)
    counts = [1] * len(decodes) + [num for num, _ in prefills]
    lengths = [*decodes, *(length for _, length in prefills)]
    entry = torch.Size((2, kv_heads, dim))
    blocks, table = _scatter(counts, lengths, entry, block_size, window, cache_dtype or dtype, foreign, random)
    q = torch.randn(sum(counts), heads, dim, generator=random).to(dtype)
    sinks = 3 * torch.randn(heads, generator=random).to(dtype) if has_sinks else None
    return Case(q, PagedCache(blocks, KIND), _batch(table, counts, lengths, len(decodes)), sinks)


def make_latent_case(decodes: Sequence[int] = (), prefills: Sequence[tuple[int, int]] = (), *, heads: int = 1, rank: int = 12,
                      plain: int = 8, rotated: int = 6, value: int = 10, block_size: int = 16, window: int | None = None,
                      dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, foreign: float = NAN,
                      seed: int = 0) -> LatentCase:  # fmt: skip
    """As make_case; q_nope and q_rope are views of one linear's output, as in a model."""
    random = torch.Generator().manual_seed(seed)
    counts = [1] * len(decodes) + [num for num, _ in prefills]
    lengths = [*decodes, *(length for _, length in prefills)]
    entry = torch.Size((rank + rotated,))
    blocks, table = _scatter(counts, lengths, entry, block_size, window, cache_dtype or dtype, foreign, random)
    q = torch.randn(sum(counts), heads, plain + rotated, generator=random).to(dtype)
    kv_b = (torch.randn(heads * (plain + value), rank, generator=random) / rank**0.5).to(dtype)
    q_nope, q_rope = q.split([plain, rotated], dim=2)
    return LatentCase(q_nope, q_rope, kv_b, PagedCache(blocks, KIND), _batch(table, counts, lengths, len(decodes)))


def make_index_case(decodes: Sequence[int] = (), prefills: Sequence[tuple[int, int]] = (), *, heads: int = 24, dim: int = 8,
                     block_size: int = 16, cache_dtype: torch.dtype = torch.float32, foreign: float = NAN,
                     seed: int = 0) -> IndexCase:  # fmt: skip
    """As make_case, of an indexer; of few heads many scores would be 0 and tie."""
    random = torch.Generator().manual_seed(seed)
    counts = [1] * len(decodes) + [num for num, _ in prefills]
    lengths = [*decodes, *(length for _, length in prefills)]
    blocks, table = _scatter(counts, lengths, torch.Size((dim,)), block_size, None, torch.float32, foreign, random)
    entries = to_index_entries(blocks.view(-1, dim), cache_dtype)
    q, weights = (torch.randn(sum(counts), heads, *more, generator=random) for more in ((dim,), ()))
    cache = PagedCache(entries.view(*blocks.shape[:2], -1), KIND)
    return IndexCase(q, weights, cache, _batch(table, counts, lengths, len(decodes)))


def choices(case: Any, top_k: int) -> Tensor:
    """`selected` i32[T, 1, top_k] of random tokens up to each query's own, all of them if they are no more."""
    rows, random = [], torch.Generator().manual_seed(0)
    for length, num in zip(case.batch.lengths.tolist(), case.batch.starts.diff().tolist(), strict=True):
        for seen in range(length - num + 1, length + 1):
            own = torch.randperm(seen, generator=random)[:top_k]
            rows.append(torch.nn.functional.pad(own, (0, top_k - len(own)), value=-1))
    return torch.stack(rows).int().unsqueeze(1)


def _batch(table: Tensor, counts: Sequence[int], lengths: Sequence[int], num_decodes: int) -> Batch:
    """Without slots."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return Batch({KIND: table}, {}, starts, torch.tensor(lengths, dtype=torch.int32), num_decodes)


def _scatter(counts: Sequence[int], lengths: Sequence[int], entry: torch.Size, block_size: int, window: int | None,
             dtype: torch.dtype, foreign: float, random: torch.Generator) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A cache [blocks, block size, *entry] with random entries where a query sees one, and its table."""
    widths = [-(-length // block_size) for length in lengths]
    blocks = 1 + torch.randperm(sum(widths), generator=random)
    cache = torch.full((1 + len(blocks), block_size, *entry), foreign, dtype=dtype)
    table = torch.zeros(len(lengths), max(widths, default=0), dtype=torch.int32)
    for row, (own, length, count) in enumerate(zip(blocks.split(widths), lengths, counts, strict=True)):
        first_seen = 0 if window is None else max(0, length - count - window + 1)
        entries = torch.randn(length, *entry, generator=random)
        for position in range(first_seen, length):
            block = table[row, position // block_size] = own[position // block_size]
            cache[block, position % block_size] = entries[position].to(cache.dtype)
    return cache, table


def change(case: Any, blocks: Tensor | None = None, table: Tensor | None = None, slots: Tensor | None = None,
           **fields: Any) -> Any:  # fmt: skip
    """The same with other blocks of its cache, another table, other slots, or other fields of its batch or its own."""
    own = {name: fields.pop(name) for name in case._fields if name in fields}
    if blocks is not None:
        own["cache"] = PagedCache(blocks, KIND)
    fields |= {name: {KIND: each} for name, each in (("tables", table), ("slot_mappings", slots)) if each is not None}
    return case._replace(**own, batch=case.batch._replace(**fields) if fields else case.batch)


def share(case: Any, groups: Sequence[tuple[int, list[int]]], spare: int = 1) -> Any:
    """The case in which these decodes begin with as many tokens of the first of them. spare: groups of nobody"""
    batch, block_size = case.batch, case.cache.blocks.shape[1]
    table, lengths = batch.tables[KIND].clone(), torch.zeros(batch.num_decodes).int()
    members = torch.full((batch.num_decodes,), 10**6).int()
    starts, blocks = [0], case.cache.blocks.clone()
    for length, rows in groups:
        assert length % PREFIX_MULTIPLE == length % block_size == 0
        for row in rows[1:]:
            blocks[table[row, : length // block_size]] = NAN
            table[row, : length // block_size] = table[rows[0], : length // block_size]
        lengths[rows] = length
        members[starts[-1] : starts[-1] + len(rows)] = torch.tensor(rows).int()
        starts.append(starts[-1] + len(rows))
    starts += [starts[-1]] * spare
    return change(case, blocks, table, prefixes=SharedPrefixes(KIND, lengths, members, torch.tensor(starts).int()))


def image_ends(case: Case, images: Sequence[tuple[int, int, int]]) -> Tensor:
    """The argument `ends` i32[T] of images, whose tokens see all of them. images: sequence, first and last position"""
    ends, batch = torch.full((len(case.q),), -1, dtype=torch.int32), case.batch
    for row, first, last in images:
        token = int(batch.starts[row + 1] - batch.lengths[row])  # that position 0 would have
        ends[max(token + first, int(batch.starts[row])) : token + last + 1] = last
    return ends


def move(case: Any, device: str) -> Any:
    """The same on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), case)


def widen(case: Any) -> Any:
    """The same with a cache of its own, numbers in place of NaN there, and all of float32: the truth for others."""
    case = tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, case)
    return change(case, case.cache.blocks.nan_to_num())


def reference(case: Case | LatentCase, *, wide: bool = False, **attributes: Any) -> Tensor:
    """The op's own body, which reads what it masks and so needs a number there; `wide`: on float32, the truth for bf16."""
    op = ops.paged_attention if isinstance(case, Case) else ops.paged_mla_attention
    return op.body(*(widen(case) if wide else change(case, case.cache.blocks.nan_to_num())), **attributes)

"""Attention ops: semantic (one whole sequence) and lowered (a paged cache)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.base import LOWERED, SEMANTIC, divide, op
from atom.graph.ops.dense import rms_norm
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need

FP8 = "fp8_e4m3"  # the dtype whose numbers have a scale
FP8_MAX = 448.0


@op(lambda x, *, heads: x.with_last(heads, divide(x.shape[-1], heads)), heads={"x": 1, "heads": None})
def split_heads(x: Tensor, *, heads: int) -> Tensor:
    """x [T, N * D] -> a view [T, N, D]"""
    *rows, width = x.shape
    return x.view(*rows, heads, width // heads)


@op(lambda x: Type(x.dtype, (x.shape[0], x.shape[1] * x.shape[2])))
def merge_heads(x: Tensor) -> Tensor:
    """x [T, N, D] -> [T, N * D]"""
    return x.flatten(1)


def _rotary(positions: Type, freqs: Type, *, scale: float = 1.0, growth: float = 0.0, period: int = 1,
            offset: int = 0, power: bool = False, every: int = 1) -> tuple[Type, Type]:  # fmt: skip
    made = Type("fp32", (*positions.shape, *freqs.shape))
    return made, made


@op(_rotary)
def rotary(positions: Tensor, freqs: Tensor, *, scale: float = 1.0, growth: float = 0.0, period: int = 1,
           offset: int = 0, power: bool = False, every: int = 1) -> tuple[Tensor, Tensor]:  # fmt: skip
    """positions i64[T], freqs fp32[D / 2] -> cos, sin fp32[T, D / 2], both times scale

    growth: and times 1 + growth * ln(1 + (position + offset) // period), as for queries of Llama 4 (Meta 2025).
    power: instead times (1 + (position + offset) / period) ** growth, as for queries of Beam (Reflection AI 2026).
    every: angles of the position of the first token of each token's run of so many, see `compress`
    """
    angles = (positions // every * every).float().unsqueeze(-1) * freqs
    cos, sin = angles.cos() * scale, angles.sin() * scale
    if not growth:
        return cos, sin
    counted = (positions + offset).unsqueeze(-1)
    if power:
        grown = torch.exp(growth * torch.log1p(counted / period))
    else:
        grown = 1.0 + growth * torch.log1p((counted // period).float())
    return cos * grown, sin * grown


def _rope(x: Type, cos: Type, sin: Type, *, interleaved: bool = False) -> Type:
    need(cos == sin, f"cos is {cos}, sin {sin}")
    need(2 * int(cos.shape[-1]) <= int(x.shape[-1]), f"{2 * int(cos.shape[-1])} rotated dims in heads of {x.shape[-1]}")
    return x


@op(_rope)
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [T, N, D], cos and sin fp32[T, P] -> [T, N, D] (Su et al. 2021)

    Dim i is rotated with i + P, or 2 i with 2 i + 1 if they are interleaved; the dims from 2 P on stay.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated, rest = torch.split(x.float(), [2 * half, x.shape[-1] - 2 * half], dim=-1)
    first, second = rotated.reshape(*x.shape[:-1], half, 2).unbind(-1) if interleaved else rotated.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, rest), dim=-1).to(x.dtype)


def _scale_by_position(q: Type, positions: Type, scale: Type, bias: Type) -> Type:
    need(scale.shape == bias.shape == q.shape[1:2], f"scale {scale} and bias {bias} of heads {q}")
    need(positions.shape == q.shape[:1], f"positions are {positions} for q {q}")
    return q


@op(_scale_by_position, heads={"q": 1, "scale": 0, "bias": 0})
def scale_by_position(q: Tensor, positions: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """q [T, N, D], positions i64[T], scale and bias [N] -> q times scale * ln(position + 1) + bias, [T, N, D]

    Scalable-Softmax (Nakanishi 2025), which keeps attention as sharp over more tokens; in float32, rounded once.
    """
    factors = scale.float() * (positions + 1).float().log().unsqueeze(-1) + bias.float()
    return (q.float() * factors.unsqueeze(-1)).to(q.dtype)


def causal_mask(
    num_queries: int,
    num_keys: int,
    window: int | None,
    device: torch.device,
    chunked: bool = False,
    ends: Tensor | None = None,
) -> Tensor:
    """bool[num_queries, num_keys], the last query at the last key; true if the query sees the key.

    chunked: a query sees the keys from a multiple of the window on, not as many as the window has
    ends: i32[num_queries], as in `attention`
    """
    queries = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    mask = keys <= (queries if ends is None else torch.maximum(queries, ends.unsqueeze(1)))
    if window is None:
        return mask
    return mask & (keys >= queries // window * window if chunked else keys > queries - window)


def chosen_mask(selected: Tensor, num_keys: int, block: int = 1) -> Tensor:
    """bool[Q, G, num_keys] of selected i32[Q, G, k]; true of what is chosen. block: keys that an entry stands for"""
    num_entries = -(-num_keys // block)
    chosen = selected.new_zeros(*selected.shape[:2], num_entries + 1, dtype=torch.bool)
    places = torch.where(selected < 0, num_entries, selected).long()
    chosen = chosen.scatter_(2, places, True)[..., :num_entries]
    return chosen if block == 1 else chosen.repeat_interleave(block, 2)[..., :num_keys]


def runs_mask(num_queries: int, length: int, every: int, device: torch.device) -> Tensor:
    """bool[num_queries, length // every], the last query at the last position; true of runs that have ended by then"""
    ended = (torch.arange(length - num_queries, length, device=device) + 1) // every
    return torch.arange(length // every, device=device) < ended.unsqueeze(1)


def need_every(cache: KV, every: int) -> None:
    need((cache.every or 1) == every, f"runs are of {every} tokens, the cache keeps an entry for {cache.every or 1}")


def need_selected(selected: Type | None, q: Type) -> None:
    if selected is None:
        return
    need(selected.dtype == "i32" and len(selected.shape) == 3, f"what is selected is {selected}, not i32[T, G, k]")
    need(selected.shape[0] == q.shape[0], f"what is selected is {selected} for q {q}")
    divide(q.shape[1], int(selected.shape[1]))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
           sinks: Tensor | None = None, slopes: Tensor | None = None, chunked: bool = False,
           ends: Tensor | None = None, selected: Tensor | None = None, block: int = 1) -> Tensor:  # fmt: skip
    """One sequence: q [Q, N, D] at the last Q of L positions, k [L, K, D], v [L, K, U] -> [Q, N, U], in float32.

    A sink is a score [N] that takes part in the softmax and has no value (Agarwal et al. 2025). A slope fp32[N] lowers
    scores by the distance of query and key (Press et al. 2022). ends i32[Q]: as in `attention`. selected i32[Q, G, k]:
    the positions that each of G equal groups of heads attends to, or the numbers of their blocks, then -1.
    """
    num_queries, heads, dim = q.shape
    grouped = q.float().view(num_queries, k.shape[1], -1, dim)  # N / K query heads share a key/value head
    scores = torch.einsum("qkgd,lkd->kgql", grouped, k.float()) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        newest = torch.arange(k.shape[0] - num_queries, k.shape[0], device=q.device).unsqueeze(1)
        distances = newest - torch.arange(k.shape[0], device=q.device)
        scores = scores - slopes.view(k.shape[1], -1, 1, 1) * distances
    mask = causal_mask(num_queries, k.shape[0], window, q.device, chunked, ends)
    scores.masked_fill_(~mask, float("-inf"))
    if selected is not None:
        chosen = chosen_mask(selected, k.shape[0], block).transpose(0, 1).unsqueeze(1)
        by_group = scores.reshape(len(chosen), heads // len(chosen), num_queries, k.shape[0])
        scores = by_group.masked_fill(~chosen, float("-inf")).view_as(scores)
    if sinks is not None:
        column = sinks.float().view(k.shape[1], -1, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("kgql,lkd->qkgd", shares, v.float()).reshape(num_queries, heads, v.shape[2]).to(q.dtype)


def need_window(cache: KV, window: int | None, chunked: bool) -> None:
    need(cache.every is None, f"the cache keeps an entry for {cache.every} tokens, not for each")
    need(not chunked or window is not None, "chunks have the size of the window, which is none")
    need(cache.window is None or (window is not None and window <= cache.window),
          f"a query sees {window or 'all'} tokens, the cache keeps {cache.window}")  # fmt: skip


def need_sinks(sinks: Type | None, q: Type) -> None:
    need(sinks is None or sinks.shape == (q.shape[1],), f"the sinks are {sinks} for q {q}")


def _slopes(slopes: Type | None, q: Type) -> None:
    need(slopes in (None, Type("fp32", (q.shape[1],))), f"the slopes are {slopes} for q {q}")


def _ends(ends: Type | None, q: Type, slopes: Type | None) -> None:
    need(ends in (None, Type("i32", q.shape[:1])), f"the ends are {ends} for q {q}")
    need(ends is None or slopes is None, "scores that fall with the distance are of tokens before a query")


def _selected(selected: Type | None, q: Type, cache: KV, window: int | None, slopes: Type | None, ends: Type | None,
              block: int) -> None:  # fmt: skip
    need_selected(selected, q)
    if selected is None:
        return
    divide(cache.type.shape[1], int(selected.shape[1]))
    need(block >= 1, f"a block of {block} positions")
    need(window is None and slopes is ends is None, "queries that choose what they see have no window, slopes and ends")


def need_scales(cache: KV, *scales: Type | None) -> None:
    for scale in scales:
        need(scale is None or cache.type.dtype == FP8, f"a scale of entries in {FP8}, the cache keeps {cache.type}")
        need(scale in (None, Type("fp32", (1,))), f"a scale of entries is {scale}, not fp32[1]")


def _attention(q: Type, k: Type, v: Type, cache: KV, sinks: Type | None = None, k_scale: Type | None = None,
               v_scale: Type | None = None, slopes: Type | None = None, ends: Type | None = None,
               selected: Type | None = None, *, scale: float, window: int | None = None, softcap: float | None = None,
               chunked: bool = False, block: int = 1) -> Type:  # fmt: skip
    need_window(cache, window, chunked)
    need_sinks(sinks, q)
    _slopes(slopes, q)
    _ends(ends, q, slopes)
    _selected(selected, q, cache, window, slopes, ends, block)
    need_scales(cache, k_scale, v_scale)
    tokens, heads, dim = q.shape
    need(k == v and k.shape[0] == tokens and k.shape[2] == dim, f"q is {q}, k {k}, v {v}")
    divide(heads, int(k.shape[1]))
    need(cache.type.shape == (2, *k.shape[1:]), f"the cache keeps {cache.type} of k {k}")
    return q


@op(_attention, level=SEMANTIC)
def attention(q: Tensor, k: Tensor, v: Tensor, cache: PagedCache | None, sinks: Tensor | None = None,
              k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
              ends: Tensor | None = None, selected: Tensor | None = None, *, scale: float, window: int | None = None,
              softcap: float | None = None, chunked: bool = False, block: int = 1) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D], sinks [N], slopes fp32[N] -> [T, N, D], causal: the T tokens are one sequence.

    A query sees the window's tokens up to its own, or, chunked, those from a multiple of the window on. The cache,
    where a lowered graph keeps k and v, is not touched, and so the scales of its entries are not needed.

    ends: i32[T], the last position that a query sees if it is after its own, as those of an image's tokens are that
        see all of it; -1 for others
    selected: i32[T, G, k], blocks of `block` positions that the query sees, for each of G groups of key/value heads
        those that an indexer chose, see block_sparse.py; None: all
    """
    return attend(q, k, v, scale, window, softcap, sinks, slopes, chunked, ends, selected, block)


def need_batch(batch: BatchType) -> None:
    need(isinstance(batch, BatchType), f"{batch} is no Batch")


def _norm_rope(q: Type, k: Type, cos: Type | None, sin: Type | None, q_norm: Type | None, k_norm: Type | None, *,
               eps: float = 0.0, interleaved: bool = False) -> tuple[Type, Type]:  # fmt: skip
    need(q.shape[::2] == k.shape[::2], f"q is {q}, k {k}")
    return q, k


@op(_norm_rope)
def norm_rope(q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
              k_norm: Tensor | None, *, eps: float = 0.0,
              interleaved: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norm and rotate q [T, N, D] and k [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D] -> both"""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps=eps), rms_norm(k, k_norm, eps=eps)
    if cos is not None and sin is not None:
        q, k = (rope(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return q, k


def _norm_rope_write(q: Type, k: Type, v: Type, cos: Type | None, sin: Type | None, q_norm: Type | None,
                     k_norm: Type | None, cache: KV, batch: BatchType, k_scale: Type | None = None,
                     v_scale: Type | None = None, *, eps: float = 0.0, interleaved: bool = False) -> Type:  # fmt: skip
    need_batch(batch)
    need(cache.type.shape == (2, *k.shape[1:]), f"the cache keeps {cache.type} of k {k}")
    need_scales(cache, k_scale, v_scale)
    return q


@op(_norm_rope_write, level=LOWERED, state=True)
def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None,
                    v_scale: Tensor | None = None, *, eps: float = 0.0,
                    interleaved: bool = False) -> Tensor:  # fmt: skip
    """Norm and rotate q and k, write k and v to the cache, give q.

    q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D], cache [blocks, block size, 2, K, D],
    k_scale and v_scale fp32[1], of entries in fp8, see `to_entry` -> q [T, N, D]
    """
    q, k = norm_rope(q, k, cos, sin, q_norm, k_norm, eps=eps, interleaved=interleaved)
    dtype = cache.blocks.dtype
    write_entries(cache, batch, torch.stack((to_entry(k, dtype, k_scale), to_entry(v, dtype, v_scale)), dim=1))
    return q


def to_entry(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """x as a cache of this dtype keeps it: in fp8 over its scale (None: 1) and at most 448, since that has no inf."""
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    scaled = x.float() if scale is None else x.float() / scale
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def write_entries(cache: PagedCache, batch: Batch, entries: Tensor, every: int = 1) -> None:
    """Entries [T, …] in the cache's dtype, to the slots of the batch's tokens.

    every: tokens that have an entry together, which is that of the last of them; what other tokens have is not kept
    """
    slots = batch.slot_mappings[cache.kind]
    if every > 1:  # of tokens, while the cache has slots of entries
        size = batch.block_size
        block, place = slots // size, slots % size
        at = block * cache.blocks.shape[1] + place // every
        slots = torch.where((place + 1) % min(every, size) == 0, at, 0)  # block 0 is padding's
    blocks = cache.blocks.view(-1, *entries.shape[1:])
    if entries.dtype is torch.float8_e4m3fn:  # which torch cannot copy by index
        blocks, entries = blocks.view(torch.uint8), entries.view(torch.uint8)
    blocks.index_copy_(0, slots, entries)


def _paged_attention(q: Type, cache: KV, batch: BatchType, sinks: Type | None = None, k_scale: Type | None = None,
                     v_scale: Type | None = None, slopes: Type | None = None, ends: Type | None = None,
                     selected: Type | None = None, *, scale: float, window: int | None = None,
                     softcap: float | None = None, chunked: bool = False, block: int = 1) -> Type:  # fmt: skip
    need_batch(batch)
    need_window(cache, window, chunked)
    need_sinks(sinks, q)
    _slopes(slopes, q)
    _ends(ends, q, slopes)
    _selected(selected, q, cache, window, slopes, ends, block)
    need_scales(cache, k_scale, v_scale)
    need(len(q.shape) == 3 and q.shape[2] == cache.type.shape[2], f"q is {q}, the cache keeps {cache.type}")
    return q


@op(_paged_attention, level=LOWERED)
def paged_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                    k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                    ends: Tensor | None = None, selected: Tensor | None = None, *, scale: float,
                    window: int | None = None, softcap: float | None = None, chunked: bool = False,
                    block: int = 1) -> Tensor:  # fmt: skip
    """Attention of a batch's sequences over the blocks that their rows of the table list.

    Rows of several tokens may list blocks that other rows of the batch write, so all entries are written before.

    q [T, N, D], cache [blocks, block size, 2, K, D], sinks [N], k_scale and v_scale fp32[1], which
    multiply entries in fp8, slopes fp32[N] -> [T, N, D]

    ends: i32[T], as in `attention`; those of decodes are not read. None, also of a text that names some: all are -1
    selected: i32[T, G, k], as in `attention`
    """
    out = torch.zeros_like(q)
    for own, entries in cached_entries(cache, batch):
        keys, values = (
            each if scale_of is None else each.float() * scale_of
            for each, scale_of in zip(entries.unbind(1), (k_scale, v_scale), strict=True)
        )
        own_ends, chosen = (None if each is None else each[own] for each in (ends, selected))
        rules = scale, window, softcap, sinks, slopes, chunked
        out[own] = attend(q[own], keys, values, *rules, own_ends, chosen, block)
    return out


def cached_entries(cache: PagedCache, batch: Batch) -> Iterator[tuple[slice, Tensor]]:
    """Of each sequence that has queries: these, among the batch's tokens, and its entries in the cache."""
    for row, own in queried(batch):
        yield own, entries_of(cache, batch, row)


def queried(batch: Batch) -> Iterator[tuple[int, slice]]:
    """The sequences that have queries, each by its row, and its queries among the batch's tokens.

    A row that pads a step, as one of a group with fewer sequences than others, has tokens but no length.
    """
    lengths = batch.lengths.tolist()  # of slots, which may be more than rows
    rows = zip(itertools.pairwise(batch.starts.tolist()), lengths, strict=False)
    for row, ((first, last), length) in enumerate(rows):
        if first < last and length:
            yield row, slice(first, last)


def entries_of(cache: PagedCache, batch: Batch, row: int, first: int = 0, every: int = 1) -> Tensor:
    """The entries of the sequence of a row in the cache, from number `first` on.

    every: tokens that have an entry together. If these are more than a place in the table is for, the block with the
      entry is at the place of the last of them
    """
    size, stop = cache.blocks.shape[1], int(batch.lengths[row]) // every
    stride = max(every // batch.block_size, 1) if every > 1 else 1
    blocks = batch.tables[cache.kind][row, stride - 1 :: stride][first // size : -(-stop // size)]
    stored = cache.blocks
    if stored.dtype is torch.float8_e4m3fn:  # which not every torch can index on a CPU
        stored = stored.view(torch.uint8)
    return stored[blocks].view(cache.blocks.dtype).flatten(0, 1)[first % size :][: max(stop - first, 0)]

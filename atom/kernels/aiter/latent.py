"""Absorbed latent attention over a paged cache, by AITER's Triton kernels (DeepSeek-AI 2024).

    out = paged_mla_attention(aiter, q_nope, q_rope, kv_b, cache, batch, scale=0.1)

Queries times the key rows of kv_b attend over the cache's entries themselves, one key/value head whose values are the
first L dims of its keys, and the sums are multiplied by the value rows. AITER's Triton kernels read the batch's table
and lengths on the device, so a CUDA graph can capture them. The assembly kernels (`aiter.mla`) need a list of all
cached tokens' pages, and are not called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.kernels.aiter.functions import Aiter

ABSORBED_BYTES = 128 << 20  # of a prefill's absorbed queries at once; at least one head's
MAX_PAGE = 32  # tokens that AITER's kernels load at once: with more, 512 dims exceed the registers of an AMD GPU


class _Sequences(NamedTuple):
    """Consecutive sequences."""

    starts: Tensor  # i32[S + 1], from 0
    lengths: Tensor  # i32[S]
    table: Tensor  # i32[S, M]


def paged_mla_attention(aiter: Aiter, q_nope: Tensor, q_rope: Tensor, kv_b: Tensor, cache: PagedCache, batch: Batch,
                        k_scale: Tensor | None = None, *, scale: float) -> Tensor:  # fmt: skip
    """Shapes as in the op, k_scale is None. Tokens of no sequence, and sequences without positions, get zeros."""
    (tokens, heads, plain), rank = q_nope.shape, kv_b.shape[1]
    pages, table = split_pages(cache.blocks, batch.tables[cache.kind])
    weight = kv_b.view(heads, -1, rank)
    out = q_nope.new_empty(tokens, heads, weight.shape[1] - plain)
    num_decodes = batch.num_decodes
    num_queries = num_decodes * batch.query_len
    if num_decodes:
        some = slice(0, num_queries)
        sequences = _Sequences(batch.starts[: num_decodes + 1], batch.lengths[:num_decodes], table[:num_decodes])
        sums = q_nope.new_empty(num_queries, heads, rank)
        _attend(aiter["latent_decode"], q_nope[some], q_rope[some], weight, pages, sequences, scale, sums)
        # versions differ in the output for a sequence without positions
        sums.view(num_decodes, -1).masked_fill_((sequences.lengths == 0).unsqueeze(1), 0.0)
        _multiply_values(sums, weight, out[some])
    if tokens > num_queries:
        rest = slice(num_queries, tokens)
        sequences = _Sequences(
            batch.starts[num_decodes:] - num_queries, batch.lengths[num_decodes:], table[num_decodes:]
        )
        at_once = max(1, ABSORBED_BYTES // ((tokens - num_queries) * rank * q_nope.element_size()))
        for first in range(0, heads, at_once):
            own = slice(first, first + at_once)
            sums = q_nope.new_zeros(tokens - num_queries, len(weight[own]), rank)
            _attend(aiter["latent_prefill"], q_nope[rest, own], q_rope[rest, own], weight[own], pages, sequences,
                    scale, sums)  # fmt: skip
            _multiply_values(sums, weight[own], out[rest, own])
    return out


def split_pages(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [blocks, block size, E] and i32[S, M] -> [pages, page size, 1, E] and i32[S, pages of the longest].

    AITER takes pages of a power of two tokens.
    """
    size = blocks.shape[1]
    page = math.gcd(size, MAX_PAGE)
    pages = blocks.view(-1, page, 1, blocks.shape[2])
    if page == size:
        return pages, table
    places = torch.arange(size // page, dtype=table.dtype, device=table.device)
    return pages, (table.unsqueeze(2) * len(places) + places).flatten(1)


def _attend(function: Callable[..., Any], q_nope: Tensor, q_rope: Tensor, weight: Tensor, pages: Tensor,
            sequences: _Sequences, scale: float, sums: Tensor) -> None:  # fmt: skip
    """q_nope [T, N, P], q_rope [T, N, R], weight [N, P + U, L] -> sums [T, N, L] of entries, by one of AITER's"""
    (tokens, heads, plain), rank, rotated = q_nope.shape, weight.shape[2], q_rope.shape[2]
    q = q_nope.new_empty(tokens, heads, rank + rotated)
    torch.bmm(q_nope.transpose(0, 1), weight[:, :plain], out=q[..., :rank].transpose(0, 1))
    q[..., rank:] = q_rope
    starts, lengths, table = sequences
    # the host knows only a bound of the longest, which affects the number of splits, not the result
    function(
        q, pages, sums, starts, lengths, table.shape[1] * pages.shape[1], table, scale, rank, rotated, True, None, None
    )


def _multiply_values(sums: Tensor, weight: Tensor, out: Tensor) -> None:
    """Sums of entries [T, N, L], weight [N, P + U, L] -> of values, out [T, N, U]"""
    torch.bmm(sums.transpose(0, 1), weight[:, -out.shape[2] :].mT, out=out.transpose(0, 1))

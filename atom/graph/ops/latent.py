"""Ops of multi-head latent attention (DeepSeek-AI 2024).

A token has one latent entry for all heads, which is expanded or absorbed.

Shapes by letter: L latent dims, P dims of a head without position, R rotated ones, U dims of a value, E of an entry:
L + R, or in fp8 the L bytes of the latent and those of the rotated key, which stays in the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import (
    FP8,
    attend,
    entries_of,
    need_batch,
    need_scales,
    need_selected,
    need_sinks,
    need_window,
    queried,
    rope,
    to_entry,
    write_entries,
)  # fmt: skip
from atom.graph.ops.base import LOWERED, SEMANTIC, divide, op
from atom.graph.ops.dense import rms_norm
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need


def latent_entry(cache_dtype: str, dtype: str, rank: int, rotated: int) -> Type:
    """The type of a token's entry, of a model in `dtype`."""
    if cache_dtype != FP8:
        return Type(cache_dtype, (rank + rotated,))
    size = Type(dtype, (1,)).num_bytes
    return Type(FP8, (find_keys(rank, size) + rotated * size,))


def find_keys(rank: int, size: int) -> int:
    """The byte offset of the rotated key, which follows an fp8 latent: a multiple of its numbers' size."""
    return -(-rank // size) * size


def join_entries(latent: Tensor, k_rope: Tensor, dtype: torch.dtype, k_scale: Tensor | None = None) -> Tensor:
    """latent [T, L] and k_rope [T, R] -> entries [T, E] as a cache of this dtype keeps them"""
    if dtype is not torch.float8_e4m3fn:
        return torch.cat((latent, k_rope), dim=-1).to(dtype)
    rank = latent.shape[-1]
    latent = F.pad(to_entry(latent, dtype, k_scale).view(torch.uint8), (0, find_keys(rank, k_rope.itemsize) - rank))
    return torch.cat((latent, k_rope.contiguous().view(torch.uint8)), dim=-1).view(dtype)


def split_entries(
    entries: Tensor, rank: int, dtype: torch.dtype, k_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """entries [C, E] of a model in `dtype` -> latent [C, L] and k_rope [C, R]"""
    latent = entries[:, :rank]
    if entries.dtype is not torch.float8_e4m3fn:
        return latent, entries[:, rank:]
    k_rope = entries[:, find_keys(rank, dtype.itemsize) :].view(dtype)
    return latent.float() if k_scale is None else latent.float() * k_scale, k_rope


def attend_latent(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, scale: float,
                  selected: Tensor | None = None, sinks: Tensor | None = None,
                  window: int | None = None) -> Tensor:  # fmt: skip
    """One sequence, its latents expanded to keys and values (DeepSeek-AI 2024, section 2.1); more: as in `attend`

    q_nope [Q, N, P] and q_rope [Q, N, R] at the last Q of C positions, latent [C, L], k_rope [C, R], kv_b [N (P + U),
    L] -> [Q, N, U]
    """
    heads, plain = q_nope.shape[1:]
    expanded = F.linear(latent.to(kv_b.dtype), kv_b).view(len(latent), heads, len(kv_b) // heads)
    rotated = k_rope.to(kv_b.dtype).unsqueeze(1).expand(-1, heads, -1)
    keys = torch.cat((expanded[..., :plain], rotated), dim=-1)
    q, values = torch.cat((q_nope, q_rope), dim=-1), expanded[..., plain:]
    return attend(q, keys, values, scale, window, sinks=sinks, selected=selected)


def _latent(q_nope: Type, q_rope: Type, kv_b: Type, cache: KV, k_scale: Type | None, selected: Type | None,
            sinks: Type | None, window: int | None) -> Type:  # fmt: skip
    """The type of latent attention's result [T, N, U]."""
    need_scales(cache, k_scale)
    need_selected(selected, q_nope)
    need_sinks(sinks, q_nope)
    need_window(cache, window, chunked=False)
    need(selected is None or window is None, "queries that choose what they see have no window")
    (tokens, heads, plain), rank = q_nope.shape, int(kv_b.shape[1])
    need(q_rope.shape[:2] == (tokens, heads), f"q without position is {q_nope}, rotated {q_rope}")
    entry = latent_entry(cache.type.dtype, q_rope.dtype, rank, int(q_rope.shape[2]))
    need(cache.type == entry, f"the cache keeps {cache.type} of {rank} latent dims, not {entry}")
    value = divide(kv_b.shape[0], int(heads)) - int(plain)
    need(value > 0, f"kv_b is {kv_b} for q {q_nope}")
    return Type(q_nope.dtype, (tokens, heads, value))


def _mla_attention(q_nope: Type, q_rope: Type, latent: Type, k_rope: Type, kv_b: Type, cache: KV,
                   k_scale: Type | None = None, selected: Type | None = None, sinks: Type | None = None, *,
                   scale: float, window: int | None = None) -> Type:  # fmt: skip
    need(latent.shape[-1] == kv_b.shape[1], f"the latent is {latent}, kv_b {kv_b}")
    need(k_rope.shape == (q_rope.shape[0], 1, q_rope.shape[2]), f"q is {q_rope}, its key {k_rope}")
    return _latent(q_nope, q_rope, kv_b, cache, k_scale, selected, sinks, window)


@op(_mla_attention, level=SEMANTIC, weight=4)
def mla_attention(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor,
                  cache: PagedCache | None, k_scale: Tensor | None = None, selected: Tensor | None = None,
                  sinks: Tensor | None = None, *, scale: float, window: int | None = None) -> Tensor:  # fmt: skip
    """Multi-head latent attention (DeepSeek-AI 2024), causal: the T tokens are one whole sequence.

    q_nope [T, N, P], q_rope [T, N, R], latent [T, L], k_rope [T, 1, R], kv_b [N (P + U), L] -> [T, N, U]; the cache,
    where a lowered graph keeps latent and k_rope, is not touched, and so the scale of its latents is not needed.

    selected: i32[T, G, k], the positions that each query attends to, see sparse.py; None: all up to its own
    sinks: [N], as in `attention`
    window: tokens that a query sees, its own included; None: all
    """
    return attend_latent(q_nope, q_rope, latent, k_rope.squeeze(1), kv_b, scale, selected, sinks, window)


def _norm_rope_write_latent(q_rope: Type, latent: Type, k_rope: Type, cos: Type | None, sin: Type | None,
                            norm: Type | None, cache: KV, batch: BatchType, k_scale: Type | None = None, *,
                            eps: float = 0.0, interleaved: bool = False) -> Type:  # fmt: skip
    need_batch(batch)
    need_scales(cache, k_scale)
    entry = latent_entry(cache.type.dtype, k_rope.dtype, int(latent.shape[-1]), int(k_rope.shape[-1]))
    need(cache.type == entry, f"the cache keeps {cache.type} of {latent} and {k_rope}")
    return q_rope


@op(_norm_rope_write_latent, level=LOWERED, state=True)
def norm_rope_write_latent(q_rope: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None,
                           norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None, *,
                           eps: float = 0.0, interleaved: bool = False) -> Tensor:  # fmt: skip
    """Norm the latent, rotate q_rope and k_rope, write latent and k_rope to the cache, give q_rope.

    q_rope [T, N, R], latent [T, L], k_rope [T, 1, R], cos and sin fp32[T, R / 2], norm [L], cache [blocks, block size,
    E], k_scale fp32[1], of latents in fp8, see `to_entry` -> q_rope [T, N, R]
    """
    if norm is not None:
        latent = rms_norm(latent, norm, eps=eps)
    if cos is not None and sin is not None:
        q_rope, k_rope = (rope(x, cos, sin, interleaved=interleaved) for x in (q_rope, k_rope))
    write_entries(cache, batch, join_entries(latent, k_rope.squeeze(1), cache.blocks.dtype, k_scale))
    return q_rope


def _paged_mla_attention(q_nope: Type, q_rope: Type, kv_b: Type, cache: KV, batch: BatchType,
                         k_scale: Type | None = None, selected: Type | None = None, sinks: Type | None = None, *,
                         scale: float, window: int | None = None) -> Type:  # fmt: skip
    need_batch(batch)
    return _latent(q_nope, q_rope, kv_b, cache, k_scale, selected, sinks, window)


@op(_paged_mla_attention, level=LOWERED, weight=2)
def paged_mla_attention(q_nope: Tensor, q_rope: Tensor, kv_b: Tensor, cache: PagedCache, batch: Batch,
                        k_scale: Tensor | None = None, selected: Tensor | None = None, sinks: Tensor | None = None, *,
                        scale: float, window: int | None = None) -> Tensor:  # fmt: skip
    """Latent attention of a batch's sequences over the blocks that their rows of the table list.

    Rows of several tokens may list blocks that other rows of the batch write, so all entries are written before.

    q_nope [T, N, P], q_rope [T, N, R], kv_b [N (P + U), L], cache [blocks, block size, E], k_scale fp32[1], which
    multiplies latents in fp8, selected i32[T, G, k] and sinks [N], as in `mla_attention` -> [T, N, U]
    """
    out = q_nope.new_zeros(*q_nope.shape[:2], kv_b.shape[0] // q_nope.shape[1] - q_nope.shape[2])
    for row, own in queried(batch):
        before = 0 if window is None else max(int(batch.lengths[row]) - (own.stop - own.start) - window + 1, 0)
        entries = entries_of(cache, batch, row, before)
        parts = split_entries(entries, kv_b.shape[1], q_rope.dtype, k_scale)
        chosen = None if selected is None else selected[own]
        out[own] = attend_latent(q_nope[own], q_rope[own], *parts, kv_b, scale, chosen, sinks, window)
    return out

"""Absorbed latent attention to chosen entries (DeepSeek-AI 2025, DeepSeek Sparse Attention).

    sums, weights = attend_chosen(q, q_rope, cache, keys, k_scale, rows, selected, sinks, scale, tiles)    # `Sums`

A program has some heads of one token, which share what the token chose. It gathers tiles of these entries, by slots
that another launch has looked up. Of few tokens each is split over its entries.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import NOTHING, begin_softmax, wait_for_inputs
from atom.kernels.triton.attention.rows import Rows, count_seen
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

MIN_PART = 128  # entries of a split


def attend_chosen(q: Tensor, q_rope: Tensor, cache: Tensor, keys: Tensor, k_scale: Tensor | None, rows: Rows,
                  selected: Tensor, sinks: Tensor | None, scale: float,
                  tiles: tuple[int, int, int, int]) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Absorbed queries q [N, R, L] and q_rope [R, N, P], selected i32[R, k] -> sums of entries [N, R, L], None; or of
    parts fp32[splits, N, R, L], and the log2 of what each weighs fp32[splits, N, R].

    cache and keys [blocks, block size, E]: one memory, as latents and as rotated keys are read
    sinks: [N], scores without a value
    tiles: heads and entries of a program's tile, warps and stages
    """
    (heads, num, rank), (_, top_k), gpu = q.shape, selected.shape, find_gpu(q.device)
    assert q_rope.stride(2) == 1 and q.is_contiguous(), "rows have gaps"
    block_m, block_n, num_warps, num_stages = tiles
    block_l, block_r = (max(16, next_power_of_2(dim)) for dim in (rank, q_rope.shape[2]))
    num_tiles = num * -(-heads // block_m)
    num_splits = max(1, min(gpu.units // num_tiles, top_k // MIN_PART))
    sums, weights = torch.empty_like(q), None
    if num_splits > 1:
        sums = q.new_empty(num_splits, *q.shape, dtype=torch.float32)
        weights = q.new_empty(num_splits, heads, num, dtype=torch.float32)
    slots, counts = find_slots(selected, rows, cache.shape[1])
    _chosen_kernel[(num_tiles, num_splits)](
        q, q_rope, cache, keys, k_scale, slots, counts, sinks, sums, weights, num, num_splits,
        scale * math.log2(math.e), q_rope.stride(0), q_rope.stride(1), HEADS=heads, RANK=rank,
        ROTATED=q_rope.shape[2], ENTRY=cache.shape[2], KEY_ENTRY=keys.shape[2], TOP_K=top_k,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_L=block_l, BLOCK_R=block_r, num_warps=num_warps, num_stages=num_stages,
        **gpu.options,
    )  # fmt: skip
    return sums, weights


def find_slots(selected: Tensor, rows: Rows, block_size: int) -> tuple[Tensor, Tensor]:
    """selected i32[R, k] -> where in the cache these entries are i32[R, k], the first i32[R] of each token"""
    num, top_k = selected.shape
    assert selected.stride(1) == 1, "rows have gaps"
    slots = torch.empty(num, top_k, dtype=torch.int32, device=selected.device)
    counts = torch.empty(num, dtype=torch.int32, device=selected.device)
    _slots_kernel[(num,)](
        selected, rows.table, rows.starts, rows.lengths, slots, counts, len(rows.lengths), rows.first,
        rows.table.stride(0), selected.stride(0), BLOCK_SIZE=block_size, QUERIES=rows.queries, TOP_K=top_k,
        BLOCK_S=rows.bucket, BLOCK_K=next_power_of_2(top_k), num_warps=4, **find_gpu(selected.device).options,
    )  # fmt: skip
    return slots, counts


@jit(
    do_not_specialize=["num_sequences", "first_token", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _slots_kernel(selected, table, starts, lengths, slots, counts, num_sequences, first_token, table_stride,
                  chosen_stride, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TOP_K: tl.constexpr,
                  BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Where in the cache the entries are that a token chose, selected i32[T, TOP_K], and how many, counts i32[T]."""
    wait_for_inputs(PDL)
    token, numbers = tl.program_id(0), tl.arange(0, BLOCK_K)
    sequence, seen = count_seen(starts, lengths, num_sequences, first_token + token, QUERIES, BLOCK_S, 1)
    is_number = numbers < TOP_K
    positions = tl.load(selected + token.to(tl.int64) * chosen_stride + numbers, mask=is_number, other=-1)
    is_chosen = (positions >= 0) & (positions < seen)
    block = tl.load(table + sequence.to(tl.int64) * table_stride + positions // BLOCK_SIZE, mask=is_chosen, other=0)
    slot = tl.where(is_chosen, block * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
    tl.store(slots + token.to(tl.int64) * TOP_K + numbers, slot, mask=is_number)
    tl.store(counts + token, tl.sum(is_chosen.to(tl.int32), 0))


@jit(do_not_specialize=["num_tokens", "num_splits"])
def _chosen_kernel(q, q_rope, cache, keys, k_scale, slots, counts, sinks, out, weights, num_tokens, num_splits, scale,
                   q_stride, head_stride, HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr,
                   ENTRY: tl.constexpr, KEY_ENTRY: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some heads of a token over what it chose or, with weights fp32[splits, N, T], a part of that.

    q [N, T, L] -> out [N, T, L], or parts fp32[splits, N, T, L] and the log2 of what each weighs. cache and keys: one
    memory, entries as ENTRY numbers of latents, and as KEY_ENTRY of rotated keys. slots i32[T, TOP_K], the first
    counts i32[T] of a token are chosen
    """
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    wait_for_inputs(PDL)
    tiles_each: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    token = tl.program_id(0) // tiles_each
    heads = tl.program_id(0) % tiles_each * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = heads < HEADS
    stop = tl.load(counts + token)
    part = tl.cdiv(stop, num_splits * BLOCK_N) * BLOCK_N
    start = tl.program_id(1) * part
    stop = tl.minimum(stop, start + part)
    places = heads.to(tl.int64) * num_tokens + token
    out_places = places
    if weights is not None:
        out_places += tl.program_id(1).to(tl.int64) * HEADS * num_tokens
        if start >= stop:
            tl.store(weights + out_places, tl.full([BLOCK_M], NOTHING, tl.float32), mask=is_head)
            return

    columns, dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    is_value = is_head[:, None] & (columns < RANK)[None, :]
    q_latents = tl.load(q + places[:, None] * RANK + columns[None, :], mask=is_value, other=0.0)
    if ROTATED > 0:
        rope_rows = q_rope + token.to(tl.int64) * q_stride + heads[:, None] * head_stride
        q_rotated = tl.load(rope_rows + dims[None, :], mask=is_head[:, None] & (dims < ROTATED)[None, :], other=0.0)

    best, total = begin_softmax(sinks, heads, is_head, tl.program_id(1) == 0)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    numbers = start + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + token.to(tl.int64) * TOP_K + numbers, mask=numbers < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        is_chosen = first + tl.arange(0, BLOCK_N) < stop
        rows = slot.to(tl.int64)
        entries, key_entries = cache + rows[:, None] * ENTRY, keys + rows[:, None] * KEY_ENTRY + (KEY_ENTRY - ROTATED)
        numbers = first + BLOCK_N + tl.arange(0, BLOCK_N)  # their slots are read one iteration ahead of the entries
        slot = tl.load(slots + token.to(tl.int64) * TOP_K + numbers, mask=numbers < stop, other=0)
        is_there, is_rotated = is_chosen[:, None], is_chosen[:, None]
        if BLOCK_L != RANK:
            is_there = is_there & (columns < RANK)[None, :]
        if BLOCK_R != ROTATED:
            is_rotated = is_rotated & (dims < ROTATED)[None, :]
        latents = tl.load(entries + columns[None, :], mask=is_there, other=0.0).to(q_latents.dtype)
        if ROTATED > 0:
            rotated = tl.load(key_entries + dims[None, :], mask=is_rotated, other=0.0).to(q_rotated.dtype)
        scores = tl.dot(q_latents, tl.trans(latents), input_precision="ieee")
        if k_scale is not None:
            scores *= k_scale
        if ROTATED > 0:
            scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee")
        scores *= scale
        scores = tl.where(is_chosen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(shares, 1)
        acc = tl.dot(shares.to(q_latents.dtype), latents, acc * fade[:, None], input_precision="ieee")
        best = higher
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    acc = acc / total[:, None]
    if k_scale is not None:
        acc *= k_scale
    if weights is not None:
        tl.store(weights + out_places, tl.where(has_seen, best + tl.log2(total), NOTHING), mask=is_head)
    tl.store(out + out_places[:, None] * RANK + columns[None, :], acc.to(out.dtype.element_ty), mask=is_value)

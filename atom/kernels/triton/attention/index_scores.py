"""Score index keys of a paged cache for each query (DeepSeek-AI 2025).

    q = write_index(q, k, cache, batch)                     # keys to their slots
    score_queries(q, weights, cache.blocks, rows, scores)   # fp32[R, positions]

A query's score of a key is the sum over index heads of weight * relu(q . k). A key is of a token, or of a run of tokens
that has ended. Keys are the rows of a matmul and the heads of some queries its columns, so that a sum over heads stays
within a thread and its neighbours. A program has some queries of one sequence and a part of its keys. Scores of keys
after a query mean nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.kernels.triton.attention.common import FP8_MAX, find_owner, look_up, wait_for_inputs
from atom.kernels.triton.attention.rows import Rows
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

DECODE_PROGRAMS = 4  # of each multiprocessor, that decodes are split to
PROMPT_PROGRAMS = 8
MIN_PART = 512  # positions of a split
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # of normal numbers in fp32


class ScoreTiles(NamedTuple):
    """The tile of a program: queries, and positions."""

    queries: int
    positions: int
    num_warps: int
    num_stages: int


def choose_tiles(rows: Rows, heads: int, element_size: int, shared_memory: int) -> ScoreTiles:
    """heads: padded ones, of which a tile has 64 to 128 columns."""
    if element_size == 4:
        return ScoreTiles(1, 32, 4, 1)
    queries = max(1, 128 // heads)
    if rows.queries:
        queries = min(queries, next_power_of_2(rows.queries))
    # programs share a multiprocessor, so that one multiplies while another sums
    stages = 3 if shared_memory >= 99 << 10 else 1
    return ScoreTiles(queries, 64 if queries * heads >= 128 else 128, 4, stages)


def count_splits(num_tiles: int, programs: int, rows: Rows, block_size: int) -> int:
    """How many parts contexts are split to, for so many programs in all."""
    width = rows.table.shape[1] * block_size
    return max(1, min(-(-programs // num_tiles), -(-width // MIN_PART)))


def write_index(q: Tensor, k: Tensor, cache: PagedCache, batch: Batch, *, every: int = 1) -> Tensor:
    """k [T, D] to cache [blocks, entries of a block, E]; q is given back: what reads the cache takes it from here.

    every: tokens of a run, of which the last one's key is written
    """
    blocks, (tokens, dim) = cache.blocks, k.shape
    assert k.stride(1) == 1 and blocks.is_contiguous(), "rows have gaps"
    size = batch.block_size or blocks.shape[1]
    _write_kernel[(tokens,)](
        k, blocks, view_scales(blocks), batch.slot_mappings[cache.kind], k.stride(0), DIM=dim, ENTRY=blocks.shape[-1],
        EVERY=every, RUN=min(every, size), BLOCK_SIZE=size, ENTRIES=blocks.shape[1],
        BLOCK_D=next_power_of_2(dim), num_warps=1, **find_gpu(k.device).options,
    )  # fmt: skip
    return q


def view_scales(cache: Tensor) -> Tensor | None:
    """The scales fp32[blocks, block size, E / 4] that end entries in fp8; None: entries of another dtype have none."""
    return cache.view(torch.float32) if cache.dtype is torch.float8_e4m3fn else None


def score_queries(q: Tensor, weights: Tensor | None, cache: Tensor, rows: Rows, scores: Tensor) -> None:
    """q [R, M, D], weights [R, M], None: 1, cache [blocks, entries of a block, E] -> scores fp32[R, entries]"""
    (num, heads, dim), gpu = q.shape, find_gpu(q.device)
    assert q.stride(2) == scores.stride(1) == 1 and cache.is_contiguous(), "rows have gaps"
    assert weights is None or weights.stride(1) == 1, "rows have gaps"
    block_h, block_d = (max(16, next_power_of_2(size)) for size in (heads, dim))
    tiles = choose_tiles(rows, block_h, q.element_size(), gpu.shared_memory)
    if rows.starts is None:
        num_tiles = len(rows.lengths) * -(-rows.queries // tiles.queries)
        programs = DECODE_PROGRAMS * gpu.units
    else:
        num_tiles = num // tiles.queries + len(rows.lengths)  # one tile of each sequence may be partial
        programs = PROMPT_PROGRAMS * gpu.units
    num_splits = count_splits(num_tiles, programs, rows, cache.shape[1])
    scales = view_scales(cache)
    weight_stride = 0 if weights is None else weights.stride(0)
    _score_kernel[(num_tiles, num_splits)](
        q, weights, cache, scales, rows.table, rows.starts, rows.lengths, scores, len(rows.lengths), rows.first, num,
        num_splits, rows.table.stride(0), q.stride(0), q.stride(1), weight_stride, scores.stride(0),
        HEADS=heads, DIM=dim, ENTRY=cache.shape[2], BLOCK_SIZE=cache.shape[1], QUERIES=rows.queries, EVERY=rows.every,
        BLOCK_S=rows.bucket, BLOCK_Q=tiles.queries, BLOCK_H=block_h, BLOCK_N=tiles.positions, BLOCK_D=block_d,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **gpu.options,
    )  # fmt: skip


@jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(k, cache, scales, slots, k_stride, DIM: tl.constexpr, ENTRY: tl.constexpr, EVERY: tl.constexpr,
                  RUN: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """A token's key; in fp8 over a scale that makes the largest of its numbers 448."""
    wait_for_inputs(PDL)
    token, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    slot = tl.load(slots + token).to(tl.int64)
    is_kept = dims < DIM
    if EVERY > 1:  # slots are of tokens, the cache has those of runs
        place = slot % BLOCK_SIZE
        is_kept = is_kept & ((place + 1) % RUN == 0)
        slot = slot // BLOCK_SIZE * ENTRIES + place // EVERY
    x = tl.load(k + token * k_stride + dims, mask=dims < DIM, other=0.0)
    if scales is not None:
        x = x.to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), SMALLEST), FP8_MAX)  # exact, as other divisions are not
        x = tl.clamp(tl.div_rn(x, scale), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scales + slot * (ENTRY // 4) + DIM // 4 + dims, scale + dims * 0.0, mask=is_kept & (dims == 0))
    tl.store(cache + slot * ENTRY + dims, x.to(cache.dtype.element_ty), mask=is_kept)


@jit(
    do_not_specialize=["num_sequences", "first_token", "num_tokens", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _score_kernel(q, weights, cache, scales, table, starts, lengths, scores, num_sequences, first_token, num_tokens,
                  num_splits, table_stride, q_stride, head_stride, weight_stride, score_stride,
                  HEADS: tl.constexpr, DIM: tl.constexpr, ENTRY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                  QUERIES: tl.constexpr, EVERY: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Q: tl.constexpr,
                  BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some queries of a sequence by a part of its keys; rows count from first_token."""
    wait_for_inputs(PDL)
    if starts is None:
        tiles_each: tl.constexpr = (QUERIES + BLOCK_Q - 1) // BLOCK_Q
        sequence = tl.program_id(0) // tiles_each
        first_row = tl.program_id(0) % tiles_each * BLOCK_Q
        row = sequence * QUERIES + first_row
        end_row = sequence * QUERIES + QUERIES
        newest = tl.load(lengths + sequence) - QUERIES + first_row
    else:
        sequences = tl.arange(0, BLOCK_S)
        is_sequence = sequences < num_sequences
        begins = tl.load(starts + sequences, mask=is_sequence, other=0)
        ends = tl.load(starts + sequences + 1, mask=is_sequence, other=0)
        begins = tl.maximum(begins, first_token)
        counts = tl.cdiv(tl.maximum(tl.minimum(ends, first_token + num_tokens) - begins, 0), BLOCK_Q)
        sequence, before = find_owner(counts, tl.program_id(0))
        if sequence >= num_sequences:
            return
        end = tl.load(starts + sequence + 1)
        token = tl.maximum(tl.load(starts + sequence), first_token) + (tl.program_id(0) - before) * BLOCK_Q
        row = token - first_token
        end_row = tl.minimum(end - first_token, num_tokens)
        newest = tl.load(lengths + sequence) - (end - token)
    stop = (newest + tl.minimum(BLOCK_Q, end_row - row)) // EVERY
    part = tl.cdiv(stop, num_splits * BLOCK_N) * BLOCK_N
    start = tl.program_id(1) * part
    stop = tl.minimum(stop, start + part)
    if start >= stop:
        return

    columns, dims = tl.arange(0, BLOCK_Q * BLOCK_H), tl.arange(0, BLOCK_D)
    own_rows, heads = (row + columns // BLOCK_H).to(tl.int64), columns % BLOCK_H
    is_own = (own_rows < end_row) & (heads < HEADS)
    places = q + own_rows[:, None] * q_stride + heads[:, None] * head_stride + dims[None, :]
    queries = tl.load(places, mask=is_own[:, None] & (dims < DIM)[None, :], other=0.0)
    shares = tl.where(is_own, 1.0, 0.0)
    if weights is not None:
        shares = tl.load(weights + own_rows * weight_stride + heads, mask=is_own, other=0.0).to(tl.float32)
    targets = row + tl.arange(0, BLOCK_Q)
    is_target = targets < end_row
    targets = targets.to(tl.int64) * score_stride

    blocks = table + sequence.to(tl.int64) * table_stride
    block = look_up(blocks, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
    for first in range(start, stop, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        slots = tl.multiple_of(block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE, 1)
        block = look_up(blocks, positions + BLOCK_N, stop, BLOCK_SIZE)  # ahead of the keys
        entries = cache + slots[:, None] * ENTRY + dims[None, :]
        # what is read after the last position gives scores that are not stored
        keys = tl.load(entries) if BLOCK_D == DIM else tl.load(entries, mask=(dims < DIM)[None, :], other=0.0)
        products = tl.dot(keys.to(queries.dtype), tl.trans(queries), input_precision="ieee")
        weighed = tl.maximum(products, 0.0) * shares[None, :]
        sums = tl.sum(tl.reshape(weighed, [BLOCK_N, BLOCK_Q, BLOCK_H]), 2)
        if scales is not None:
            sums *= tl.load(scales + slots * (ENTRY // 4) + DIM // 4)[:, None]
        is_seen = (positions < stop)[:, None] & is_target[None, :]
        tl.store(scores + targets[None, :] + positions[:, None], sums, mask=is_seen)

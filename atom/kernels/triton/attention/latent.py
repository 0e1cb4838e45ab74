"""Latent attention in Triton, absorbed or expanded (DeepSeek-AI 2024).

The entries of the cache are keys and values of all heads.

    attend = PagedLatentAttention()    # one object for all layers: it owns the memory that prompts are expanded to
    for layer in layers:
        q_rope = norm_rope_write_latent(q_rope, latent, k_rope, cos, sin, norm, cache, batch, eps=1e-6)
        out = attend(q_nope, q_rope, kv_b, cache, batch, None, selected, scale=0.1)  # None: all

Queries times the key rows of kv_b meet the entries themselves, one key/value head whose values are the first L dims of
its keys, and the sums are multiplied by the value rows. The rows of a tile are pairs of token and head, so that the
entries are read once for many heads. Decodes, of one query or of several, are split over their contexts, and the parts
merged in a fixed order. For few queries kv_b is sent for while the kernel ahead still runs, and one launch merges the
parts and multiplies by the value rows; of more, the vendor's library multiplies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.kernels.triton.attention.chosen import attend_chosen
from atom.kernels.triton.attention.common import NOTHING, begin_softmax, find_owner, sequence_bucket, wait_for_inputs
from atom.kernels.triton.attention.rope import store_rotated
from atom.kernels.triton.attention.rows import Rows, split_rows
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.padded_alloc import new_rows

ABSORBED_BYTES = 128 << 20  # of a prefill's absorbed queries at a time, at least one head's
MAX_SPLITS = 128  # of a context
FEW_QUERIES = 4  # of decodes, up to which kv_b is multiplied by kernels that send for it ahead
WIDE_ENTRY = 1024  # dims, of more a tile has few rows, and twice the warps
PART_TILES = 2  # min tiles of positions in a part of the longest context


class Tiles(NamedTuple):
    """The tile of a program: pairs of token and head, and positions."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int


def choose_tiles(
    rows: int, entry: int, element_size: int, shared: int, queries: int = 1, takes_64: bool = True
) -> Tiles:
    """Choose tiles for sequences of this many rows, with up to 3 stages, as fit next to the queries in shared memory.

    entry: padded dims of a cache entry
    queries: of each decode
    takes_64: whether tiles of 64 rows fit; for Blackwell's tensor cores Triton keeps further copies of them in shared
        memory, 345 KiB in all
    """
    if entry > WIDE_ENTRY:
        tile = 16, 16, 8
    elif element_size == 4:
        tile = 16, 16, 4
    elif rows <= 16 or shared < 200 << 10:
        tile = 16, 32, 4
    elif (rows <= 32 and queries > 1) or not takes_64:
        tile = 32, 32, 8
    else:
        tile = 64, 64, 8
    stages = (shared - tile[0] * entry * element_size) // (tile[1] * entry * element_size)
    return Tiles(*tile, num_stages=max(1, min(3, stages)))


def norm_rope_write_latent(q_rope: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None,
                           norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None, *,
                           eps: float = 0.0, interleaved: bool = False) -> Tensor:  # fmt: skip
    """q_rope [T, N, R], latent [T, L], k_rope [T, 1, R], cos and sin fp32[T, P], norm [L], cache [blocks, block
    size, E], k_scale fp32[1] -> q_rope [T, N, R]"""
    blocks = cache.blocks
    assert all(x.stride(-1) == 1 for x in (q_rope, latent, k_rope)) and blocks.is_contiguous(), "rows have gaps"
    assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous()), "cos and sin must be contiguous"
    (tokens, heads, rope_dim), rank = q_rope.shape, latent.shape[1]
    half, gpu, keys = 0 if cos is None else cos.shape[1], find_gpu(q_rope.device), view_keys(blocks, k_rope.dtype)
    rotated = q_rope.new_empty(q_rope.shape) if half else q_rope
    _write_kernel[(tokens, 1 + -(-heads // 32) if half else 1)](
        q_rope, latent, k_rope, cos, sin, norm, blocks, keys, k_scale, batch.slot_mappings[cache.kind], rotated,
        q_rope.stride(0), q_rope.stride(1), latent.stride(0), k_rope.stride(0), EPS=eps, INTERLEAVED=interleaved,
        HEADS=heads, RANK=rank, ROTATED=rope_dim, ENTRY=blocks.shape[-1], KEY_ENTRY=keys.shape[-1], HALF=half,
        BLOCK_N=32, **gpu.options,
    )  # fmt: skip
    return rotated


class PagedLatentAttention:
    """The op `paged_mla_attention`; its calls must run one after another."""

    def __call__(self, q_nope: Tensor, q_rope: Tensor, kv_b: Tensor, cache: PagedCache, batch: Batch,
                 k_scale: Tensor | None = None, selected: Tensor | None = None, sinks: Tensor | None = None, *,
                 scale: float, window: int | None = None) -> Tensor:  # fmt: skip
        """Shapes as in the op. A token of no sequence and a sequence of no positions give zeros."""
        blocks, table, num_decodes = cache.blocks, batch.tables[cache.kind], batch.num_decodes
        num_queries = num_decodes * batch.query_len
        assert q_rope.stride(2) == 1 and blocks.is_contiguous(), "rows have gaps"
        (tokens, heads, plain), rank = q_nope.shape, kv_b.shape[1]
        weight = kv_b.view(heads, -1, rank)
        out = new_rows(q_nope, tokens, heads, weight.shape[1] - plain)
        if selected is not None and table.shape[1] * blocks.shape[1] > selected.shape[2]:  # else all were chosen
            chosen = selected.squeeze(1)
            self._attend_chosen(q_nope, q_rope, weight, cache, batch, k_scale, chosen, sinks, scale, out)
            return out
        rule = sinks, scale, window
        if num_decodes:
            some, has_few = slice(0, num_queries), num_queries <= FEW_QUERIES
            q = _absorb_few(q_nope[some], weight) if has_few else _absorb(q_nope[some], weight)
            lengths = batch.lengths[:num_decodes]
            sums = _attend(q, q_rope[some], blocks, table[:num_decodes], None, lengths, k_scale, rule)
            if has_few and sums.weights is not None:
                _merge_values(sums, weight, out[some])
            else:
                _sum_values(merge_sums(sums, q.dtype), weight, out[some])
        if tokens > num_queries:
            plan = None
            if sinks is None and window is None:
                plan = self._attend_expanded(q_nope, q_rope, weight, cache, batch, k_scale, scale, out)
            others = slice(num_queries, tokens)
            sequences = table[num_decodes:], batch.starts[num_decodes:], batch.lengths[num_decodes:]
            at_once = max(1, ABSORBED_BYTES // ((tokens - num_queries) * rank * q_nope.element_size()))
            for first in range(0, heads, at_once):
                some = slice(first, first + at_once)
                _attend_absorbed(q_nope[others, some], q_rope[others, some], weight[some], blocks, *sequences, plan,
                                 k_scale, (_of_heads(sinks, some), scale, window), out[others, some])  # fmt: skip
        return out

    def _attend_chosen(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: PagedCache, batch: Batch,
                       k_scale: Tensor | None, selected: Tensor, sinks: Tensor | None, scale: float,
                       out: Tensor) -> None:  # fmt: skip
        """Attend to chosen entries, selected i32[T, k]"""
        at_once = ABSORBED_BYTES // (len(weight) * weight.shape[2] * q_nope.element_size())
        for rows, own in split_rows(cache.kind, batch, len(q_nope), at_once):
            has_few = rows.num <= FEW_QUERIES
            q = _absorb_few(q_nope[own], weight) if has_few else _absorb(q_nope[own], weight)
            sums = self._sum_chosen(q, q_rope[own], cache.blocks, k_scale, rows, selected[own], sinks, scale)
            if has_few and sums.weights is not None:
                _merge_values(sums, weight, out[own])
            else:
                _sum_values(merge_sums(sums, q.dtype), weight, out[own])

    def _sum_chosen(self, q: Tensor, q_rope: Tensor, cache: Tensor, k_scale: Tensor | None, rows: Rows,
                    selected: Tensor, sinks: Tensor | None, scale: float) -> Sums:  # fmt: skip
        """Absorbed queries q [N, R, L] and q_rope [R, N, P], selected i32[R, k] -> sums of entries"""
        gpu, keys = find_gpu(q.device), view_keys(cache, q_rope.dtype)
        entry = sum(max(16, next_power_of_2(dim)) for dim in (q.shape[2], q_rope.shape[2]))
        element_size = max(q.element_size(), cache.element_size())
        tiles = choose_tiles(len(q), entry, element_size, gpu.shared_memory, takes_64=gpu.capability < (10, 0))
        return Sums(*attend_chosen(q, q_rope, cache, keys, k_scale, rows, selected, sinks, scale, tiles))

    def _attend_expanded(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: PagedCache, batch: Batch,
                         k_scale: Tensor | None, scale: float, out: Tensor) -> Tensor | None:  # fmt: skip
        """Attend prompts by expanded entries: the part of expand.py's plan for prompts; None: none are, as here."""
        return None


Rule = tuple[Tensor | None, float, int | None]  # sinks [N], scale and window


def _of_heads(sinks: Tensor | None, some: slice) -> Tensor | None:
    return None if sinks is None else sinks[some]


def _attend_absorbed(q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: Tensor, table: Tensor, starts: Tensor,
                     lengths: Tensor, plan: Tensor | None, k_scale: Tensor | None, rule: Rule,
                     out: Tensor) -> None:  # fmt: skip
    """Attend prompts, or those that are not in the plan of expand.py."""
    if plan is None:
        sums = _attend(_absorb(q_nope, weight), q_rope, cache, table, starts, lengths, k_scale, rule)
        _sum_values(sums.parts, weight, out)
        return
    (tokens, heads, plain), (_, _, rank) = q_nope.shape, weight.shape
    q = q_nope.new_empty(heads, tokens, rank)
    _multiply_rest(q_nope, weight[:, :plain], q.transpose(0, 1), starts, plan)
    sums = _attend(q, q_rope, cache, table, starts, lengths, k_scale, rule, plan)
    _multiply_rest(sums.parts.transpose(0, 1), weight[:, plain:].mT, out, starts, plan)


def _multiply_rest(x: Tensor, weight: Tensor, out: Tensor, starts: Tensor, plan: Tensor) -> None:
    """x [T, N, K] by weight [N, K, M] -> out [T, N, M], rows of sequences that are not in the plan of expand.py"""
    (_, heads, inner), columns, gpu = x.shape, weight.shape[2], find_gpu(x.device)
    num_sequences = len(starts) - 1
    _multiply_rest_kernel[(2 * gpu.units,)](
        x, weight, out, starts, plan, num_sequences, *x.stride()[:2], *out.stride()[:2], *weight.stride(), HEADS=heads,
        INNER=inner, COLUMNS=columns, BLOCK_S=sequence_bucket(num_sequences), BLOCK_M=64, BLOCK_N=64, BLOCK_K=64,
        **gpu.options,
    )  # fmt: skip


def view_keys(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The cache as its rotated keys are read, which end each entry: next to latents in fp8 they are in `dtype`."""
    return cache.view(dtype) if cache.dtype is torch.float8_e4m3fn else cache


def _absorb(q_nope: Tensor, weight: Tensor) -> Tensor:
    """q_nope [T, N, P], weight [N, P + U, L] -> [N, T, L]"""
    return torch.bmm(q_nope.transpose(0, 1), weight[:, : q_nope.shape[2]])


def _absorb_few(q_nope: Tensor, weight: Tensor) -> Tensor:
    """`_absorb` of up to 16 tokens."""
    (tokens, heads, plain), (_, rows, rank), gpu = q_nope.shape, weight.shape, find_gpu(q_nope.device)
    q = q_nope.new_empty(heads, tokens, rank)
    _absorb_kernel[(heads, -(-rank // 64))](
        q_nope, weight, q, tokens, q_nope.stride(0), q_nope.stride(1), ROWS=rows, PLAIN=plain, RANK=rank,
        BLOCK_P=max(16, next_power_of_2(plain)), BLOCK_L=64, num_warps=4, **gpu.options,
    )  # fmt: skip
    return q


def _sum_values(sums: Tensor, weight: Tensor, out: Tensor) -> None:
    """Sums of entries [N, T, L], weight [N, P + U, L] -> of values, out [T, N, U]"""
    torch.bmm(sums, weight[:, -out.shape[2] :].mT, out=out.transpose(0, 1))


class Sums(NamedTuple):
    """Sums of entries [A, B, L], or of parts of contexts fp32[splits, A, B, L], and the log2 of what each weighs.

    A and B are heads and tokens, in either order.
    """

    parts: Tensor
    weights: Tensor | None  # fp32[splits, A, B]


def merge_sums(sums: Sums, dtype: torch.dtype) -> Tensor:
    """The sums [A, B, L] of all parts."""
    if sums.weights is None:
        return sums.parts
    (num_splits, *outer, rank), gpu = sums.parts.shape, find_gpu(sums.parts.device)
    num_rows = math.prod(outer)
    merged = torch.empty(*outer, rank, dtype=dtype, device=sums.parts.device)
    block_s = min(16, next_power_of_2(num_splits))
    block_r, block_l = max(1, 8 // block_s), min(512, next_power_of_2(rank))
    _merge_kernel[(-(-num_rows // block_r), -(-rank // block_l))](
        *sums, merged, num_rows, num_splits, RANK=rank, BLOCK_R=block_r, BLOCK_L=block_l, BLOCK_S=block_s,
        num_warps=4, **gpu.options,
    )  # fmt: skip
    return merged


def _merge_values(sums: Sums, weight: Tensor, out: Tensor) -> None:
    """`merge_sums` and `_sum_values` in one launch"""
    (num_splits, heads, tokens, rank), (_, rows, _), gpu = sums.parts.shape, weight.shape, find_gpu(out.device)
    value = out.shape[2]
    _merge_values_kernel[(heads, tokens, -(-value // 16))](
        *sums, weight, out, tokens, num_splits, out.stride(0), out.stride(1), ROWS=rows, VALUE=value, RANK=rank,
        HEADS=heads, BLOCK_U=16, BLOCK_L=next_power_of_2(rank), BLOCK_S=8,
        BLOCK_ALL=max(16, next_power_of_2(num_splits)), num_warps=4, **gpu.options,
    )  # fmt: skip


def _attend(q: Tensor, q_rope: Tensor, cache: Tensor, table: Tensor, starts: Tensor | None, lengths: Tensor,
            k_scale: Tensor | None, rule: Rule, plan: Tensor | None = None) -> Sums:  # fmt: skip
    """Absorbed queries q [N, T, L] and q_rope [T, N, R] of sequences one after another -> sums of entries.

    Starts count from an earlier token, the first of them is q's; without, each sequence has as many tokens as others.
    Sequences of the plan of expand.py are left out, sums of theirs are not written.
    """
    (heads, tokens, rank), rope_dim, sequences, (sinks, scale, window) = q.shape, q_rope.shape[2], len(lengths), rule
    block_l, block_r = (max(16, next_power_of_2(dim)) for dim in (rank, rope_dim))  # tiles of tl.dot have at least 16
    gpu, keys = find_gpu(q.device), view_keys(cache, q_rope.dtype)
    element_size = max(q.element_size(), cache.element_size())
    queries = tokens // sequences if starts is None else 0  # 0: each sequence has its own number
    rows = heads * tokens // sequences
    takes_64 = gpu.capability < (10, 0)
    tiles = choose_tiles(rows, block_l + block_r, element_size, gpu.shared_memory, queries, takes_64)
    num_splits = 1
    if starts is None:
        num_tiles = sequences * -(-heads * queries // tiles.rows)
        longest = min(table.shape[1] * cache.shape[1], math.inf if window is None else window + queries)
        max_splits = int(-(-longest // (PART_TILES * tiles.positions)))
        num_splits = max(1, min(2 * gpu.units // num_tiles, MAX_SPLITS, max_splits))
    else:
        num_tiles = heads * tokens // tiles.rows + sequences  # one tile of each sequence may be partial
        if plan is not None:
            num_tiles = min(num_tiles, 2 * gpu.units)
    weights = None
    is_whole = starts is None or plan is not None
    sums = torch.empty_like(q) if is_whole else torch.zeros_like(q)  # tokens of no sequence give zeros
    if num_splits > 1:
        sums = q.new_empty(num_splits, heads, tokens, rank, dtype=torch.float32)
        weights = q.new_empty(num_splits, heads, tokens, dtype=torch.float32)
    _attend_kernel[(num_tiles, num_splits)](
        q, q_rope, cache, keys, k_scale, table, starts, lengths, plan, sinks, sums, weights, sequences, tokens,
        num_splits, scale * math.log2(math.e), table.stride(0), q_rope.stride(0), q_rope.stride(1), HEADS=heads,
        RANK=rank, ROTATED=rope_dim, ENTRY=cache.shape[-1], KEY_ENTRY=keys.shape[-1], BLOCK_SIZE=cache.shape[1],
        QUERIES=queries, WINDOW=window, BLOCK_S=1 if starts is None else sequence_bucket(sequences),
        BLOCK_M=tiles.rows, BLOCK_N=tiles.positions, BLOCK_L=block_l, BLOCK_R=block_r, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **gpu.options,
    )  # fmt: skip
    return Sums(sums, weights)


@jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(q_rope, latent, k_rope, cos, sin, norm, cache, keys, k_scale, slots, rotated, q_stride, head_stride,
                  latent_stride, k_stride, EPS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
                  RANK: tl.constexpr, ROTATED: tl.constexpr, ENTRY: tl.constexpr, KEY_ENTRY: tl.constexpr,
                  HALF: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token's entry, then the queries of some of its heads.

    cache and keys: one memory, entries as ENTRY numbers of latents, and as KEY_ENTRY of rotated keys
    """
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        row = tl.zeros([1], tl.int64)
        slot = tl.load(slots + token) + row
        store_rotated(latent + token * latent_stride + row, cache + slot * ENTRY, k_scale, token + row, row == 0, cos,
                     sin, norm, EPS, INTERLEAVED, RANK, 0)  # fmt: skip
        if ROTATED > 0:
            rotated_key = keys + slot * KEY_ENTRY + (KEY_ENTRY - ROTATED)
            store_rotated(k_rope + token * k_stride + row, rotated_key, None, token + row, row == 0, cos, sin, None,
                         EPS, INTERLEAVED, ROTATED, HALF)  # fmt: skip
    elif HALF > 0:
        heads = (tl.program_id(1) - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = q_rope + token * q_stride + heads * head_stride
        places = rotated + (token * HEADS + heads) * ROTATED
        store_rotated(rows, places, None, token + tl.zeros([BLOCK_N], tl.int64), heads < HEADS, cos, sin, None, EPS,
                     INTERLEAVED, ROTATED, HALF)  # fmt: skip


@jit(
    do_not_specialize=["num_sequences", "num_tokens", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _attend_kernel(q, q_rope, cache, keys, k_scale, table, starts, lengths, plan, sinks, out, weights, num_sequences,
                   num_tokens, num_splits, scale, table_stride, q_stride, head_stride, HEADS: tl.constexpr,
                   RANK: tl.constexpr, ROTATED: tl.constexpr, ENTRY: tl.constexpr, KEY_ENTRY: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, BLOCK_S: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """Tiles of rows, pairs of token and head, over contexts or, with weights fp32[splits, N, T], over parts of them.

    q [N, T, L] -> out [N, T, L], or parts fp32[splits, N, T, L] and the log2 of what each weighs.

    cache, keys: as in _write_kernel
    starts: None: each sequence has QUERIES tokens
    plan: of expand.py; few programs share the tiles of sequences that are not in it, since mostly all are
    """
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    wait_for_inputs(PDL)
    if starts is None:
        tiles_each: tl.constexpr = (HEADS * QUERIES + BLOCK_M - 1) // BLOCK_M
        sequence = tl.program_id(0) // tiles_each
        _attend_tile(
            q, q_rope, cache, keys, k_scale, table, lengths, sinks, out, weights, num_tokens, num_splits, scale,
            table_stride, q_stride, head_stride, sequence, tl.program_id(0) % tiles_each, sequence * QUERIES, QUERIES,
            HEADS, RANK, ROTATED, ENTRY, KEY_ENTRY, BLOCK_SIZE, WINDOW, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R,
        )  # fmt: skip
    else:
        sequences = tl.arange(0, BLOCK_S)
        is_sequence = sequences < num_sequences
        counts = tl.load(starts + sequences + 1, mask=is_sequence, other=0)
        counts -= tl.load(starts + sequences, mask=is_sequence, other=0)
        counts = tl.cdiv(counts * HEADS, BLOCK_M)
        if plan is not None:
            counts = tl.where(tl.load(plan + sequences, mask=is_sequence, other=0) < 0, counts, 0)
        num_tiles = tl.sum(counts, 0)
        for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):  # without a plan one at most
            tile = num_tiles - 1 - number  # the longest of a sequence first
            sequence, before = find_owner(counts, tile)
            begin = tl.load(starts + sequence)
            queries = tl.load(starts + sequence + 1) - begin
            _attend_tile(
                q, q_rope, cache, keys, k_scale, table, lengths, sinks, out, weights, num_tokens, num_splits, scale,
                table_stride, q_stride, head_stride, sequence, tile - before, begin - tl.load(starts), queries, HEADS,
                RANK, ROTATED, ENTRY, KEY_ENTRY, BLOCK_SIZE, WINDOW, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R,
            )  # fmt: skip


@jit
def _attend_tile(
    q, q_rope, cache, keys, k_scale, table, lengths, sinks, out, weights, num_tokens, num_splits, scale, table_stride,
    q_stride, head_stride, sequence, tile, begin, queries, HEADS: tl.constexpr, RANK: tl.constexpr,
    ROTATED: tl.constexpr, ENTRY: tl.constexpr, KEY_ENTRY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's rows, whose tokens begin there."""
    length = tl.load(lengths + sequence)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < queries * HEADS
    tokens, heads = begin + rows // HEADS, rows % HEADS
    newest = length - queries + rows // HEADS  # the position of each row
    columns, dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    places = heads.to(tl.int64) * num_tokens + tokens
    stop = tl.minimum(length, length - queries + (tile * BLOCK_M + BLOCK_M - 1) // HEADS + 1)
    start = 0
    if WINDOW is not None:  # from what the first row of the tile sees
        start = tl.maximum(length - queries + tile * BLOCK_M // HEADS - (WINDOW - 1), 0)
    part = tl.cdiv(stop - start, num_splits * BLOCK_N) * BLOCK_N
    start += tl.program_id(1) * part
    stop = tl.minimum(stop, start + part)
    out_places = places
    if weights is not None:
        out_places += tl.program_id(1).to(tl.int64) * HEADS * num_tokens
        if start >= stop:
            tl.store(weights + out_places, tl.full([BLOCK_M], NOTHING, tl.float32), mask=is_row)
            return

    is_value = is_row[:, None] & (columns < RANK)[None, :]
    q_latents = tl.load(q + places[:, None] * RANK + columns[None, :], mask=is_value, other=0.0)
    if ROTATED > 0:
        rope_rows = q_rope + tokens.to(tl.int64)[:, None] * q_stride + heads[:, None] * head_stride
        q_rotated = tl.load(rope_rows + dims[None, :], mask=is_row[:, None] & (dims < ROTATED)[None, :], other=0.0)

    best, total = begin_softmax(sinks, heads, is_row, tl.program_id(1) == 0)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    blocks = table + sequence.to(tl.int64) * table_stride
    positions = start + tl.arange(0, BLOCK_N)
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=positions < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        is_there = (positions < stop)[:, None]
        # multiples of 1 only: Triton takes sums of a block's start and places in it for multiples of the block's size
        slots = tl.multiple_of(block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE, 1)
        entries, key_entries = cache + slots[:, None] * ENTRY, keys + slots[:, None] * KEY_ENTRY + (KEY_ENTRY - ROTATED)
        following = positions + BLOCK_N  # its blocks are looked up one iteration ahead of the entries
        block = tl.load(blocks + following // BLOCK_SIZE, mask=following < stop, other=0)
        latents = tl.load(entries + columns[None, :], mask=is_there & (columns < RANK)[None, :], other=0.0)
        latents = latents.to(q_latents.dtype)
        if ROTATED > 0:
            rotated = tl.load(key_entries + dims[None, :], mask=is_there & (dims < ROTATED)[None, :], other=0.0)
            rotated = rotated.to(q_rotated.dtype)
        scores = tl.dot(q_latents, tl.trans(latents), input_precision="ieee")
        if k_scale is not None:
            scores *= k_scale
        if ROTATED > 0:
            scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee")
        scores *= scale
        is_seen = (positions[None, :] <= newest[:, None]) & (positions < stop)[None, :]
        if WINDOW is not None:
            is_seen = is_seen & (positions[None, :] > newest[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
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
        tl.store(weights + out_places, tl.where(has_seen, best + tl.log2(total), NOTHING), mask=is_row)
    tl.store(out + out_places[:, None] * RANK + columns[None, :], acc.to(out.dtype.element_ty), mask=is_value)


@jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(parts, weights, out, num_rows, num_splits, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
                  BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some columns of rows of parts fp32[splits, rows, L], by their weights in log2 fp32[splits, rows] -> [rows, L]

    A thread has the same columns of BLOCK_S parts, so that no sum crosses threads, and these are on their way at once.
    """
    wait_for_inputs(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    is_row, is_column = rows < num_rows, (columns < RANK)[None, :]
    best = tl.full([BLOCK_R], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_L], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        logs, values = (), ()
        higher = best
        for number in tl.static_range(BLOCK_S):
            split = first + number
            log = tl.load(weights + split * num_rows + rows, mask=is_row & (split < num_splits), other=NOTHING)
            logs += (log,)  # type: ignore[assignment]
        for number in tl.static_range(BLOCK_S):
            places = (first + number) * num_rows + rows
            is_part = (logs[number] > NOTHING)[:, None] & is_column
            each = tl.load(parts + places[:, None] * RANK + columns[None, :], mask=is_part, other=0.0)
            values += (each,)  # type: ignore[assignment]
            higher = tl.maximum(higher, logs[number])
        fade = tl.exp2(best - higher)
        total *= fade
        acc *= fade[:, None]
        for number in tl.static_range(BLOCK_S):
            share = tl.exp2(logs[number] - higher)
            total += share
            acc += values[number] * share[:, None]
        best = higher
    merged = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * RANK + columns[None, :], merged, mask=is_row[:, None] & is_column)


@jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["starts", "plan"])
def _multiply_rest_kernel(x, weight, out, starts, plan, num_sequences, x_stride, x_head_stride, out_stride,
                          out_head_stride, weight_stride, inner_stride, column_stride, HEADS: tl.constexpr,
                          INNER: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles of rows of sequences that are not in the plan, x [T, N, INNER] by weight [N, INNER, COLUMNS] -> out; starts
    count from an earlier token, the first of them is that of x and out."""
    wait_for_inputs(PDL)
    sequences = tl.arange(0, BLOCK_S)
    is_left = tl.load(plan + sequences, mask=sequences < num_sequences, other=0) < 0
    counts = tl.load(starts + sequences + 1, mask=is_left, other=0) - tl.load(starts + sequences, mask=is_left, other=0)
    counts = tl.cdiv(counts, BLOCK_M)
    parts: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    for item in range(tl.program_id(0), tl.sum(counts, 0) * (HEADS * parts), tl.num_programs(0)):
        sequence, before = find_owner(counts, item // (HEADS * parts))
        head, part = item // parts % HEADS, item % parts
        row = (item // (HEADS * parts) - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        begin = tl.load(starts + sequence)
        is_row = (begin + row < tl.load(starts + sequence + 1))[:, None]
        tokens = (begin - tl.load(starts) + row).to(tl.int64)[:, None]
        columns = part * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (columns < COLUMNS)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, INNER, BLOCK_K):
            inner = first + tl.arange(0, BLOCK_K)
            rows = tl.load(x + tokens * x_stride + head * x_head_stride + inner[None, :],
                           mask=is_row & (inner < INNER)[None, :], other=0.0)  # fmt: skip
            place = weight + head * weight_stride + inner[:, None] * inner_stride + columns[None, :] * column_stride
            tile = tl.load(place, mask=(inner < INNER)[:, None] & is_column, other=0.0)
            acc = tl.dot(rows, tile, acc, input_precision="ieee")
        target = out + tokens * out_stride + head * out_head_stride + columns[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=is_row & is_column)


@jit(do_not_specialize=["num_tokens"])
def _absorb_kernel(q_nope, weight, out, num_tokens, q_stride, head_stride, ROWS: tl.constexpr, PLAIN: tl.constexpr,
                   RANK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some latent dims of up to 16 queries of a head; what is read of the weight is sent for ahead of the wait."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    plain, tokens = tl.arange(0, BLOCK_P), tl.arange(0, 16)
    is_column = columns < RANK
    rows = weight + (head * ROWS + plain)[:, None] * RANK
    tile = tl.load(rows + columns[None, :], mask=(plain < PLAIN)[:, None] & is_column[None, :], other=0.0)
    wait_for_inputs(PDL)
    is_token = (tokens < num_tokens)[:, None]
    queries = q_nope + tokens[:, None] * q_stride + head * head_stride + plain[None, :]
    q = tl.load(queries, mask=is_token & (plain < PLAIN)[None, :], other=0.0)
    absorbed = tl.dot(q, tile, input_precision="ieee")
    places = out + (head * num_tokens + tokens)[:, None] * RANK + columns[None, :]
    tl.store(places, absorbed.to(out.dtype.element_ty), mask=is_token & is_column[None, :])


@jit(do_not_specialize=["num_tokens", "num_splits"])
def _merge_values_kernel(parts, weights, kv_b, out, num_tokens, num_splits, out_stride, head_stride,
                         ROWS: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, HEADS: tl.constexpr,
                         BLOCK_U: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
                         BLOCK_ALL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some values of a query's head: its parts as in _merge_kernel, by the value rows of kv_b, which are its last."""
    head, token = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = tl.program_id(2) * BLOCK_U + tl.arange(0, BLOCK_U)
    columns = tl.arange(0, BLOCK_L)
    is_value, is_column = values < VALUE, columns < RANK
    rows = kv_b + (head * ROWS + ROWS - VALUE + values)[:, None] * RANK
    tile = tl.load(rows + columns[None, :], mask=is_value[:, None] & is_column[None, :], other=0.0)
    wait_for_inputs(PDL)
    num_rows = HEADS * num_tokens
    row = head * num_tokens + token
    every = tl.arange(0, BLOCK_ALL)
    logs = tl.load(weights + every * num_rows + row, mask=every < num_splits, other=NOTHING)
    best = tl.max(logs)
    stop = tl.max(tl.where(logs > NOTHING, every + 1, 0))  # parts after it are of no positions
    acc = tl.zeros([BLOCK_L], tl.float32)
    for first in range(0, stop, BLOCK_S):
        splits = first + tl.arange(0, BLOCK_S)
        places = splits * num_rows + row
        log = tl.load(weights + places, mask=splits < stop, other=NOTHING)
        is_part = (log > NOTHING)[:, None] & is_column[None, :]
        each = tl.load(parts + places[:, None] * RANK + columns[None, :], mask=is_part, other=0.0)
        acc += tl.sum(each * tl.exp2(log - best)[:, None], 0)
    sums = (acc / tl.sum(tl.exp2(logs - best))).to(out.dtype.element_ty).to(tl.float32)
    y = tl.sum(tile.to(tl.float32) * sums[None, :], 1)
    place = out + token.to(tl.int64) * out_stride + head * head_stride + values
    tl.store(place, y.to(out.dtype.element_ty), mask=is_value)

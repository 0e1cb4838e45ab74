"""Choose by index scores on NVIDIA's Hopper, those of prompts in Gluon.

    selected = paged_index_topk(q, weights, cache, batch, top_k=2048)      # i32[T, 1, k]

While a tile of keys is multiplied by the heads of some queries, and these are summed, the next tile is on its way: in
Triton its copy starts only after that, unless there is memory for a third tile, and then no second program fits that
multiplies while the first sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom.graph import Batch, PagedCache
from atom.kernels.hopper import INDEX_DIM, INDEX_HEADS
from atom.kernels.hopper.gluon import barrier, jit
from atom.kernels.triton.attention import index_scores
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.attention.rows import Rows
from atom.kernels.triton.attention.top_k import choose_by
from atom.kernels.triton.gpu import find_gpu

KEYS = gl.constexpr(128)  # of a tile
COLUMNS = gl.constexpr(128)  # of a tile: heads of some queries
DIM = gl.constexpr(INDEX_DIM)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # lines of 128 bytes
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
STORED = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 2], [0, 1]))
SEQUENCES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@jit
def find_tile(starts, num_sequences, first_token, tile, QUERIES: gl.constexpr, BLOCK_S: gl.constexpr):
    """The sequence of a tile of queries from first_token on, the tile's first token, and the sequence's end.

    A sequence has room for its tiles from the number of whole ones in the tokens before it, and one for each sequence.
    """
    each = gl.arange(0, BLOCK_S, layout=SEQUENCES)
    own = gl.maximum(gl.load(starts + each, mask=each < num_sequences, other=0), first_token)
    is_begun = (each < num_sequences) & ((own - first_token) // QUERIES + each <= tile)
    sequence = gl.sum(is_begun.to(gl.int32), 0) - 1
    begin = gl.maximum(gl.load(starts + sequence), first_token)
    token = begin + (tile - (begin - first_token) // QUERIES - sequence) * QUERIES
    return sequence, token, gl.load(starts + sequence + 1)


@jit
def copy_keys(cache, slot, keys):
    """Keys of the cache at slots i32[KEYS] to shared memory, in flight."""
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPIES))
    async_copy.async_copy_global_to_shared(keys, cache + (slot.to(gl.int64) * DIM)[:, None] + dims[None, :])
    async_copy.commit_group()


@jit
def find_keys(blocks, first, stop, BLOCK_SIZE: gl.constexpr):
    """The slots of KEYS positions from `first` on; from `stop` on they are of block 0."""
    positions = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPIES))
    block = gl.load(blocks + positions // BLOCK_SIZE, mask=positions < stop, other=0)
    return block * BLOCK_SIZE + positions % BLOCK_SIZE


@jit(
    do_not_specialize=["num_sequences", "first_token", "num_tokens", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _score_kernel(q, weights, cache, table, starts, lengths, scores, num_sequences, first_token, num_tokens, num_splits,
                  table_stride, q_stride, head_stride, weight_stride, score_stride, HEADS: gl.constexpr,
                  BLOCK_SIZE: gl.constexpr, BLOCK_S: gl.constexpr):  # fmt: skip
    """Some queries of a sequence by a part of its keys; rows count from first_token."""
    dtype: gl.constexpr = q.dtype.element_ty
    QUERIES: gl.constexpr = COLUMNS // HEADS
    queries = gl.allocate_shared_memory(dtype, [COLUMNS, DIM], SHARED)
    keys = gl.allocate_shared_memory(dtype, [2, KEYS, DIM], SHARED)
    wait_for_inputs(True)
    sequence, token, end = find_tile(starts, num_sequences, first_token, gl.program_id(0), QUERIES, BLOCK_S)
    length = gl.load(lengths + sequence)
    row, end_row = token - first_token, gl.minimum(end - first_token, num_tokens)
    stop = length - (end - token) + gl.minimum(QUERIES, end_row - row)
    part = gl.cdiv(gl.maximum(stop, 0), num_splits * KEYS) * KEYS
    start = gl.program_id(1) * part
    stop = gl.minimum(stop, start + part)
    num_tiles = gl.where(row < end_row, gl.cdiv(gl.maximum(stop - start, 0), KEYS), 0)

    blocks = table + sequence * table_stride
    if num_tiles > 0:
        copy_keys(cache, find_keys(blocks, start, stop, BLOCK_SIZE), keys.index(0))
        own = row + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPIES)) // HEADS
        heads = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPIES)) % HEADS
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPIES))
        places = own.to(gl.int64) * q_stride + heads * head_stride
        queries.store(gl.load(q + places[:, None] + dims[None, :], mask=(own < end_row)[:, None], other=0.0))
    slot = find_keys(blocks, start + KEYS, stop, BLOCK_SIZE)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCTS))
    weight_rows = row + column // HEADS
    shares = gl.load(weights + weight_rows.to(gl.int64) * weight_stride + column % HEADS,
                     mask=weight_rows < end_row, other=0.0).to(gl.float32)  # fmt: skip
    targets = row + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, STORED))
    is_target = targets < end_row
    target_rows = targets.to(gl.int64) * score_stride
    for step in range(num_tiles):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        stage = step % 2
        if step + 1 < num_tiles:
            copy_keys(cache, slot, keys.index(1 - stage))
        first = start + step * KEYS
        slot = find_keys(blocks, first + 2 * KEYS, stop, BLOCK_SIZE)  # ahead of the copy
        products = gl.zeros([KEYS, COLUMNS], gl.float32, PRODUCTS)
        products = warpgroup_mma(keys.index(stage), queries.permute((1, 0)), products, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products,))
        weighed = gl.maximum(products, 0.0) * shares[None, :]
        sums = gl.convert_layout(gl.sum(gl.reshape(weighed, [KEYS, QUERIES, HEADS]), 2), STORED)
        positions = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, STORED))
        is_seen = (positions < stop)[:, None] & is_target[None, :]
        gl.store(scores + target_rows[None, :] + positions[:, None], sums, mask=is_seen)


def paged_index_topk(q: Tensor, weights: Tensor, cache: PagedCache, batch: Batch, *, top_k: int,
                     every: int = 1) -> Tensor:  # fmt: skip
    """As that of triton/attention/top_k.py, of single tokens."""
    assert every == 1, "runs are chosen elsewhere"
    return choose_by(score_queries, q, weights, cache, batch, top_k)


def score_queries(q: Tensor, weights: Tensor | None, cache: Tensor, rows: Rows, scores: Tensor) -> None:
    assert weights is not None, "only runs are chosen without weights of heads"
    (score_prompts if suits(q, cache, rows) else index_scores.score_queries)(q, weights, cache, rows, scores)


def suits(q: Tensor, cache: Tensor, rows: Rows) -> bool:
    """Whether `score_prompts` takes these."""
    return (
        rows.starts is not None
        and q.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype == q.dtype
        and q.shape[1] in INDEX_HEADS
        and q.shape[2] == INDEX_DIM
    )


def score_prompts(q: Tensor, weights: Tensor, cache: Tensor, rows: Rows, scores: Tensor) -> None:
    """q [R, M, D], weights [R, M], cache [blocks, block size, D] -> scores fp32[R, positions]"""
    (num, heads, _), gpu = q.shape, find_gpu(q.device)
    assert rows.starts is not None, "decodes have no starts"
    assert q.stride(2) == weights.stride(1) == scores.stride(1) == 1 and cache.is_contiguous(), "rows have gaps"
    num_tiles = num // (COLUMNS.value // heads) + len(rows.lengths)  # one tile of each sequence may be partial
    num_splits = index_scores.count_splits(num_tiles, index_scores.PROMPT_PROGRAMS * gpu.units, rows, cache.shape[1])
    _score_kernel[(num_tiles, num_splits)](
        q, weights, cache, rows.table, rows.starts, rows.lengths, scores, len(rows.lengths), rows.first, num,
        num_splits, rows.table.stride(0), q.stride(0), q.stride(1), weights.stride(0), scores.stride(0), HEADS=heads,
        BLOCK_SIZE=cache.shape[1], BLOCK_S=rows.bucket, num_warps=8, maxnreg=128, launch_pdl=True,
    )  # fmt: skip

"""Linear attention over prompts, in chunks of 64 tokens that tensor cores multiply.

    attend_chunks(q, k, v, states, batch, out, steps=decay, beta=beta, is_delta=True, scale=0.088, eps=1e-6)
    attend_chunks(c, b, x, states, batch, out, steps=dt, rates=-a_log.exp(), beta=dt, skip=d, is_transposed=True)

Within a chunk the delta rule is a triangular system (Yang et al. 2024, section 3): with A[i, j] = beta_i (k_i . k_j)
times the decay from j to i, for j < i, and T = (I + A)^-1, the values that the chunk adds to a state S before it are
U - W S, where U = T (beta v) and W = T (beta k, decayed from the chunk's begin).

One kernel computes U, W and the scores of queries for all chunks at once, and another goes through a sequence's
chunks, with some columns of a head's state in registers. Without the delta rule U is beta v, and there is no W.

Keys and queries stay as they are stored; the inverses of their lengths are factors of rows and columns in float32.

With a decay for each dim of a key (Kimi Team 2025) A[i, j] and the scores are sums over dims of k_i k_j exp(G_i - G_j),
with G the sum of a dim's logarithms up to a token. A product of matrices takes factors of i and of j, and exp(-G_j) has
no bound. So tokens i > j meet in the smallest aligned block of 2, 4, ... 64 tokens that has both, and exp(G_i - G_j) is
exp(G_i - R) exp(R - G_j) with R where the block's right half begins: both factors are at most 1. One product makes the
pairs of all blocks of a size, and one of 0s and 1s with the logarithms all factors, without a difference of large sums.
That is a kernel of its own, before one that solves the system; the one that passes a state on is the same.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.attention.common import sequence_bucket, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.recurrent.states import find_chunk, first_chunk, num_chunks, row_of

CHUNK = 64
COLUMNS = 64  # of a state, of a program that passes it on
MAX_STAGES = 3  # of what such a program loads of a chunk
OTHER_MEMORY = 12 << 10  # of its shared memory, what is not loaded
DTYPES = (torch.bfloat16,)  # of keys of any length: what they make may be beyond fp16
MAX_DIM = 128  # of keys and values: a program has all of a chunk
TILE = tl.constexpr(64)  # dims: of tiles with 32 and others with more, Triton 3.6's ptxas loses addresses
BLOCK = 16  # tokens that a warp has, of a chunk whose decays are by dim
BLOCK_K = 32  # dims that its program has at a time
DIM_MULTIPLE = 8  # of such keys
LOG2_E = tl.constexpr(1.4426950408889634)
MIN_STEP = tl.constexpr(-150.0)  # of a decay's logarithm to base 2: below it all are 0, and fp16 ends


@jit
def _load_tile(x, rows, columns, mask, stride, SIZE: tl.constexpr):
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask[:, None] & (columns < SIZE)[None, :],
                   other=0.0)  # fmt: skip


@jit
def _invert(a, i, j, SIZE: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [SIZE, SIZE]: of diagonal blocks, which double until one is left.

    [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]

    Factors are rounded to fp16, as finely as tf32 has them: keys of unit length make none that is large.
    """
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i >> 1 == j >> 1, a, 0.0)
    for level in tl.static_range(1, SIZE.bit_length() - 1):
        is_left = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        below = tl.dot(inverse.to(tl.float16), tl.where(is_left, a, 0.0).to(tl.float16))
        inverse -= tl.dot(below.to(tl.float16), inverse.to(tl.float16))
    return inverse


@jit(
    do_not_specialize=["num_sequences", "first_sequence", "num_tokens"],
    do_not_specialize_on_alignment=["starts"],
)
def _solve_chunks(
    q, k, v, steps, rates, beta, starts, added, keys, scores, factors, q_stride, k_stride, v_stride, num_sequences,
    first_sequence, num_tokens, SCALE: tl.constexpr, EPS: tl.constexpr, KEPT: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_DELTA: tl.constexpr, SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """U [T, N, V] to `added`, W [T, N, K] to `keys`, scores [T, N, CHUNK] and factors [3, T, N] of a chunk and a head.

    steps, rates: the logarithm of a decay is their product; None: 1
    factors: of queries that read the state, of keys that are added to it, and the decay of the whole chunk
    IS_DELTA: without it there are neither U nor W
    """
    wait_for_inputs(PDL)
    starts += first_sequence
    sequence, at = find_chunk(starts, tl.program_id(0), num_sequences, CHUNK, SEQUENCES)
    head = tl.program_id(1)
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32) - (KEPT - 1)
    if at >= count:
        return
    tokens = at + tl.arange(0, CHUNK)
    is_token = tokens < count
    rows = first + tokens
    of_key = head // (HEADS // KEY_HEADS) * DIM
    dims = tl.arange(0, (DIM + TILE - 1) // TILE * TILE)
    columns = tl.arange(0, (WIDTH + TILE - 1) // TILE * TILE)
    key = _load_tile(k + of_key, rows, dims, is_token, k_stride, DIM)
    query = _load_tile(q + of_key, rows, dims, is_token, q_stride, DIM)
    by_head = rows * HEADS + head
    decay = tl.where(is_token, 1.0, 0.0)
    if steps is not None:
        decay = tl.load(steps + by_head, mask=is_token, other=0.0).to(tl.float32)
    if rates is not None:
        decay *= tl.load(rates + head)
    decayed = tl.cumsum(decay, 0)
    if EPS is not None:
        wide = key.to(tl.float32)
        of_keys = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
        wide = query.to(tl.float32)
        of_queries = SCALE * tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
    else:
        of_keys = tl.full((CHUNK,), 1.0, tl.float32)
        of_queries = tl.full((CHUNK,), SCALE, tl.float32)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # what is left at token i of what token j added
    left = tl.exp(tl.minimum(decayed[:, None] - decayed[None, :], 0.0))
    left = tl.where(i >= j, left, 0.0) * of_keys[None, :]
    transposed = tl.trans(key)
    read = tl.dot(query, transposed) * left * of_queries[:, None]
    places = by_head[:, None] * CHUNK + j
    tl.store(scores + places, read.to(scores.dtype.element_ty), mask=is_token[:, None] & (j >= 0))
    total = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, decayed, 0.0), 0)
    size = num_tokens.to(tl.int64) * HEADS
    tl.store(factors + by_head, of_queries * tl.exp(decayed), mask=is_token)
    tl.store(factors + size + by_head, of_keys * tl.exp(total - decayed), mask=is_token)
    tl.store(factors + 2 * size + by_head, tl.exp(total) + 0.0 * decayed, mask=is_token)
    if IS_DELTA:
        step = tl.load(beta + by_head, mask=is_token, other=0.0).to(tl.float32)
        is_below = (i > j) & is_token[:, None]
        alike = tl.dot(key, transposed)
        inverse = _invert(tl.where(is_below, alike * left * (step * of_keys)[:, None], 0.0), i, j, CHUNK)
        value = _load_tile(v + head * WIDTH, rows, columns, is_token, v_stride, WIDTH)
        moved = tl.dot((inverse * step[None, :]).to(value.dtype), value)
        places = by_head[:, None] * WIDTH + columns[None, :]
        is_there = is_token[:, None] & (columns < WIDTH)[None, :]
        tl.store(added + places, moved.to(added.dtype.element_ty), mask=is_there)
        by_key = inverse * (step * of_keys * tl.exp(decayed))[None, :]
        seen = tl.dot(by_key.to(key.dtype), key)
        places = by_head[:, None] * DIM + dims[None, :]
        tl.store(keys + places, seen.to(keys.dtype.element_ty), mask=is_token[:, None] & (dims < DIM)[None, :])


@jit
def _sums_to_middle(i, j, LEVEL: tl.constexpr):
    """Which tokens j are between token i and the middle of its aligned block of 2 << LEVEL: 1, others 0."""
    is_right = (i >> LEVEL) % 2 == 1
    return tl.where((i >> LEVEL == j >> LEVEL) & ((j <= i) == is_right), 1.0, 0.0).to(tl.float16)


@jit
def _spread(x, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK, CHUNK] whose blocks on the diagonal are x [CHUNK / BLOCK, BLOCK, BLOCK], with copies elsewhere."""
    rows = tl.reshape(x, (CHUNK, 1, BLOCK))
    return tl.reshape(tl.broadcast_to(rows, (CHUNK, CHUNK // BLOCK, BLOCK)), (CHUNK, CHUNK))


@jit(
    do_not_specialize=["num_sequences", "first_sequence"],
    do_not_specialize_on_alignment=["starts"],
)
def _score_chunks_by_dim(
    q, k, decay, beta, starts, systems, scores, keys, queries, rest, kept, q_stride, k_stride, num_sequences,
    first_sequence, SCALE: tl.constexpr, EPS: tl.constexpr, KEPT: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A and the scores of queries [T, N, CHUNK] of a chunk and a head, to `systems` and `scores`.

    decay: fp32[T, N, K], logarithms
    keys, queries: [T, N, K], by which tokens read the state before the chunk
    rest: [T, N, K], by which keys are added to the state after it
    kept: fp32[chunks, N, K], decays of whole chunks
    """
    wait_for_inputs(PDL)
    starts += first_sequence
    chunk, head = tl.program_id(0), tl.program_id(1)
    sequence, at = find_chunk(starts, chunk, num_sequences, CHUNK, SEQUENCES)
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32) - (KEPT - 1)
    if at >= count:
        return
    first += at
    rows = tl.arange(0, CHUNK)
    is_token = rows < count - at
    by_head = first * HEADS + head
    q += first * q_stride + head // (HEADS // KEY_HEADS) * DIM
    k += first * k_stride + head // (HEADS // KEY_HEADS) * DIM
    decay += by_head * DIM
    all_dims = tl.arange(0, (DIM + TILE - 1) // TILE * TILE)
    whole = _load_tile(k, rows, all_dims, is_token, k_stride, DIM).to(tl.float32)
    of_keys = tl.rsqrt(tl.sum(whole * whole, 1) + EPS)[:, None]
    whole = _load_tile(q, rows, all_dims, is_token, q_stride, DIM).to(tl.float32)
    of_queries = tl.rsqrt(tl.sum(whole * whole, 1) + EPS)[:, None]
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    own = tl.zeros((CHUNK,), tl.float32)
    begins = tl.arange(0, CHUNK // BLOCK)[:, None, None] * BLOCK
    near_i, near_j = begins + tl.arange(0, BLOCK)[None, :, None], begins + tl.arange(0, BLOCK)[None, None, :]
    far_alike, far_read = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    near_alike = tl.zeros((CHUNK // BLOCK, BLOCK, BLOCK), tl.float32)
    near_read = tl.zeros((CHUNK // BLOCK, BLOCK, BLOCK), tl.float32)
    for begin in tl.range(0, DIM, BLOCK_K, num_stages=1):
        dims = begin + tl.arange(0, BLOCK_K)
        key = _load_tile(k, rows, dims, is_token, k_stride, DIM).to(tl.float32) * of_keys
        query = _load_tile(q, rows, dims, is_token, q_stride, DIM).to(tl.float32) * of_queries
        own += tl.sum(key * query, 1)
        key, query = key.to(tl.float16), query.to(tl.float16)
        wide = tl.maximum(_load_tile(decay, rows, dims, is_token, HEADS * DIM, DIM) * LOG2_E, MIN_STEP)
        tl.store(kept + (chunk * HEADS + head).to(tl.int64) * DIM + dims, tl.exp2(tl.sum(wide, 0)), mask=dims < DIM)
        steps = wide.to(tl.float16)
        near_keys = tl.reshape(key, (CHUNK // BLOCK, BLOCK, BLOCK_K))
        near_queries = tl.reshape(query, (CHUNK // BLOCK, BLOCK, BLOCK_K))
        near_steps = tl.reshape(steps, (CHUNK // BLOCK, BLOCK, BLOCK_K))
        for level in tl.static_range(BLOCK.bit_length() - 1):
            left = tl.exp2(tl.dot(_sums_to_middle(near_i, near_j, level), near_steps)).to(tl.float16)
            columns = tl.permute(near_keys * left, (0, 2, 1))
            is_pair = (near_i > near_j) & ((near_i ^ near_j) >> level == 1)
            near_alike += tl.where(is_pair, tl.dot(near_keys * left, columns), 0.0)
            near_read += tl.where(is_pair, tl.dot(near_queries * left, columns), 0.0)
        for level in tl.static_range(BLOCK.bit_length() - 1, CHUNK.bit_length() - 1):
            left = tl.exp2(tl.dot(_sums_to_middle(i, j, level), steps)).to(tl.float16)
            far_keys, far_queries = key * left, query * left
            for block in tl.static_range(CHUNK >> (level + 1)):
                is_left = tl.where(i >> level == 2 * block, 1.0, 0.0).to(tl.float16)
                is_right = tl.where(i >> level == 2 * block + 1, 1.0, 0.0).to(tl.float16)
                columns = tl.trans(far_keys * is_left)
                far_alike = tl.dot(far_keys * is_right, columns, far_alike)
                far_read = tl.dot(far_queries * is_right, columns, far_read)
        places = by_head * DIM + rows[:, None] * (HEADS * DIM) + dims[None, :]
        is_there = is_token[:, None] & (dims < DIM)[None, :]
        left = tl.exp2(tl.dot(tl.where(j <= i, 1.0, 0.0).to(tl.float16), steps))
        tl.store(queries + places, (query.to(tl.float32) * (left * SCALE)).to(queries.dtype.element_ty), mask=is_there)
        tl.store(keys + places, (key.to(tl.float32) * left).to(keys.dtype.element_ty), mask=is_there)
        left = tl.exp2(tl.dot(tl.where(j > i, 1.0, 0.0).to(tl.float16), steps))
        tl.store(rest + places, (key.to(tl.float32) * left).to(rest.dtype.element_ty), mask=is_there)
    is_near = i // BLOCK == j // BLOCK
    step = tl.load(beta + by_head + rows * HEADS, mask=is_token, other=0.0).to(tl.float32)
    alike = tl.where(is_near, _spread(near_alike, CHUNK, BLOCK), far_alike) * step[:, None]
    read = tl.where(is_near, _spread(near_read, CHUNK, BLOCK), far_read)
    read = tl.where(i == j, own[:, None], read) * SCALE
    places, is_there = by_head * CHUNK + i * (HEADS * CHUNK) + j, is_token[:, None] & (j >= 0)
    tl.store(systems + places, alike.to(systems.dtype.element_ty), mask=is_there)
    tl.store(scores + places, read.to(scores.dtype.element_ty), mask=is_there)


@jit(
    do_not_specialize=["num_sequences", "first_sequence"],
    do_not_specialize_on_alignment=["starts"],
)
def _solve_chunks_by_dim(
    v, beta, starts, systems, added, keys, v_stride, num_sequences, first_sequence, KEPT: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """U [T, N, V] to `added`, and W [T, N, K] in place of keys; of the A of `_score_chunks_by_dim`."""
    wait_for_inputs(PDL)
    starts += first_sequence
    sequence, at = find_chunk(starts, tl.program_id(0), num_sequences, CHUNK, SEQUENCES)
    head = tl.program_id(1)
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32) - (KEPT - 1)
    if at >= count:
        return
    tokens = at + tl.arange(0, CHUNK)
    is_token = tokens < count
    rows = first + tokens
    by_head = rows * HEADS + head
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    system = _load_tile(systems + head * CHUNK, rows, tl.arange(0, CHUNK), is_token, HEADS * CHUNK, CHUNK)
    step = tl.load(beta + by_head, mask=is_token, other=0.0).to(tl.float32)
    inverse = (_invert(system.to(tl.float32), i, j, CHUNK) * step[None, :]).to(v.dtype.element_ty)
    columns = tl.arange(0, (WIDTH + TILE - 1) // TILE * TILE)
    value = _load_tile(v + head * WIDTH, rows, columns, is_token, v_stride, WIDTH)
    places = by_head[:, None] * WIDTH + columns[None, :]
    is_there = is_token[:, None] & (columns < WIDTH)[None, :]
    tl.store(added + places, tl.dot(inverse, value).to(added.dtype.element_ty), mask=is_there)
    dims = tl.arange(0, (DIM + TILE - 1) // TILE * TILE)
    key = _load_tile(keys + head * DIM, rows, dims, is_token, HEADS * DIM, DIM)
    places = by_head[:, None] * DIM + dims[None, :]
    is_there = is_token[:, None] & (dims < DIM)[None, :]
    tl.store(keys + places, tl.dot(inverse, key).to(keys.dtype.element_ty), mask=is_there)


@jit(
    do_not_specialize=["first_sequence", "num_tokens"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths"],
)
def _pass_state(
    q, k, v, beta, skip, keys, scores, factors, states, slots, starts, lengths, out, q_stride, k_stride, v_stride,
    first_sequence, num_tokens, KEPT: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, IS_DELTA: tl.constexpr, BY_DIM: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What queries read, to `out`, which with the delta rule has U [T, N, V] before.

    skip: [N], what of a token's own values is added; None: nothing
    BY_DIM: queries and keys have their factors, and a chunk's decay is fp32[chunks, N, K]
    IS_TRANSPOSED: a state is [V, K], not [K, V]
    """
    wait_for_inputs(PDL)
    sequence, head = first_sequence + tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first = tl.load(starts + sequence).to(tl.int64)
    whole = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    count = whole - (KEPT - 1)
    if count <= 0:
        return
    num_before = tl.load(lengths + sequence) - whole
    slot = tl.load(slots + sequence)
    dims = tl.arange(0, (DIM + TILE - 1) // TILE * TILE)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    if IS_TRANSPOSED:
        entries = (head * WIDTH + columns[None, :]) * DIM + dims[:, None]
    else:
        entries = (head * DIM + dims[:, None]) * WIDTH + columns[None, :]
    is_entry = (dims < DIM)[:, None] & (columns < WIDTH)[None, :]
    size: tl.constexpr = HEADS * DIM * WIDTH
    before = states + row_of(slot, num_before, KEPT) * size + entries
    state = tl.load(before, mask=is_entry & (num_before > 0), other=0.0).to(tl.float32)
    of_key = head // (HEADS // KEY_HEADS) * DIM
    stride = num_tokens.to(tl.int64) * HEADS
    if BY_DIM:
        chunk = first_chunk(starts + first_sequence, sequence - first_sequence, CHUNK)
        factors += (chunk * HEADS + head).to(tl.int64) * DIM + dims
    dtype: tl.constexpr = out.dtype.element_ty
    for at in tl.range(0, count, CHUNK, num_stages=STAGES):
        tokens = at + tl.arange(0, CHUNK)
        is_token = tokens < count
        rows = first + tokens
        by_head = rows * HEADS + head
        query = _load_tile(q + of_key, rows, dims, is_token, q_stride, DIM)
        key = _load_tile(k + of_key, rows, dims, is_token, k_stride, DIM)
        score = _load_tile(scores + head * CHUNK, rows, tl.arange(0, CHUNK), is_token, HEADS * CHUNK, CHUNK)
        if BY_DIM:
            kept = tl.load(factors + at // CHUNK * (HEADS * DIM), mask=dims < DIM, other=0.0)[:, None]
        else:
            of_queries = tl.load(factors + by_head, mask=is_token, other=0.0)
            of_keys = tl.load(factors + stride + by_head, mask=is_token, other=0.0)
            kept = tl.load(factors + 2 * stride + (first + at) * HEADS + head)
        narrow = state.to(dtype)
        read = tl.dot(query, narrow)
        if not BY_DIM:
            read *= of_queries[:, None]
        if IS_DELTA:
            seen = _load_tile(keys + head * DIM, rows, dims, is_token, HEADS * DIM, DIM)
            added = _load_tile(out + head * WIDTH, rows, columns, is_token, HEADS * WIDTH, WIDTH)
            value = added.to(tl.float32) - tl.dot(seen, narrow)
        else:
            value = _load_tile(v + head * WIDTH, rows, columns, is_token, v_stride, WIDTH).to(tl.float32)
            if skip is not None:
                read += value * tl.load(skip + head).to(tl.float32)
            if beta is not None:
                value *= tl.load(beta + by_head, mask=is_token, other=0.0).to(tl.float32)[:, None]
        read = tl.dot(score, value.to(dtype), read)
        places = by_head[:, None] * WIDTH + columns[None, :]
        tl.store(out + places, read.to(dtype), mask=is_token[:, None] & (columns < WIDTH)[None, :])
        if not BY_DIM:
            value *= of_keys[:, None]
        state = tl.dot(tl.trans(key), value.to(dtype), state * kept)
    after = states + row_of(slot, num_before + count, KEPT) * size + entries
    tl.store(after, state.to(states.dtype.element_ty), mask=is_entry)


def single_tokens(batch: Batch, kept: int, is_chunked: bool) -> tuple[int, int]:
    """Sequences that have tokens which go one by one, and the first ones of them that have no others.

    is_chunked: prompts go in chunks, but for their last `kept` - 1 tokens
    """
    assert batch.slots is not None
    num_whole = batch.num_decodes if is_chunked else len(batch.slots)
    return len(batch.slots) if kept > 1 else num_whole, num_whole


def suits(v: Tensor, dim: int, batch: Batch, *, is_unit: bool = False, by_dim: bool = False) -> bool:
    """Whether there are prompts that go in chunks: in bf16 or, if keys have the length 1, fp16, of dims that can be.

    by_dim: each dim has a decay of its own, which takes keys of the length 1
    """
    assert batch.slots is not None
    if batch.num_decodes == len(batch.slots):
        return False
    if by_dim and (not is_unit or dim % DIM_MULTIPLE):
        return False
    is_known = v.dtype in DTYPES or (is_unit and v.dtype == torch.float16)
    return is_known and max(dim, v.shape[2]) <= MAX_DIM


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, batch: Batch, out: Tensor, *, steps: Tensor | None = None,
    rates: Tensor | None = None, beta: Tensor | None = None, skip: Tensor | None = None, scale: float = 1.0,
    eps: float | None = None, is_delta: bool = False, is_transposed: bool = False,
) -> None:  # fmt: skip
    """Linear attention of a batch's prompts, less the last L - 1 tokens of each, if a slot keeps L states.

    q and k [T, Nk, K], v [T, N, V], states of slots [slots + 1, L, N, K, V] or, transposed, [slots + 1, L, N, V, K]

    out: [T, N, V], contiguous
    steps, rates: fp32[T, N] and fp32[N], whose product is the logarithm of a token's decay; None: 1. Or fp32[T, N, K],
    the logarithms of decays of each dim of a key, by the delta rule and with eps
    beta: [T, N], what of a token's value is added, by the delta rule or as it is; None: all, without that rule
    skip: [N], what of it the output gets besides, without that rule
    eps: added to squared lengths of keys and queries, which are normalized then; None: they are not
    """
    assert batch.slots is not None and (beta is not None or not is_delta)
    first, num_sequences = batch.num_decodes, len(batch.slots) - batch.num_decodes
    num_tokens, heads, width = v.shape
    key_heads, dim = q.shape[1:]
    by_dim = steps is not None and steps.dim() == 3
    keys = v.new_empty(num_tokens, heads, dim) if is_delta else None
    scores = v.new_empty(num_tokens, heads, CHUNK)
    grid = num_chunks(num_tokens, num_sequences, CHUNK), heads
    sizes = {"KEPT": states.shape[1], "HEADS": heads, "DIM": dim, "CHUNK": CHUNK}
    how = {"num_warps": 4, **find_gpu(v.device).options}
    chunks = {"SEQUENCES": sequence_bucket(num_sequences), **sizes, **how}
    if by_dim:
        assert is_delta and eps is not None and rates is None
        systems = v.new_empty(num_tokens, heads, CHUNK, dtype=torch.float16)
        queries, rest = v.new_empty(2, num_tokens, heads, dim)
        factors = v.new_empty(grid[0], heads, dim, dtype=torch.float32)
        _score_chunks_by_dim[grid](
            q, k, steps, beta, batch.starts, systems, scores, keys, queries, rest, factors, q.stride(0), k.stride(0),
            num_sequences, first, scale, eps, KEY_HEADS=key_heads, **chunks, BLOCK=BLOCK, BLOCK_K=BLOCK_K,
        )  # fmt: skip
        _solve_chunks_by_dim[grid](
            v, beta, batch.starts, systems, out, keys, v.stride(0), num_sequences, first, WIDTH=width, **chunks
        )
        q, k, key_heads = queries, rest, heads
    else:
        factors = v.new_empty(3, num_tokens, heads, dtype=torch.float32)
        _solve_chunks[grid](
            q, k, v, steps, rates, beta, batch.starts, out, keys, scores, factors, q.stride(0), k.stride(0),
            v.stride(0), num_sequences, first, num_tokens, scale, eps, KEY_HEADS=key_heads, WIDTH=width,
            IS_DELTA=is_delta, **chunks,
        )  # fmt: skip
    stage = CHUNK * ((2 + is_delta) * -(-dim // TILE.value) * TILE.value + CHUNK + COLUMNS) * v.element_size()
    stages = max(1, min(MAX_STAGES, (find_gpu(v.device).shared_memory - OTHER_MEMORY) // stage))
    _pass_state[num_sequences * heads, -(-width // COLUMNS)](
        q, k, v, beta, skip, keys, scores, factors, states, batch.slots, batch.starts, batch.lengths, out, q.stride(0),
        k.stride(0), v.stride(0), first, num_tokens, KEY_HEADS=key_heads, WIDTH=width, IS_DELTA=is_delta,
        BY_DIM=by_dim, IS_TRANSPOSED=is_transposed, BLOCK_V=COLUMNS, STAGES=stages, **sizes, **how,
    )  # fmt: skip

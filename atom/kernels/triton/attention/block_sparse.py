"""Choose blocks of keys for each query, and attend to these only.

    selected = paged_index_blocks(q, keys, batch, block=128, top_k=16)    # i32[T, G, top_k]
    attend_blocks(q, cache, batch, selected, sinks, k_scale, v_scale, out, scale, softcap, block)

Scores of blocks come first, for tiles of a sequence's queries with all index heads, so that a key is read once for
them; then each query's best blocks are picked. Attention has a program for each query and key/value head, whose query
heads are the rows of a tile; if these are few, each has some of the chosen blocks, and a second kernel merges them
(flash decoding, Dao et al. 2023). Queries of a prompt that are next to each other and choose few different blocks are
attended together, to all of these, each masking what it did not choose: fuller tiles make up for that.

Decodes and prompts go the same way, by `starts` and `lengths`: a launch depends on the numbers of tokens and sequences
and the width of the table only.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.sparse import SCALE_BYTES
from atom.kernels.triton.attention import prefill
from atom.kernels.triton.attention.common import (
    NOTHING,
    attend_tile,
    find_owner,
    product_size,
    sequence_bucket,
    store_attended,
    wait_for_inputs,
)
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

SCORES_BYTES = 64 << 20  # of blocks at once
PROMPT_ROWS, DECODE_ROWS = 128, 16  # of a tile of scores: queries times index heads
MAX_TILE = 128  # keys that are scored at once
MAX_TOKENS = 64  # of a tile, if blocks are single tokens
PROGRAMS_PER_UNIT = 4
MAX_TOGETHER = 31  # queries, which have a bit each
MAX_UNION = 3  # times the blocks of a query: those of queries that are attended together
UNION_BINS = tl.constexpr(512)  # blocks that are looked for at once
UNLIMITED = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-(1 << 63))


@jit
def find_token(starts, lengths, token, num_sequences, BLOCK_S: tl.constexpr):
    """A token's sequence, and its position there; -1 if it is of none."""
    sequences = tl.arange(0, BLOCK_S)
    ends = tl.load(starts + 1 + sequences, mask=sequences < num_sequences, other=UNLIMITED)
    sequence = tl.sum((ends <= token).to(tl.int32), 0)
    is_there = sequence < num_sequences
    end = tl.load(starts + 1 + sequence, mask=is_there, other=0)
    length = tl.load(lengths + sequence, mask=is_there, other=0)
    return sequence, tl.where(is_there, length - end + token, -1)


@jit
def load_tile(cache, blocks, positions, mask, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """Where entries at positions i32[N] begin, in the blocks listed at `blocks`, and their first DIM numbers."""
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=mask, other=0)
    offsets = (block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * ROW
    columns = tl.arange(0, BLOCK_D)
    is_there = mask[:, None] & (columns < DIM)[None, :]
    return offsets, tl.load(cache + offsets[:, None] + columns[None, :], mask=is_there, other=0.0)


@jit(
    do_not_specialize=["low", "high", "num_sequences", "table_stride", "width"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _score_blocks(
    q, keys, key_scales, table, starts, lengths, scores, low, high, num_sequences, table_stride, q_stride, width,
    BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, ENTRY: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M // GROUPS queries of tokens low to high, by a part of the blocks that they see.

    scores fp32[high - low, GROUPS, width], which has no number for blocks after that of a tile's last query.
    key_scales: entries in fp8 as float32, the last of each its scale; None: they have none
    """
    wait_for_inputs(PDL)
    QUERIES: tl.constexpr = BLOCK_M // GROUPS
    sequences = tl.arange(0, BLOCK_S)
    is_sequence = sequences < num_sequences
    firsts = tl.load(starts + sequences, mask=is_sequence, other=0)
    stops = tl.load(starts + 1 + sequences, mask=is_sequence, other=0)
    counts = tl.cdiv(tl.maximum(tl.minimum(stops, high) - tl.maximum(firsts, low), 0), QUERIES)
    tile = tl.program_id(0)
    if tile >= tl.sum(counts, 0):
        return
    sequence, before = find_owner(counts, tile)
    stop = tl.load(starts + 1 + sequence)
    first = tl.maximum(tl.load(starts + sequence), low) + (tile - before) * QUERIES
    end = tl.minimum(stop, high)
    shift = tl.load(lengths + sequence) - stop  # from a token to its position
    last = tl.minimum(first + QUERIES, end) - 1 + shift

    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, groups = first + rows // GROUPS, rows % GROUPS
    is_row = (rows < QUERIES * GROUPS) & (tokens < end)
    newest = tokens + shift
    q_rows = q + tokens.to(tl.int64) * q_stride + groups * DIM
    queries = tl.load(q_rows[:, None] + columns[None, :], mask=is_row[:, None] & (columns < DIM)[None, :], other=0.0)
    IS_FP8: tl.constexpr = keys.dtype.element_ty.is_fp8()
    if keys.dtype.element_ty != q.dtype.element_ty and not IS_FP8:
        queries = queries.to(tl.float32)
    blocks = table + sequence.to(tl.int64) * table_stride
    out = scores + ((tokens - low).to(tl.int64) * GROUPS + groups) * width
    num_blocks = tl.maximum(last + BLOCK, 0) // BLOCK
    share = tl.cdiv(num_blocks, tl.num_programs(1))
    begin = tl.program_id(1) * share
    for number in range(begin, tl.minimum(begin + share, num_blocks)):
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for start in range(0, BLOCK, BLOCK_N):
            places = start + tl.arange(0, BLOCK_N)
            positions = number * BLOCK + places
            is_there = (places < BLOCK) & (positions <= last)
            offsets, k = load_tile(keys, blocks, positions, is_there, BLOCK_SIZE, ENTRY, DIM, BLOCK_D)
            products = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee")
            if IS_FP8:
                products *= tl.load(key_scales + offsets // 4 + DIM // 4, mask=is_there, other=0.0)[None, :]
            is_seen = is_there[None, :] & (positions[None, :] <= newest[:, None])
            best = tl.maximum(best, tl.max(tl.where(is_seen, products, float("-inf")), 1))
        tl.store(out + number, best, mask=is_row)


@jit(
    do_not_specialize=["low", "num_sequences", "width"],
    do_not_specialize_on_alignment=["starts", "lengths"],
)
def _pick_blocks(
    scores, starts, lengths, selected, low, num_sequences, width, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, LOCAL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best blocks of one query and index head, ascending; scores None: there are no more than TOP_K."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    _, newest = find_token(starts, lengths, low + row // GROUPS, num_sequences, BLOCK_S)
    num_blocks = (newest + BLOCK) // BLOCK
    count = tl.minimum(num_blocks, TOP_K)
    numbers = tl.arange(0, BLOCK_W)
    is_chosen = numbers < num_blocks
    if scores is not None:  # noqa: SIM102 - which is known when this is compiled
        if num_blocks > TOP_K:
            values = tl.load(scores + row.to(tl.int64) * width + numbers, mask=is_chosen, other=float("-inf"))
            values = tl.where(numbers >= num_blocks - LOCAL, float("inf"), values)
            bits = values.to(tl.int32, bitcast=True)
            ranks = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # whose order is that of the values
            # each is another one: of equal values, the first block is the best
            left = tl.where(is_chosen, ranks * (1 << 32) + (BLOCK_W - numbers), LOWEST)
            for _ in range(0, TOP_K):
                left = tl.where(left == tl.max(left, 0), LOWEST, left)
            is_chosen = is_chosen & (left == LOWEST)
    out = selected + (low + row // GROUPS).to(tl.int64) * (GROUPS * TOP_K) + row % GROUPS * TOP_K
    tl.store(out + tl.cumsum(is_chosen.to(tl.int32), 0) - 1, numbers, mask=is_chosen)
    places = tl.arange(0, BLOCK_K)
    tl.store(out + places, tl.full([BLOCK_K], -1, tl.int32), mask=(places >= count) & (places < TOP_K))


def paged_index_blocks(q: Tensor, cache: PagedCache, batch: Batch, *, block: int, top_k: int,
                       local: int = 1) -> Tensor:  # fmt: skip
    """The op of this name; the rows of q may lie apart."""
    keys, table, starts, lengths = cache.blocks, batch.tables[cache.kind], batch.starts, batch.lengths
    (num_tokens, groups, dim), num_sequences = q.shape, len(lengths)
    q = q if q.stride()[1:] == (dim, 1) else q.contiguous()
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    assert keys.is_contiguous(), "blocks must lie side by side"
    assert not is_fp8 or dim % SCALE_BYTES == 0, "scales of keys must be aligned"
    gpu = find_gpu(q.device)
    selected = torch.empty((num_tokens, groups, top_k), dtype=torch.int32, device=q.device)
    width = -(-table.shape[1] * keys.shape[1] // block)
    bucket, block_w = sequence_bucket(num_sequences), next_power_of_2(max(width, 2))
    pick = {"num_warps": 1 if block_w <= 512 else 4 if block_w <= 4096 else 8, **gpu.options}
    sizes = block, groups, top_k, local, bucket, block_w, max(2, next_power_of_2(top_k))
    if width <= top_k:
        if num_tokens:
            _pick_blocks[(num_tokens * groups,)](
                None, starts, lengths, selected, 0, num_sequences, width, *sizes, **pick
            )
        return selected
    are_decodes = num_tokens <= num_sequences * batch.query_len
    rows = max(DECODE_ROWS if are_decodes else PROMPT_ROWS, next_power_of_2(groups))
    tile = min(MAX_TILE, max(16, next_power_of_2(block)))
    if product_size(q, keys) == 4:  # without tensor cores
        rows, tile = min(rows, max(32, next_power_of_2(groups))), min(tile, 32)
    key_scales = keys.view(torch.float32) if is_fp8 else None
    at_once = max(1, SCORES_BYTES // (groups * width * 4))
    for low in range(0, num_tokens, at_once):
        high = min(low + at_once, num_tokens)
        scores = torch.empty((high - low, groups, width), device=q.device)
        num_tiles = min(high - low, (high - low) // (rows // groups) + num_sequences)
        parts = min(width, max(1, -(-PROGRAMS_PER_UNIT * gpu.units // num_tiles)))
        _score_blocks[(num_tiles, parts)](
            q, keys, key_scales, table, starts, lengths, scores, low, high, num_sequences, table.stride(0), q.stride(0),
            width, block, keys.shape[1], groups, dim, keys.shape[2], bucket, rows, tile, max(16, next_power_of_2(dim)),
            num_warps=4, num_stages=3, **gpu.options,
        )  # fmt: skip
        _pick_blocks[((high - low) * groups,)](
            scores, starts, lengths, selected, low, num_sequences, width, *sizes, **pick
        )
    return selected


@jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _attend_blocks(
    q, cache, table, starts, lengths, selected, counts, sinks, k_scale, v_scale, out, sums, stats, num_sequences,
    table_stride, q_stride, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr, QUERIES: tl.constexpr, LIMIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query's GROUP heads of a key/value head of HEADS, by a part of its blocks; GROUPS index heads chose TOP_K.

    counts: of `_unite_blocks`, of queries that are attended together; None: none are
    """
    wait_for_inputs(PDL)
    token, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if counts is not None:  # noqa: SIM102 - which is known when this is compiled
        if tl.load(counts + token // QUERIES * GROUPS + head // (HEADS // GROUPS)) <= LIMIT:
            return
    sequence, newest = find_token(starts, lengths, token, num_sequences, BLOCK_S)
    chosen = selected + (token * GROUPS + head // (HEADS // GROUPS)) * TOP_K
    places = tl.arange(0, BLOCK_K)
    count = tl.sum((tl.load(chosen + places, mask=places < TOP_K, other=-1) >= 0).to(tl.int32), 0)
    count = tl.where(newest >= 0, count, 0)
    # a tile is a part of a block, or several small ones
    TILES: tl.constexpr = (BLOCK + BLOCK_N - 1) // BLOCK_N
    PER_TILE: tl.constexpr = BLOCK_N // BLOCK if BLOCK < BLOCK_N else 1
    num_tiles = tl.cdiv(count, PER_TILE)
    share = tl.cdiv(num_tiles, PARTS)

    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_row = rows < GROUP
    heads = head * GROUP + rows
    q_rows = q + token * q_stride + heads * DIM
    queries = tl.load(q_rows[:, None] + columns[None, :], mask=is_row[:, None] & (columns < DIM)[None, :], other=0.0)
    if cache.dtype.element_ty != q.dtype.element_ty and not cache.dtype.element_ty.is_fp8():
        queries = queries.to(tl.float32)
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    if v_scale is not None:
        v_scale = tl.load(v_scale)
    keys = cache + head * DIM
    blocks = table + sequence.to(tl.int64) * table_stride
    best = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in range(part * share * TILES, tl.minimum((part + 1) * share, num_tiles) * TILES):
        inside = step % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        if PER_TILE == 1:
            positions = tl.load(chosen + step // TILES) * BLOCK + inside
            is_seen = (inside < BLOCK) & (positions <= newest)
        else:
            number = step // TILES * PER_TILE + inside // BLOCK
            is_there = (inside < PER_TILE * BLOCK) & (number < count)
            positions = tl.load(chosen + number, mask=is_there, other=0) * BLOCK + inside % BLOCK
            is_seen = is_there & (positions <= newest)
        offsets, k = load_tile(keys, blocks, positions, is_seen, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_D)
        is_value = is_seen[:, None] & (columns < DIM)[None, :]
        v = tl.load(keys + HEADS * DIM + offsets[:, None] + columns[None, :], mask=is_value, other=0.0)
        best, total, acc = attend_tile(queries, k, v, best, total, acc, is_seen[None, :], k_scale, None,
                                       positions[None, :], SCALE, SOFTCAP)  # fmt: skip
    if PARTS == 1:
        offsets = (token * (HEADS * GROUP) + heads) * DIM
        store_attended(acc, best, total, sinks, v_scale, out, heads, offsets, is_row, DIM)
    else:
        at = ((token * HEADS + head) * PARTS + part) * GROUP + rows
        tl.store(stats + 2 * at, best, mask=is_row)
        tl.store(stats + 2 * at + 1, total, mask=is_row)
        tl.store(sums + at[:, None] * DIM + columns[None, :], acc, mask=is_row[:, None] & (columns < DIM)[None, :])


@jit
def _merge_parts(
    sums, stats, sinks, v_scale, out, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of one query's heads of a key/value head -> out"""
    wait_for_inputs(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_row = rows < GROUP
    best = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(0, PARTS):
        at = ((token * HEADS + head) * PARTS + part) * GROUP + rows
        own = tl.load(stats + 2 * at, mask=is_row, other=NOTHING)
        own_total = tl.load(stats + 2 * at + 1, mask=is_row, other=0.0)
        is_there = is_row[:, None] & (columns < DIM)[None, :]
        own_sums = tl.load(sums + at[:, None] * DIM + columns[None, :], mask=is_there, other=0.0)
        higher = tl.maximum(best, own)
        fade, own_fade = tl.exp2(best - higher), tl.exp2(own - higher)
        total = total * fade + own_total * own_fade
        acc = acc * fade[:, None] + own_sums * own_fade[:, None]
        best = higher
    if v_scale is not None:
        v_scale = tl.load(v_scale)
    heads = head * GROUP + rows
    offsets = (token * (HEADS * GROUP) + heads) * DIM
    store_attended(acc, best, total, sinks, v_scale, out, heads, offsets, is_row, DIM)


@jit(
    do_not_specialize=["num_tokens", "num_sequences"],
    do_not_specialize_on_alignment=["starts", "lengths"],
)
def _unite_blocks(
    selected, starts, lengths, counts, numbers, choices, num_tokens, num_sequences, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, TOP_K: tl.constexpr, QUERIES: tl.constexpr, LIMIT: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The blocks that any of QUERIES tokens chose by an index head: numbers and choices i32[tiles, GROUPS, LIMIT], the
    bits of which say which queries did, and counts i32[tiles, GROUPS]: above LIMIT if tokens are of several sequences.
    """
    wait_for_inputs(PDL)
    tile, group = tl.program_id(0), tl.program_id(1)
    first, last = tile * QUERIES, tl.minimum((tile + 1) * QUERIES, num_tokens) - 1
    sequence, _ = find_token(starts, lengths, first, num_sequences, BLOCK_S)
    last_sequence, newest = find_token(starts, lengths, last, num_sequences, BLOCK_S)
    is_one = (sequence == last_sequence) & (newest >= last - first)
    num_blocks = tl.where(is_one, (newest + BLOCK) // BLOCK, 0)
    places, out = tl.arange(0, BLOCK_K), (tile.to(tl.int64) * GROUPS + group) * LIMIT
    count = 0
    for start in range(0, num_blocks, UNION_BINS):
        bins = start + tl.arange(0, UNION_BINS)
        bits = tl.zeros([UNION_BINS], tl.int32)
        for query in range(0, QUERIES):
            is_place = (places < TOP_K) & (first + query <= last)
            chosen = selected + ((first + query).to(tl.int64) * GROUPS + group) * TOP_K
            own = tl.load(chosen + places, mask=is_place, other=-1)
            bits += tl.sum((own[:, None] == bins[None, :]).to(tl.int32), 0) << query
        is_chosen = (bits != 0).to(tl.int32)
        at = count + tl.cumsum(is_chosen, 0) - 1
        is_kept = (is_chosen > 0) & (at < LIMIT)
        tl.store(numbers + out + at, bins, mask=is_kept)
        tl.store(choices + out + at, bits, mask=is_kept)
        count += tl.sum(is_chosen, 0)
    tl.store(counts + tile * GROUPS + group, tl.where(is_one, count, LIMIT + 1))


@jit(
    do_not_specialize=["num_tokens", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "lengths"],
)
def _attend_tiles(
    q, cache, table, starts, lengths, counts, numbers, choices, sinks, k_scale, v_scale, out, num_tokens,
    num_sequences, table_stride, q_stride, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    LIMIT: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens by the GROUP heads of a key/value head of HEADS, to all blocks that `_unite_blocks` found."""
    wait_for_inputs(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    union = tile.to(tl.int64) * GROUPS + head // (HEADS // GROUPS)
    count = tl.load(counts + union)
    if count > LIMIT:
        return
    numbers += union * LIMIT
    choices += union * LIMIT
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = rows // GROUP
    first = tile * QUERIES
    last = tl.minimum(first + QUERIES, num_tokens) - 1
    sequence, end = find_token(starts, lengths, last, num_sequences, BLOCK_S)
    newest = end - (last - first) + queries
    tokens, heads = (first + queries).to(tl.int64), head * GROUP + rows % GROUP
    is_row = (queries < QUERIES) & (tokens < num_tokens)
    q_rows = q + tokens * q_stride + heads * DIM
    q_tile = tl.load(q_rows[:, None] + columns[None, :], mask=is_row[:, None] & (columns < DIM)[None, :], other=0.0)
    if cache.dtype.element_ty != q.dtype.element_ty and not cache.dtype.element_ty.is_fp8():
        q_tile = q_tile.to(tl.float32)
    if k_scale is not None:
        k_scale = tl.load(k_scale)
    if v_scale is not None:
        v_scale = tl.load(v_scale)
    keys = cache + head * DIM
    blocks = table + sequence.to(tl.int64) * table_stride
    best = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    TILES: tl.constexpr = (BLOCK + BLOCK_N - 1) // BLOCK_N
    for step in range(0, count * TILES):
        inside = step % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        positions = tl.load(numbers + step // TILES) * BLOCK + inside
        is_there = (inside < BLOCK) & (positions <= end)
        offsets, k = load_tile(keys, blocks, positions, is_there, BLOCK_SIZE, 2 * HEADS * DIM, DIM, BLOCK_D)
        is_value = is_there[:, None] & (columns < DIM)[None, :]
        v = tl.load(keys + HEADS * DIM + offsets[:, None] + columns[None, :], mask=is_value, other=0.0)
        has_chosen = (tl.load(choices + step // TILES) >> queries) & 1
        newest_seen = tl.where(has_chosen > 0, newest, -1)
        is_seen = is_there[None, :] & (positions[None, :] <= newest_seen[:, None])
        best, total, acc = attend_tile(q_tile, k, v, best, total, acc, is_seen, k_scale, None, positions[None, :],
                                       SCALE, SOFTCAP)  # fmt: skip
    store_attended(acc, best, total, sinks, v_scale, out, heads, (tokens * (HEADS * GROUP) + heads) * DIM, is_row, DIM)


def attend_blocks(q: Tensor, cache: PagedCache, batch: Batch, selected: Tensor, sinks: Tensor | None,
                  k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor, scale: float, softcap: float | None,
                  block: int) -> None:  # fmt: skip
    """Attention of q [T, N, D] to the blocks selected i32[T, G, k], of `block` positions -> out [T, N, D]"""
    blocks, table = cache.blocks, batch.tables[cache.kind]
    (num_tokens, num_heads, dim), (_, groups, top_k) = q.shape, selected.shape
    block_size, _, kv_heads, _ = blocks.shape[1:]
    if not num_tokens:
        return
    gpu, group, programs = find_gpu(q.device), num_heads // kv_heads, num_tokens * kv_heads
    parts = min(next_power_of_2(top_k), next_power_of_2(max(1, PROGRAMS_PER_UNIT * gpu.units // (2 * programs))))
    sums = stats = counts = None
    if parts > 1:
        sums = torch.empty((programs, parts, group, dim), device=q.device)
        stats = torch.empty((programs, parts, group, 2), device=q.device)
    block_d, size, num_sequences = max(16, next_power_of_2(dim)), product_size(q, blocks), len(batch.lengths)
    bucket, block_k = sequence_bucket(num_sequences), max(2, next_power_of_2(top_k))
    given = q, blocks, table, batch.starts, batch.lengths
    rules = scale, softcap, block, block_size, kv_heads, group, groups
    tiling = prefill.choose(block_d, size, blocks.element_size(), gpu)
    together, limit = min(MAX_TOGETHER, tiling.rows // next_power_of_2(group)), MAX_UNION * top_k
    if parts == 1 and together > 1 and block > 1:  # of single tokens, queries choose too many
        num_tiles = -(-num_tokens // together)
        counts = torch.empty((num_tiles, groups), dtype=torch.int32, device=q.device)
        numbers, choices = torch.empty((2, num_tiles, groups, limit), dtype=torch.int32, device=q.device)
        _unite_blocks[(num_tiles, groups)](
            selected, batch.starts, batch.lengths, counts, numbers, choices, num_tokens, num_sequences, block, groups,
            top_k, together, limit, bucket, block_k, num_warps=4, **gpu.options,
        )  # fmt: skip
        registers = {} if tiling.max_registers is None else {"maxnreg": tiling.max_registers}
        _attend_tiles[(num_tiles, kv_heads)](
            *given, counts, numbers, choices, sinks, k_scale, v_scale, out, num_tokens, num_sequences, table.stride(0),
            q.stride(0), *rules, together, limit, dim, bucket, tiling.rows,
            min(tiling.positions, max(16, next_power_of_2(block))), block_d, num_warps=tiling.num_warps,
            num_stages=tiling.num_stages, **registers, **gpu.options,
        )  # fmt: skip
    block_m, is_small = max(16, next_power_of_2(group)), block_d <= 128 and size < 4
    tile = max(16, (16 << 10) // (block_d * size))
    tile = min(tile, MAX_TOKENS if block == 1 else max(16, next_power_of_2(block)))
    _attend_blocks[(num_tokens, kv_heads, parts)](
        *given, selected, counts, sinks, k_scale, v_scale, out, sums, stats, num_sequences, table.stride(0),
        q.stride(0), *rules, top_k, dim, parts, together, limit, bucket, block_m, tile, block_k, block_d,
        num_warps=4 if block_m < 64 else 8, num_stages=3 if is_small else 2, **gpu.options,
    )  # fmt: skip
    if parts > 1:
        _merge_parts[(num_tokens, kv_heads)](
            sums, stats, sinks, v_scale, out, kv_heads, group, dim, parts, block_m, block_d, num_warps=4, **gpu.options
        )

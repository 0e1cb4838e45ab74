"""Absorbed latent attention to chosen entries on NVIDIA's Hopper, in Gluon.

    sums, weights = attend_chosen(q, q_rope, cache, rows, selected, scale)      # as triton/attention/chosen.py

A program has 64 heads of a token. One group of warps gathers tiles of what the token chose, and two multiply them: each
has the scores of every other tile, and half of the latent dims of all sums, to which both weigh all tiles in order. So
while one has scores to soften, the other multiplies (as in FlashMLA, DeepSeek-AI 2025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.kernels.hopper.gluon import barrier, jit
from atom.kernels.triton.attention.chosen import MIN_PART, find_slots
from atom.kernels.triton.attention.common import NOTHING, wait_for_inputs
from atom.kernels.triton.attention.rows import Rows
from atom.kernels.triton.gpu import find_gpu

HEADS_EACH = gl.constexpr(64)  # of a program
ENTRIES = gl.constexpr(64)  # of a tile
RANK = gl.constexpr(512)
HALF = gl.constexpr(256)  # of the latent dims
ROTATED = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # lines of 128 bytes
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ATTENDED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))


@jit
def produce(q, q_rope, cache, chosen, token, first_head, start, stop, num_pairs, num_tokens, q_stride, head_stride,
            memory):  # fmt: skip
    """Copy the queries, and then tile after tile."""
    queries, q_rotated, latents, rotated, _, _, q_ready, ready, free, _, _ = memory
    lines = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, COPIES))
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPIES))
    dims = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, COPIES))
    heads = first_head + lines
    rows = q + ((heads.to(gl.int64) * num_tokens + token) * RANK)[:, None]
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(queries.index(half), rows + (half * HALF + columns)[None, :])
    rows = q_rope + (token * q_stride + heads * head_stride)[:, None]
    async_copy.async_copy_global_to_shared(q_rotated, rows + dims[None, :])
    async_copy.mbarrier_arrive(q_ready, increment_count=False)
    last = gl.maximum(stop - 1, 0)  # after the last entry comes that one again, with no weight
    slot = gl.load(chosen + gl.minimum(start + lines, last))
    for tile in range(2 * num_pairs):
        side = tile % 2
        rows = cache + (slot.to(gl.int64) * (RANK + ROTATED))[:, None]
        slot = gl.load(chosen + gl.minimum(start + (tile + 1) * ENTRIES + lines, last))
        mbarrier.wait(free.index(side), tile // 2 & 1 ^ 1)
        for half in gl.static_range(2):
            target = latents.index(side * 2 + half)
            async_copy.async_copy_global_to_shared(target, rows + (half * HALF + columns)[None, :])
        async_copy.async_copy_global_to_shared(rotated.index(side), rows + (RANK + dims)[None, :])
        async_copy.mbarrier_arrive(ready.index(side), increment_count=False)


@jit
def add_tile(acc, best, higher, side, memory, WHO: gl.constexpr):
    """Add the weighed latents of a tile to sums of half of the dims, in units of a higher maximum."""
    _, _, latents, rotated, _, _, _, _, free, _, _ = memory
    fade = gl.exp2(best - higher)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, ATTENDED))[:, None]
    acc = warpgroup_mma(rotated.index(side), latents.index(side * 2 + WHO), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(side))
    return acc, fade


@jit
def consume(out, weights, first_head, token, start, stop, num_pairs, num_tokens, scale, memory, dtype: gl.constexpr,
            HEADS: gl.constexpr, WHO: gl.constexpr):  # fmt: skip
    """The scores of every other tile, and half of the dims of the sums."""
    queries, q_rotated, latents, rotated, maxima, sums, q_ready, ready, _, weighed, done = memory
    best = gl.full([HEADS_EACH], NOTHING, gl.float32, ROWS)
    total = gl.zeros([HEADS_EACH], gl.float32, ROWS)  # of this one's tiles
    acc = gl.zeros([HEADS_EACH, HALF], gl.float32, ATTENDED)
    numbers = gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, SCORES))
    mbarrier.wait(q_ready, 0)
    for pair in range(num_pairs):
        phase = pair & 1
        mbarrier.wait(ready.index(WHO), phase)
        fence_async_shared()
        scores = gl.zeros([HEADS_EACH, ENTRIES], gl.float32, SCORES)
        scores = warpgroup_mma(
            queries.index(0), latents.index(WHO * 2).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(queries.index(1), latents.index(WHO * 2 + 1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(q_rotated, rotated.index(WHO).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        first = start + (2 * pair + WHO) * ENTRIES
        scores = gl.where((first + numbers < stop)[None, :], scores * scale, float("-inf"))
        own_best = gl.max(scores, 1)
        if WHO == 1:  # the other's tile comes first
            mbarrier.wait(weighed.index(0), phase)
            before = maxima.index(0).load(ROWS)
            higher = gl.maximum(before, own_best)
        else:
            higher = gl.maximum(best, own_best)
        shares = gl.exp2(scores - higher[:, None])
        own_total = gl.sum(shares, 1)
        rotated.index(WHO).store(shares.to(dtype))  # in place of what only these scores are of
        maxima.index(WHO).store(higher)
        fence_async_shared()
        barrier()
        mbarrier.arrive(weighed.index(WHO))
        if WHO == 1:
            acc, fade = add_tile(acc, best, before, 0, memory, WHO)
            total *= fade
            acc, fade = add_tile(acc, before, higher, 1, memory, WHO)
            total = total * fade + own_total
            best = higher
        else:
            acc, fade = add_tile(acc, best, higher, 0, memory, WHO)
            total = total * fade + own_total
            mbarrier.wait(weighed.index(1), phase)
            best = maxima.index(1).load(ROWS)
            acc, fade = add_tile(acc, higher, best, 1, memory, WHO)
            total *= fade
    sums.index(WHO).store(total)
    barrier()
    mbarrier.arrive(done.index(WHO))
    mbarrier.wait(done.index(1 - WHO), 0)
    total = sums.index(0).load(ROWS) + sums.index(1).load(ROWS)
    rows = first_head + gl.arange(0, HEADS_EACH, layout=ROWS)
    target = rows.to(gl.int64) * num_tokens + token
    if weights is not None:
        target += gl.program_id(1) * (HEADS * num_tokens)
        gl.store(weights + target, gl.where(total > 0, best + gl.log2(total), NOTHING))
    factor = gl.convert_layout(1.0 / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, ATTENDED))
    target = gl.convert_layout(target, gl.SliceLayout(1, ATTENDED))
    outs = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, ATTENDED))
    gl.store(out + target[:, None] * RANK + outs[None, :], (acc * factor[:, None]).to(out.dtype.element_ty))


@jit(do_not_specialize=["num_tokens", "num_splits"])
def _chosen_kernel(q, q_rope, cache, slots, counts, out, weights, num_tokens, num_splits, scale, q_stride, head_stride,
                   HEADS: gl.constexpr, TOP_K: gl.constexpr):  # fmt: skip
    """64 heads of a token over what it chose or, with weights fp32[splits, N, T], a part of that.

    q [N, T, L] -> out [N, T, L], or parts fp32[splits, N, T, L] and the log2 of what each weighs. slots i32[T, TOP_K],
    the first counts i32[T] of a token are chosen
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [2, HEADS_EACH, HALF], SHARED)
    q_rotated = gl.allocate_shared_memory(dtype, [HEADS_EACH, ROTATED], SHARED)
    latents = gl.allocate_shared_memory(dtype, [4, ENTRIES, HALF], SHARED)
    rotated = gl.allocate_shared_memory(dtype, [2, ENTRIES, ROTATED], SHARED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, HEADS_EACH], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS_EACH], PLAIN)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_ready, count=128)
    for side in gl.static_range(2):
        mbarrier.init(ready.index(side), count=128)
        mbarrier.init(free.index(side), count=2)
        mbarrier.init(weighed.index(side), count=1)
        mbarrier.init(done.index(side), count=1)
    fence_async_shared()
    wait_for_inputs(True)
    tiles_each: gl.constexpr = HEADS // HEADS_EACH
    token = gl.program_id(0) // tiles_each
    first_head = gl.program_id(0) % tiles_each * HEADS_EACH
    stop = gl.load(counts + token)
    part = gl.cdiv(stop, num_splits * ENTRIES) * ENTRIES
    start = gl.program_id(1) * part
    stop = gl.minimum(stop, start + part)
    num_pairs = gl.cdiv(gl.maximum(stop - start, 0), 2 * ENTRIES)
    memory = queries, q_rotated, latents, rotated, maxima, sums, q_ready, ready, free, weighed, done
    gl.warp_specialize(
        [
            (produce, (q, q_rope, cache, slots + token * TOP_K, token, first_head, start, stop, num_pairs, num_tokens,
                       q_stride, head_stride, memory)),
            (consume, (out, weights, first_head, token, start, stop, num_pairs, num_tokens, scale, memory, dtype,
                       HEADS, 0)),
            (consume, (out, weights, first_head, token, start, stop, num_pairs, num_tokens, scale, memory, dtype,
                       HEADS, 1)),
        ],
        [4, 4],  # warps
        [216, 216],  # registers a thread
    )  # fmt: skip


def suits(q: Tensor, q_rope: Tensor, cache: Tensor) -> bool:
    """Whether `attend_chosen` takes these: absorbed queries q [N, R, L], q_rope [R, N, P], cache [blocks, size, E]."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype == q.dtype
        and q.shape[0] % HEADS_EACH.value == 0
        and (q.shape[2], q_rope.shape[2]) == (RANK.value, ROTATED.value)
        and q_rope.stride(0) % 16 == q_rope.stride(1) % 16 == q_rope.data_ptr() % 16 == 0
    )


def attend_chosen(q: Tensor, q_rope: Tensor, cache: Tensor, rows: Rows, selected: Tensor,
                  scale: float) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As that of triton/attention/chosen.py."""
    (heads, num, _), (_, top_k), gpu = q.shape, selected.shape, find_gpu(q.device)
    assert q_rope.stride(2) == 1 and q.is_contiguous() and cache.is_contiguous(), "rows have gaps"
    num_tiles = num * (heads // HEADS_EACH.value)
    num_splits = max(1, min(gpu.units // num_tiles, top_k // MIN_PART))
    sums, weights = torch.empty_like(q), None
    if num_splits > 1:
        sums = q.new_empty(num_splits, *q.shape, dtype=torch.float32)
        weights = q.new_empty(num_splits, heads, num, dtype=torch.float32)
    slots, counts = find_slots(selected, rows, cache.shape[1])
    _chosen_kernel[(num_tiles, num_splits)](
        q, q_rope, cache, slots, counts, sums, weights, num, num_splits, scale * math.log2(math.e), q_rope.stride(0),
        q_rope.stride(1), HEADS=heads, TOP_K=top_k, num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return sums, weights

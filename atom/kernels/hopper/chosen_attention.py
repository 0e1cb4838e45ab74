"""Absorbed latent attention to chosen entries on NVIDIA's Hopper, in Gluon.

    sums, weights = attend_chosen(q, q_rope, cache, rows, selected, scale)      # as triton/attention/chosen.py

A program has 64 heads of a token; tiles of what the token chose are gathered while the tile before is multiplied. Two
groups of warps have half of a tile's entries each for scores, and then, of all of them, half of the latent dims: in
Triton both would compute all scores, since warps of a chained matmul are laid along rows only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom.kernels.hopper.gluon import barrier, jit
from atom.kernels.triton.attention.chosen import MIN_PART, find_slots
from atom.kernels.triton.attention.common import NOTHING, wait_for_inputs
from atom.kernels.triton.attention.rows import Rows
from atom.kernels.triton.gpu import find_gpu

HEADS_EACH = gl.constexpr(64)  # of a program
ENTRIES = gl.constexpr(64)  # of a tile
RANK = gl.constexpr(512)
ROTATED = gl.constexpr(64)
IN_REGISTERS = True
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # lines of 128 bytes
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
ATTENDED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))


@jit
def copy_entries(cache, slot, latents, rotated):
    """Entries of the cache at slots i32[ENTRIES] to shared memory, in flight."""
    entries = cache + (slot.to(gl.int64) * (RANK + ROTATED))[:, None]
    columns = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPIES))
    dims = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, COPIES))
    async_copy.async_copy_global_to_shared(latents, entries + columns[None, :])
    async_copy.async_copy_global_to_shared(rotated, entries + (RANK + dims)[None, :])
    async_copy.commit_group()


@jit(do_not_specialize=["num_tokens", "num_splits"])
def _chosen_kernel(q, q_rope, cache, slots, counts, out, weights, num_tokens, num_splits, scale, q_stride, head_stride,
                   HEADS: gl.constexpr, TOP_K: gl.constexpr, IN_REGISTERS: gl.constexpr):  # fmt: skip
    """64 heads of a token over what it chose or, with weights fp32[splits, N, T], a part of that.

    q [N, T, L] -> out [N, T, L], or parts fp32[splits, N, T, L] and the log2 of what each weighs. slots i32[T, TOP_K],
    the first counts i32[T] of a token are chosen
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_latents = gl.allocate_shared_memory(dtype, [HEADS_EACH, RANK], SHARED)
    q_rotated = gl.allocate_shared_memory(dtype, [HEADS_EACH, ROTATED], SHARED)
    latents = gl.allocate_shared_memory(dtype, [2, ENTRIES, RANK], SHARED)
    rotated = gl.allocate_shared_memory(dtype, [2, ENTRIES, ROTATED], SHARED)
    if not IN_REGISTERS:
        shares_memory = gl.allocate_shared_memory(dtype, [HEADS_EACH, ENTRIES], SHARED)
    wait_for_inputs(True)
    tiles_each: gl.constexpr = HEADS // HEADS_EACH
    token = gl.program_id(0) // tiles_each
    first_head = gl.program_id(0) % tiles_each * HEADS_EACH
    stop = gl.load(counts + token)
    part = gl.cdiv(stop, num_splits * ENTRIES) * ENTRIES
    start = gl.program_id(1) * part
    stop = gl.minimum(stop, start + part)

    heads = first_head + gl.arange(0, HEADS_EACH, layout=gl.SliceLayout(1, COPIES))
    places = heads.to(gl.int64) * num_tokens + token
    columns = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPIES))
    dims = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, COPIES))
    lines = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, COPIES))
    chosen = slots + token * TOP_K  # few tokens at a time, see ABSORBED_BYTES of triton/attention/latent.py

    best = gl.full([HEADS_EACH], NOTHING, gl.float32, gl.SliceLayout(1, SCORES))
    totals = gl.zeros([HEADS_EACH, ENTRIES], gl.float32, SCORES)  # summed over entries in the end
    acc = gl.zeros([HEADS_EACH, RANK], gl.float32, ATTENDED)
    num_tiles = gl.cdiv(gl.maximum(stop - start, 0), ENTRIES)
    if num_tiles > 0:
        # after the last entry comes that one again, with no weight
        copy_entries(cache, gl.load(chosen + gl.minimum(start + lines, stop - 1)), latents.index(0), rotated.index(0))
        q_latents.store(gl.load(q + places[:, None] * RANK + columns[None, :]))
        rope_rows = token * q_stride + heads * head_stride
        q_rotated.store(gl.load(q_rope + rope_rows[:, None] + dims[None, :]))
    slot = gl.load(chosen + gl.maximum(gl.minimum(start + ENTRIES + lines, stop - 1), 0))
    for step in range(num_tiles):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        stage = step % 2
        if step + 1 < num_tiles:
            copy_entries(cache, slot, latents.index(1 - stage), rotated.index(1 - stage))
        first = start + step * ENTRIES
        slot = gl.load(chosen + gl.minimum(first + 2 * ENTRIES + lines, stop - 1))
        scores = gl.zeros([HEADS_EACH, ENTRIES], gl.float32, SCORES)
        scores = warpgroup_mma(q_latents, latents.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_rotated, rotated.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        numbers = first + gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where((numbers < stop)[None, :], scores * scale, float("-inf"))
        higher = gl.maximum(best, gl.max(scores, 1))
        shares = gl.exp2(scores - higher[:, None])
        fade = gl.exp2(best - higher)
        best = higher
        totals = totals * fade[:, None] + shares
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, ATTENDED))[:, None]
        if IN_REGISTERS:
            weighed = gl.convert_layout(shares.to(dtype), gl.DotOperandLayout(0, ATTENDED, 2))
            acc = warpgroup_mma(weighed, latents.index(stage), acc, is_async=True)
            acc, weighed = warpgroup_mma_wait(0, deps=(acc, weighed))
        else:
            shares_memory.store(shares.to(dtype))
            fence_async_shared()
            barrier()
            acc = warpgroup_mma(shares_memory, latents.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.sum(totals, 1)
    rows = first_head + gl.arange(0, HEADS_EACH, layout=gl.SliceLayout(1, SCORES))
    target = rows.to(gl.int64) * num_tokens + token
    if weights is not None:
        target += gl.program_id(1) * (HEADS * num_tokens)
        gl.store(weights + target, gl.where(total > 0, best + gl.log2(total), NOTHING))
    factor = gl.convert_layout(1.0 / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, ATTENDED))
    target = gl.convert_layout(target, gl.SliceLayout(1, ATTENDED))
    outs = gl.arange(0, RANK, layout=gl.SliceLayout(0, ATTENDED))
    gl.store(out + target[:, None] * RANK + outs[None, :], (acc * factor[:, None]).to(out.dtype.element_ty))


def suits(q: Tensor, q_rope: Tensor, cache: Tensor) -> bool:
    """Whether `attend_chosen` takes these: absorbed queries q [N, R, L], q_rope [R, N, P], cache [blocks, size, E]."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype == q.dtype
        and q.shape[0] % HEADS_EACH.value == 0
        and (q.shape[2], q_rope.shape[2]) == (RANK.value, ROTATED.value)
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
        q_rope.stride(1), HEADS=heads, TOP_K=top_k, IN_REGISTERS=IN_REGISTERS, num_warps=8, launch_pdl=True,
    )  # fmt: skip
    return sums, weights

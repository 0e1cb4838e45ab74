"""Segment attention: the patches of an image attend to each other, without a cache.

    out = segment_attention(q, k, v, starts, scale=0.1)

A program has a tile of one segment's queries, by one head (Dao 2023). The launch depends on the numbers of patches and
segments only: a segment's tiles begin at the number starts[s] // rows + s, which leaves room for all before it, and
programs between the last tile of one and the first of the next return. So each finds its segment by counting.

Heads of towers have 72, 80 or 88 dims: a power of two, and a few more. These are multiplied apart, since a tile of 128
would be up to twice the work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.attention.common import LOG2E, NOTHING, has_rows, wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2

MIN_DIM = 16  # of a product


class Parameters(NamedTuple):
    rows: int = 128  # of queries in a tile
    keys: int = 64  # in a tile, and values
    num_warps: int = 8
    num_stages: int = 2
    max_registers: int | None = None  # a thread; NVIDIA only
    segments: int = 512  # counted at a time


def choose(dim: int, element_size: int, patches_of_segment: int, gpu: Gpu) -> Parameters:
    """dim: of a head; patches_of_segment: on average"""
    if element_size == 4:
        return Parameters(32, 16, 8, 2)  # without tensor cores
    if patches_of_segment <= 64:
        return Parameters(64, 64 if dim <= 128 else 32, 4, 2)
    if gpu.shared_memory > 200 << 10 and dim <= 128:  # two programs of a multiprocessor at a time; measured on an H200
        return Parameters(num_stages=3 if dim <= 96 else 2, max_registers=128)
    return Parameters() if dim <= 128 else Parameters(64, 32)


def divide_dim(dim: int) -> tuple[int, int]:
    """The dims of the two products, powers of two, that hold so many; 0: there is one product."""
    whole = max(MIN_DIM, next_power_of_2(dim))
    half = whole // 2
    rest = max(MIN_DIM, next_power_of_2(max(dim - half, 1)))
    return (half, rest) if half >= MIN_DIM and half + rest < whole else (whole, 0)


@jit
def _find_segment(starts, num_segments, tile, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """The last segment whose tiles begin at this number or before it."""
    count = 0
    for first in range(0, num_segments, BLOCK_S):
        segments = first + tl.arange(0, BLOCK_S)
        begins = tl.load(starts + segments, mask=segments < num_segments, other=0) // BLOCK_M + segments
        count += tl.sum(((begins <= tile) & (segments < num_segments)).to(tl.int32), 0)
    return count - 1


@jit
def _load(rows, columns, is_row, DIM: tl.constexpr, HAS_ALL: tl.constexpr, MASKED: tl.constexpr):
    """The columns [D] of rows at pointers [R]; zeros in those that are not there. HAS_ALL: all columns are below DIM"""
    places = rows[:, None] + columns[None, :]
    if HAS_ALL and not MASKED:
        return tl.load(places)
    if HAS_ALL:
        return tl.load(places, mask=is_row[:, None], other=0.0)
    if MASKED:
        return tl.load(places, mask=is_row[:, None] & (columns < DIM)[None, :], other=0.0)
    return tl.load(places, mask=(columns < DIM)[None, :], other=0.0)


@jit
def _attend(q, q_rest, best, total, acc, acc_rest, keys, values, k_stride, v_stride, start, stop, SCALE: tl.constexpr,
            DIM: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
            REST: tl.constexpr):  # fmt: skip
    """Rows q [M, BLOCK_D + REST] attend to the patches start to stop; without MASKED a multiple of BLOCK_N."""
    factor: tl.constexpr = SCALE * LOG2E
    columns = tl.arange(0, BLOCK_D)
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
    for first in range(start, stop, BLOCK_N):
        patches = first + tl.arange(0, BLOCK_N)
        is_there = patches < stop
        k_rows = keys + patches.to(tl.int64) * k_stride
        v_rows = values + patches.to(tl.int64) * v_stride
        k = _load(k_rows, columns, is_there, DIM, BLOCK_D <= DIM, MASKED)
        v = _load(v_rows, columns, is_there, DIM, BLOCK_D <= DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _load(k_rows, rest, is_there, DIM, BLOCK_D + REST <= DIM, MASKED)
            v_rest = _load(v_rows, rest, is_there, DIM, BLOCK_D + REST <= DIM, MASKED)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights, 1)
        rounded = weights.to(q.dtype)
        acc = tl.dot(rounded, v, acc * fade[:, None], input_precision="ieee")
        if REST > 0:
            acc_rest = tl.dot(rounded, v_rest, acc_rest * fade[:, None], input_precision="ieee")
        best = higher
    return best, total, acc, acc_rest


@jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["starts"])
def _segment_attention(
    q, k, v, starts, out, num_segments, q_stride, k_stride, v_stride, SCALE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tile program_id(0), head program_id(1): programs that run at a time read the same keys."""
    wait_for_inputs(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    segment = _find_segment(starts, num_segments, tile, BLOCK_M, BLOCK_S)
    first, end = tl.load(starts + segment), tl.load(starts + segment + 1)
    patches = first + (tile - first // BLOCK_M - segment) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = patches < end
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    columns = tl.arange(0, BLOCK_D)
    q_rows = q + patches.to(tl.int64) * q_stride + head * DIM
    queries = _load(q_rows, columns, is_row, DIM, BLOCK_D <= DIM, True)
    best, total = tl.full([BLOCK_M], NOTHING, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    queries_rest, acc_rest = queries, total
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        queries_rest = _load(q_rows, rest, is_row, DIM, BLOCK_D + REST <= DIM, True)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    keys, values = k + head * DIM, v + head * DIM
    whole = first + (end - first) // BLOCK_N * BLOCK_N
    best, total, acc, acc_rest = _attend(
        queries, queries_rest, best, total, acc, acc_rest, keys, values, k_stride, v_stride, first, whole, SCALE, DIM,
        False, BLOCK_N, BLOCK_D, REST,
    )  # fmt: skip
    best, total, acc, acc_rest = _attend(
        queries, queries_rest, best, total, acc, acc_rest, keys, values, k_stride, v_stride, whole, end, SCALE, DIM,
        True, BLOCK_N, BLOCK_D, REST,
    )  # fmt: skip
    rows = out + (patches.to(tl.int64) * HEADS + head) * DIM
    tl.store(rows[:, None] + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
             mask=is_row[:, None] & (columns < DIM)[None, :])  # fmt: skip
    if REST > 0:
        tl.store(rows[:, None] + rest[None, :], (acc_rest / total[:, None]).to(out.dtype.element_ty),
                 mask=is_row[:, None] & (rest < DIM)[None, :])  # fmt: skip


def segment_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float,
                      parameters: Parameters | None = None) -> Tensor:  # fmt: skip
    """q, k, v [P, N, D], which may be views of one output, starts i32[S + 1] -> [P, N, D]"""
    assert has_rows(q) and has_rows(k) and has_rows(v), "heads must lie side by side"
    num_patches, heads, dim = q.shape
    num_segments = len(starts) - 1
    gpu = find_gpu(q.device)
    rows, keys, num_warps, num_stages, max_registers, counted = parameters or choose(
        dim, q.element_size(), num_patches // max(num_segments, 1), gpu
    )
    options = gpu.options if max_registers is None else {**gpu.options, "maxnreg": max_registers}
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _segment_attention[(num_patches // rows + num_segments, heads)](
        q, k, v, starts, out, num_segments, q.stride(0), k.stride(0), v.stride(0), scale, heads, dim,
        counted, rows, keys, *divide_dim(dim), num_warps=num_warps, num_stages=num_stages, **options,
    )  # fmt: skip
    return out

"""Add adapters to a linear's outputs: all of a batch in one launch.

    y = expand_lora(y, b, adapters, rank=16, sizes=[4096, 1024, 1024])     # y [T, 6144 + 3 L r] -> [T, 6144]
    y = lora(y, x, a, b, adapters, rank=16, sizes=[4096])                  # both GEMMs, next to a packed weight
    y = grouped_lora(y, x, a, b, ends)                                     # both GEMMs of experts' adapters

The launch is the second GEMM. What the first one gives is masked to the columns of each token's own adapter, so that
one dense GEMM by the b of many adapters is right for all rows: b is read once for all tokens, and nothing is sorted.
Columns whose adapters no token of a tile has are skipped: without adapters a launch copies y. Rows by adapter in one
launch are as in SGMV of Punica (Chen et al. 2023).

On NVIDIA from sm_90 a launch of few tokens starts while the preceding kernel still runs, and loads b meanwhile, which
must have been written before that kernel began.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.activations import gated
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.experts.moe import Experts
from atom.kernels.triton.gpu import find_gpu, next_power_of_2

FEW_ROWS = 64  # of a batch of decodes, which is one tile


def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, *, rank: int, sizes: Sequence[int]) -> Tensor:
    """y [T, O], x [T, I], a [S L r, I], b [O, L r], adapters i64[T] -> [T, O]"""
    return _expand(y, F.linear(x, a), b, adapters, rank, sizes, None)


def grouped_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """y [P, O], x [P, I], a [E, L + 1, r, I], b [E, L + 1, O, r], ends i64[E (L + 1)] -> [P, O]"""
    return add_grouped(Experts(), y, x, a, b, ends)


def add_grouped(experts: Experts, y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """grouped_lora by these experts' kernels"""
    multiply = experts.multiply
    return y + multiply(multiply(x, a.flatten(0, 1), ends), b.flatten(0, 1), ends)


def expand_lora(
    y: Tensor, b: Tensor, adapters: Tensor, *, rank: int, sizes: Sequence[int], kind: str | None = None
) -> Tensor:
    """y [T, O + S L r], b [O, L r], adapters i64[T] -> [T, O], or with a kind its gated activation [T, O / 2]"""
    outputs = sum(sizes)
    return _expand(y[:, :outputs], y[:, outputs:], b, adapters, rank, sizes, kind)


def _expand(
    y: Tensor, shrunk: Tensor, b: Tensor, adapters: Tensor, rank: int, sizes: Sequence[int], kind: str | None
) -> Tensor:
    assert y.stride(1) == shrunk.stride(1) == 1 and b.is_contiguous(), "rows have gaps"
    (tokens, outputs), columns, gpu = y.shape, b.shape[1], find_gpu(y.device)
    width = outputs if kind is None else outputs // 2
    out = y.new_empty(tokens, width)
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    first, second = (ends[0], (*ends, ends[-1])[1]) if kind is None else (width, width)
    is_few = tokens <= FEW_ROWS
    block_t = max(16, next_power_of_2(tokens)) if is_few else FEW_ROWS
    block_o = 32 if is_few and width < 8192 else 64 if is_few else 128
    block_k = min(128, max(16, next_power_of_2(columns))) if is_few or rank < 64 else 64
    runs = (first, second - first, width - second)
    num_tiles = sum(-(-run // block_o) for run in runs)
    _expand_kernel[(num_tiles, -(-tokens // block_t))](
        y, shrunk, b, adapters, out, tokens, y.stride(0), shrunk.stride(0), WIDTH=width, COLUMNS=columns, RANK=rank,
        FIRST=first, SECOND=second, UP=columns if len(sizes) > 1 else 0, KIND=kind, BLOCK_T=block_t, BLOCK_O=block_o,
        BLOCK_K=block_k, IS_FEW=is_few, num_warps=4, **gpu.options,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    y, shrunk, b, adapters, out, num_tokens, y_stride, shrunk_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    RANK: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, UP: tl.constexpr, KIND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, IS_FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, tokens = tl.program_id(0), tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    # the slice that the tile is of: its first output, its end, and the first column of what the first GEMM gives
    start, end, at = tile * BLOCK_O, FIRST, 0
    tiles: tl.constexpr = (FIRST + BLOCK_O - 1) // BLOCK_O
    more: tl.constexpr = (SECOND - FIRST + BLOCK_O - 1) // BLOCK_O
    if tile >= tiles + more:
        start, end, at = SECOND + (tile - tiles - more) * BLOCK_O, WIDTH, 2 * COLUMNS
    elif tile >= tiles:
        start, end, at = FIRST + (tile - tiles) * BLOCK_O, SECOND, COLUMNS
    outputs = start + tl.arange(0, BLOCK_O)
    is_token, is_output = tokens < num_tokens, outputs < end
    numbers = tl.load(adapters + tokens, mask=is_token, other=-1)
    factor, up_factor = None, None
    if IS_FEW:  # loads do not wait for the preceding kernel
        factor = _load_factor(b, numbers, outputs, is_output, 0, COLUMNS, RANK, BLOCK_K)
        if KIND is not None:
            up_factor = _load_factor(b, numbers, WIDTH + outputs, is_output, 0, COLUMNS, RANK, BLOCK_K)
    wait_for_inputs(PDL)
    rows, is_there = tokens.to(tl.int64)[:, None], is_token[:, None] & is_output[None, :]
    total = tl.load(y + rows * y_stride + outputs[None, :], mask=is_there, other=0.0).to(tl.float32)
    total = _add(total, factor, shrunk + at, b, numbers, rows, is_token, outputs, is_output, shrunk_stride, COLUMNS,
                 RANK, BLOCK_K)  # fmt: skip
    if KIND is not None:
        up = tl.load(y + rows * y_stride + WIDTH + outputs[None, :], mask=is_there, other=0.0).to(tl.float32)
        up = _add(up, up_factor, shrunk + UP, b, numbers, rows, is_token, WIDTH + outputs, is_output, shrunk_stride,
                   COLUMNS, RANK, BLOCK_K)  # fmt: skip
        dtype: tl.constexpr = y.dtype.element_ty
        total = gated(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, KIND)
    tl.store(out + rows * WIDTH + outputs[None, :], total.to(out.dtype.element_ty), mask=is_there)


@jit
def _add(total, factor, shrunk, b, numbers, rows, is_token, outputs, is_output, shrunk_stride, COLUMNS: tl.constexpr,
         RANK: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """total fp32[T, O] and each token's own columns times b; factor: the first rows of b, if loaded"""
    if factor is not None:
        total = _multiply(total, factor, shrunk, numbers, rows, is_token, 0, shrunk_stride, COLUMNS, RANK, BLOCK_K)
    for first in range(0 if factor is None else BLOCK_K, COLUMNS, BLOCK_K):
        more = _load_factor(b, numbers, outputs, is_output, first, COLUMNS, RANK, BLOCK_K)
        total = _multiply(total, more, shrunk, numbers, rows, is_token, first, shrunk_stride, COLUMNS, RANK, BLOCK_K)
    return total


@jit
def _load_factor(b, numbers, outputs, is_output, first, COLUMNS: tl.constexpr, RANK: tl.constexpr,
                 BLOCK_K: tl.constexpr):  # fmt: skip
    """Columns [K, O] of b from first on, zeros where no token has their adapters"""
    columns = first + tl.arange(0, BLOCK_K)
    is_read = (columns < COLUMNS) & _are_used(numbers, first, RANK, BLOCK_K)
    at = b + outputs.to(tl.int64)[None, :] * COLUMNS + columns[:, None]
    return tl.load(at, mask=is_output[None, :] & is_read[:, None], other=0.0)


@jit
def _multiply(total, factor, shrunk, numbers, rows, is_token, first, shrunk_stride, COLUMNS: tl.constexpr,
              RANK: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    columns = first + tl.arange(0, BLOCK_K)
    if _are_used(numbers, first, RANK, BLOCK_K):
        is_column = columns < COLUMNS
        is_own = is_token[:, None] & is_column[None, :] & (numbers[:, None] == (columns // RANK)[None, :])
        own = tl.load(shrunk + rows * shrunk_stride + columns[None, :], mask=is_own, other=0.0)
        total = tl.dot(own, factor, total, input_precision="ieee")
    return total


@jit
def _are_used(numbers, first, RANK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Whether a token has an adapter whose columns are among these"""
    last = (first + BLOCK_K - 1) // RANK
    return tl.max(((numbers >= first // RANK) & (numbers <= last)).to(tl.int32), 0) > 0

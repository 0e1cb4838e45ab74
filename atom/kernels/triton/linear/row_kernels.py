"""Kernels of whole rows: norms, gates, and rows quantized to 8 bits.

    x, total = normalize(a, b, norm, eps)       # rms_norm(a + b), a + b
    m = activate_gates(x, "silu")               # gate before up
    q = quantize_rows(x, 128, FP8)              # numbers, and a scale for each 128 columns of a row

    q, total = quantize_normalized(a, b, norm, eps, 128)        # the first and the last as one
    q = quantize_gated(x, "silu", 128)                          # the second and the last

Those of two steps round in between as the two would, so that they give the same numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.graph.formats import parse_format
from atom.kernels.triton.activations import activate_rounded
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.padded_alloc import new_rows

FP8 = torch.float8_e4m3fn
# of many rows that are short, a program quantizes some, since to start one takes longer than a row
MANY_ROWS, SHORT, TOGETHER = 4096, 2048, 4  # rows, their columns, rows of a program
WHOLE_TILES = range(129, 1025)  # rows in fp8 that the library multiplies up to 1.46 times as fast in whole tiles
TILE = 128  # rows


class QuantizedRows(NamedTuple):
    """Rows [T, I] as the library multiplies them: T made a multiple of 4 or of TILE by rows of zeros."""

    values: Tensor  # [T, I], in fp8 or int8
    scales: Tensor  # fp32[T, I / span], whose columns lie together, see `graph.quantize_rows`
    rows: int  # that are there
    is_shuffled: bool  # the columns are in the order of the layout wgmma


def span_of(act: str, inner: int) -> int:
    """The columns that share a scale, of rows of `inner` in this format."""
    return parse_format(act).block[1] or inner


def normalize(a: Tensor, b: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """a and b [T, I], norm [I] -> rms_norm(a + b), and a + b, which is a without b"""
    rows, inner = a.shape
    y = new_rows(a, rows, inner)
    total = a if b is None else a.new_empty(rows, inner)
    gpu = find_gpu(a.device)
    warps = min(max(next_power_of_2(inner) // 512, 1), 16)
    _norm_kernel[(rows,)](
        a, b, norm, total, y, eps, a.stride(0), 0 if b is None else b.stride(0), inner, num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y, total


def activate_gates(x: Tensor, kind: str, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """x [T, 2 W], gate before up -> gated_activate, [T, W]"""
    rows, width = x.shape[0], x.shape[1] // 2
    y = new_rows(x, rows, width)
    gpu = find_gpu(x.device)
    _gate_kernel[(rows, -(-width // 1024))](  # of rows there may be more than the second dim holds
        x, y, width, 1024, kind, limit, alpha, num_warps=4, **gpu.options
    )
    return y


def quantize_rows(
    x: Tensor, span: int, dtype: torch.dtype, min_rows: int = 4, is_shuffled: bool = False
) -> QuantizedRows:
    """x [T, I], at least min_rows of it are made. is_shuffled: in the order of the layout wgmma"""
    inner = x.shape[1]
    made = _empty_rows(x, inner, span, dtype, min_rows, is_shuffled)
    block_r = TOGETHER if len(x) >= MANY_ROWS and inner <= SHORT else 1
    _quantize_kernel[(len(made.values) // block_r,)](
        x, *_given(made, inner, span, x.stride(0)), BLOCK_R=block_r, **_options(x, inner * block_r)
    )
    return made


def quantize_normalized(
    a: Tensor, b: Tensor | None, norm: Tensor, eps: float, span: int, is_shuffled: bool = False
) -> tuple[QuantizedRows, Tensor]:
    """quantize_rows of what `normalize` gives, in fp8, and a + b"""
    inner, total = a.shape[1], a if b is None else a.new_empty(a.shape)
    made = _empty_rows(a, inner, span, FP8, 4, is_shuffled)
    _norm_quantize_kernel[(len(made.values),)](
        a, b, norm, total, eps, 0 if b is None else b.stride(0), *_given(made, inner, span, a.stride(0)),
        **_options(a, inner),
    )  # fmt: skip
    return made, total


def quantize_gated(x: Tensor, kind: str, span: int, is_shuffled: bool = False) -> QuantizedRows:
    """quantize_rows of what `activate_gates` gives, in fp8"""
    width = x.shape[1] // 2
    made = _empty_rows(x, width, span, FP8, 4, is_shuffled)
    _gate_quantize_kernel[(len(made.values),)](x, kind, *_given(made, width, span, x.stride(0)), **_options(x, width))
    return made


def _empty_rows(x: Tensor, inner: int, span: int, dtype: torch.dtype, min_rows: int, is_shuffled: bool
                ) -> QuantizedRows:  # fmt: skip
    values = x.new_empty(max(rows_made(len(x), dtype, find_gpu(x.device)), min_rows), inner, dtype=dtype)
    scales = x.new_empty(-(-inner // span), len(values), dtype=torch.float32).t()
    return QuantizedRows(values, scales, len(x), is_shuffled)


def rows_made(rows: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """How many rows the library multiplies in place of this many: whole tiles if those are faster on an H200."""
    together = TILE if dtype == FP8 and gpu.capability == (9, 0) and rows in WHOLE_TILES else 4
    return -(-rows // together) * together


def _given(made: QuantizedRows, inner: int, span: int, stride: int) -> tuple[Any, ...]:
    """The arguments that kernels of quantized rows share. stride: of the rows that they read"""
    return made.values, made.scales, made.rows, stride, len(made.values), inner, span, made.is_shuffled


def _options(x: Tensor, inner: int) -> dict[str, Any]:
    warps = min(max(next_power_of_2(inner) // 512, 1), 16)
    return {"num_warps": warps, **find_gpu(x.device).options}


@jit
def load_total(a_ptr, b_ptr, offsets, mask):
    """a, or a + b, rounded as it is stored, in float32."""
    total = tl.load(a_ptr + offsets, mask=mask, other=0.0)
    if b_ptr is not None:
        total = (total.to(tl.float32) + tl.load(b_ptr + offsets, mask=mask, other=0.0).to(tl.float32)).to(total.dtype)
    return total.to(tl.float32)


@jit
def load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER: tl.constexpr):
    """Load the row to multiply, in float32, rounded as it would be stored. The first program stores the total."""
    column = tl.arange(0, triton.next_power_of_2(INNER))
    mask = column < INNER
    x = load_total(a_ptr, b_ptr, column, mask)
    if b_ptr is not None:
        tl.store(total_ptr + column, x.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x) / INNER + eps) * norm).to(a_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def weight_rows(first, out, BLOCK_O: tl.constexpr, KIND: tl.constexpr):
    """The rows of the weight, i64, for the outputs from first on; if gated, gate and up projections alternate."""
    local = tl.arange(0, BLOCK_O)
    row = (
        (first + local) % out if KIND is None else (first + local // 2) % out + local % 2 * out
    )  # no row beyond the end
    return row.to(tl.int64)


@jit
def store_outputs(acc, bias_ptr, y_ptr, first, out, BLOCK_O: tl.constexpr, KIND: tl.constexpr):
    """Store a row's dot products with the weight's rows of `weight_rows`, fp32[BLOCK_O]: biased, rounded, and gated."""
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_rows(first, out, BLOCK_O, KIND)).to(tl.float32)
    y = acc.to(y_ptr.dtype.element_ty)
    if KIND is not None:
        gate, up = tl.split(y.reshape([NUM, 2]))
        y = activate_rounded(gate, up, KIND)
    index = first + tl.arange(0, NUM)
    tl.store(y_ptr + index, y, mask=index < out)


@jit
def _norm_kernel(a_ptr, b_ptr, norm_ptr, total_ptr, y_ptr, eps, a_stride, b_stride, INNER: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """A row."""
    HIDDEN: tl.constexpr = triton.next_power_of_2(INNER)
    hidden = tl.arange(0, HIDDEN)
    mask = hidden < INNER
    norm = tl.load(norm_ptr + hidden, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    b_row = None if b_ptr is None else b_ptr + row * b_stride
    total = load_total(a_ptr + row * a_stride, b_row, hidden, mask)
    offsets = row * INNER + hidden
    if b_ptr is not None:
        tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=mask)
    rstd = tl.rsqrt(tl.sum(total * total) / INNER + eps)
    tl.store(y_ptr + offsets, (total * rstd * norm).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _gate_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
                 ALPHA: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK outputs of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = x_ptr + row * 2 * width + index
    gate = tl.load(pointers, mask=index < width, other=0.0)
    up = tl.load(pointers + width, mask=index < width, other=0.0)
    tl.store(y_ptr + row * width + index, activate_rounded(gate, up, KIND, LIMIT, ALPHA), mask=index < width)


@jit
def _places(INNER: tl.constexpr, SPAN: tl.constexpr, BLOCK_R: tl.constexpr = 1):
    """The columns of BLOCK_R rows by span, and which of them are there."""
    WIDTH: tl.constexpr = triton.next_power_of_2(SPAN)
    NUM: tl.constexpr = triton.next_power_of_2(triton.cdiv(INNER, SPAN))
    place = tl.arange(0, WIDTH)[None, :]
    column = (tl.arange(0, BLOCK_R * NUM) % NUM)[:, None] * SPAN + place
    return column, (place < SPAN) & (column < INNER)


@jit
def _store_quantized(x, column, mask, row, q_ptr, scales_ptr, scales_stride, INNER: tl.constexpr, SPAN: tl.constexpr,
                     IS_SHUFFLED: tl.constexpr):  # fmt: skip
    """Quantize rows from this one on, fp32 by span, and store them."""
    SPANS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    NUM: tl.constexpr = triton.next_power_of_2(triton.cdiv(INNER, SPAN))  # of a row
    LARGEST: tl.constexpr = 127.0 if q_ptr.dtype.element_ty == tl.int8 else 448.0
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4) / LARGEST  # as DeepSeek-V3 clamps it
    scale += tl.sum(x * 0.0, axis=1)  # NaN where x has one, or an inf, which numbers of 8 bits do not keep
    scaled = tl.clamp(x / scale[:, None], -LARGEST, LARGEST)
    if q_ptr.dtype.element_ty == tl.int8:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest whole number, of two the even one
    if IS_SHUFFLED:  # as the layout wgmma has the columns of weights
        scaled = scaled.reshape([SPANS, WIDTH // 64, 4, 2, 4, 2]).permute((0, 1, 4, 2, 5, 3)).reshape([SPANS, WIDTH])
    rows, index = row + tl.arange(0, SPANS) // NUM, tl.arange(0, SPANS) % NUM
    tl.store(q_ptr + rows[:, None] * INNER + column, scaled.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + index * scales_stride + rows, scale, mask=index * SPAN < INNER)


@jit(do_not_specialize=["rows", "scales_stride"])
def _quantize_kernel(x_ptr, q_ptr, scales_ptr, rows, x_stride, scales_stride, INNER: tl.constexpr, SPAN: tl.constexpr,
                     IS_SHUFFLED: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK_R rows; those beyond the end become zeros."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_R
    column, mask = _places(INNER, SPAN, BLOCK_R)
    own = row + tl.arange(0, column.shape[0]) // (column.shape[0] // BLOCK_R)
    is_there = mask & (own < rows)[:, None]
    x = tl.load(x_ptr + own[:, None] * x_stride + column, mask=is_there, other=0.0).to(tl.float32)
    _store_quantized(x, column, mask, row, q_ptr, scales_ptr, scales_stride, INNER, SPAN, IS_SHUFFLED)


@jit(do_not_specialize=["rows", "scales_stride"])
def _norm_quantize_kernel(a_ptr, b_ptr, norm_ptr, total_ptr, eps, b_stride, q_ptr, scales_ptr, rows, a_stride,
                          scales_stride, INNER: tl.constexpr, SPAN: tl.constexpr, IS_SHUFFLED: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    """A row; those beyond the end become zeros."""
    column, mask = _places(INNER, SPAN)
    norm = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    is_there = mask & (row < rows)
    b_row = None if b_ptr is None else b_ptr + row * b_stride
    total = load_total(a_ptr + row * a_stride, b_row, column, is_there)
    if b_ptr is not None:
        tl.store(total_ptr + row * INNER + column, total.to(total_ptr.dtype.element_ty), mask=is_there)
    rstd = tl.rsqrt(tl.sum(tl.sum(total * total, axis=1), axis=0) / INNER + eps)
    x = (total * rstd * norm).to(a_ptr.dtype.element_ty).to(tl.float32)
    _store_quantized(x, column, mask, row, q_ptr, scales_ptr, scales_stride, INNER, SPAN, IS_SHUFFLED)


@jit(do_not_specialize=["rows", "scales_stride"])
def _gate_quantize_kernel(x_ptr, KIND: tl.constexpr, q_ptr, scales_ptr, rows, x_stride, scales_stride,
                          INNER: tl.constexpr, SPAN: tl.constexpr, IS_SHUFFLED: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    """A row of INNER outputs; those beyond the end become zeros."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column, mask = _places(INNER, SPAN)
    pointers = x_ptr + row * x_stride + column
    gate = tl.load(pointers, mask=mask & (row < rows), other=0.0)
    up = tl.load(pointers + INNER, mask=mask & (row < rows), other=0.0)
    x = activate_rounded(gate, up, KIND).to(tl.float32)
    _store_quantized(x, column, mask, row, q_ptr, scales_ptr, scales_stride, INNER, SPAN, IS_SHUFFLED)

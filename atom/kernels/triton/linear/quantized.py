"""Multiply quantized rows by packed weights, with the vendor's library.

y = multiply_quantized(x, weight, None, "fp8[1, *]")     # x is quantized first, unless it is already
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from atom.dtypes import DTYPES
from atom.graph.formats import parse_format, rounded_act_of
from atom.graph.packed import PackedWeight
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.packed import round_to_fp8
from atom.kernels.triton.linear.row_kernels import FP8, QuantizedRows, quantize_rows, span_of

INT8_ROWS = 4096  # of x at a time: their sums take 4 bytes each
MIN_INT8_ROWS = 32  # that the library multiplies


def multiply_quantized(x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None, act: str) -> Tensor:
    """x [T, I] -> [T, O], by the library, with x quantized to this format, as `accepts_linear` takes it.

    Rows that come quantized are in fp8, in the order of the weight's columns.
    """
    if isinstance(x, Tensor) and act.startswith("int8"):
        return _multiply_int8(x, weight, bias)
    weight = as_multiplied(weight, act)
    is_shuffled = weight.layout is not None
    if isinstance(x, Tensor):
        x = quantize_rows(x, span_of(act, x.shape[1]), FP8, is_shuffled=is_shuffled)
    assert x.is_shuffled == is_shuffled, "the columns of x and of the weight are in other orders"
    y = _multiply_fp8(x, weight)
    return y if bias is None else y.add_(bias)


def as_multiplied(weight: PackedWeight, act: str) -> PackedWeight:
    """The weight whose numbers the library multiplies: of 4 bits they are rounded to fp8, into a temporary."""
    return round_to_fp8(weight) if rounded_act_of(str(weight.type.fmt)) == act else weight


def _multiply_fp8(x: QuantizedRows, weight: PackedWeight) -> Tensor:
    values, scales = weight.parts["values"].view(FP8), weight.parts["scales"]
    dtype = getattr(torch, DTYPES[weight.type.dtype].name)
    if parse_format(str(weight.type.fmt)).block[0] == 1:
        y = F.scaled_mm(
            x.values, values.t(), x.scales, F.ScalingType.RowWise, scales.view(1, -1), F.ScalingType.RowWise,
            output_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
    else:
        if scales.shape[1] % 4:  # the library wants it so, as most models have it; to pad by nothing is a copy
            scales = F.pad(scales, (0, -scales.shape[1] % 4))
        y = F.scaled_mm(
            x.values, values.t(), x.scales, F.ScalingType.BlockWise1x128, scales.t(), F.ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )  # fmt: skip
    return y[: x.rows]


def _multiply_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Sums in int32, of some rows at a time, scaled by row and column."""
    values, scales, gpu = weight.parts["values"], weight.parts["scales"], find_gpu(x.device)
    out = len(values)
    y = x.new_empty(len(x), out)
    for some, part in zip(x.split(INT8_ROWS), y.split(INT8_ROWS), strict=True):
        q, q_scales, *_ = quantize_rows(some, x.shape[1], torch.int8, MIN_INT8_ROWS)
        sums = torch._int_mm(q, values.t())
        _scale_kernel[(-(-out // 1024), len(some))](
            sums, q_scales, scales, bias, part, out, 1024, num_warps=4, **gpu.options
        )
    return y


@jit
def _scale_kernel(sums_ptr, row_scales_ptr, scales_ptr, bias_ptr, y_ptr, OUT: tl.constexpr, BLOCK: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Sums of a row by its scale and those of columns, and a bias."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < OUT
    sums = tl.load(sums_ptr + row * OUT + column, mask=mask, other=0).to(tl.float32)
    y = sums * tl.load(row_scales_ptr + row) * tl.load(scales_ptr + column, mask=mask, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * OUT + column, y.to(y_ptr.dtype.element_ty), mask=mask)

"""torch._scaled_mm of fp8 in blocks of 128 x 128, against float64 on the CPU of the same numbers unpacked.

The rounding of activations is plain torch's, each 128 columns of a row by a scale of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import PackedWeight, Type
from atom.kernels.hopper.shuffle import shuffle

ROWS, OUT, SPAN = 300, 512, 128
FP8 = torch.float8_e4m3fn
COLUMNS = (5 * SPAN, 7 * SPAN, 9 * SPAN)  # of rows whose blocks are not a multiple of 4
LARGEST_ERROR = 0.01  # relative: bf16's rounding gives 0.002


def relative_error(columns: int, *, is_shuffled: bool) -> float:
    """‖a - b‖ / ‖b‖ of rows of so many columns by a packed weight, in the layout of `hopper` or as stored."""
    from atom.kernels.triton.linear.quantized import multiply_quantized

    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(ROWS, columns, generator=generator).bfloat16()
    values = torch.randn(OUT, columns, generator=generator).to(FP8)
    scales = 0.1 + torch.rand(OUT // SPAN, columns // SPAN, generator=generator)
    parts = {"values": values.cuda(), "scales": scales.cuda()}
    weight = PackedWeight(Type("bf16", (OUT, columns), f"fp8[{SPAN}, {SPAN}]"), parts)
    y = multiply_quantized(x.cuda(), shuffle(weight) if is_shuffled else weight, None, f"fp8[1, {SPAN}]").cpu().double()
    plain = values.double() * scales.double().repeat_interleave(SPAN, 0).repeat_interleave(SPAN, 1)
    wanted = in_fp8(x) @ plain.T
    return ((y - wanted).norm() / wanted.norm()).item()


def in_fp8(x: Tensor) -> Tensor:
    """bf16[T, I] -> float64[T, I]"""
    spans = x.float().unflatten(-1, (-1, SPAN))
    scales = spans.abs().amax(-1, keepdim=True) / 448
    return ((spans / scales).to(FP8).double() * scales.double()).flatten(-2)

"""Quantize activations, each row or span of its columns by its own scale.

values, scales = quantize_rows(x, "int8[1, *]")     # i8[T, I], fp32[T, 1]
values, scales = quantize_rows(x, "fp8[1, 128]")    # fp8[T, I], fp32[T, spans]
rounded = round_rows(x, "fp8[1, 128]")              # fp32[T, I]: the numbers that these are
wide = round_weight(weight, "fp8[1, *]")            # fp32[O, I]: those of a weight, which 4 bits are rounded to first
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.formats import parse_format, rounded_act_of
from atom.graph.packed import PackedWeight, plain

MIN_AMAX = 1e-4  # lower bound of a span's largest number: DeepSeek-V3's
MIN_ROW = 2.0**-100  # the same of a weight's row
LARGEST = {"fp8_e4m3": 448.0, "i8": 127.0}  # numbers by dtype


def quantize_rows(x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """x [T, I] -> its numbers [T, I] in the dtype of the format, and scales fp32[T, spans]; rounded to the nearest"""
    spans, scales, dtype = _scaled(x, act)
    values = spans.round_().to(torch.int8) if dtype == "i8" else spans.to(torch.float8_e4m3fn)
    return values.flatten(1)[:, : x.shape[1]], scales.squeeze(-1)


def round_rows(x: Tensor, act: str) -> Tensor:
    """x [T, I] -> fp32[T, I]: the numbers that `quantize_rows` makes, times their scales"""
    spans, scales, dtype = _scaled(x, act)
    values = spans.round_() if dtype == "i8" else spans.to(torch.float8_e4m3fn).float()
    return values.mul_(scales).flatten(1)[:, : x.shape[1]]


def _scaled(x: Tensor, act: str) -> tuple[Tensor, Tensor, str]:
    """Spans fp32[T, spans, columns] over their scales, scales fp32[T, spans, 1], and the dtype of the format."""
    known, inner = parse_format(act), x.shape[1]
    dtype, span = known.parts["values"].dtype, known.block[1] or inner
    spans = F.pad(x, (0, -inner % span)).reshape(len(x), -(-inner // span), span)
    scales = spans.abs().amax(-1, keepdim=True).float().clamp_(min=MIN_AMAX).div_(LARGEST[dtype])
    return spans.to(torch.float32, copy=True).div_(scales), scales, dtype


def round_weight(weight: Tensor | PackedWeight, act: str) -> Tensor:
    """A weight [..., O, I] as activations in this format multiply it, in float32.

    Numbers of 4 bits are rounded to fp8 with a scale by row, the smallest power of 2 that its largest number fits by.
    """
    if not isinstance(weight, PackedWeight) or rounded_act_of(str(weight.type.fmt)) != act:
        return plain(weight).float()
    wide = replace(weight, type=replace(weight.type, dtype="fp32")).unpack()  # so that it is rounded once
    mantissa, exponent = torch.frexp(wide.abs().amax(-1, keepdim=True).clamp_(min=MIN_ROW))
    # 448 is 0.875 * 2^9
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - 9 + (mantissa > 0.875))
    return (wide / scales).to(torch.float8_e4m3fn).float().mul_(scales)

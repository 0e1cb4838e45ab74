"""Quantize activations: each row, or each span of its columns, by its own scale.

values, scales = quantize_rows(x, "int8[1, *]")     # i8[T, I], fp32[T, 1]
values, scales = quantize_rows(x, "fp8[1, 128]")    # fp8[T, I], fp32[T, spans]
rounded = round_rows(x, "fp8[1, 128]")              # fp32[T, I]: the numbers that these are
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.formats import parse_format

MIN_AMAX = 1e-4  # lower bound of a span's largest number: DeepSeek-V3's
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

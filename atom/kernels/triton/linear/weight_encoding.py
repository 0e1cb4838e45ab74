"""How weights of linears encode numbers, and the operands that kernels get.

encoding = encoding_of("int4[1, 128]", 6144)    # WeightEncoding("u4", 1, 128, "z"), for a weight of 6,144 rows
operand = operand_of(weight)                    # a plain weight, or the parts of a packed one, and its encoding
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from atom.graph.formats import parse_format, rounded_act_of
from atom.graph.gguf_blocks import SPLIT, TYPES
from atom.graph.packed import PackedWeight

Weight = Tensor | PackedWeight
SPANS = "spans"
KQUANTS = ("u4k", "u5k", "u6k")
FACTOR_SPAN = 256  # columns whose scales and minima, of 8 bits, have a factor each in common: a block of K-quants


class WeightEncoding(NamedTuple):
    """How a weight encodes numbers: constants that a kernel is compiled for."""

    values: str | None = None  # e4m3, i8, u8, u4, e2m1; u4k, u5k, u6k: of K-quants in the layout wgmma; None: plain
    rows: int = 1  # that share a scale
    columns: int | None = None  # that share a scale; None: all
    offset: str = ""  # of each block: z, a zero point, or m, a minimum
    factor: str | None = None  # factor or divisor of the tensor, factors or divisors of its rows; spans, of FACTOR_SPAN
    act: str | None = None  # fp8 or int8: what the library multiplies x in; None: in its dtype
    is_shuffled: bool = False  # in the layout wgmma

    @property
    def name(self) -> str:
        """In keys of measured parameters; empty of a plain weight."""
        if self.values is None:
            return ""
        by = f" {self.act}" if self.act else ""
        layout = " wgmma" if self.is_shuffled else " k" if self.factor == SPANS else ""
        return f"{self.values}{self.offset}[{self.rows},{self.columns or '*'}]{by}{layout}"

    @property
    def bits(self) -> int:
        """Of a number in values; 16 of a plain weight, though it may be float32."""
        return 16 if self.values is None else 4 if self.values in ("u4", "e2m1", *KQUANTS) else 8

    @property
    def per_byte(self) -> int:
        return 2 if self.bits == 4 else 1

    @property
    def constants(self) -> tuple[str | int | None, ...]:
        """The last constants of a kernel of linears."""
        return self.values, self.per_byte, self.rows, self.columns, self.factor


PLAIN = WeightEncoding()


class KernelOperand(NamedTuple):
    """A weight as the arguments of a kernel."""

    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None  # zero points, u8, or minima, in floating point
    factor: Tensor | None = None
    encoding: WeightEncoding = PLAIN


def operand_of(weight: Weight) -> KernelOperand:
    """A plain weight [O, I], or a packed one's parts, bytes as u8."""
    if isinstance(weight, Tensor):
        return KernelOperand(weight)
    parts, encoding = weight.parts, encoding_of_weight(weight)
    factor = next((parts[name] for name in ("factor", "divisor", SPANS) if name in parts), None)
    if factor is not None and factor.numel() > 1 and encoding.factor != SPANS:
        encoding = encoding._replace(factor=f"{encoding.factor}s")
    values = parts["values"]
    values = values if values.dtype == torch.uint8 else values.view(torch.uint8)
    scales = parts["scales"]
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales
    has_pairs = encoding.factor == SPANS and encoding.offset == "m"  # minima after their scales
    zeros = scales if has_pairs else parts.get("zeros", parts.get("mins"))
    return KernelOperand(values, scales, zeros, factor, encoding)


def encoding_of_weight(weight: Weight, act: str | None = None) -> WeightEncoding:
    """`encoding_of` of a weight [O, I] or, of experts, [E, O, I]."""
    if isinstance(weight, Tensor):
        return PLAIN
    return encoding_of(str(weight.type.fmt), weight.shape[-2], act, weight.layout not in (None, SPLIT))


@cache
def encoding_of(fmt: str | None, out: int, act: str | None = None, is_shuffled: bool = False) -> WeightEncoding:
    """The encoding of a weight of this format. act: what the library multiplies x in"""
    if fmt is None:
        return PLAIN
    known = parse_format(fmt)
    if blocks := TYPES.get(known.kind):  # as `split_blocks` takes them apart
        is_scaled_twice = known.block[1] != blocks.group
        offset, factor = "m" if blocks.has_mins else "", SPANS if is_scaled_twice else None
        kind = f"u{known.bits}k" if is_shuffled else "u4" if known.bits <= 4 else "i8"
        return WeightEncoding(kind, 1, blocks.group, offset, factor, None, is_shuffled)
    rows, columns = known.block
    values = {"scaled": "e4m3" if known.parts["values"].dtype == "fp8_e4m3" else "i8", "int4": "u4", "int8": "u8"}
    factor = next((name for name in ("factor", "divisor") if name in known.parts), None)
    by = None if act is None or rounded_act_of(fmt) == act else act.partition("[")[0]
    offset = "z" if "zeros" in known.parts else "m" if "mins" in known.parts else ""
    return WeightEncoding(values.get(known.kind, "e2m1"), rows or out, columns, offset, factor, by, is_shuffled)

"""Quantize plain weights: the inverse of `atom.graph.unpack`.

parts = quantize("fp8[1, *]", weight)                   # {"values": fp8[O, I], "scales": fp32[O, 1]}
parts = quantize("int4[1, 128]", weight, importance)    # columns of larger importance are rounded with less error
parts = quantize("int4[1, 128]", weight, plan)         # and errors are made up for in other columns

Numbers are rounded to the nearest that the format has. A block's scale takes its largest number to the format's
largest; of 4 bits, which are few, other scales are tried too, and the one with the smallest squared error is kept. The
importance of a column weights its squared errors: with the mean square of what the column is multiplied with
(`calibration.py`), their sum is about that of the linear's outputs. Integers' scales are then fitted by least squares
too; without importance that gains nothing, since it clips the largest numbers. With a plan, which knows how columns
depend on each other, numbers are rounded again by these scales as `gptq.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.dtypes import FOUR_BITS, Format
from atom.graph import TORCH_DTYPES
from atom.graph.formats import parse_format, part_shape
from atom.graph.types import Type
from atom.graph.unpack import FP4
from atom.weights.gptq import MIN_SHARE, ColumnOrder, round_in_order

AT_ONCE = 1 << 24  # elements, of which some copies in float32 are made
AT_ONCE_ON_CPU = 1 << 18  # which stay in a core's cache
FP8_MAX, FP4_MAX = 448.0, 6.0
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the range that a block's largest number asks for
# the same if columns have an importance; below 0: its sign is that of the smaller half of integers
WEIGHTED_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, -1.0, -0.9, -0.8, -0.7)
NUM_FITS = 3  # times that scales are fitted to rounded numbers

Parts = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor | None, int, int, Tensor | None, torch.dtype], Parts]


def is_calibrated(fmt: str, calibration: str) -> bool:
    """Whether numbers of a format are rounded by what they are multiplied with: `quant.calibration` says so of all
    formats by naming a text, and else only of those of 4 bits."""
    return calibration != "none" and (calibration != "auto" or parse_format(fmt).kind in FOUR_BITS)


def quantize(fmt: str, weight: Tensor, importance: Tensor | ColumnOrder | None = None) -> Parts:
    """weight [..., O, I] -> its parts, as `graph.parts` names and shapes them

    importance: fp32[..., 1, I] from 0, of columns, or the plan of a matrix; None: all are equal
    """
    known = parse_format(fmt)
    parts = {
        name: weight.new_empty([int(dim) for dim in part.shape], dtype=TORCH_DTYPES[part.dtype])
        for name, part in part_types(Type("fp32", tuple(weight.shape), fmt)).items()
    }
    plan = None
    if isinstance(importance, ColumnOrder):
        plan, importance = importance, importance.importance
    if importance is not None:
        importance = importance.expand(*weight.shape[:-2], 1, weight.shape[-1]).to(weight.device)
    dtype = parts["values"].dtype
    for matrix, of_columns, of_matrix in _matrices(weight, importance, parts):
        factor = _set_factors(matrix, of_matrix, known)
        rows, columns = (size or dim for size, dim in zip(known.block, matrix.shape, strict=True))
        step = max((AT_ONCE_ON_CPU if weight.is_cpu else AT_ONCE) // matrix.shape[1] // rows * rows, rows)
        for start in range(0, len(matrix), step):
            some = matrix[start : start + step].float()
            for name, made in PACK[known.kind](some, of_columns, rows, columns, factor, dtype).items():
                first = start // rows if known.parts[name].holds == "blocks" else start
                of_matrix[name][first : first + len(made)] = made
        if plan is not None:
            _round_in_order(matrix.float(), of_matrix, plan, known.kind, rows)
    if "mins" in parts:
        parts["mins"].copy_(parts["scales"] * -(1 << (known.bits - 1)))
    return parts


def part_types(type: Type) -> dict[str, Type]:
    """The dtypes and shapes of the parts that a weight of this type is quantized to."""
    types = {}
    for name, part in parse_format(str(type.fmt)).parts.items():
        experts = type.shape[:-2] if part.holds in ("columns", "tensor") else ()
        types[name] = Type(part.dtype, (*experts, *part_shape(type, part)))
    return types


def _matrices(weight: Tensor, importance: Tensor | None, parts: Parts) -> Iterator[tuple[Tensor, Tensor | None, Parts]]:
    """A weight's matrices, each with its columns' importance and its parts; the experts of a stack one by one."""
    if weight.dim() == 2:
        yield weight, importance, parts
        return
    for expert, matrix in enumerate(weight):
        of_columns = None if importance is None else importance[expert]
        yield matrix, of_columns, {name: part[expert] for name, part in parts.items()}


def _set_factors(matrix: Tensor, parts: Parts, known: Format) -> Tensor | None:
    """Set what is not made block by block: a tensor's own factor, which is returned, zeros in the middle, the order."""
    factor = None
    for name, part in parts.items():
        if name in ("factor", "divisor"):
            factor = (matrix.abs().amax().float() / (FP8_MAX * FP4_MAX)).clamp(min=1e-30)
            part.fill_(factor if name == "factor" else 1 / factor)
        elif name == "zeros":
            part.fill_(1 << (known.bits - 1))
        elif name == "groups":
            part.copy_(torch.arange(len(part), device=part.device) // (known.block[1] or len(part)))
    return factor


def pack_scaled(weight: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Parts:
    """weight fp32[O, I] -> values fp8 or i8[O, I], scales fp32[⌈O / rows⌉, ⌈I / columns⌉]"""
    (num_rows, num_columns), is_fp8 = weight.shape, dtype.is_floating_point
    padded = F.pad(weight, (0, -num_columns % columns, 0, -num_rows % rows))
    blocks = padded.view(-(-num_rows // rows), rows, -(-num_columns // columns), columns)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest, 1) / (FP8_MAX if is_fp8 else 127)
    values = (blocks / scales[:, None, :, None]).view_as(padded)[:num_rows, :num_columns]
    return {"values": _nearest_of(dtype)(values).to(dtype), "scales": scales}


class Rounded(NamedTuple):
    """A way to round blocks."""

    numbers: Tensor  # [O, B, N]
    scales: Tensor  # [O, B], or exponents
    error: Tensor  # [O, B], the sum of the squared errors by their columns' importance

    def closer(self, other: Rounded) -> Rounded:
        """The better of both ways for each block."""
        is_less = other.error < self.error
        return Rounded(
            torch.where(is_less.unsqueeze(-1), other.numbers, self.numbers),
            torch.where(is_less, other.scales, self.scales),
            torch.where(is_less, other.error, self.error),
        )


def pack_integers(weight: Tensor, columns: int, bits: int, importance: Tensor | None = None) -> Parts:
    """weight fp32[O, I] -> values u8[O, B, block bytes], scales fp32[O, B]; zero is the middle"""
    blocks, half = weight.view(len(weight), -1, columns), 1 << (bits - 1)
    weights = _by_block(importance, blocks)
    # the number furthest from zero becomes -half, so that the whole range is used
    furthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)

    def round_by(scales: Tensor) -> Rounded:
        scales = scales.to(torch.float16).float()
        scales = torch.where((scales == 0) | ~scales.isfinite(), 1.0, scales)
        numbers = (blocks / scales.unsqueeze(-1)).round_().clamp_(-half, half - 1)
        return Rounded(numbers, scales, _error(numbers * scales.unsqueeze(-1), blocks, weights))

    best = round_by(furthest / -half)
    shares = WEIGHTED_SHARES if importance is not None else SHARES if bits == 4 else ()
    for share in shares[1:]:
        best = best.closer(round_by(furthest * (-share / half)))
    for _ in range(NUM_FITS if importance is not None else 0):
        weighted = best.numbers * weights
        best = best.closer(round_by((weighted * blocks).sum(-1) / (weighted * best.numbers).sum(-1)))
    values = (best.numbers + half).to(torch.uint8)
    return {"values": _pairs(values) if bits == 4 else values, "scales": best.scales}


def pack_mxfp4(weight: Tensor, importance: Tensor | None = None) -> Parts:
    """weight fp32[O, 32 B] -> values u8[O, B, 16], scales u8[O, B]"""
    blocks = weight.view(len(weight), -1, 32)
    weights = _by_block(importance, blocks)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-120))) - 2  # 4 is 2 to the power of 2

    def round_by(exponents: Tensor) -> Rounded:
        scales = torch.exp2(exponents).unsqueeze(-1)
        numbers = _to_fp4(blocks / scales)  # which may clip what is above 6
        return Rounded(numbers, exponents, _error(_from_fp4(numbers) * scales, blocks, weights))

    best = round_by(exponents).closer(round_by(exponents + 1))
    if importance is not None:
        best = best.closer(round_by(exponents - 1))
    return {"values": _pairs(best.numbers), "scales": (best.scales + 127).to(torch.uint8)}


def _round_in_order(weight: Tensor, parts: Parts, plan: ColumnOrder, kind: str, rows: int) -> None:
    """Round a matrix again by the scales of its parts, column by column.

    rows: of a block.
    """
    values, scales = parts["values"], parts["scales"]
    if kind == "scaled":
        by_row = scales.repeat_interleave(rows, 0)[: len(weight)]
        values.copy_(round_in_order(weight, by_row, plan, _nearest_of(values.dtype)))
    elif kind == "int4":
        numbers = round_in_order(weight, scales.float(), plan, lambda x: x.round_().clamp_(-8, 7))
        values.copy_(_pairs((numbers + 8).to(torch.uint8)).view_as(values))
    elif kind == "mxfp4":
        numbers = round_in_order(weight, torch.exp2(scales.float() - 127), plan, _nearest_fp4)
        values.copy_(_pairs(_to_fp4(numbers)).view_as(values))


def _nearest_of(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The rounding to fp8 or i8, which may change what it is given; numbers in float32."""
    if dtype.is_floating_point:
        return lambda numbers: numbers.clamp_(-FP8_MAX, FP8_MAX).to(dtype).float()
    return lambda numbers: numbers.round_().clamp_(-127, 127)


def pack_nvfp4(weight: Tensor, factor: Tensor) -> Parts:
    """weight fp32[O, 16 B] -> values u8[O, B, 8], scales fp8[O, B], of a tensor with this factor"""
    blocks = weight.view(len(weight), -1, 16)
    scales = (blocks.abs().amax(-1) / FP4_MAX / factor).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    numbers = _to_fp4(blocks / (scales.float() * factor).unsqueeze(-1))
    return {"values": _pairs(numbers), "scales": scales}


def _by_block(importance: Tensor | None, blocks: Tensor) -> Tensor:
    """The importance of the columns of blocks [O, B, N], [1, B, N]; columns of none still count a little."""
    if importance is None:
        return blocks.new_ones(1, 1, 1)
    return (importance + MIN_SHARE * importance.mean()).view(1, *blocks.shape[1:])


def _error(rounded: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    return (rounded - blocks).square_().mul_(weights).sum(-1)


def _to_fp4(numbers: Tensor) -> Tensor:
    """The nearest e2m1 of each number, u8 of 4 bits."""
    magnitudes = torch.tensor(FP4[:8], device=numbers.device)
    places = torch.bucketize(numbers.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
    return (places + 8 * numbers.signbit()).to(torch.uint8)


def _from_fp4(numbers: Tensor) -> Tensor:
    return torch.tensor(FP4, device=numbers.device)[numbers.int()]


def _nearest_fp4(numbers: Tensor) -> Tensor:
    """The nearest number of e2m1, whose numbers are 0.5 apart up to 2, 1 up to 4 and 2 up to 6."""
    magnitudes = numbers.abs()
    steps = (1 + (magnitudes >= 2).float() + 2 * (magnitudes >= 4).float()) / 2
    return (numbers / steps).round_().mul_(steps).clamp_(-FP4_MAX, FP4_MAX)


def _pairs(numbers: Tensor) -> Tensor:
    """Numbers of 4 bits, u8[..., N] -> two a byte, the first in its lower half, u8[..., N / 2]"""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def _need(factor: Tensor | None) -> Tensor:
    assert factor is not None, "the format has a factor or a divisor"
    return factor


# by kind: (weight fp32[O, I], its columns' importance, rows and columns of a block, the tensor's factor, the dtype of
# values)
PACK: dict[str, Rule] = {
    "scaled": lambda weight, importance, rows, columns, factor, dtype: pack_scaled(weight, rows, columns, dtype),
    "int4": lambda weight, importance, rows, columns, factor, dtype: pack_integers(weight, columns, 4, importance),
    "int8": lambda weight, importance, rows, columns, factor, dtype: pack_integers(weight, columns, 8),
    "mxfp4": lambda weight, importance, rows, columns, factor, dtype: pack_mxfp4(weight, importance),
    "nvfp4": lambda weight, importance, rows, columns, factor, dtype: pack_nvfp4(weight, _need(factor)),
}

"""Quantize plain weights: the inverse of `atom.graph.unpack`.

parts = quantize("fp8[1, *]", weight)       # {"values": fp8[O, I], "scales": fp32[O, 1]}

Numbers are rounded to the nearest that the format has. A block's scale takes its largest number to the format's
largest; of 4 bits, which are few, some smaller scales are tried too, and that with the least squared error is kept.
VERSION is an ingredient of the key under which results are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.dtypes import Format
from atom.graph import TORCH_DTYPES
from atom.graph.formats import parse_format, part_shape
from atom.graph.types import Type
from atom.graph.unpack import FP4

VERSION = 1
AT_ONCE = 1 << 24  # elements, of which some copies in float32 are made
FP8_MAX, FP4_MAX = 448.0, 6.0
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the range that a block's largest number asks for

Parts = dict[str, Tensor]


def quantize(fmt: str, weight: Tensor) -> Parts:
    """weight [..., O, I] -> its parts, as `graph.parts` names and shapes them"""
    known = parse_format(fmt)
    parts = {
        name: weight.new_empty([int(dim) for dim in part.shape], dtype=TORCH_DTYPES[part.dtype])
        for name, part in part_types(Type("fp32", tuple(weight.shape), fmt)).items()
    }
    for matrix, of_matrix in _matrices(weight, parts):
        factor = _set_factors(matrix, of_matrix, known)
        rows, columns = (size or dim for size, dim in zip(known.block, matrix.shape, strict=True))
        step = max(AT_ONCE // matrix.shape[1] // rows * rows, rows)
        for start in range(0, len(matrix), step):
            some = matrix[start : start + step].float()
            for name, made in PACK[known.kind](some, rows, columns, factor, parts["values"].dtype).items():
                first = start // rows if known.parts[name].holds == "blocks" else start
                of_matrix[name][first : first + len(made)] = made
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


def _matrices(weight: Tensor, parts: Parts) -> Iterator[tuple[Tensor, Parts]]:
    """A weight's matrices, each with its parts; the experts of a stack one by one."""
    if weight.dim() == 2:
        yield weight, parts
        return
    for expert, matrix in enumerate(weight):
        yield matrix, {name: part[expert] for name, part in parts.items()}


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


def pack_scaled(weight: Tensor, rows: int, columns: int, _factor: Tensor | None, dtype: torch.dtype) -> Parts:
    """weight fp32[O, I] -> values fp8 or i8[O, I], scales fp32[⌈O / rows⌉, ⌈I / columns⌉]"""
    (num_rows, num_columns), is_fp8 = weight.shape, dtype.is_floating_point
    padded = F.pad(weight, (0, -num_columns % columns, 0, -num_rows % rows))
    blocks = padded.view(-(-num_rows // rows), rows, -(-num_columns // columns), columns)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest, 1) / (FP8_MAX if is_fp8 else 127)
    values = (blocks / scales[:, None, :, None]).view_as(padded)[:num_rows, :num_columns]
    values = values.clamp_(-FP8_MAX, FP8_MAX) if is_fp8 else values.round_().clamp_(-127, 127)
    return {"values": values.to(dtype), "scales": scales}


def pack_integers(weight: Tensor, columns: int, bits: int) -> Parts:
    """weight fp32[O, I] -> values u8[O, B, block bytes], scales fp32[O, B]; zero is the middle"""
    blocks, half = weight.view(len(weight), -1, columns), 1 << (bits - 1)
    # the number furthest from zero becomes -half, so that the whole range is used
    furthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)

    def candidates() -> Iterator[tuple[Tensor, Tensor]]:
        for share in SHARES if bits == 4 else SHARES[:1]:
            scales = (furthest * (-share / half)).to(torch.float16).float()
            scales = torch.where(scales == 0, 1.0, scales)
            yield (blocks / scales.unsqueeze(-1)).round_().clamp_(-half, half - 1), scales

    numbers, scales = _closest(blocks, candidates(), lambda numbers, scales: numbers * scales.unsqueeze(-1))
    values = (numbers + half).to(torch.uint8)
    return {"values": _pairs(values) if bits == 4 else values, "scales": scales}


def pack_mxfp4(weight: Tensor) -> Parts:
    """weight fp32[O, 32 B] -> values u8[O, B, 16], scales u8[O, B]"""
    blocks = weight.view(len(weight), -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-120))) - 2  # 4 is 2 to the power of 2

    def candidates() -> Iterator[tuple[Tensor, Tensor]]:
        for exponent in (exponents, exponents + 1):  # which may clip what is above 6
            yield _to_fp4(blocks / torch.exp2(exponent).unsqueeze(-1)), exponent

    numbers, exponents = _closest(
        blocks, candidates(), lambda numbers, exponents: _from_fp4(numbers) * torch.exp2(exponents).unsqueeze(-1)
    )
    return {"values": _pairs(numbers), "scales": (exponents + 127).to(torch.uint8)}


def pack_nvfp4(weight: Tensor, factor: Tensor) -> Parts:
    """weight fp32[O, 16 B] -> values u8[O, B, 8], scales fp8[O, B], of a tensor with this factor"""
    blocks = weight.view(len(weight), -1, 16)
    scales = (blocks.abs().amax(-1) / FP4_MAX / factor).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    numbers = _to_fp4(blocks / (scales.float() * factor).unsqueeze(-1))
    return {"values": _pairs(numbers), "scales": scales}


def _closest(
    blocks: Tensor, candidates: Iterable[tuple[Tensor, Tensor]], unpack: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The candidate of each block, numbers [..., N] and scales [...], whose squared error is the least."""
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for numbers, scales in candidates:
        error = (unpack(numbers, scales) - blocks).square_().sum(-1)
        if best is None:
            best = numbers, scales, error
        else:
            is_less = error < best[2]
            best = (
                torch.where(is_less.unsqueeze(-1), numbers, best[0]),
                torch.where(is_less, scales, best[1]),
                torch.where(is_less, error, best[2]),
            )
    assert best is not None, "there is a candidate"
    return best[:2]


def _to_fp4(numbers: Tensor) -> Tensor:
    """The nearest e2m1 of each number, u8 of 4 bits."""
    magnitudes = torch.tensor(FP4[:8], device=numbers.device)
    places = torch.bucketize(numbers.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
    return (places + 8 * numbers.signbit()).to(torch.uint8)


def _from_fp4(numbers: Tensor) -> Tensor:
    return torch.tensor(FP4, device=numbers.device)[numbers.int()]


def _pairs(numbers: Tensor) -> Tensor:
    """Numbers of 4 bits, u8[..., N] -> two a byte, the first in its lower half, u8[..., N / 2]"""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def _need(factor: Tensor | None) -> Tensor:
    assert factor is not None, "the format has a factor or a divisor"
    return factor


# by kind: (weight fp32[O, I], rows and columns of a block, the tensor's factor, the dtype of values)
PACK: dict[str, Callable[[Tensor, int, int, Tensor | None, torch.dtype], Parts]] = {
    "scaled": pack_scaled,
    "int4": lambda weight, rows, columns, factor, dtype: pack_integers(weight, columns, 4),
    "int8": lambda weight, rows, columns, factor, dtype: pack_integers(weight, columns, 8),
    "mxfp4": lambda weight, rows, columns, factor, dtype: pack_mxfp4(weight),
    "nvfp4": lambda weight, rows, columns, factor, dtype: pack_nvfp4(weight, _need(factor)),
}

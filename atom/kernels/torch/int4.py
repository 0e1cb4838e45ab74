"""Linears over int4 and int8 weights, by torch's weight-only int4 product.

packed = pack_int4(weight)             # once: a PackedWeight [O, I] as one u8[O, bytes of a row]
y = int4_linear(x, packed, bias)       # bf16[T, I] -> bf16[T, O], summed in float32

The product computes (number - 8) · scale + minimum, which is any int4 format with groups of 32 to 256 columns. A number
of 8 bits is two of 4: columns [I, 2 I) are the lower halves, and x is taken twice. Many rows multiply by the unpacked
weight, block by block.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from atom.graph.formats import parse_format
from atom.graph.packed import PackedWeight
from atom.graph.types import Type
from atom.kernels.backend import Target

FEATURE = "int4_bf16"
GROUPS = (256, 128, 64, 32)  # columns that share a scale, as torch's product takes them
BLOCK = 64  # rows whose numbers are packed together
FEW = 64  # rows of x up to which the packed product is faster than to unpack the weight
AT_ONCE = 1 << 20  # numbers that are unpacked at a time


def accepts(target: Target, x: Type, weight: Type) -> str | None:
    known, (out, inner) = parse_format(str(weight.fmt)), weight.shape[-2:]
    if known.has_order or (known.kind == "scaled" and (known.bits, known.block[0]) != (8, 1)):
        return f"its weight is stored as {weight.fmt}"
    if known.kind == "scaled" and known.parts["values"].dtype != "i8":
        return f"its weight is stored as {weight.fmt}"
    if x.dtype != "bf16":
        return f"torch multiplies packed weights by bf16, not by {x.dtype}"
    if FEATURE not in target.features:
        return "torch has no fast product of int4 for this CPU"
    if int(out) % BLOCK or _group(weight) is None:
        return f"{out} rows of {inner} columns are no blocks of {BLOCK} rows and 32 columns"
    return None


def _group(weight: Type) -> int | None:
    """Columns that share a scale; None where torch's product has no such groups."""
    inner = int(weight.shape[-1])
    size = parse_format(str(weight.fmt)).block[1] or inner
    return next((group for group in GROUPS if size % group == 0 and inner % size == 0), None)


def _num_digits(weight: Type) -> int:
    """How many numbers of 4 bits make one of the weight's."""
    return parse_format(str(weight.fmt)).bits // 4


def packed_type(weight: Type) -> Type:
    """The type of a weight [O, I] as packed: the numbers of all rows, then their scales and minima, bf16[B, O, 2]."""
    out, inner = map(int, weight.shape[-2:])
    group = _group(weight)
    assert group is not None, "accepts refuses others"
    return Type("u8", (out, _num_digits(weight) * (inner // 2 + inner // group * 4)))


def pack_int4(weight: PackedWeight) -> Tensor:
    """A weight [O, I], or [1, O, I], as one u8[O, bytes of a row]."""
    (out, num_bytes), parts = packed_type(weight.type).shape, weight.parts
    group, num_digits, inner = _group(weight.type), _num_digits(weight.type), weight.shape[-1]
    assert group is not None, "accepts refuses others"
    values, scales = parts["values"], parts["scales"].float().view(int(out), -1)
    if num_digits == 1:
        pairs = values.view(int(out), -1)
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    else:
        numbers = values.view(torch.uint8).view(int(out), inner) ^ (128 if values.dtype == torch.int8 else 0)
        numbers = torch.cat((numbers >> 4, numbers & 15), -1)
    middle = 8.0 if num_digits == 1 else 136.0  # what the product takes from a number, of both digits
    if "mins" in parts:
        minima = parts["mins"].float().view_as(scales) + middle * scales
    else:
        zeros = parts["zeros"].float().view_as(scales) if "zeros" in parts else middle - 8 * (num_digits == 2)
        minima = (middle - zeros) * scales
    if num_digits == 2:
        scales, minima = torch.cat((16 * scales, scales), -1), torch.cat((minima, torch.zeros_like(minima)), -1)
    times = num_digits * inner // group // scales.shape[-1]
    pair = torch.stack((scales, minima), -1).repeat_interleave(times, 1).transpose(0, 1).to(torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
    made = torch.cat((packed.view(-1), pair.contiguous().view(torch.uint8).view(-1)))
    return made.view(int(out), int(num_bytes))


def int4_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x bf16[T, I], weight of `pack_int4`, bias bf16[O] -> bf16[T, O]"""
    (out, num_bytes), inner = weight.shape, x.shape[-1]
    num_digits = 2 if num_bytes > inner else 1
    columns = num_digits * inner
    num_groups = (num_bytes - columns // 2) // 4
    flat, end = weight.view(-1), out * columns // 2
    numbers, scales = flat[:end].view(out, columns // 2), flat[end:].view(torch.bfloat16).view(num_groups, out, 2)
    if x.shape[0] > FEW:
        return _multiply_unpacked(x, numbers, scales, num_digits, bias)
    twice = x if num_digits == 1 else torch.cat((x, x), -1)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(twice, numbers, columns // num_groups, scales)
    return y if bias is None else y.add_(bias)


def _multiply_unpacked(x: Tensor, numbers: Tensor, scales: Tensor, num_digits: int, bias: Tensor | None) -> Tensor:
    out, columns = numbers.shape[0], 2 * numbers.shape[1]
    blocks = numbers.view(out // BLOCK, columns, BLOCK // 2)
    y = x.new_empty(len(x), out)
    step = max(AT_ONCE // columns // BLOCK, 1)
    for first in range(0, len(blocks), step):
        some, rows = blocks[first : first + step], slice(first * BLOCK, (first + step) * BLOCK)
        weight = _unpack(some, scales[:, rows])
        if num_digits == 2:
            weight = weight[: columns // 2].add_(weight[columns // 2 :])
        y[:, rows] = torch.nn.functional.linear(x, weight.t().contiguous(), None if bias is None else bias[rows])
    return y


def _unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks u8[N, I, 32], two rows a byte, scales and minima bf16[B, 64 N, 2] -> bf16[I, 64 N]"""
    num_blocks, columns, half = blocks.shape
    unpacked = torch.empty(columns, num_blocks, 2, half, dtype=torch.bfloat16)
    turned = blocks.transpose(0, 1)
    unpacked[:, :, 0] = turned & 15
    unpacked[:, :, 1] = turned >> 4
    by_group = unpacked.view(len(scales), columns // len(scales), num_blocks * 2 * half).sub_(8)
    scale, minimum = scales.permute(2, 0, 1).unsqueeze(2).contiguous()
    return torch.addcmul(minimum, by_group, scale).view(columns, -1)


@cache
def is_supported() -> bool:
    """Whether torch packs int4 as `_unpack` reads it, as with AVX512; for others its product is slow."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    numbers = torch.arange(BLOCK * 32, dtype=torch.int32).view(BLOCK, 32) % 13
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1).view(1, 32, BLOCK // 2)
    return torch.equal(_unpack(packed, torch.tensor([1.0, 8.0]).bfloat16().repeat(1, BLOCK, 1)).t().int(), numbers)

"""Packed weights in panels of 16 rows, the layout of packed.cpp.

    weight = pack_panels(packed)               # once: a LaidOut, one u8[panels, bytes of a panel]
    y = panel_linear(x, weight, bias)          # [T, I] -> [T, O], summed in float32
    h = panel_embedding(tokens, weight)        # i64[T] -> [T, H]

Panels hold any format with blocks within a row, and fp8 in blocks of several rows. Scales and minima are float16 if the
file's are, as in GGUF, whose scales may also be int8 with a common factor. Others are bfloat16 if the model computes in
bfloat16 and groups have few columns, otherwise float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from atom.graph import TORCH_DTYPES
from atom.graph.formats import block_of, parse_format
from atom.graph.gguf_blocks import TYPES, take_apart
from atom.graph.packed import LaidOut, PackedWeight
from atom.graph.types import Type
from atom.graph.unpack import FP4
from atom.kernels.cpp.build import PACKED, load_library

ROWS = 16  # of a panel
KINDS = ("int4", "int8", "fp8", "fp4", "int5", "int6")  # as packed.cpp numbers them
BITS = (4, 8, 8, 4, 5, 6)  # of a number, by kind
TOGETHER = (2, 1, 1, 2, 32, 16)  # columns whose numbers are stored together, by kind
SCALES = (torch.bfloat16, torch.float32, torch.float16, torch.int8)  # as packed.cpp numbers them; int8 has factors
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
NARROW_GROUP = 64  # max columns that share a bfloat16 scale
CHUNK_BYTES = 1 << 22  # of panels packed at once


class Panels(NamedTuple):
    """A weight's layout, as packed.cpp takes it."""

    kind: int  # of KINDS
    out: int
    inner: int
    group: int  # columns that share a scale
    scales: int  # of SCALES: the dtype of scales and minima
    has_minima: bool
    middle: int  # offset added to stored numbers
    per_factor: int  # groups that share a factor, if scales are int8; otherwise 1

    @classmethod
    def of(cls, weight: Type) -> Panels:
        known, (out, inner) = parse_format(str(weight.fmt)), map(int, weight.shape[-2:])
        if blocks := TYPES.get(known.kind):
            columns = block_of(weight)[-1]
            per_factor = columns // blocks.group
            scales = SCALES.index(torch.int8 if per_factor > 1 else torch.float16)
            number = KINDS.index(f"int{max(known.bits, 4)}")
            return cls(number, out, inner, blocks.group, scales, blocks.has_mins, blocks.middle, per_factor)
        kind, group = _kind_of(weight), block_of(weight)[-1]
        is_wide = weight.dtype != "bf16" or group > NARROW_GROUP
        dtype = torch.float16 if known.parts["scales"].dtype == "fp16" else torch.float32 if is_wide else torch.bfloat16
        has_minima = not known.parts.keys().isdisjoint(("zeros", "mins"))
        middle = 8 if kind == "int4" and "mins" not in known.parts else 0
        return cls(KINDS.index(kind), out, inner, group, SCALES.index(dtype), has_minima, middle, 1)

    @property
    def num_panels(self) -> int:
        return -(-self.out // ROWS)

    @property
    def num_groups(self) -> int:
        return -(-self.inner // self.group)

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALES[self.scales]

    @property
    def group_bytes(self) -> list[int]:
        """Bytes of a group: scales, minima, numbers."""
        scales = ROWS * self.scale_dtype.itemsize
        return [scales, scales * self.has_minima, ROWS * self.group * BITS[self.kind] // 8]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's numbers."""
        return self.inner * BITS[self.kind] // 8

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors that precede `per_factor` groups."""
        return ROWS * 2 * (1 + self.has_minima) if self.scale_dtype == torch.int8 else 0

    @property
    def size(self) -> int:
        """Bytes of a panel."""
        scales, minima, _ = self.group_bytes
        factors = -(-self.num_groups // self.per_factor) * self.factor_bytes
        return ROWS * self.row_bytes + self.num_groups * (scales + minima) + factors

    @property
    def numbers(self) -> list[int]:
        return [*map(int, self)]


def _kind_of(weight: Type) -> str:
    known = parse_format(str(weight.fmt))
    if known.kind == "scaled":
        return "fp8" if known.parts["values"].dtype == "fp8_e4m3" else "int8"
    return known.kind if known.kind in KINDS else "fp4"


def refusal(weight: Type) -> str | None:
    """Why a packed weight cannot be in panels; None: it can."""
    known = parse_format(str(weight.fmt))
    if known.has_order or (known.kind != "scaled" and known.block[0] != 1):
        return f"its weight is stored as {weight.fmt}"
    if int(weight.shape[-1]) % (together := TOGETHER[Panels.of(weight).kind]):
        return f"{weight.shape[-1]} columns are no multiple of {together}"
    return None


def packed_type(weight: Type) -> Type:
    """The type of a weight's panels."""
    panels = Panels.of(weight)
    return Type("u8", (panels.num_panels, panels.size))


def kept_type(weight: Type) -> Type | None:
    """The type of a weight's panels; None without the library, when weights are unpacked instead."""
    return packed_type(weight) if load_library(PACKED) else None


def pack_panels(weight: PackedWeight) -> LaidOut:
    """A weight [O, I], or [1, O, I], in panels; without the library it is unpacked."""
    if not load_library(PACKED):
        return LaidOut(weight.type, weight.unpack().view(weight.shape[-2:]))
    panels = Panels.of(weight.type)
    contents = (_contents_of_blocks if weight.kind in TYPES else _contents_of_parts)(weight, panels)
    made = torch.empty(panels.num_panels, panels.size, dtype=torch.uint8)
    missing = panels.num_groups * panels.group_bytes[-1] // ROWS - panels.row_bytes  # of the last group
    step = max(CHUNK_BYTES // panels.size, 1)
    for first in range(0, len(made), step):
        some = contents(slice(first * ROWS, (first + step) * ROWS))
        columns = _interleave_rows(F.pad(some.numbers, (0, missing))).view(torch.uint8)
        groups = [_interleave_rows(each).view(torch.uint8) for each in some.scales]
        whole = torch.cat([*groups, columns.view(len(columns), panels.num_groups, -1)], 2)
        if some.factors:
            factors = [_interleave_rows(each).view(torch.uint8) for each in some.factors]
            whole = torch.cat([*factors, whole.view(*factors[0].shape[:2], -1)], 2)
        made[first : first + step] = whole.flatten(1)[:, : panels.size]
    return LaidOut(weight.type, made)


class _Contents(NamedTuple):
    """The contents of panels, for some rows."""

    numbers: Tensor  # u8[R, bytes of a row], or i32[R, words]
    scales: list[Tensor]  # [R, groups], then minima if the format has them
    factors: list[Tensor]  # fp16[R, factors] each; empty if scales have none


def _contents_of_blocks(weight: PackedWeight, panels: Panels) -> Callable[[slice], _Contents]:
    """For a weight in GGUF blocks, which are taken apart some rows at a time."""
    stored = weight.parts["values"].flatten(0, -3)

    def contents(rows: slice) -> _Contents:
        blocks = take_apart(weight.kind, stored[rows])
        factors = [each for each in (blocks.factors, blocks.min_factors) if each is not None]
        scales = [each.flatten(1) for each in (blocks.scales, blocks.mins) if each is not None]
        numbers = _pack_together(blocks.numbers.flatten(1), panels)
        return _Contents(numbers, scales, factors) if scales else _Contents(numbers, factors, [])

    return contents


def _pack_together(numbers: Tensor, panels: Panels) -> Tensor:
    """Numbers u8[R, I]: of 4 bits as bytes of two columns, of 5 and 6 bits as words i32, the lowest bits first."""
    bits = BITS[panels.kind]
    while bits % 8:  # join neighbours until they are whole bytes
        numbers = numbers.to(next(dtype for dtype in INTEGERS if dtype.itemsize * 8 >= 2 * bits))
        numbers, bits = numbers[:, ::2] | numbers[:, 1::2] << bits, 2 * bits
    stored = numbers.view(torch.uint8).view(*numbers.shape, -1)[..., : bits // 8].flatten(1)
    return stored if BITS[panels.kind] == 4 else stored.view(torch.int32)


def _contents_of_parts(weight: PackedWeight, panels: Panels) -> Callable[[slice], _Contents]:
    """For a weight whose numbers and scales are separate parts."""
    numbers = weight.parts["values"].view(torch.uint8).view(panels.out, -1)
    if weight.kind == "int8":
        numbers = numbers ^ 0x80
    scales, minima = _scales_of(weight, panels)
    if KINDS[panels.kind] == "fp8":  # NaN, whose bits read as 480 here, must make the row's outputs NaN
        scales = scales.masked_fill(((numbers & 0x7F) == 0x7F).any(1, keepdim=True), math.nan)
    of_groups = [scales] if minima is None else [scales, minima]
    return lambda rows: _Contents(numbers[rows], [each[rows] for each in of_groups], [])


def _interleave_rows(rows: Tensor) -> Tensor:
    """[R, C] -> [R / 16, C, 16], padded with rows of zeros"""
    return F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).view(-1, ROWS, rows.shape[1]).transpose(1, 2).contiguous()


def _scales_of(weight: PackedWeight, panels: Panels) -> tuple[Tensor, Tensor | None]:
    """The scales [O, groups] of a weight's groups, and minima if the format has them, as a panel stores them."""
    parts, dtype = weight.parts, panels.scale_dtype
    scales = parts["scales"]
    if weight.kind == "mxfp4":
        scales = torch.exp2(scales.float() - 127)
    scales = scales.float().view(-1, panels.num_groups)
    if weight.kind == "nvfp4":
        factor = parts["factor"] if "factor" in parts else parts["divisor"].reciprocal()
        scales = scales * factor.float().view(-1, 1)
    if len(scales) < panels.out:
        scales = scales.repeat_interleave(block_of(weight.type)[-2], 0)[: panels.out]
    if not panels.has_minima:
        return scales.to(dtype), None
    if "mins" in parts:
        return scales.to(dtype), parts["mins"].view_as(scales)
    middle = panels.middle or 128
    return scales.to(dtype), ((middle - parts["zeros"].float().view_as(scales)) * scales).to(dtype)


# The ops without the library: in a process that only checks compiled code, and if it cannot be compiled.


def _unpack(panels: Tensor, layout: Sequence[int]) -> Tensor:
    """Panels as fp32[O, I]"""
    if panels.dtype != torch.uint8:
        return panels
    known = Panels._make(layout)
    size, factors = sum(known.group_bytes), None
    if known.factor_bytes:
        panels = panels.view(len(panels), -1, known.factor_bytes + known.per_factor * size)
        factors = panels[..., : known.factor_bytes].contiguous().view(torch.float16).float()
        factors = factors.view(*factors.shape[:2], -1, ROWS).repeat_interleave(known.per_factor, 1)
        panels = panels[..., known.factor_bytes :].flatten(1)
    groups = F.pad(panels, (0, known.num_groups * size - panels.shape[1])).view(len(panels), known.num_groups, size)
    scales, minima, stored = torch.split(groups, known.group_bytes, 2)
    stored = stored.reshape(*stored.shape[:2], -1, ROWS)

    def product(numbers: Tensor, which: int) -> Tensor:
        wide = numbers.contiguous().view(known.scale_dtype).float()
        return (wide if factors is None else wide * factors[:, :, which]).unsqueeze(2)

    values = _numbers_of_bytes(stored, known) * product(scales, 0)
    if known.has_minima:
        values += product(minima, 1)
    return values.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)[: known.out, : known.inner]


def _numbers_of_bytes(stored: Tensor, panels: Panels) -> Tensor:
    """u8[panels, groups, bytes of a row, 16] -> fp32[panels, groups, columns, 16]"""
    match KINDS[panels.kind]:
        case "int8":
            return stored.contiguous().view(torch.int8).float()
        case "fp8":
            return stored.contiguous().view(torch.float8_e4m3fn).float()
    if BITS[panels.kind] == 4:
        numbers = torch.stack((stored & 15, stored >> 4), 3).flatten(2, 3)
        return torch.tensor(FP4)[numbers.int()] if KINDS[panels.kind] == "fp4" else numbers.float() - panels.middle
    columns, bits = TOGETHER[panels.kind], BITS[panels.kind]
    words = stored.contiguous().flatten(2).view(torch.int32).view(*stored.shape[:2], -1, ROWS).long() & 0xFFFFFFFF
    words = F.pad(words, (0, 0, 0, 1))  # after the last
    places = (divmod(column * bits, 32) for column in range(columns))
    numbers = torch.stack([words[:, :, at] >> shift | words[:, :, at + 1] << 32 - shift for at, shift in places], 2)
    return (numbers & (1 << bits) - 1).float() - panels.middle


def _linear(x: Tensor, panels: Tensor, bias: Tensor | None, layout: Sequence[int]) -> Tensor:
    return F.linear(x, _unpack(panels, layout).to(x.dtype), bias)


def _embedding(tokens: Tensor, panels: Tensor, dtype: int, layout: Sequence[int]) -> Tensor:
    return F.embedding(tokens, _unpack(panels, layout).to(DTYPES[dtype]))


# of an embedding's output, by index: PyTorch 2.11 passes the wrong ScalarType from compiled pieces
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("panel_linear(Tensor x, Tensor panels, Tensor? bias, int[] layout) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define("panel_embedding(Tensor tokens, Tensor panels, int dtype, int[] layout) -> Tensor")  # type: ignore[no-untyped-call]


LIBRARY.impl("panel_linear", _linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("panel_embedding", _embedding, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _linear_shape(x: Tensor, panels: Tensor, bias: Tensor | None, layout: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], layout[1])


LIBRARY.impl("panel_linear", _linear_shape, "Meta")  # type: ignore[no-untyped-call]


def _embedding_shape(tokens: Tensor, panels: Tensor, dtype: int, layout: Sequence[int]) -> Tensor:
    return tokens.new_empty(tokens.shape[0], layout[2], dtype=DTYPES[dtype])


LIBRARY.impl("panel_embedding", _embedding_shape, "Meta")  # type: ignore[no-untyped-call]


@cache
def _numbers_of(weight: Type) -> list[int]:
    return Panels.of(weight).numbers


def panel_linear(x: Tensor, weight: LaidOut, bias: Tensor | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]"""
    return torch.ops.atom.panel_linear(x.contiguous(), weight.tensor, bias, _numbers_of(weight.type))  # type: ignore[no-any-return]


def panel_embedding(tokens: Tensor, weight: LaidOut) -> Tensor:
    """tokens i64[T], weight [V, H] -> [T, H]"""
    dtype = DTYPES.index(TORCH_DTYPES[weight.type.dtype])
    return torch.ops.atom.panel_embedding(tokens, weight.tensor, dtype, _numbers_of(weight.type))  # type: ignore[no-any-return]

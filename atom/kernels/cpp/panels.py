"""Packed weights in panels of 16 rows, which packed.cpp multiplies by.

    weight = pack_panels(packed)               # once: a LaidOut, one u8[panels, bytes of a panel]
    y = panel_linear(x, weight, bias)          # [T, I] -> [T, O], summed in float32
    h = panel_embedding(tokens, weight)        # i64[T] -> [T, H]

Any format of blocks within a row, and fp8 in blocks of rows too. Scales and minima are float16 where the file's are, as
in GGUF; else bfloat16 where the model computes in that and their groups have few columns, else float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from atom.graph import TORCH_DTYPES
from atom.graph.formats import block_of, parse_format
from atom.graph.packed import LaidOut, PackedWeight
from atom.graph.types import Type
from atom.graph.unpack import FP4
from atom.kernels.cpp.build import PACKED, load_library

ROWS = 16  # of a panel
KINDS = ("int4", "int8", "fp8", "fp4")  # as packed.cpp numbers them
SCALES = (torch.bfloat16, torch.float32, torch.float16)  # the same
NARROW_GROUP = 64  # columns that share a scale, up to which it is a bfloat16
AT_ONCE = 1 << 22  # bytes of panels that are made at a time


class Panels(NamedTuple):
    """A weight's layout, as packed.cpp takes it."""

    kind: int  # of KINDS
    out: int
    inner: int
    group: int  # columns that share a scale
    scales: int  # of SCALES: the dtype of scales and minima
    has_minima: bool

    @classmethod
    def of(cls, weight: Type) -> Panels:
        known, (out, inner) = parse_format(str(weight.fmt)), map(int, weight.shape[-2:])
        group = block_of(weight)[-1]
        is_wide = weight.dtype != "bf16" or group > NARROW_GROUP
        dtype = torch.float16 if known.parts["scales"].dtype == "fp16" else torch.float32 if is_wide else torch.bfloat16
        has_minima = not known.parts.keys().isdisjoint(("zeros", "mins"))
        return cls(KINDS.index(_kind_of(weight)), out, inner, group, SCALES.index(dtype), has_minima)

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
    def is_pair(self) -> bool:
        """Whether a byte has numbers of two columns."""
        return KINDS[self.kind] in ("int4", "fp4")

    @property
    def size(self) -> int:
        """Bytes of a panel."""
        scales = self.num_groups * self.scale_dtype.itemsize * (2 if self.has_minima else 1)
        return ROWS * (self.inner // (2 if self.is_pair else 1) + scales)

    @property
    def numbers(self) -> list[int]:
        return [*map(int, self)]


def _kind_of(weight: Type) -> str:
    known = parse_format(str(weight.fmt))
    if known.kind == "scaled":
        return "fp8" if known.parts["values"].dtype == "fp8_e4m3" else "int8"
    return known.kind if known.kind in KINDS else "fp4"


def refusal(weight: Type) -> str | None:
    """Why a packed weight is not multiplied in panels; None where it is."""
    known = parse_format(str(weight.fmt))
    if known.has_order or (known.kind != "scaled" and known.block[0] != 1):
        return f"its weight is stored as {weight.fmt}"
    if int(weight.shape[-1]) % 2 and Panels.of(weight).is_pair:
        return f"{weight.shape[-1]} columns are no pairs"
    return None


def packed_type(weight: Type) -> Type:
    """The type of a weight's panels."""
    panels = Panels.of(weight)
    return Type("u8", (panels.num_panels, panels.size))


def kept_type(weight: Type) -> Type | None:
    """The type of panels where weights are put into them; None without the library, for which they are unpacked."""
    return packed_type(weight) if load_library(PACKED) else None


def pack_panels(weight: PackedWeight) -> LaidOut:
    """A weight [O, I], or [1, O, I], in panels; without the library it is unpacked."""
    if not load_library(PACKED):
        return LaidOut(weight.type, weight.unpack().view(weight.shape[-2:]))
    panels = Panels.of(weight.type)
    numbers = weight.parts["values"].view(torch.uint8).view(panels.out, -1)
    if weight.kind == "int8":
        numbers = numbers ^ 0x80
    scales, minima = _scales_of(weight, panels)
    if KINDS[panels.kind] == "fp8":  # a NaN, whose bits would be 480, makes a NaN of all that its row gives
        scales = scales.masked_fill(((numbers & 0x7F) == 0x7F).any(1, keepdim=True), math.nan)
    made = numbers.new_empty(panels.num_panels, panels.size)
    bytes_of_group = panels.group // 2 if panels.is_pair else panels.group
    missing = panels.num_groups * bytes_of_group - numbers.shape[1]  # of the last group
    step = max(AT_ONCE // made.shape[1], 1)
    for first in range(0, len(made), step):
        rows = slice(first * ROWS, (first + step) * ROWS)
        columns = _turned(F.pad(numbers[rows], (0, missing)))
        groups = [_turned(each[rows]).view(torch.uint8) for each in (scales, minima) if each is not None]
        whole = torch.cat([*groups, columns.view(len(columns), panels.num_groups, -1)], 2)
        made[first : first + step] = whole.flatten(1)[:, : panels.size]
    return LaidOut(weight.type, made)


def _turned(rows: Tensor) -> Tensor:
    """[R, C] -> [R / 16, C, 16], with rows of zeros behind the last"""
    return F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).view(-1, ROWS, rows.shape[1]).transpose(1, 2).contiguous()


def _scales_of(weight: PackedWeight, panels: Panels) -> tuple[Tensor, Tensor | None]:
    """The scales [O, groups] and, where there are some, minima of a weight's groups, as a panel has them."""
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
    if "mins" in parts:  # as the file has them, packed.cpp knows it by their dtype
        return scales.to(dtype), parts["mins"].view_as(scales)
    middle = 8 if panels.is_pair else 128
    return scales.to(dtype), ((middle - parts["zeros"].float().view_as(scales)) * scales).to(dtype)


# The ops without the library: in a process that only checks compiled code, and where it cannot be compiled.


def _unpack(panels: Tensor, layout: Sequence[int]) -> Tensor:
    """Panels as fp32[O, I]"""
    if panels.dtype != torch.uint8:
        return panels
    kind, out, inner, group, scales_index, has_minima = layout
    dtype = SCALES[scales_index]
    is_pair, num_panels, num_groups = KINDS[kind] in ("int4", "fp4"), len(panels), -(-inner // group)
    scales_size = ROWS * dtype.itemsize
    first = scales_size * (2 if has_minima else 1)
    size = first + ROWS * (group // 2 if is_pair else group)  # of a group
    groups = F.pad(panels, (0, num_groups * size - panels.shape[1])).view(num_panels, num_groups, size)
    scales = groups[..., :scales_size].contiguous().view(dtype).float().unsqueeze(2)
    stored = groups[..., first:].view(num_panels, num_groups, -1, ROWS)
    if is_pair:
        stored = torch.stack((stored & 15, stored >> 4), 3).flatten(2, 3)
    match KINDS[kind]:
        case "int4":
            values = stored.float() - (0 if has_minima and dtype is torch.float16 else 8)
        case "int8":
            values = stored.contiguous().view(torch.int8).float()
        case "fp8":
            values = stored.contiguous().view(torch.float8_e4m3fn).float()
        case _:
            values = torch.tensor(FP4)[stored.int()]
    values = values * scales
    if has_minima:
        values += groups[..., scales_size:first].contiguous().view(dtype).float().unsqueeze(2)
    return values.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)[:out, :inner]


def _linear(x: Tensor, panels: Tensor, bias: Tensor | None, layout: Sequence[int]) -> Tensor:
    return F.linear(x, _unpack(panels, layout).to(x.dtype), bias)


def _embedding(tokens: Tensor, panels: Tensor, dtype: int, layout: Sequence[int]) -> Tensor:
    return F.embedding(tokens, _unpack(panels, layout).to(DTYPES[dtype]))


# of an embedding's output, by number: PyTorch 2.11 hands on a ScalarType of a compiled piece as another one
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

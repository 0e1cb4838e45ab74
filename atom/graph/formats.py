"""Storage formats of quantized weights, by the name in the text.

    num_bytes(Type("bf16", (7168, 2048)), "fp8[128, 128]")    # fp8 with a float32 scale for each 128 x 128 block
    num_bytes(Type("bf16", (2880, 2880)), "mxfp4")            # 4 bits, an 8-bit exponent for each 32 of a row
    num_bytes(Type("bf16", (2880, 2880)), None)               # plain

A format is a name and, in brackets, the block that shares a scale: rows and columns, * for a whole dim.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from atom.errors import UnsupportedError
from atom.graph.types import Type


class FormatError(UnsupportedError, ValueError):
    """A weight cannot be stored in the named format."""


class Format(NamedTuple):
    """The packing of a weight [..., O, I]."""

    bits: int  # an element
    scale_bits: int  # a block's scale, and its zero point if it has one
    block: tuple[int | None, int | None]  # rows and columns; None: all


# name -> bits of an element, bits of a scale, block where none is stated
FORMATS: dict[str, Format] = {
    "fp8": Format(8, 32, (None, None)),
    "int8": Format(8, 16, (1, None)),
    "int4": Format(4, 16, (1, 128)),
    "int4z": Format(4, 20, (1, 128)),  # with a zero point a block
    "int8z": Format(8, 24, (1, 128)),
    "mxfp4": Format(4, 8, (1, 32)),
}


def parse_format(fmt: str) -> Format:
    """The format of a name such as `fp8[128, 128]`, `int4[1, 32]` or `fp8[1, *]`."""
    match = re.fullmatch(r"(\w+)(?:\[([1-9]\d*|\*), ([1-9]\d*|\*)\])?", fmt, re.ASCII)
    if not match or match[1] not in FORMATS:
        raise UnsupportedError(f"weights stored as {fmt} are not known yet; formats: {', '.join(FORMATS)}")
    known = FORMATS[match[1]]
    if match[2] is None:
        return known
    rows, columns = (None if size == "*" else int(size) for size in match.groups()[1:])
    return known._replace(block=(rows, columns))


def check_columns(type: Type, fmt: str | None) -> None:
    """Raise FormatError where a weight must be, but is not, a whole number of blocks."""
    if fmt == "mxfp4" and (len(type.shape) < 2 or int(type.shape[-1]) % 32):
        columns = f"{type.shape[-1]} columns" if len(type.shape) > 1 else "no columns"
        raise FormatError(f"{type} has {columns}, mxfp4 stores multiples of 32; set another model.fmt, or model.plain")


def num_bytes(type: Type, fmt: str | None) -> int:
    """Bytes of a weight [..., O, I] in a format, its scales included; None is plain."""
    if fmt is None:
        return type.num_bytes
    known = parse_format(fmt)
    check_columns(type, fmt)
    *others, rows, columns = (int(dim) for dim in type.shape)
    blocks = [-(-dim // (size or dim)) for dim, size in zip((rows, columns), known.block, strict=True)]
    num_bits = (rows * columns * known.bits, math.prod(blocks) * known.scale_bits)
    return math.prod(others) * sum(-(-bits // 8) for bits in num_bits)


def stored_parts(type: Type, fmt: str | None) -> dict[str, Type]:
    """The tensors that a weight of this type is stored in: suffix of the name -> type."""
    if fmt is None:
        return {"": type}
    if fmt != "mxfp4":
        raise UnsupportedError(f"the tensors of a weight stored as {fmt} are not known yet")
    check_columns(type, fmt)
    *others, columns = type.shape
    num_blocks = int(columns) // 32
    return {"_blocks": Type("u8", (*others, num_blocks, 16)), "_scales": Type("u8", (*others, num_blocks))}

"""Storage formats of quantized weights, by the name in a type of the text.

    num_bytes(Type("bf16", (7168, 2048), "fp8[128, 128]"))    # fp8 with a float32 scale for each 128 x 128 block
    num_bytes(Type("bf16", (2880, 2880), "mxfp4"))            # 4 bits, an 8-bit exponent for each 32 of a row

A format is a name and, in brackets, the block that shares a scale: rows and columns, * for a whole dim.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING

from atom.dtypes import FORMATS, Format, Part
from atom.errors import UnsupportedError

if TYPE_CHECKING:
    from atom.graph.types import Type

# of one tensor of blocks, as GGUF has them
BLOCK_WORDS = ("block_scales", "block_exponents", "block_mins", "block_pairs", "block_bytes")


ACTS = {"fp8_e4m3": "fp8", "i8": "int8"}  # formats of activations, by the dtype of a weight's numbers
ROUNDED = ("int4", "mxfp4")  # kinds of weights that can be rounded to fp8 by row, for activations in it
MIN_GROUP = 32  # columns that share a scale, of what is packed while it loads


class FormatError(UnsupportedError, ValueError):
    """A weight cannot be stored in the named format."""


@functools.cache
def parse_format(fmt: str) -> Format:
    """The format of a name such as `fp8[128, 128]`, `int4[1, 32]` or `fp8[1, *]`."""
    match = re.fullmatch(r"(\w+)(?:\[([1-9]\d*|\*), ([1-9]\d*|\*)\])?", fmt, re.ASCII)
    if not match or match[1] not in FORMATS:
        raise UnsupportedError(f"weights stored as {fmt} are not supported (supported: {', '.join(FORMATS)})")
    known = FORMATS[match[1]]
    if match[2] is None:
        return known
    rows, columns = (None if size == "*" else int(size) for size in match.groups()[1:])
    return known._replace(block=(rows, columns))


def act_of(fmt: str) -> str | None:
    """The format of activations that a weight's stored numbers can be multiplied with: the same numbers, a scale for as
    many columns of a row as a block of the weight has. None: a weight's numbers are not multiplied as they are stored.
    """
    known = parse_format(fmt)
    name = ACTS.get(known.parts["values"].dtype) if known.kind == "scaled" else None
    return name and f"{name}[1, {known.block[1] or '*'}]"


def rounded_act_of(fmt: str) -> str | None:
    """The format of activations that a weight of 4 bits is multiplied with once it is rounded to 8 bits, see
    `quantize_rows.round_weight`. None: it is not.

    MXFP4 loses nothing by that, unless a number is 2^14 times smaller than the largest of its row.
    """
    known = parse_format(fmt)
    return "fp8[1, *]" if known.kind in ROUNDED and not known.has_order else None


def check_act(act: str) -> None:
    """Raise FormatError unless activations can have this format: 8 bits, blocks within a row, only a scale."""
    if act.partition("[")[0] not in ACTS.values() or parse_format(act).block[0] != 1:
        raise FormatError(f"activations cannot be {act}, but fp8 or int8 with a scale for columns of a row")


def block_of(type: Type) -> tuple[int, ...]:
    """How many elements of a packed weight go together along each of its dims: a slice cuts between them.

    Those that share a scale, or all columns if these are not neighbours.
    """
    block = _scaled_block(type)
    return (*block[:-1], int(type.shape[-1])) if parse_format(str(type.fmt)).has_order else block


def _scaled_block(type: Type) -> tuple[int, ...]:
    """How many elements of a packed weight share a scale, along each of its dims."""
    *others, rows, columns = (int(dim) for dim in type.shape)
    block = parse_format(str(type.fmt)).block
    return (*(1 for _ in others), *(size or dim for dim, size in zip((rows, columns), block, strict=True)))


def block_size(type: Type, dim: int) -> int | None:
    """How many elements of a packed weight share a scale along a dim; None: all of them, however many."""
    before = len(type.shape) - 2
    return 1 if dim < before else parse_format(str(type.fmt)).block[dim - before]


def part_shape(type: Type, part: Part) -> tuple[int, ...]:
    """The shape of a part of a packed weight."""
    block, dims = _scaled_block(type), tuple(map(int, type.shape))
    shape = tuple(-(-dim // size) for dim, size in zip(dims, block, strict=True))
    known = parse_format(str(type.fmt))
    scale_bits = 0 if "scales" in known.parts else known.scale_bits  # a block's bytes have its scales too
    shapes = {
        "elements": dims,
        "blocks": shape,
        "bytes": (*shape, (math.prod(block) * known.bits + scale_bits) // 8),
        "columns": dims[-1:],
        "tensor": (1,),
    }
    return shapes[part.holds]


def words_type(type: Type, part: Part) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of the stored tensor that has a part, see `recipes.Repack`."""
    if part.words == "exponents":
        return "u8", part_shape(type, part)
    if part.words not in BLOCK_WORDS:
        return "i32", _words_shape(type, part)
    blocks, known = part_shape(type, part._replace(holds="blocks")), parse_format(str(type.fmt))
    return "u8", (*blocks, (math.prod(_scaled_block(type)) * known.bits + known.scale_bits) // 8)


def _words_shape(type: Type, part: Part) -> tuple[int, ...]:
    """The shape [..., R, C] of a part that is packed into int32 words."""
    *others, rows, columns = map(int, type.shape)
    holds_values, per_word = part.holds == "bytes", 32 // parse_format(str(type.fmt)).bits
    if not holds_values:
        rows, columns = (-(-dim // size) for dim, size in zip((rows, columns), _scaled_block(type)[-2:], strict=True))
    match part.words:
        case "columns":
            packed = (rows, -(-columns // per_word))
        case "rows":
            packed = (-(-rows // per_word), columns)
        case "awq":
            packed = (columns, -(-rows // per_word))
        case _:
            packed = (-(-columns // per_word), rows) if holds_values else (columns, -(-rows // per_word))
    return (*others, *packed)


def num_bytes(type: Type) -> int:
    """Bytes of a packed weight [..., O, I], its scales included."""
    known = parse_format(str(type.fmt))
    *others, rows, columns = (int(dim) for dim in type.shape)
    num_blocks = math.prod(-(-dim // size) for dim, size in zip((rows, columns), _scaled_block(type)[-2:], strict=True))
    num_bits = (rows * columns * known.bits, num_blocks * known.scale_bits)
    return math.prod(others) * sum(-(-bits // 8) for bits in num_bits)


def transpose(fmt: str) -> str:
    """The format of a weight whose rows are the columns of one in this format."""
    rows, columns = parse_format(fmt).block
    return fmt if rows == columns else with_block(fmt, columns, rows)


def with_block(fmt: str, rows: int | None, columns: int | None) -> str:
    """The format with another block; None: a whole dim."""
    name = fmt.partition("[")[0]
    return name if FORMATS[name].block == (rows, columns) else f"{name}[{rows or '*'}, {columns or '*'}]"


def shrink_group(fmt: str, type: Type) -> str:
    """The format with its group size reduced until it divides the row, if the format needs that.

    FormatError if no group of at least MIN_GROUP columns does.
    """
    known, columns = parse_format(fmt), int(type.shape[-1])
    rows, size = known.block
    if size is None or not known.is_whole:
        return fmt
    group = size if known.kind not in ("int4", "int8") else math.gcd(size, columns)
    if columns % group or group < min(MIN_GROUP, size):
        raise FormatError(f"{fmt} packs multiples of {MIN_GROUP} columns, and it has {columns}")
    return with_block(fmt, rows, group)


def check_columns(type: Type) -> None:
    """Raise FormatError if a row must be, but is not, a whole number of blocks."""
    fmt = str(type.fmt)
    size = parse_format(fmt).block[1] if fmt.partition("[")[0] in FORMATS and parse_format(fmt).is_whole else None
    if size is not None and (len(type.shape) < 2 or int(type.shape[-1]) % size):
        columns = f"{type.shape[-1]} columns" if len(type.shape) > 1 else "no columns"
        rule = f"{type.fmt} stores multiples of {size}; set another model.fmt, or model.plain"
        raise FormatError(f"{type.plain} has {columns}, {rule}")

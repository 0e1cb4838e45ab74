"""Vision ops: patches of a tower, and their rows among tokens.

Shapes by letter, besides those of `atom.graph.ops`: P patches, M rows that they become, F pixels of a patch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from atom.dtypes import DTYPES
from atom.graph.ops.base import divide, divide_rows, op
from atom.graph.types import Type, need

PLACE = 4  # numbers of a patch's place: row, column, height, width
TABLE_MODES = ("bilinear", "bicubic")  # in which a table is interpolated
CUBIC = -0.75  # a of Keys' kernel


def _normalize_pixels(patches: Type, *, mean: Sequence[float], std: Sequence[float], dtype: str) -> Type:
    need(patches.dtype == "u8", f"pixels are u8, not {patches.dtype}")
    need(len(mean) == len(std), f"{len(mean)} means and {len(std)} deviations")
    divide(patches.shape[-1], len(mean))
    return Type(dtype, patches.shape)


@op(_normalize_pixels)
def normalize_pixels(patches: Tensor, *, mean: Sequence[float], std: Sequence[float], dtype: str) -> Tensor:
    """patches u8[P, F], channel by channel -> [P, F]: (x - mean) / std of each channel, in float32, rounded once

    mean, std: by channel, in units of a pixel's 255 levels
    """
    by_channel = patches.float().view(patches.shape[0], len(mean), -1).unbind(1)
    normalized = [(x - shift) / factor for x, shift, factor in zip(by_channel, mean, std, strict=True)]
    return torch.cat(normalized, dim=1).to(dtype=getattr(torch, DTYPES[dtype].name))


def _segment_attention(q: Type, k: Type, v: Type, starts: Type, *, scale: float) -> Type:
    need(q == k and len(q.shape) == 3, f"q is {q}, k {k}")
    need(v == q, f"q is {q}, v {v}")
    need(starts.dtype == "i32" and len(starts.shape) == 1, f"starts are i32[S + 1], not {starts}")
    return q


@op(_segment_attention, heads={"q": 1, "k": 1, "v": 1})
def segment_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float) -> Tensor:
    """q, k, v [P, N, D], starts i32[S + 1] -> [P, N, D], each segment by itself, in float32

    starts: where each segment begins, and P; a patch sees all patches of its segment. Empty segments may come last.
    """
    out = torch.zeros_like(q)
    for first, last in itertools.pairwise(starts.tolist()):
        if first < last:
            scores = torch.einsum("qnd,knd->nqk", q[first:last].float(), k[first:last].float()) * scale
            out[first:last] = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v[first:last].float()).to(q.dtype)
    return out


def _fold_rows(x: Type, *, rows: int) -> Type:
    return Type(x.dtype, (divide_rows(x.shape[0], rows), int(x.shape[1]) * rows))


@op(_fold_rows)
def fold_rows(x: Tensor, *, rows: int) -> Tensor:
    """x [rows * M, H] -> [M, rows * H]: so many neighbours become one row"""
    return x.reshape(-1, rows * x.shape[1])


def _mean_rows(x: Type, *, rows: int) -> Type:
    return Type(x.dtype, (divide_rows(x.shape[0], rows), *x.shape[1:]))


@op(_mean_rows)
def mean_rows(x: Tensor, *, rows: int) -> Tensor:
    """x [rows * M, H] -> [M, H]: the mean of so many neighbours, in float32, rounded once"""
    return x.view(-1, rows, x.shape[1]).float().mean(1).to(x.dtype)


def _take_rows(x: Type, rows: Type) -> Type:
    need(rows.dtype == "i64" and len(rows.shape) == 1, f"rows are i64[P], not {rows}")
    return Type(x.dtype, (*rows.shape, *x.shape[1:]))


@op(_take_rows)
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [N, H], rows i64[P] -> [P, H]"""
    return x.index_select(0, rows)


def _axis_tables(tables: Type, places: Type) -> Type:
    need(len(tables.shape) == 3 and tables.shape[0] == 2, f"a table of columns and one of rows, not {tables}")
    need(places.dtype == "i64" and places.shape[1:] == (PLACE,), f"places are i64[P, {PLACE}], not {places}")
    return Type(tables.dtype, (places.shape[0], tables.shape[2]))


@op(_axis_tables)
def axis_tables(tables: Tensor, places: Tensor) -> Tensor:
    """tables [2, L, H], places i64[P, 4] -> [P, H]: that of a patch's column in the first plus that of its row

    In float32, rounded once.
    """
    return (tables[0][places[:, 1]].float() + tables[1][places[:, 0]].float()).to(tables.dtype)


def _interpolate_table(table: Type, places: Type, *, side: int, mode: str = "bilinear") -> Type:
    need(table.shape[0] == side**2, f"a table of {side} by {side} rows, not {table}")
    need(places.dtype == "i64" and places.shape[1:] == (PLACE,), f"places are i64[P, {PLACE}], not {places}")
    need(mode in TABLE_MODES, f"mode {mode!r} is not supported (supported: {', '.join(TABLE_MODES)})")
    return Type(table.dtype, (places.shape[0], table.shape[1]))


@op(_interpolate_table)
def interpolate_table(table: Tensor, places: Tensor, *, side: int, mode: str = "bilinear") -> Tensor:
    """table [side * side, H], places i64[P, 4] -> [P, H], in float32, rounded once

    mode: bilinear: between the 4 nearest entries; the corners of the table are those of a segment, whatever its size
        (as with align_corners=True of torch's interpolate).
        bicubic: of the 16 nearest by Keys' kernel (1981) with a = -0.75; the edges of the table are those of a segment
        (as torch's interpolate has it by default, and grid_sample with padding_mode="border").
    """
    find_taps = cubic_taps if mode == "bicubic" else linear_taps
    rows, columns = (find_taps(places[:, axis].float(), places[:, axis + 2].float(), side) for axis in (0, 1))
    terms = [
        table[row * side + column].float() * (share * other).unsqueeze(-1)
        for (row, share), (column, other) in itertools.product(rows, columns)
    ]
    return functools.reduce(torch.add, terms).to(table.dtype)


def linear_taps(position: Tensor, size: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two entries of one axis of a table that each patch lies between, and their shares."""
    at = position * (side - 1) / (size - 1).clamp(min=1)
    low = at.floor().long()
    return [(low, 1 - (at - low)), ((low + 1).clamp(max=side - 1), at - low)]


def cubic_taps(position: Tensor, size: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The four entries of one axis that are nearest to each patch, clamped to the edges, and their shares."""
    at = (position + 0.5) * side / size - 0.5
    low = at.floor()
    past = at - low
    shares = [cubic_far(past + 1), cubic_near(past), cubic_near(1 - past), cubic_far(2 - past)]
    return [((low.long() + step).clamp(0, side - 1), share) for step, share in zip(range(-1, 3), shares, strict=True)]


def cubic_near(distance: Tensor) -> Tensor:
    """The share of an entry at a distance of at most 1."""
    return ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1


def cubic_far(distance: Tensor) -> Tensor:
    """The share of an entry at a distance of 1 to 2."""
    return ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC


def _resample_table(table: Type, places: Type, *, side: int) -> Type:
    return _interpolate_table(table, places, side=side)


@op(_resample_table)
def resample_table(table: Tensor, places: Tensor, *, side: int) -> Tensor:
    """table [side * side, H], places i64[P, 4] -> [P, H], in float32, rounded once

    Bilinear; the edges of the table are those of a segment, and of a segment with fewer patches than the table has
    entries, each is an average over as many as it takes the place of (as torch's interpolate with antialias=True).
    """
    rows, columns = (triangle_shares(places[:, axis].float(), places[:, axis + 2].float(), side) for axis in (0, 1))
    shares = (rows.unsqueeze(2) * columns.unsqueeze(1)).flatten(1)
    return (shares @ table.float()).to(table.dtype)


def triangle_shares(position: Tensor, size: Tensor, side: int) -> Tensor:
    """The share [P, side] of each entry of one axis of a table in each patch."""
    step = (side / size).unsqueeze(1)  # entries from one patch to the next
    center = (position.unsqueeze(1) + 0.5) * step - 0.5
    entries = torch.arange(side, device=position.device)
    shares = (1 - (entries - center).abs() / step.clamp(min=1)).clamp(min=0)
    return shares / shares.sum(1, keepdim=True)


def _rotary_sections(
    positions: Type, freqs: Type, *, sections: Sequence[int], interleaved: bool = False, scale: float = 1.0,
    axes: Sequence[int] | None = None,
) -> tuple[Type, Type]:  # fmt: skip
    need(len(positions.shape) == 2 and len(sections) <= int(positions.shape[1]), f"{len(sections)} of {positions}")
    need(axes is None or len(axes) == len(sections), f"{len(sections)} sections turn by axes {axes}")
    divide(sum(sections), int(freqs.shape[0]))
    made = Type("fp32", (positions.shape[0], sum(sections)))
    return made, made


@op(_rotary_sections)
def rotary_sections(
    positions: Tensor, freqs: Tensor, *, sections: Sequence[int], interleaved: bool = False, scale: float = 1.0,
    axes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """positions i64[T, C], freqs fp32[F] -> cos, sin fp32[T, D / 2], both times scale (Wang et al. 2024, M-RoPE)

    sections: of each of the first positions, how many frequencies it turns, one section after the other; of more than
        F, freqs begin anew.
    interleaved: instead they take turns, and the first has those that are left (Qwen3-VL); of more than F, those that
        come one after the other have the same one (MoonViT).
    axes: which positions sections are of; None: the first ones, in their order.
    """
    axes, num = range(len(sections)) if axes is None else axes, sum(sections) // freqs.shape[0]
    freqs = freqs.repeat_interleave(num) if interleaved else freqs.repeat(num)
    angles, start = positions[:, axes[0] : axes[0] + 1].float() * freqs, 0
    for number, (axis, size) in enumerate(zip(axes, sections, strict=True)):
        own = slice(number, len(sections) * size, len(sections)) if interleaved else slice(start, start + size)
        start += size
        if number:
            angles[:, own] = positions[:, axis : axis + 1].float() * freqs[own]
    return angles.cos() * scale, angles.sin() * scale


def _place_rows(x: Type, rows: Type, encoded: Type, *, part: int = 0, adds: bool = False) -> Type:
    need(rows == Type("i32", x.shape[:1]), f"the rows are {rows} of x {x}")
    parts = divide_rows(encoded.shape[1], int(x.shape[1]))
    need(encoded.dtype == x.dtype and part < int(parts), f"part {part} of {encoded} for x {x}")
    return x


@op(_place_rows)
def place_rows(x: Tensor, rows: Tensor, encoded: Tensor, *, part: int = 0, adds: bool = False) -> Tensor:
    """x [T, H], rows i32[T], encoded [N, H * parts] -> [T, H]: columns of encoded rows in place of some tokens' own

    rows: of each token; -1: it keeps its own.
    part: which H columns.
    adds: they are added, as those of deeper layers are (Meng et al. 2024, DeepStack).
    """
    is_placed, hidden = (rows >= 0).unsqueeze(-1), x.shape[1]
    placed = encoded[:, part * hidden : (part + 1) * hidden][rows.clamp(min=0).long()]
    return torch.where(is_placed, x + placed if adds else placed, x)

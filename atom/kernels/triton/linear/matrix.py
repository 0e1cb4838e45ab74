"""Multiply several rows by a weight in tensor cores, with the gated activation after.

    y = multiply_matrix(x, weight, bias, "silu", make_counters(x.device), Matrix(64, 128, 4, 4))

The weight is the left operand, so that the rows are padded to 8 and not to 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.activations import activate_rounded
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.packed import (
    SPAN,
    are_minima,
    has_factors,
    has_spans,
    load_factors,
    load_offsets,
    load_scales,
    load_spans,
    load_zeros,
    multiply_spans,
    offsets_of,
    pair_of,
    parts_of,
    raise_of,
    rest_of,
    split_pairs,
    unpack_bytes,
    unpack_half,
)
from atom.kernels.triton.linear.row_kernels import weight_rows
from atom.kernels.triton.linear.tiles import MAX_TILES, Matrix, TileError
from atom.kernels.triton.linear.weight_encoding import Weight, operand_of
from atom.kernels.triton.unpack import spread


def make_counters(device: torch.device) -> Tensor:
    """Make the counters of splits, one for each tile of a GEMM; each is zero again after it."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def multiply_matrix(x: Tensor, weight: Weight, bias: Tensor | None, kind: str | None, counters: Tensor,
                    parameters: Matrix, heads: int = 1, *, rows_are_fixed: bool = False) -> Tensor:  # fmt: skip
    """multiply for up to MAX_ROWS normed rows x [T, I]. TileError if split columns have too many tiles.

    counters: of `make_counters`; calls that share them must run one after another
    heads: of x [T, N I], by each of which its own rows of the weight [N O, I] are multiplied; whole tiles of them
    rows_are_fixed: a program takes `block_rows`, however few rows there are
    """
    (rows, inner), gates, gpu, num_rows = weight.shape, 1 if kind is None else 2, find_gpu(x.device), x.shape[0]
    operand = operand_of(weight)
    tile = parameters.as_run(parameters.block_rows if rows_are_fixed else num_rows, gpu, operand.encoding)
    assert rows % heads == 0 and (heads == 1 or rows // heads % tile.block_out == 0), "a tile has rows of two heads"
    block_out, block_inner, warps, stages, groups, splits, prefetch, block_rows = tile
    if operand.encoding.per_byte == 2 and (x.stride(0) % 2 or x.data_ptr() % (2 * x.element_size())):
        x = x.clone(memory_format=torch.contiguous_format)  # pairs of columns are loaded as words
    row_tiles, tiles = -(-num_rows // block_rows), -(-rows // block_out)
    y = x.new_empty(num_rows, rows // gates)
    partial = arrived = None
    if splits > 1:
        if row_tiles * tiles > MAX_TILES:
            raise TileError(f"{row_tiles} x {tiles} tiles, of which {MAX_TILES} can be split")
        partial = x.new_empty(splits, tiles, row_tiles, block_out, block_rows, dtype=torch.float32)
        arrived = counters
    _matrix_kernel[(row_tiles, tiles, splits)](
        x, *operand[:4], bias, y, partial, arrived, num_rows, rows // gates, x.stride(0),
        inner, block_rows, block_out, block_inner, stages, groups, splits, prefetch, kind, heads,
        *operand.encoding.constants, num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y


@jit
def _send_for(weights, begin, INNER: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetch lines of 128 bytes of each row, from a column on, into NVIDIA's L2."""
    LINE: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    lines = weights[:, None] + tl.minimum(begin + tl.arange(0, PREFETCH) * LINE, INNER - 1)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@jit
def _load_scales(
    scales_ptr, blocks, column, PARTS: tl.constexpr, WIDTH: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    NUM: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The scales of each part of the columns from one on: [O] or, of groups, [G, O]."""
    scales = ()
    for part in tl.static_range(PARTS):
        block = (column + part * WIDTH) // SCALE_COLUMNS
        scales = scales + (load_scales(scales_ptr + blocks + block, block < NUM, FACTOR),)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@jit
def _load_zeros(zeros_ptr, blocks, first, columns, PARTS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, NUM: tl.constexpr,
                VALUES: tl.constexpr):  # fmt: skip
    """The zero points of a step: one of each row, [O, 1], or group, [G, O, 1], else one of each column.

    first: the step's first column, or that of each group.
    """
    if NUM == 1:
        return load_zeros(zeros_ptr + blocks, None, VALUES)[:, None]
    elif PARTS == 1:
        block = first // SCALE_COLUMNS
        return tl.expand_dims(load_zeros(zeros_ptr + blocks + block, block < NUM, VALUES), -1)
    else:
        block = columns // SCALE_COLUMNS
        return load_zeros(zeros_ptr + blocks[:, None] + block, block < NUM, VALUES)


@jit
def _load_offsets(
    minima_ptr, blocks, column, scales, PARTS: tl.constexpr, WIDTH: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    NUM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """`load_offsets` of the scales of each part."""
    offsets = ()
    for part in tl.static_range(PARTS):
        block = (column + part * WIDTH) // SCALE_COLUMNS
        offsets = offsets + (load_offsets(minima_ptr + blocks + block, block < NUM, scales[part], VALUES),)  # type: ignore[assignment]  # noqa: RUF005
    return offsets


@jit
def _sum_columns(x, TYPE: tl.constexpr, PER_BYTE: tl.constexpr):
    """The sums of columns [I, T] or [G, I, T], or of words of two, fp32[1, T] or [G, 1, T]."""
    AXIS: tl.constexpr = len(x.shape) - 2
    if PER_BYTE == 1:
        columns = x.to(tl.float32)
    else:
        even, odd = split_pairs(x, TYPE)
        columns = even.to(tl.float32) + odd.to(tl.float32)
    return tl.expand_dims(tl.sum(columns, axis=AXIS), AXIS)


@jit
def _load_step(scales_ptr, factor_ptr, blocks, spans, column, INNER: tl.constexpr, BLOCK_I: tl.constexpr,
               SCALE_COLUMNS: tl.constexpr, HAS_MINIMA: tl.constexpr):  # fmt: skip
    """`load_spans` of the columns of a step, [O, blocks] and [O, 1]: they are of one span."""
    tl.static_assert(SPAN % BLOCK_I == 0, "a step is of one span")
    block = column // SCALE_COLUMNS + tl.arange(0, BLOCK_I // SCALE_COLUMNS)[None, :]
    span = (spans + tl.minimum(column, INNER - 1) // SPAN)[:, None]
    mask = block < INNER // SCALE_COLUMNS
    return load_spans(scales_ptr, factor_ptr, blocks[:, None] + tl.where(mask, block, 0), span, None, HAS_MINIMA)


@jit
def _scale_tile(numbers, scales, factors, VALUES: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """Numbers [O, I] of a step, scaled and rounded."""
    scale, minimum = multiply_spans(scales, factors, HAS_MINIMA)
    wide = numbers.to(tl.float32) * spread(scale, numbers.shape[1])
    if HAS_MINIMA:
        wide += spread(offsets_of(minimum, scale, VALUES), numbers.shape[1])
    return wide.to(numbers.dtype)


@jit
def _unpack_tile(w, zero, TYPE: tl.constexpr, VALUES: tl.constexpr, PER_BYTE: tl.constexpr, HAS_ASM: tl.constexpr):
    """A tile of bytes as numbers: of all columns, or those of even ones and those of odd ones."""
    if PER_BYTE == 1:
        number = unpack_bytes(w, TYPE, VALUES, HAS_ASM)
        number = number if zero is None else number - zero.to(TYPE)
        return number, number  # Triton 3.6 returns no None next to a tensor
    else:
        low, high = unpack_half(w, False, TYPE, VALUES, HAS_ASM), unpack_half(w, True, TYPE, VALUES, HAS_ASM)
        return low if zero is None else low - zero.to(TYPE), high if zero is None else high - zero.to(TYPE)


@jit
def _multiply_tile(numbers, odd_numbers, x, acc, PER_BYTE: tl.constexpr, UP: tl.constexpr):
    """acc + unpacked numbers by rows, of which words hold an even and an odd column if there are odd numbers."""
    TYPE: tl.constexpr = numbers.dtype
    if PER_BYTE == 1:
        return tl.dot(numbers, _raise(x, UP), acc, input_precision="ieee")
    else:
        even, odd = split_pairs(x, TYPE)
        acc = tl.dot(numbers, _raise(even, UP), acc, input_precision="ieee")
        return tl.dot(odd_numbers, _raise(odd, UP), acc, input_precision="ieee")


@jit
def _spread(values, part, PARTS: tl.constexpr):
    """Values of each part, [O] or [G, O], by the part of each row."""
    spread = tl.expand_dims(values[0], -1)
    for other in tl.static_range(1, PARTS):
        spread = tl.where(part == other, tl.expand_dims(values[other], -1), spread)
    return spread


@jit
def _raise(x, UP: tl.constexpr):
    return x if UP == 1 else (x * UP).to(x.dtype)


@jit
def _row_scales(scales_ptr, factor_ptr, weight_row, blocks, FACTOR: tl.constexpr, IS_WHOLE: tl.constexpr,
                REST: tl.constexpr):  # fmt: skip
    """What the rows of the result are multiplied by in the end."""
    scale = tl.full(weight_row.shape, REST, tl.float32)
    if IS_WHOLE:
        scale *= load_scales(scales_ptr + blocks, None, FACTOR)
    if has_factors(FACTOR):
        scale *= load_factors(factor_ptr, weight_row, FACTOR)
    return scale


@jit(do_not_specialize=["rows"])
def _matrix_kernel(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, factor_ptr, bias_ptr, y_ptr, partial_ptr, arrived_ptr, rows, out,
    x_stride, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr, KIND: tl.constexpr,
    HEADS: tl.constexpr, VALUES: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by BLOCK_O rows of the weight, over a split of the columns; of bytes, where packed."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = INNER // PER_BYTE
    BLOCK_C: tl.constexpr = BLOCK_I // PER_BYTE
    STEP: tl.constexpr = GROUPS * BLOCK_C
    WIDTH: tl.constexpr = triton.cdiv(triton.cdiv(COLUMNS, STEP), SPLITS) * STEP  # of a split
    begin = tl.program_id(2) * WIDTH
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    first = tl.program_id(1) * NUM
    weight_row = weight_rows(first, out, BLOCK_O, KIND)
    weights = weight_ptr + weight_row * COLUMNS
    if HEADS > 1:
        x_ptr += first // (out // HEADS) * INNER
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            _send_for(weights, begin, COLUMNS, PREFETCH)
        tl.extra.cuda.gdc_wait()
    # of packed weights: the columns of a step that share a scale are summed up apart, by rows that are zero elsewhere
    BLOCKS: tl.constexpr = 1 if SCALE_COLUMNS is None else triton.cdiv(INNER, SCALE_COLUMNS)
    IS_SCALED: tl.constexpr = has_spans(FACTOR)  # before it is multiplied
    PARTS: tl.constexpr = 1 if IS_SCALED else parts_of(BLOCKS, SCALE_COLUMNS, BLOCK_I)
    local = tl.arange(0, PARTS * BLOCK_T)
    row = tl.program_id(0) * BLOCK_T + (local if PARTS == 1 else local % BLOCK_T)
    if PER_BYTE == 1:
        x_row = x_ptr + row * x_stride
    else:
        x_row = x_ptr.to(tl.pointer_type(pair_of(TYPE))) + row * (x_stride // 2)
    is_row = row < rows
    mask = is_row
    if PARTS > 1:
        mask &= (tl.arange(0, BLOCK_C) // (BLOCK_C // PARTS))[:, None] == local // BLOCK_T
    if GROUPS == 1:
        column = begin + tl.arange(0, BLOCK_C)
        acc = tl.zeros([BLOCK_O, PARTS * BLOCK_T], tl.float32)
    else:
        column = begin + tl.arange(0, GROUPS)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        acc = tl.zeros([GROUPS, BLOCK_O, PARTS * BLOCK_T], tl.float32)
    UP: tl.constexpr = raise_of(VALUES, TYPE)
    HAS_MINIMA: tl.constexpr = are_minima(zeros_ptr)
    blocks = weight_row // SCALE_ROWS * BLOCKS  # the first of each row
    place = begin if GROUPS == 1 else begin + tl.arange(0, GROUPS)[:, None] * BLOCK_C
    if IS_SCALED:
        spans = weight_row * (INNER // SPAN)
        scales, factors = _load_step(
            scales_ptr, factor_ptr, blocks, spans, begin * PER_BYTE, INNER, BLOCK_I, SCALE_COLUMNS, HAS_MINIMA
        )
    elif BLOCKS > 1:
        scales = _load_scales(
            scales_ptr, blocks, place * PER_BYTE, PARTS, BLOCK_I // PARTS, SCALE_COLUMNS, BLOCKS, FACTOR
        )
    for start in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        across, down = tl.expand_dims(start + column, -2), tl.expand_dims(start + column, -1)
        w = tl.load(weights[:, None] + across, mask=across < COLUMNS, other=0, eviction_policy="evict_first")
        x = tl.load(x_row + down, mask=(down < COLUMNS) & mask, other=0)
        if VALUES is None:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            zero = None
            if zeros_ptr is not None and not HAS_MINIMA:
                # what is loaded here can be subtracted where tensor cores take their operands
                zero = _load_zeros(
                    zeros_ptr, blocks, (place + start) * PER_BYTE, across * PER_BYTE, PARTS, SCALE_COLUMNS, BLOCKS,
                    VALUES,
                )  # fmt: skip
            numbers, odd_numbers = _unpack_tile(w, zero, TYPE, VALUES, PER_BYTE, PDL)
            if IS_SCALED:  # blocks are too small for a sum of each
                next_scales, next_factors = _load_step(
                    scales_ptr, factor_ptr, blocks, spans, (begin + start + STEP) * PER_BYTE, INNER, BLOCK_I,
                    SCALE_COLUMNS, HAS_MINIMA,
                )  # fmt: skip
                numbers = _scale_tile(numbers, scales, factors, VALUES, HAS_MINIMA)
                odd_numbers = _scale_tile(odd_numbers, scales, factors, VALUES, HAS_MINIMA)
                acc = _multiply_tile(numbers, odd_numbers, x, acc, PER_BYTE, UP)
                scales, factors = next_scales, next_factors
            elif BLOCKS == 1:
                acc = _multiply_tile(numbers, odd_numbers, x, acc, PER_BYTE, UP)
            else:  # scales are loaded a step ahead
                next_scales = _load_scales(
                    scales_ptr, blocks, (place + start + STEP) * PER_BYTE, PARTS, BLOCK_I // PARTS, SCALE_COLUMNS,
                    BLOCKS, FACTOR,
                )  # fmt: skip
                product = _multiply_tile(numbers, odd_numbers, x, tl.zeros_like(acc), PER_BYTE, UP)
                acc += product * _spread(scales, local // BLOCK_T, PARTS)
                if HAS_MINIMA:
                    offsets = _load_offsets(
                        zeros_ptr, blocks, (place + start) * PER_BYTE, scales, PARTS, BLOCK_I // PARTS, SCALE_COLUMNS,
                        BLOCKS, VALUES,
                    )  # fmt: skip
                    acc += _spread(offsets, local // BLOCK_T, PARTS) * _sum_columns(x, TYPE, PER_BYTE)
                scales = next_scales
    if GROUPS > 1:
        acc = tl.sum(acc, axis=0)
    if PARTS > 1:
        acc = tl.sum(acc.reshape([BLOCK_O, PARTS, BLOCK_T]), axis=1)
        row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_row = row < rows
    if SPLITS > 1:  # the last split of a tile to arrive sums up all of them, always in one order
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        element = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        place = partial_ptr + tile * BLOCK_O * BLOCK_T + element
        stride = tl.num_programs(0) * tl.num_programs(1) * BLOCK_O * BLOCK_T
        tl.store(place + tl.program_id(2) * stride, acc)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        acc = tl.zeros_like(acc)
        for split in range(SPLITS):
            acc += tl.load(place + split * stride, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    if VALUES is not None:
        ROW: tl.constexpr = BLOCKS == 1
        REST: tl.constexpr = rest_of(VALUES, TYPE)
        acc *= _row_scales(scales_ptr, factor_ptr, weight_row, blocks, FACTOR, ROW, REST)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    y = acc.to(y_ptr.dtype.element_ty)
    if KIND is not None:
        gate, up = tl.split(tl.permute(y.reshape([NUM, 2, BLOCK_T]), (0, 2, 1)))
        y = activate_rounded(gate, up, KIND)
    index = (first + tl.arange(0, NUM))[:, None]
    tl.store(y_ptr + row[None, :] * out + index, y, mask=(index < out) & is_row[None, :])

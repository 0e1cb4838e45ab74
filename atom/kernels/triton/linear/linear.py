"""Linears of few rows, fused with the norm before and gates behind.

They cost the reading of the weight and little else.

    products = Products()                                       # of one model
    y = products.linear(x, weight, bias)                        # [T, I] by [O, I] -> [T, O]
    y, total = products.add_norm_linear(a, b, norm, weight, eps=1e-6)    # linear(rms_norm(a + b)), a + b
    m, _ = products.add_norm_linear(a, b, norm, weight, eps=1e-6, kind="silu")    # and the gates behind it

One row is multiplied without tensor cores: each program computes its norm again and then streams its share of the
weight. More rows are normed first and go through tensor cores with the weight as the left operand, so that they are
padded to 8 and not to 64. Above MAX_ROWS, and above 32 where no parameters were measured, the vendor's library takes
over; on Hopper gate_hopper.py does products of many rows with gates behind them.

Packed weights are unpacked in registers (packed.py), the products in the dtype of x, and each block of columns that
share a scale is summed up in float32 by itself. For many rows the library multiplies in fp8, or all of the weight is
unpacked first.

On NVIDIA from sm_90, each kernel starts while the preceding one still runs, and prefetches the weight until that has
ended: a weight must have been written before the preceding kernel began. The splits of all products of a model share
one array of counters: its products run on one stream, and the first before any capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from atom.graph import ops
from atom.graph.ops import Op
from atom.graph.packed import PackedWeight
from atom.kernels import tuned
from atom.kernels.triton.activations import activate_rounded
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.jit import jit
from atom.kernels.triton.linear import packed, shuffled
from atom.kernels.triton.linear.packed import (
    PLAIN,
    Style,
    are_minima,
    load_factors,
    load_offsets,
    load_scales,
    load_zeros,
    operand_of,
    pair_of,
    parts_of,
    raise_of,
    rest_of,
    split_pairs,
    style_of,
    unpack_bytes,
    unpack_half,
)
from atom.kernels.triton.linear.row_kernels import (
    QuantizedRows,
    activate_gates,
    load_total,
    normalize,
    quantize_gated,
    quantize_normalized,
    span_of,
)
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.tuned import BUCKETS

BACKENDS = ("triton", "hopper")  # whose kernels these are
PRODUCTS = (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear)
MAX_ROWS = BUCKETS[-1]
MANY_ROWS = 1024  # of a product with gates, from which gate_hopper.py is faster on an H200
MAX_STAGES = 9  # of a product of one row
WARP = 32  # threads, of NVIDIA's
MAX_TILES = 4096  # of a product whose columns are split
MIN_BYTES = 32  # of a row of a packed weight in a group: of fewer no registers for tensor cores are filled
MEMORY = 98304, 16384  # bytes of a processor that a product of one row takes, and of them in a step
# where there are more: so much that two programs never share a processor, while attention still keeps another one
LARGE_MEMORY = 131072, 32768
# the same of a step of four programs on a processor, where a weight has few rows for each
FEW_MEMORY = 16384


class Vector(NamedTuple):
    """Tiles of a product of one row."""

    block_out: int  # rows of the weight in a step of a program; where gated, half of them gates
    warps: int
    stages: int  # steps in memory at a time, all but one on their way
    programs: int  # for each processor


class Matrix(NamedTuple):
    """Tiles of a product of several rows."""

    block_out: int  # rows of the weight that a program takes; where gated, half of them gates
    block_inner: int  # columns of the weight that a group reads in a step
    warps: int
    stages: int  # steps in memory at a time, all but one on their way
    groups: int = 1  # of warps, which share out the columns of a step
    splits: int = 1  # programs that share out the columns
    prefetch: int = 0  # lines of 128 bytes of each row to send for while the kernel ahead still runs
    block_rows: int = 128  # rows that a program takes at most

    def as_run(self, rows: int, gpu: Gpu, style: Style = PLAIN) -> Matrix:
        """The parameters to run a product of so many rows with on this GPU.

        Where columns share a scale, a group reads those of one, but at least MIN_BYTES.
        """
        columns = style.columns or self.block_inner
        share = min(max(columns & -columns, MIN_BYTES * style.per_byte), self.block_inner)
        tile = self._replace(
            block_rows=min(max(8, next_power_of_2(rows)), self.block_rows),
            prefetch=self.prefetch if gpu.has_dependent_launch else 0,
            block_inner=share,
            groups=self.groups * self.block_inner // share,
        )
        if torch.version.hip is not None:  # AMD's tensor cores take 16 rows, and its programs 64 KB of memory
            tile = tile._replace(block_rows=max(16, tile.block_rows), stages=2)
        return tile

    def num_sums(self, style: Style = PLAIN) -> int:
        """float32 sums that a thread holds, of a tile as it is run: those of each scale of a group apart.

        Triton gives each warp whole groups; where they are fewer than warps, several warps compute the same one.
        """
        columns = style.columns or self.block_inner
        parts = self.block_inner // min(columns & -columns, self.block_inner)
        of_group = self.block_out * self.block_rows * parts // WARP
        return of_group // self.warps if self.groups == 1 else of_group * max(1, self.groups // self.warps)


class TileError(Exception):
    """A product cannot be tiled with these parameters."""


Parameters = Vector | Matrix | Wgmma | None  # None: the vendor's library multiplies
Find = Callable[[int, int, int, int, int, Gpu, Style], Parameters]  # what `choose` takes


@cache
def find(rows: int, out: int, inner: int, element_size: int, gates: int, gpu: Gpu, style: Style = PLAIN) -> Parameters:
    """Look up the packaged parameters of such a product on such a GPU, else `choose` them."""
    measured = functools.partial(tuned.parameters, gpu.name, "linear")
    return _find(measured, rows, out, inner, element_size, gates, gpu, style)


def finder(measured: Mapping[str, Sequence[Any]]) -> Find:
    """Make a lookup like `find` with these measured parameters of a GPU, by key."""
    return cache(functools.partial(_find, measured.get))


def _find(measured: Callable[[str], Sequence[Any] | None], rows: int, out: int, inner: int, element_size: int,
          gates: int, gpu: Gpu, style: Style = PLAIN) -> Parameters:  # fmt: skip
    # of 32 bits nobody measures
    entry = measured(key_of(rows, out, inner, gates, style)) if element_size == 2 else None
    return choose(rows, out, inner, element_size, gates, gpu, style) if entry is None else from_entry(entry)


Weight = Tensor | PackedWeight
Rows = Tensor | QuantizedRows


class Products:
    """The products of one model, which must run one after another: they share the counters of splits."""

    def __init__(self, parameters: Find = find) -> None:
        self._parameters = parameters
        self._arrived: Tensor | None = None  # for good: graphs hold it

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None, *, act: str | None = None,
               parameters: Find | None = None) -> Tensor:  # fmt: skip
        """x [T, I], weight [O, I], bias [O] -> [T, O]; act: as in the op, of what the library multiplies"""
        y, _ = self.multiply(x, None, None, weight, bias, act=act, parameters=parameters)
        assert isinstance(y, Tensor), "rows are given quantized behind gates alone"
        return y

    def gated_linear(self, x: Tensor, weight: Weight, *, kind: str, act: str | None = None, gives: str | None = None,
                     parameters: Find | None = None) -> Rows:  # fmt: skip
        """x [T, I], weight [2 W, I], gates before ups -> gated_activate(linear(x)), [T, W]; gives: as in the op"""
        return self.multiply(x, None, None, weight, None, 0.0, kind, act, gives, parameters)[0]

    def norm_linear(self, x: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None = None, *, eps: float,
                    kind: str | None = None, act: str | None = None, gives: str | None = None,
                    parameters: Find | None = None) -> Rows:  # fmt: skip
        """x [T, I], norm [I], weight [O, I], bias [O] -> linear(rms_norm(x)), [T, O]; with a kind, gated_activate"""
        return self.multiply(x, None, norm, weight, bias, eps, kind, act, gives, parameters)[0]

    def add_norm_linear(self, a: Tensor, b: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None = None, *,
                        eps: float, kind: str | None = None, act: str | None = None, gives: str | None = None,
                        parameters: Find | None = None) -> tuple[Rows, Tensor]:  # fmt: skip
        """a and b [T, I], the others as in norm_linear -> norm_linear(a + b), a + b"""
        return self.multiply(a, b, norm, weight, bias, eps, kind, act, gives, parameters)

    def kernels(self) -> dict[tuple[Op, str], Callable[..., Any]]:
        """The methods above by op and backend, as a text names them."""
        return {(op, backend): getattr(self, op.name) for op in PRODUCTS for backend in BACKENDS}

    def multiply(
        self, a: Rows, b: Tensor | None, norm: Tensor | None, weight: Weight, bias: Tensor | None, eps: float = 0.0,
        kind: str | None = None, act: str | None = None, gives: str | None = None, parameters: Find | None = None,
    ) -> tuple[Rows, Tensor]:  # fmt: skip
        """Compute any of the above: the product, and a + b, which is a without b.

        b only with a norm. All are contiguous, but the rows of a and b may lie apart. More than MAX_ROWS rows are given
        quantized where the op says so, and taken so.
        """
        assert b is None or norm is not None, "a sum without a norm"
        if isinstance(a, QuantizedRows):
            assert isinstance(weight, PackedWeight) and act is not None, "quantized rows by a plain weight"
            y = packed.multiply_quantized(a, weight, bias, act)
            return y, y
        chosen = None
        rows = a.shape[0]
        if rows <= MAX_ROWS:
            (out, inner), gates = weight.shape, 1 if kind is None else 2
            style = PLAIN
            if isinstance(weight, PackedWeight):
                style = style_of(str(weight.type.fmt), out, act, weight.layout is not None)
            find = parameters or self._parameters
            chosen = find(rows, out, inner, a.element_size(), gates, find_gpu(weight.device), style)
        if isinstance(chosen, Vector):
            assert rows == 1, f"{chosen} is for one row, not for {rows}"
            return multiply_vector(a, b, norm, weight, bias, eps, kind, chosen)
        if chosen is None and act is not None:
            assert isinstance(weight, PackedWeight), "quantized rows by a plain weight"
            return multiply_many(a, b, norm, weight, bias, eps, kind, act, gives if rows > MAX_ROWS else None)
        x, total = (a, a) if norm is None else normalize(a, b, norm, eps)
        if chosen is not None:
            if self._arrived is None:
                self._arrived = make_counters(x.device)
            if isinstance(chosen, Wgmma):
                from atom.kernels.triton.linear import packed_hopper  # imports what only NVIDIA's GPUs need

                assert isinstance(weight, PackedWeight), f"{chosen} is for packed weights"
                return packed_hopper.multiply(x, weight, bias, kind, self._arrived, chosen), total
            return multiply_matrix(x, weight, bias, kind, self._arrived, chosen), total
        if isinstance(weight, PackedWeight):
            weight = packed.unpack(weight, x.dtype)
        if kind is not None and bias is None and suits_hopper(find_gpu(x.device), x, weight, kind):
            from atom.kernels.triton.linear import gate_hopper  # imports what only NVIDIA's GPUs need

            return gate_hopper.gated_linear(x, weight), total
        y = F.linear(x, weight, bias)
        return y if kind is None else activate_gates(y, kind), total


def multiply_many(
    a: Tensor, b: Tensor | None, norm: Tensor | None, weight: PackedWeight, bias: Tensor | None, eps: float,
    kind: str | None, act: str, gives: str | None,
) -> tuple[Rows, Tensor]:  # fmt: skip
    """multiply of rows that the library multiplies quantized to `act`; gives: the format of the result's rows"""
    is_shuffled, total = weight.layout is not None, a
    x: Rows = a
    if norm is not None and act.startswith("fp8"):
        x, total = quantize_normalized(a, b, norm, eps, span_of(act, a.shape[1]), is_shuffled)
    elif norm is not None:
        x, total = normalize(a, b, norm, eps)
    y = packed.multiply_quantized(x, weight, bias, act)
    if kind is None:
        return y, total
    if gives is None:
        return activate_gates(y, kind), total
    return quantize_gated(y, kind, span_of(gives, y.shape[1] // 2), is_shuffled), total


def key_of(rows: int, out: int, inner: int, gates: int, style: Style = PLAIN) -> str:
    """The key of such a product's parameters."""
    bucket = next(size for size in BUCKETS if size >= rows)
    return f"{bucket} {out} {inner} {gates} {style.name}".rstrip()


def from_entry(entry: Sequence[Any]) -> Parameters:
    """["matrix", 64, 128, 4, 4] -> Matrix(64, 128, 4, 4)"""
    style, *numbers = entry
    return None if style == "library" else {"vector": Vector, "matrix": Matrix, "wgmma": Wgmma}[style](*numbers)


def to_entry(parameters: Parameters) -> list[Any]:
    """The inverse of `from_entry`."""
    return ["library"] if parameters is None else [type(parameters).__name__.lower(), *parameters]


def choose(rows: int, out: int, inner: int, element_size: int, gates: int, gpu: Gpu, style: Style = PLAIN
           ) -> Parameters:  # fmt: skip
    """Choose the tiles of a product of MAX_ROWS rows or fewer by a weight [out, inner]; None: the vendor's library.

    element_size is that of x. gates is 2 where half of the outputs are gates, else 1.
    """
    if style.is_shuffled:
        return None if style.act is not None and rows > 64 else shuffled.choose(rows, out, inner, style, gpu)
    if style.values is not None:
        return choose_packed(rows, out, inner, element_size, gpu, style)
    columns = next_power_of_2(inner)
    row_size = columns * element_size
    has_few = gpu.has_dependent_launch and gpu.shared_memory > LARGE_MEMORY[0] and out < 64 * gpu.units
    memory, step = LARGE_MEMORY if gpu.has_dependent_launch and gpu.shared_memory > LARGE_MEMORY[0] else MEMORY
    if rows == 1 and has_few and row_size * gates <= FEW_MEMORY:
        # measured on an H200 with 2,048 to 6,144 rows of 2,880 and 4,096 columns
        block_out = max(gates, FEW_MEMORY // row_size)
        while block_out > gates and out < 4 * block_out * gpu.units:
            block_out //= 2
        return Vector(block_out, warps=4, stages=3, programs=4)
    if rows == 1 and row_size * gates <= memory:
        block_out = max(gates, step // row_size)
        while block_out > gates and out < 2 * block_out * gpu.units:
            block_out //= 2
        stages = min(1 + memory // (block_out * row_size), MAX_STAGES)
        return Vector(block_out, warps=min(max(columns // 256, 1), 8), stages=stages, programs=1)
    if element_size > 2 or rows > 32:  # at 64 rows of layers of Qwen3 the library beat what follows
        return None
    # measured on an H200 with the layers of Qwen3-0.6B and 8B at 4, 16 and 32 rows
    block_out, block_inner, warps, at_least = (32, 256, 2, 0.9) if rows <= 8 else (64, 128, 4, 1.4)
    tiles, splits = -(-out // block_out), 1
    while splits < 8 and tiles * splits < at_least * gpu.units and inner >= 4 * splits * block_inner:
        splits *= 2
    return Matrix(block_out, block_inner, warps, stages=4, splits=splits, prefetch=4)


def choose_packed(rows: int, out: int, inner: int, element_size: int, gpu: Gpu, style: Style) -> Parameters:
    """`choose` of a packed weight: a row too goes through tensor cores, which leave others free to unpack."""
    parts = -(-MIN_BYTES * style.per_byte // (style.columns & -style.columns)) if style.columns else 1
    if element_size > 2 or rows * parts > 64:
        return None
    # what an H200 does fastest with the layers of Qwen3-8B; each warp of a group unpacks columns of its own
    tiles, units = -(-out // 16), gpu.units
    if rows <= 16:
        if style.bits == 8 and out >= 2.5 * 64 * units:
            tile = Matrix(64, 256, 4, 4, 1, 1, 4) if style.columns is None else Matrix(32, 128, 2, 4, 2, 1, 4)
        elif style.bits == 4 and out >= 2.5 * 64 * units:
            tile = Matrix(32, 128, 4, 4, 4, 1, 4)
        elif style.bits == 4 and inner >= 8192:
            tile = Matrix(32, 128, 4, 4, 4, 2, 4)
        else:
            tile = Matrix(16, 128, 4, 4, 4, 2 if tiles < 2.5 * units and inner >= 2048 else 1, 4)
    elif style.act is not None and out >= 40 * units:  # the library multiplies 8-bit numbers faster
        return None
    elif out >= 2.5 * 64 * units:
        tile = Matrix(64, 128, 4 if style.bits == 8 else 2, 6, 1, 1, 4)
    else:
        tile = Matrix(32, 128, 4, 4 if style.bits == 8 else 3, 4, 2 if inner >= 8192 and style.bits == 4 else 1, 4)
    # stages of a group's columns of the weight and of x, which blocks of few columns widen
    width = tile.block_out * style.bits // 8 + max(16, next_power_of_2(rows)) * 2 * parts
    if tile.stages * tile.block_inner * tile.groups * width > gpu.shared_memory:
        tile = Matrix(64, 128, 4, 3, 1, 1, 4)
    return tile if tile.splits == 1 or -(-out // tile.block_out) <= MAX_TILES else tile._replace(splits=1)


def suits_hopper(gpu: Gpu, x: Tensor, weight: Tensor, kind: str | None) -> bool:
    """Whether the kernel of gate_hopper.py takes this product; with many rows it is faster."""
    rows, inner = x.shape
    return (
        rows >= MANY_ROWS
        and kind == "silu"
        and gpu.runs_gluon
        and x.dtype == weight.dtype == torch.bfloat16
        and inner > 64
        # elements between rows: the TMA wants 16 bytes
        and x.stride(0) % 8 == inner % 8 == weight.shape[0] // 2 % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def make_counters(device: torch.device) -> Tensor:
    """Make the counters of splits, one for each tile of a product; each is zero again after a product."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def multiply_vector(
    a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Weight, bias: Tensor | None, eps: float,
    kind: str | None, parameters: Vector,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """multiply for one row: a and b [1, I]. TileError where scales are of columns that are no power of 2."""
    (rows, inner), gates = weight.shape, 1 if kind is None else 2
    operand = operand_of(weight)
    check_columns(operand.style)
    y = a.new_empty(1, rows // gates)
    total = a if b is None else a.new_empty(1, inner)
    gpu = find_gpu(a.device)
    block_out, warps, stages, programs = parameters
    tiles = -(-rows // block_out)
    programs = min(programs * gpu.units, tiles)
    _vector_kernel[(programs,)](
        a, b, norm, total, *operand[:4], bias, y, eps, rows // gates,
        inner, block_out, -(-tiles // programs), stages, kind, *operand.style.constants, num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y, total


def check_columns(style: Style) -> None:
    if style.columns is not None and style.columns & style.columns - 1:
        raise TileError(f"{style.columns} columns share a scale, which is no power of 2")


def multiply_matrix(x: Tensor, weight: Weight, bias: Tensor | None, kind: str | None, counters: Tensor,
                    parameters: Matrix) -> Tensor:  # fmt: skip
    """multiply for up to MAX_ROWS normed rows x [T, I]. TileError where split columns have too many tiles.
    counters: of `make_counters`; calls that share them must run one after another."""
    (rows, inner), gates, gpu, num_rows = weight.shape, 1 if kind is None else 2, find_gpu(x.device), x.shape[0]
    operand = operand_of(weight)
    tile = parameters.as_run(num_rows, gpu, operand.style)
    block_out, block_inner, warps, stages, groups, splits, prefetch, block_rows = tile
    if operand.style.per_byte == 2 and (x.stride(0) % 2 or x.data_ptr() % (2 * x.element_size())):
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
        inner, block_rows, block_out, block_inner, stages, groups, splits, prefetch, kind, *operand.style.constants,
        num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y


@jit
def _weight_rows(first, out, BLOCK_O: tl.constexpr, KIND: tl.constexpr):
    """The rows of the weight, i64, for the outputs from first on; where gated, gates and ups take turns."""
    turn = tl.arange(0, BLOCK_O)
    row = (first + turn) % out if KIND is None else (first + turn // 2) % out + turn % 2 * out  # no row beyond the end
    return row.to(tl.int64)


@jit
def _send_for(weights, begin, INNER: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetch lines of 128 bytes of each row, from a column on, into NVIDIA's L2."""
    LINE: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    lines = weights[:, None] + tl.minimum(begin + tl.arange(0, PREFETCH) * LINE, INNER - 1)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@jit
def _load_pairs(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER: tl.constexpr):
    """`_load_row`, in even and odd columns."""
    even = tl.arange(0, triton.next_power_of_2(INNER) // 2) * 2
    mask = even < INNER
    x, y = load_total(a_ptr, b_ptr, even, mask), load_total(a_ptr, b_ptr, even + 1, mask)
    if b_ptr is not None:
        tl.store(total_ptr + even, x.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
        tl.store(total_ptr + even + 1, y.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
    if norm_ptr is not None:
        scale = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / INNER + eps)
        norm = tl.load(norm_ptr + even, mask=mask, other=0.0).to(tl.float32)
        next_norm = tl.load(norm_ptr + even + 1, mask=mask, other=0.0).to(tl.float32)
        x = (x * scale * norm).to(a_ptr.dtype.element_ty).to(tl.float32)
        y = (y * scale * next_norm).to(a_ptr.dtype.element_ty).to(tl.float32)
    return x, y


@jit
def _load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER: tl.constexpr):
    """Load the row to multiply, in float32, rounded as it would be stored. The first program stores the total."""
    column = tl.arange(0, triton.next_power_of_2(INNER))
    mask = column < INNER
    x = load_total(a_ptr, b_ptr, column, mask)
    if b_ptr is not None:
        tl.store(total_ptr + column, x.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x) / INNER + eps) * norm).to(a_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def _multiply_row(
    tile, x, odd, scales_ptr, zeros_ptr, factor_ptr, weight_row, INNER: tl.constexpr, VALUES: tl.constexpr,
    PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, FACTOR: tl.constexpr,
    HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Rows of a packed weight by a row, x, or its even columns and its odd ones, in float32."""
    TYPE: tl.constexpr = tl.bfloat16 if HAS_ASM else tl.float32
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1] if SCALE_COLUMNS is None else SCALE_COLUMNS // PER_BYTE  # bytes of a block
    BLOCKS: tl.constexpr = 1 if SCALE_COLUMNS is None else triton.cdiv(INNER, SCALE_COLUMNS)
    NUM: tl.constexpr = tile.shape[1] // WIDTH
    block = tl.arange(0, NUM)[None, :]
    index = (weight_row // SCALE_ROWS)[:, None] * BLOCKS + block
    scale = load_scales(scales_ptr + index, block < BLOCKS, FACTOR)
    blocks = tile.reshape([ROWS, NUM, WIDTH])
    UP: tl.constexpr = raise_of(VALUES, TYPE)
    x = (x * UP).reshape([1, NUM, WIDTH])
    if PER_BYTE == 1:
        product = unpack_bytes(blocks, TYPE, VALUES, HAS_ASM).to(tl.float32) * x
    else:
        low = unpack_half(blocks, False, TYPE, VALUES, HAS_ASM).to(tl.float32)
        high = unpack_half(blocks, True, TYPE, VALUES, HAS_ASM).to(tl.float32)
        odd = (odd * UP).reshape([1, NUM, WIDTH])
        product = low * x + high * odd
        x += odd
    acc = tl.sum(product, axis=2)
    if are_minima(zeros_ptr):
        return tl.sum(acc * scale + load_offsets(zeros_ptr + index, block < BLOCKS, scale) * tl.sum(x, axis=2), axis=1)
    if zeros_ptr is not None:
        acc -= load_zeros(zeros_ptr + index, block < BLOCKS, VALUES) * tl.sum(x, axis=2)
    result = tl.sum(acc * scale, axis=1) * rest_of(VALUES, TYPE)
    return result if FACTOR is None else result * load_factors(factor_ptr, weight_row, FACTOR)


@jit
def _vector_kernel(
    a_ptr, b_ptr, norm_ptr, total_ptr, weight_ptr, scales_ptr, zeros_ptr, factor_ptr, bias_ptr, y_ptr, eps, out,
    INNER: tl.constexpr, BLOCK_O: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    VALUES: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: each program takes BLOCK_O rows of the weight at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    COLUMNS: tl.constexpr = INNER // PER_BYTE  # of bytes, where packed
    column = tl.arange(0, triton.next_power_of_2(INNER) // PER_BYTE)
    x = tl.zeros([column.shape[0]], tl.float32)
    odd = x
    if not PDL:
        if PER_BYTE == 1:
            x = _load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
        else:
            x, odd = _load_pairs(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (step * tl.num_programs(0) + tl.program_id(0)) * NUM
        weight_row = _weight_rows(first, out, BLOCK_O, KIND)
        tile = tl.load(weight_ptr + weight_row[:, None] * COLUMNS + column[None, :], other=0,
                       mask=(column < COLUMNS)[None, :] & (first < out), eviction_policy="evict_first")  # fmt: skip
        if PDL and step == 0:  # inside the loop, so that the loads of the first steps are issued before the wait
            tl.extra.cuda.gdc_wait()
            if PER_BYTE == 1:
                x = _load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
            else:
                x, odd = _load_pairs(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
        if VALUES is None:
            acc = tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
        else:
            acc = _multiply_row(tile, x, odd, scales_ptr, zeros_ptr, factor_ptr, weight_row, INNER, VALUES, PER_BYTE,
                                SCALE_ROWS, SCALE_COLUMNS, FACTOR, PDL)  # fmt: skip
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + weight_row).to(tl.float32)
        y = acc.to(y_ptr.dtype.element_ty)
        if KIND is not None:
            gates, ups = tl.split(y.reshape([NUM, 2]))
            y = activate_rounded(gates, ups, KIND)
        index = first + tl.arange(0, NUM)
        tl.store(y_ptr + index, y, mask=index < out)


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
def _load_offsets(
    minima_ptr, blocks, column, scales, PARTS: tl.constexpr, WIDTH: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    NUM: tl.constexpr,
):  # fmt: skip
    """`load_offsets` of the scales of each part."""
    offsets = ()
    for part in tl.static_range(PARTS):
        block = (column + part * WIDTH) // SCALE_COLUMNS
        offsets = offsets + (load_offsets(minima_ptr + blocks + block, block < NUM, scales[part]),)  # type: ignore[assignment]  # noqa: RUF005
    return offsets


@jit
def _sum_pairs(x, TYPE: tl.constexpr):
    """The sums of columns of words [I / 2, T] or [G, I / 2, T], fp32[1, T] or [G, 1, T]."""
    even, odd = split_pairs(x, TYPE)
    AXIS: tl.constexpr = len(x.shape) - 2
    return tl.expand_dims(tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=AXIS), AXIS)


@jit
def _unpack_tile(w, zero, TYPE: tl.constexpr, VALUES: tl.constexpr, PER_BYTE: tl.constexpr, HAS_ASM: tl.constexpr):
    """A tile of bytes as numbers: of all columns, or those of even ones and those of odd ones."""
    if PER_BYTE == 1:
        number = unpack_bytes(w, TYPE, VALUES, HAS_ASM)
        number = number if zero is None else number - zero.to(TYPE)
        return number, number  # Triton 3.6 returns no None beside a tensor
    else:
        low, high = unpack_half(w, False, TYPE, VALUES, HAS_ASM), unpack_half(w, True, TYPE, VALUES, HAS_ASM)
        return low if zero is None else low - zero.to(TYPE), high if zero is None else high - zero.to(TYPE)


@jit
def _multiply_tile(numbers, odd_numbers, x, acc, PER_BYTE: tl.constexpr, UP: tl.constexpr):
    """acc + unpacked numbers by rows, of which words hold an even and an odd column where there are odd numbers."""
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
    """What a product's rows are multiplied by in the end."""
    scale = tl.full(weight_row.shape, REST, tl.float32)
    if IS_WHOLE:
        scale *= load_scales(scales_ptr + blocks, None, FACTOR)
    if FACTOR is not None:
        scale *= load_factors(factor_ptr, weight_row, FACTOR)
    return scale


@jit(do_not_specialize=["rows"])
def _matrix_kernel(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, factor_ptr, bias_ptr, y_ptr, partial_ptr, arrived_ptr, rows, out,
    x_stride, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr, KIND: tl.constexpr,
    VALUES: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr, PDL: tl.constexpr,
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
    weight_row = _weight_rows(first, out, BLOCK_O, KIND)
    weights = weight_ptr + weight_row * COLUMNS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            _send_for(weights, begin, COLUMNS, PREFETCH)
        tl.extra.cuda.gdc_wait()
    # of packed weights: the columns of a step that share a scale are summed up apart, by rows that are zero elsewhere
    BLOCKS: tl.constexpr = 1 if SCALE_COLUMNS is None else triton.cdiv(INNER, SCALE_COLUMNS)
    PARTS: tl.constexpr = parts_of(BLOCKS, SCALE_COLUMNS, BLOCK_I)
    turn = tl.arange(0, PARTS * BLOCK_T)
    row = tl.program_id(0) * BLOCK_T + (turn if PARTS == 1 else turn % BLOCK_T)
    if PER_BYTE == 1:
        x_row = x_ptr + row * x_stride
    else:
        x_row = x_ptr.to(tl.pointer_type(pair_of(TYPE))) + row * (x_stride // 2)
    is_row = row < rows
    mask = is_row
    if PARTS > 1:
        mask &= (tl.arange(0, BLOCK_C) // (BLOCK_C // PARTS))[:, None] == turn // BLOCK_T
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
    if BLOCKS > 1:
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
            if (
                zeros_ptr is not None and not HAS_MINIMA
            ):  # what is loaded here can be subtracted where tensor cores take their operands
                if BLOCKS == 1:
                    zero = load_zeros(zeros_ptr + blocks, None, VALUES)[:, None]
                elif PARTS == 1:
                    block = (place + start) * PER_BYTE // SCALE_COLUMNS
                    zero = tl.expand_dims(load_zeros(zeros_ptr + blocks + block, block < BLOCKS, VALUES), -1)
                else:
                    block = across * PER_BYTE // SCALE_COLUMNS
                    zero = load_zeros(zeros_ptr + blocks[:, None] + block, block < BLOCKS, VALUES)
            numbers, odd_numbers = _unpack_tile(w, zero, TYPE, VALUES, PER_BYTE, PDL)
            if BLOCKS == 1:
                acc = _multiply_tile(numbers, odd_numbers, x, acc, PER_BYTE, UP)
            else:  # scales are loaded a step ahead
                next_scales = _load_scales(
                    scales_ptr, blocks, (place + start + STEP) * PER_BYTE, PARTS, BLOCK_I // PARTS, SCALE_COLUMNS,
                    BLOCKS, FACTOR,
                )  # fmt: skip
                product = _multiply_tile(numbers, odd_numbers, x, tl.zeros_like(acc), PER_BYTE, UP)
                acc += product * _spread(scales, turn // BLOCK_T, PARTS)
                if HAS_MINIMA:
                    offsets = _load_offsets(
                        zeros_ptr, blocks, (place + start) * PER_BYTE, scales, PARTS, BLOCK_I // PARTS, SCALE_COLUMNS,
                        BLOCKS,
                    )  # fmt: skip
                    acc += _spread(offsets, turn // BLOCK_T, PARTS) * _sum_pairs(x, TYPE)
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
        gates, ups = tl.split(tl.permute(y.reshape([NUM, 2, BLOCK_T]), (0, 2, 1)))
        y = activate_rounded(gates, ups, KIND)
    index = (first + tl.arange(0, NUM))[:, None]
    tl.store(y_ptr + row[None, :] * out + index, y, mask=(index < out) & is_row[None, :])

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
from atom.kernels import tuned
from atom.kernels.triton.activations import gated
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.jit import jit
from atom.kernels.tuned import BUCKETS

PRODUCTS = (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear)
MAX_ROWS = BUCKETS[-1]
MANY_ROWS = 1024  # of a product with gates, from which gate_hopper.py is faster on an H200
MAX_STAGES = 9  # of a product of one row
MAX_TILES = 4096  # of a product whose columns are split
MEMORY = 98304, 16384  # bytes of a processor that a product of one row takes, and of them in a step
# where there are more: so much that two programs never share a processor, while attention still keeps another one
LARGE_MEMORY = 131072, 32768


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

    def as_run(self, rows: int, gpu: Gpu) -> Matrix:
        """The parameters to run a product of so many rows with on this GPU."""
        tile = self._replace(
            block_rows=min(max(8, next_power_of_2(rows)), self.block_rows),
            prefetch=self.prefetch if gpu.has_dependent_launch else 0,
        )
        if torch.version.hip is not None:  # AMD's tensor cores take 16 rows, and its programs 64 KB of memory
            tile = tile._replace(block_rows=max(16, tile.block_rows), stages=2)
        return tile


class TileError(Exception):
    """A product cannot be tiled with these parameters."""


Parameters = Vector | Matrix | None  # None: the vendor's library multiplies
Find = Callable[[int, int, int, int, int, Gpu], Parameters]  # what `choose` takes


@cache
def find(rows: int, out: int, inner: int, element_size: int, gates: int, gpu: Gpu) -> Parameters:
    """Look up the packaged parameters of such a product on such a GPU, else `choose` them."""
    measured = functools.partial(tuned.parameters, gpu.name, "linear")
    return _find(measured, rows, out, inner, element_size, gates, gpu)


def finder(measured: Mapping[str, Sequence[Any]]) -> Find:
    """Make a lookup like `find` with these measured parameters of a GPU, by key."""
    return cache(functools.partial(_find, measured.get))


def _find(measured: Callable[[str], Sequence[Any] | None], rows: int, out: int, inner: int, element_size: int,
          gates: int, gpu: Gpu) -> Parameters:  # fmt: skip
    entry = measured(key_of(rows, out, inner, gates)) if element_size == 2 else None  # of 32 bits nobody measures
    return choose(rows, out, inner, element_size, gates, gpu) if entry is None else from_entry(entry)


class Products:
    """The products of one model, which must run one after another: they share the counters of splits."""

    def __init__(self, parameters: Find = find) -> None:
        self._parameters = parameters
        self._arrived: Tensor | None = None  # for good: graphs hold it

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
               parameters: Find | None = None) -> Tensor:  # fmt: skip
        """x [T, I], weight [O, I], bias [O] -> [T, O]"""
        return self.multiply(x, None, None, weight, bias, parameters=parameters)[0]

    def gated_linear(self, x: Tensor, weight: Tensor, *, kind: str, parameters: Find | None = None) -> Tensor:
        """x [T, I], weight [2 W, I], gates before ups -> gated_activate(linear(x)), [T, W]"""
        return self.multiply(x, None, None, weight, None, kind=kind, parameters=parameters)[0]

    def norm_linear(self, x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float,
                    kind: str | None = None, parameters: Find | None = None) -> Tensor:  # fmt: skip
        """x [T, I], norm [I], weight [O, I], bias [O] -> linear(rms_norm(x)), [T, O]; with a kind, gated_activate"""
        return self.multiply(x, None, norm, weight, bias, eps, kind, parameters)[0]

    def add_norm_linear(self, a: Tensor, b: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None, *,
                        eps: float, kind: str | None = None, parameters: Find | None = None
                        ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """a and b [T, I], the others as in norm_linear -> norm_linear(a + b), a + b"""
        return self.multiply(a, b, norm, weight, bias, eps, kind, parameters)

    def kernels(self) -> dict[tuple[Op, str], Callable[..., Any]]:
        """The methods above by op and backend, as a text names them."""
        return {(op, "triton"): getattr(self, op.name) for op in PRODUCTS}

    def multiply(
        self, a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 0.0,
        kind: str | None = None, parameters: Find | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute any of the above: the product, and a + b, which is a without b.

        b only with a norm. All are contiguous, but the rows of a and b may lie apart.
        """
        assert b is None or norm is not None, "a sum without a norm"
        chosen = None
        rows = a.shape[0]
        if rows <= MAX_ROWS:
            (out, inner), gates = weight.shape, 1 if kind is None else 2
            find = parameters or self._parameters
            chosen = find(rows, out, inner, weight.element_size(), gates, find_gpu(weight.device))
        if isinstance(chosen, Vector):
            assert rows == 1, f"{chosen} is for one row, not for {rows}"
            return multiply_vector(a, b, norm, weight, bias, eps, kind, chosen)
        x, total = (a, a) if norm is None else normalize(a, b, norm, eps)
        if chosen is not None:
            if self._arrived is None:
                self._arrived = make_counters(x.device)
            return multiply_matrix(x, weight, bias, kind, self._arrived, chosen), total
        if kind is not None and bias is None and suits_hopper(find_gpu(x.device), x, weight, kind):
            from atom.kernels.triton.linear import gate_hopper  # imports what only NVIDIA's GPUs need

            return gate_hopper.gated_linear(x, weight), total
        y = F.linear(x, weight, bias)
        return y if kind is None else activate_gates(y, kind), total


def key_of(rows: int, out: int, inner: int, gates: int) -> str:
    """The key of such a product's parameters."""
    bucket = next(size for size in BUCKETS if size >= rows)
    return f"{bucket} {out} {inner} {gates}"


def from_entry(entry: Sequence[Any]) -> Parameters:
    """["matrix", 64, 128, 4, 4] -> Matrix(64, 128, 4, 4)"""
    style, *numbers = entry
    return None if style == "library" else {"vector": Vector, "matrix": Matrix}[style](*numbers)


def to_entry(parameters: Parameters) -> list[Any]:
    """The inverse of `from_entry`."""
    return ["library"] if parameters is None else [type(parameters).__name__.lower(), *parameters]


def choose(rows: int, out: int, inner: int, element_size: int, gates: int, gpu: Gpu) -> Parameters:
    """Choose the tiles of a product of MAX_ROWS rows or fewer by a weight [out, inner]; None: the vendor's library.

    gates is 2 where half of the outputs are gates, else 1.
    """
    columns = next_power_of_2(inner)
    row_size = columns * element_size
    memory, step = LARGE_MEMORY if gpu.has_dependent_launch and gpu.shared_memory > LARGE_MEMORY[0] else MEMORY
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
    a: Tensor, b: Tensor | None, norm: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    kind: str | None, parameters: Vector,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """multiply for one row: a and b [1, I]"""
    (rows, inner), gates = weight.shape, 1 if kind is None else 2
    y = a.new_empty(1, rows // gates)
    total = a if b is None else a.new_empty(1, inner)
    gpu = find_gpu(a.device)
    block_out, warps, stages, programs = parameters
    tiles = -(-rows // block_out)
    programs = min(programs * gpu.units, tiles)
    _vector_kernel[(programs,)](
        a, b, norm, total, weight, bias, y, eps, rows // gates,
        inner, block_out, -(-tiles // programs), stages, kind, num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y, total


def multiply_matrix(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str | None, counters: Tensor,
                    parameters: Matrix) -> Tensor:  # fmt: skip
    """multiply for up to MAX_ROWS normed rows x [T, I]. TileError where split columns have too many tiles.
    counters: of `make_counters`; calls that share them must run one after another."""
    (rows, inner), gates, gpu, num_rows = weight.shape, 1 if kind is None else 2, find_gpu(x.device), x.shape[0]
    block_out, block_inner, warps, stages, groups, splits, prefetch, block_rows = parameters.as_run(num_rows, gpu)
    row_tiles, tiles = -(-num_rows // block_rows), -(-rows // block_out)
    y = x.new_empty(num_rows, rows // gates)
    partial = arrived = None
    if splits > 1:
        if row_tiles * tiles > MAX_TILES:
            raise TileError(f"{row_tiles} x {tiles} tiles, of which {MAX_TILES} can be split")
        partial = x.new_empty(splits, tiles, row_tiles, block_out, block_rows, dtype=torch.float32)
        arrived = counters
    _matrix_kernel[(row_tiles, tiles, splits)](
        x, weight, bias, y, partial, arrived, num_rows, rows // gates, x.stride(0),
        inner, block_rows, block_out, block_inner, stages, groups, splits, prefetch, kind,
        num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y


def normalize(a: Tensor, b: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """a and b [T, I], norm [I] -> rms_norm(a + b), and a + b, which is a where there is no b"""
    rows, inner = a.shape
    y = a.new_empty(rows, inner)
    total = a if b is None else a.new_empty(rows, inner)
    gpu = find_gpu(a.device)
    warps = min(max(next_power_of_2(inner) // 512, 1), 16)
    _norm_kernel[(rows,)](
        a, b, norm, total, y, eps, a.stride(0), 0 if b is None else b.stride(0), inner, num_warps=warps, **gpu.options,
    )  # fmt: skip
    return y, total


def activate_gates(x: Tensor, kind: str) -> Tensor:
    """x [T, 2 W], gates before ups -> gated_activate, [T, W]"""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    gpu = find_gpu(x.device)
    _gate_kernel[(-(-width // 1024), rows)](x, y, width, 1024, kind, num_warps=4, **gpu.options)
    return y


@jit
def _gate(gates, ups, KIND: tl.constexpr):
    return gated(gates.to(tl.float32), ups.to(tl.float32), gates.dtype, KIND).to(gates.dtype)


@jit
def _load_total(a_ptr, b_ptr, offsets, mask):
    """a, or a + b, rounded as it is stored, in float32."""
    total = tl.load(a_ptr + offsets, mask=mask, other=0.0)
    if b_ptr is not None:
        total = (total.to(tl.float32) + tl.load(b_ptr + offsets, mask=mask, other=0.0).to(tl.float32)).to(total.dtype)
    return total.to(tl.float32)


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
def _load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER: tl.constexpr):
    """Load the row to multiply, in float32, rounded as it would be stored. The first program stores the total."""
    column = tl.arange(0, triton.next_power_of_2(INNER))
    mask = column < INNER
    x = _load_total(a_ptr, b_ptr, column, mask)
    if b_ptr is not None:
        tl.store(total_ptr + column, x.to(total_ptr.dtype.element_ty), mask=mask & (tl.program_id(0) == 0))
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x) / INNER + eps) * norm).to(a_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def _vector_kernel(
    a_ptr, b_ptr, norm_ptr, total_ptr, weight_ptr, bias_ptr, y_ptr, eps, out,
    INNER: tl.constexpr, BLOCK_O: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: each program takes BLOCK_O rows of the weight at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    column = tl.arange(0, triton.next_power_of_2(INNER))
    x = tl.zeros([column.shape[0]], tl.float32) if PDL else _load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (step * tl.num_programs(0) + tl.program_id(0)) * NUM
        weight_row = _weight_rows(first, out, BLOCK_O, KIND)
        tile = tl.load(weight_ptr + weight_row[:, None] * INNER + column[None, :], other=0.0,
                       mask=(column < INNER)[None, :] & (first < out), eviction_policy="evict_first")  # fmt: skip
        if PDL and step == 0:  # inside the loop, so that the loads of the first steps are issued before the wait
            tl.extra.cuda.gdc_wait()
            x = _load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
        acc = tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + weight_row).to(tl.float32)
        y = acc.to(y_ptr.dtype.element_ty)
        if KIND is not None:
            gates, ups = tl.split(y.reshape([NUM, 2]))
            y = _gate(gates, ups, KIND)
        index = first + tl.arange(0, NUM)
        tl.store(y_ptr + index, y, mask=index < out)


@jit(do_not_specialize=["rows"])
def _matrix_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, partial_ptr, arrived_ptr, rows, out, x_stride,
    INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
    GROUPS: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by BLOCK_O rows of the weight, over a split of the columns."""
    STEP: tl.constexpr = GROUPS * BLOCK_I
    WIDTH: tl.constexpr = triton.cdiv(triton.cdiv(INNER, STEP), SPLITS) * STEP  # of a split
    begin = tl.program_id(2) * WIDTH
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    first = tl.program_id(1) * NUM
    weight_row = _weight_rows(first, out, BLOCK_O, KIND)
    weights = weight_ptr + weight_row * INNER
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            _send_for(weights, begin, INNER, PREFETCH)
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_row = x_ptr + row * x_stride
    is_row = row < rows
    if GROUPS == 1:
        column = begin + tl.arange(0, BLOCK_I)
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    else:
        column = begin + tl.arange(0, GROUPS)[:, None] * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
        acc = tl.zeros([GROUPS, BLOCK_O, BLOCK_T], tl.float32)
    for start in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        across, down = tl.expand_dims(start + column, -2), tl.expand_dims(start + column, -1)
        w = tl.load(weights[:, None] + across, mask=across < INNER, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_row + down, mask=(down < INNER) & is_row, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if GROUPS > 1:
        acc = tl.sum(acc, axis=0)
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
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    y = acc.to(y_ptr.dtype.element_ty)
    if KIND is not None:
        gates, ups = tl.split(tl.permute(y.reshape([NUM, 2, BLOCK_T]), (0, 2, 1)))
        y = _gate(gates, ups, KIND)
    index = (first + tl.arange(0, NUM))[:, None]
    tl.store(y_ptr + row[None, :] * out + index, y, mask=(index < out) & is_row[None, :])


@jit
def _norm_kernel(a_ptr, b_ptr, norm_ptr, total_ptr, y_ptr, eps, a_stride, b_stride, INNER: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """A row."""
    HIDDEN: tl.constexpr = triton.next_power_of_2(INNER)
    hidden = tl.arange(0, HIDDEN)
    mask = hidden < INNER
    norm = tl.load(norm_ptr + hidden, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    b_row = None if b_ptr is None else b_ptr + row * b_stride
    total = _load_total(a_ptr + row * a_stride, b_row, hidden, mask)
    offsets = row * INNER + hidden
    if b_ptr is not None:
        tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=mask)
    rstd = tl.rsqrt(tl.sum(total * total) / INNER + eps)
    tl.store(y_ptr + offsets, (total * rstd * norm).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _gate_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """BLOCK outputs of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pointers = x_ptr + row * 2 * width + index
    gates = tl.load(pointers, mask=index < width, other=0.0)
    ups = tl.load(pointers + width, mask=index < width, other=0.0)
    tl.store(y_ptr + row * width + index, _gate(gates, ups, KIND), mask=index < width)

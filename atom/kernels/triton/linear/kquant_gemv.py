"""GEMV over K-quant weights, whose scales have factors.

    y, total = multiply_kquants(a, b, norm, weight, bias, 1e-6, "silu", Vector(8, 4, 1, 4))

A program has the row in registers, and reads some rows of the weight at a time, the next ones ahead: a thread has whole
groups of columns, 16 bytes each. A number becomes a float in two instructions, since its bits are those of a mantissa:
a byte's lower four make 1 + n / 256, its upper four 1 + n / 16, and a whole byte n from -32 on 1 + (n + 32) / 128. The
sums of the row's own columns then take away what that adds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu, next_power_of_2
from atom.kernels.triton.linear.packed import SPAN, are_minima, load_spans, multiply_spans
from atom.kernels.triton.linear.row_kernels import load_row, store_outputs
from atom.kernels.triton.linear.tiles import Vector
from atom.kernels.triton.linear.weight_encoding import KernelOperand

THREADS = 32  # of a warp of NVIDIA's, each of which has a group of columns at a time


def multiply_kquants(
    a: Tensor, b: Tensor | None, norm: Tensor | None, shape: tuple[int, int], operand: KernelOperand,
    bias: Tensor | None, eps: float, kind: str | None, parameters: Vector,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`multiply_vector` of a weight of this shape, whose encoding has spans."""
    (rows, inner), gates, encoding = shape, 1 if kind is None else 2, operand.encoding
    y = a.new_empty(1, rows // gates)
    total = a if b is None else a.new_empty(1, inner)
    gpu = find_gpu(a.device)
    tiles = -(-rows // parameters.block_out)
    programs = min(parameters.programs * gpu.units, tiles)
    groups = next_power_of_2(inner) // (encoding.columns or inner)
    chunks = max(groups // (THREADS * parameters.warps), 1)
    _kquant_gemv_kernel[(programs,)](
        a, b, norm, total, *operand[:4], bias, y, eps, rows // gates, -(-tiles // programs), inner,
        parameters.block_out, chunks, kind, encoding.per_byte, encoding.columns, num_warps=parameters.warps,
        **gpu.options,
    )  # fmt: skip
    return y, total


@jit
def _row_of(first, local: tl.constexpr, out, KIND: tl.constexpr):
    """A row of the weight, as `weight_rows` has them; beyond the end the last, since a remainder takes long."""
    if KIND is None:
        return tl.minimum(first + local, out - 1).to(tl.int64)
    else:
        return (tl.minimum(first + local // 2, out - 1) + local % 2 * out).to(tl.int64)


@jit
def _load_rows(
    words_ptr, scales_ptr, factor_ptr, first, out, INNER: tl.constexpr, BLOCK_O: tl.constexpr, KIND: tl.constexpr,
    PER_WORD: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, HAS_MINIMA: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_O rows in CHUNKS of columns: words [W], scales [G], maybe with minima, and their factors [G]."""
    WORDS: tl.constexpr = INNER // PER_WORD
    WIDTH: tl.constexpr = triton.next_power_of_2(WORDS) // CHUNKS
    GROUPS: tl.constexpr = WIDTH * PER_WORD // SCALE_COLUMNS
    words, scales, spans = (), (), ()
    for local in tl.static_range(BLOCK_O):
        row = _row_of(first, local, out, KIND)
        for chunk in tl.static_range(CHUNKS):
            word = chunk * WIDTH + tl.arange(0, WIDTH)
            group = chunk * GROUPS + tl.arange(0, GROUPS)
            is_word, is_group = (word < WORDS) & (first < out), (group < INNER // SCALE_COLUMNS) & (first < out)
            words = words + (tl.load(words_ptr + row * WORDS + word, mask=is_word, other=0,  # noqa: RUF005
                                     eviction_policy="evict_first"),)  # type: ignore[assignment]  # fmt: skip
            block = row * (INNER // SCALE_COLUMNS) + group
            span = row * (INNER // SPAN) + group // (SPAN // SCALE_COLUMNS)
            scale, factor = load_spans(scales_ptr, factor_ptr, block, span, is_group, HAS_MINIMA)
            scales, spans = scales + (scale,), spans + (factor,)  # type: ignore[assignment]  # noqa: RUF005
    return words, scales, spans


@jit
def _shift(words, LEFT: tl.constexpr):
    return words << LEFT if LEFT > 0 else words >> -LEFT


@jit
def _as_mantissa(bits, MASK: tl.constexpr, HAS_ASM: tl.constexpr):
    """1 + the bits of a mask as those of a mantissa, which takes the compiler two instructions."""
    if HAS_ASM:
        ones = tl.inline_asm_elementwise(
            f"{{.reg .b32 one; mov.b32 one, 0x3F800000; lop3.b32 $0, $1, {MASK}, one, 0xEA;}}", "=r,r", [bits],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        ones = bits & MASK | 0x3F800000
    return ones.to(tl.float32, bitcast=True)


@jit
def _add_nibbles(acc, words, low, high, LEFT: tl.constexpr, HAS_ASM: tl.constexpr):
    """Add the numbers of a byte by their columns, low and high."""
    bits = _shift(words, LEFT)
    acc += _as_mantissa(bits, 0x00078000, HAS_ASM) * low
    return acc + _as_mantissa(bits, 0x00780000, HAS_ASM) * high


@jit
def _add_byte(acc, words, x, BYTE: tl.constexpr, HAS_ASM: tl.constexpr):
    """Add the number of a byte, whose upper bit is set, by its column."""
    if HAS_ASM:
        bits = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, 0x3F000000, {0x7044 + 256 * BYTE};", "=r,r", [words], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        bits = _shift(words, 16 - 8 * BYTE) & 0x00FF0000 | 0x3F000000
    return acc + bits.to(tl.float32, bitcast=True) * x


@jit
def _sum_groups(x, GROUPS: tl.constexpr):
    """[W] -> [GROUPS]"""
    return tl.sum(x.reshape([GROUPS, x.shape[0] // GROUPS]), axis=1)


@jit
def _split_chunk(x, chunk: tl.constexpr, CHUNKS: tl.constexpr):
    """A chunk of equal parts of [N]."""
    if CHUNKS == 1:
        return x
    else:
        halves = x.reshape([2, x.shape[0] // 2])
        first, second = tl.split(tl.trans(halves))
        return _split_chunk(first if chunk < CHUNKS // 2 else second, chunk % (CHUNKS // 2), CHUNKS // 2)


@jit
def _columns_of(x, GROUPS: tl.constexpr, HAS_MINIMA: tl.constexpr, PER_WORD: tl.constexpr):
    """The columns [I] of a chunk by their place in words, its groups' sums, and what the dot products are off by."""
    if PER_WORD == 8:
        even, odd = tl.split(x.reshape([x.shape[0] // 8, 2, 2, 2]))
        even02, even13 = tl.split(even * 16)
        odd02, odd13 = tl.split(odd)
        even0, even2 = tl.split(even02)
        even1, even3 = tl.split(even13)
        odd0, odd2 = tl.split(odd02)
        odd1, odd3 = tl.split(odd13)
        evens = _sum_groups(even0 + even1 + even2 + even3, GROUPS)
        odds = _sum_groups(odd0 + odd1 + odd2 + odd3, GROUPS)
        sums = evens / 16 + odds
        shift = -16 * (evens + odds) - (0 if HAS_MINIMA else 8) * sums
        return (even0, odd0, even1, odd1, even2, odd2, even3, odd3), sums, shift
    else:
        x02, x13 = tl.split(x.reshape([x.shape[0] // 4, 2, 2]))
        x0, x2 = tl.split(x02)
        x1, x3 = tl.split(x13)
        sums = _sum_groups(x0 + x1 + x2 + x3, GROUPS)
        return (x0, x1, x2, x3), sums, -160 * sums


@jit
def _multiply_words(words, x, PER_WORD: tl.constexpr, HAS_ASM: tl.constexpr):
    """The dot product of each word, [W], without the factor of its numbers."""
    product = tl.zeros(words.shape, tl.float32)
    if PER_WORD == 8:
        product = _add_nibbles(product, words, x[0], x[1], 15, HAS_ASM)
        product = _add_nibbles(product, words, x[2], x[3], 7, HAS_ASM)
        product = _add_nibbles(product, words, x[4], x[5], -1, HAS_ASM)
        product = _add_nibbles(product, words, x[6], x[7], -9, HAS_ASM)
    else:
        above = (words ^ -0x7F7F7F80) + 0x20202020
        for byte in tl.static_range(4):
            product = _add_byte(product, above, x[byte], byte, HAS_ASM)
    return product


@jit
def _join(parts, first: tl.constexpr, step: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tensors [G] -> [G, 2, 2, …], in their order."""
    if COUNT == 1:
        return parts[first]
    else:
        even = _join(parts, first, 2 * step, COUNT // 2)
        return tl.join(even, _join(parts, first + step, 2 * step, COUNT // 2))


@jit(do_not_specialize=["steps"])
def _kquant_gemv_kernel(
    a_ptr, b_ptr, norm_ptr, total_ptr, weight_ptr, scales_ptr, zeros_ptr, factor_ptr, bias_ptr, y_ptr, eps, out,
    steps, INNER: tl.constexpr, BLOCK_O: tl.constexpr, CHUNKS: tl.constexpr, KIND: tl.constexpr,
    PER_BYTE: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: each program takes BLOCK_O rows of the weight at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NUM: tl.constexpr = BLOCK_O if KIND is None else BLOCK_O // 2
    PER_WORD: tl.constexpr = 4 * PER_BYTE
    UP: tl.constexpr = 16 if PER_BYTE == 2 else 128
    COLUMNS: tl.constexpr = triton.next_power_of_2(INNER) // CHUNKS
    GROUPS: tl.constexpr = COLUMNS // SCALE_COLUMNS
    HAS_MINIMA: tl.constexpr = are_minima(zeros_ptr)
    words_ptr = weight_ptr.to(tl.pointer_type(tl.int32))
    first = tl.program_id(0) * NUM
    words, scales, spans = _load_rows(
        words_ptr, scales_ptr, factor_ptr, first, out, INNER, BLOCK_O, KIND, PER_WORD, SCALE_COLUMNS, CHUNKS,
        HAS_MINIMA,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = load_row(a_ptr, b_ptr, norm_ptr, total_ptr, eps, INNER)
    x, sums, shifts = (), (), ()
    for chunk in tl.static_range(CHUNKS):
        own, of_groups, shift = _columns_of(_split_chunk(row, chunk, CHUNKS), GROUPS, HAS_MINIMA, PER_WORD)
        x, sums, shifts = x + (own,), sums + (of_groups,), shifts + (shift,)  # type: ignore[assignment]  # noqa: RUF005
    for _ in range(steps):  # not a constant: Triton would lay out one step for fewer exchanges of what it keeps
        next_first = first + tl.num_programs(0) * NUM
        next_words, next_scales, next_spans = _load_rows(
            words_ptr, scales_ptr, factor_ptr, next_first, out, INNER, BLOCK_O, KIND, PER_WORD, SCALE_COLUMNS, CHUNKS,
            HAS_MINIMA,
        )  # fmt: skip
        accs = ()
        for local in tl.static_range(BLOCK_O):
            acc = tl.zeros([GROUPS], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                product = _multiply_words(words[local * CHUNKS + chunk], x[chunk], PER_WORD, PDL)
                factors = spans[local * CHUNKS + chunk]
                scale, minimum = multiply_spans(scales[local * CHUNKS + chunk], factors, HAS_MINIMA)
                acc += (_sum_groups(product, GROUPS) * UP + shifts[chunk]) * scale
                if HAS_MINIMA:
                    acc += minimum * sums[chunk]
            accs = accs + (acc,)  # type: ignore[assignment]  # noqa: RUF005
        result = tl.sum(_join(accs, 0, 1, BLOCK_O).reshape([GROUPS, BLOCK_O]), axis=0)
        store_outputs(result, bias_ptr, y_ptr, first, out, BLOCK_O, KIND)
        words, scales, spans, first = next_words, next_scales, next_spans, next_first

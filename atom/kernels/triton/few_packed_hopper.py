"""Packed experts of few tokens in two launches on NVIDIA's Hopper, in Gluon.

    m = multiply_gates(x, ids, gate_up, bias, "silu")     # x [T, H], ids i64[T, k] -> [k T, W]
    y = multiply_downs(m, weights, ids, down, bias)       # and summed by the weights fp32[T, k]: [T, H]

A weight is laid out as hopper/shuffle.py says. A program has ROWS rows of it: 8 gates and their ups of one pair of
token and expert, or 16 downs of each of a token's experts. Warps share the columns of an expert. Each loads some groups
of 64 bytes of every row into registers, and the next ones before it unpacks these and multiplies them by mma. x is the
right side, the same in all its columns, and comes from shared memory. Warps wait for each other once, at the end, where
their sums are added up.

Downs are loaded before gates and ups have ended: the ids were written by a kernel that these have waited for.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from atom.graph import PackedWeight
from atom.kernels.hopper.shuffle import GROUP
from atom.kernels.triton.activations import activate_rounded
from atom.kernels.triton.gluon import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.linear.packed_hopper import E2M1_ASM, U4_ASM, UP_EXPONENT, barrier
from atom.kernels.triton.linear.style import Style, style_of_weight
from atom.kernels.triton.tensor_descriptors import align_rows
from atom.kernels.triton.unpack import EVEN_ODD_FP8_PTX

ROWS = gl.constexpr(16)  # of a product by mma
WORDS = gl.constexpr(GROUP // 4)  # of a group
TOKENS = gl.constexpr(8)  # columns of a product by mma, all of the same token
FEW = 2  # tokens, up to which they are not grouped: more are as fast grouped
MOST_CHOSEN = 8  # experts of a token
MOST_COLUMNS = 1 << 15  # of x in shared memory, of all of a token's experts, which takes 160 KiB at most


class Split(NamedTuple):
    """How warps go through an expert's columns."""

    warps: int  # that share them
    depth: int  # groups of each row that a warp has on their way


def split_gates(style: Style, row_bytes: int) -> Split:
    """The split of gates and ups, by what was fastest on an H200.

    Of 1, 2, 4 and 8 warps that loaded 2, 4 and 8 groups, these had gates of 2048 columns in fp8 and int4, of 4096 in
    fp8, and of 2880 in MXFP4, whose scales take registers, too.
    """
    depth = 2 if style.values == "e2m1" else 8 if row_bytes >= 4096 else 4
    return Split(4, _round_up(depth, style))


def split_downs(style: Style, programs: int, top_k: int, gpu: Gpu) -> Split:
    """The split of downs: a program has 8 warps, or 16 if each has a multiprocessor of its own.

    So it was fastest on an H200, of 1, 2 and 4 warps an expert that loaded 2, 4 and 6 groups.
    """
    warps = 16 if programs <= gpu.units else 8
    return Split(warps // next_power_of_2(top_k), _round_up(4, style))


def _round_up(depth: int, style: Style) -> int:
    """To whole blocks of columns that share a scale."""
    every = _groups_of_a_scale(style) or 1
    return -(-depth // every) * every


def _groups_of_a_scale(style: Style) -> int | None:
    """Groups of a row that share a scale, if not all of them do; of MXFP4 a group has more scales than one."""
    return None if style.columns is None else max(style.columns // (GROUP * style.per_byte), 1)


@triton.constexpr_function
def _sums_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@triton.constexpr_function
def _x_layout(columns, warps):
    return gl.BlockedLayout([1, 1, 8], [256 // columns, 1, columns // 8], [1, warps, 1], [2, 1, 0])


@triton.constexpr_function
def _linear_layout(registers, lanes, warps, shape):
    """A layout whose first dim is of warps."""
    others = [0] * (len(shape) - 1)
    bases = [[1 << bit, *others] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, bases, [], [warps, *shape[1:]])


@triton.constexpr_function
def _words_layout(warps):
    """A thread has four neighbours of two rows, 8 apart."""
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear_layout([[0, 0, 1], [0, 0, 2], [0, 8, 0]], lanes, warps, [warps, 16, 16])


@triton.constexpr_function
def _fours_layout(warps):
    """The same words, of which each of a thread's four belongs to a block of 32 columns."""
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return _linear_layout([[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0]], lanes, warps, [warps, 16, 4, 4])


@triton.constexpr_function
def _exponents_layout(warps):
    """The threads of a row have its four scales each."""
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear_layout([[0, 0, 1], [0, 0, 2], [0, 8, 0]], lanes, warps, [warps, 16, 4])


def _of_two_words(code: str, results: int) -> str:
    """Code that unpacks a word, for two of them: the results of both, then both words, then the operands of both."""

    def rename(place: re.Match[str], word: int) -> str:
        own = int(place[1])
        return f"${word * results + own if own < results else 2 * own + word}"

    return "{" + "\n".join(re.sub(r"\$(\d)", lambda place: rename(place, word), code) for word in (0, 1)) + "}"  # noqa: B023


FP8_ASM = gl.constexpr(_of_two_words(EVEN_ODD_FP8_PTX.value, 2))
U4_TWO_ASM = gl.constexpr(_of_two_words(U4_ASM.value, 4))
E2M1_TWO_ASM = gl.constexpr(_of_two_words(E2M1_ASM.value, 4))


@jit
def _unpack(words, operand, VALUES: gl.constexpr, LEFT: gl.constexpr):
    """Words [W, 16, 16] of a group -> its numbers [W, 16, columns]. operand: of `_find_operand`

    The code takes two words, so that a pair in a register, which is of one word, comes as an element of each.
    """
    W: gl.constexpr = words.shape[0]
    if VALUES == "e4m3":
        a, b, c, d = gl.inline_asm_elementwise(
            FP8_ASM, "=r,=r,=r,=r,r,r", [words], is_pure=True, pack=2,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        )  # fmt: skip
        numbers = gl.join(gl.join(a, b), gl.join(c, d))
        # thread, product / 2, turn, eighth, product % 2
        numbers = numbers.reshape([W, 16, 4, 2, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4)).reshape([W, 16, 64])
    else:
        ASM: gl.constexpr = U4_TWO_ASM if VALUES == "u4" else E2M1_TWO_ASM
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words, operand], is_pure=True, pack=2,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                   gl.bfloat16),
        )  # fmt: skip
        numbers = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        # thread, product / 2, turn, eighth, second, product % 2
        numbers = numbers.reshape([W, 16, 4, 2, 2, 2, 2, 2]).permute((0, 1, 3, 7, 6, 5, 2, 4)).reshape([W, 16, 128])
    return gl.convert_layout(numbers, LEFT, assert_trivial=True)


@jit
def _load_groups(weight, rows, blocks, first, VALUES: gl.constexpr, NUM: gl.constexpr, EVERY: gl.constexpr,
                 GROUPS: gl.constexpr, DEPTH: gl.constexpr):  # fmt: skip
    """DEPTH groups of each row, i32[W, 16, 16] each, with their scales and zeros; beyond the end 0.

    rows, blocks [W, 16]: where each row, and its scales, begin. first [W]: of its groups. EVERY: groups with one scale
    """
    values, scales, zeros = weight
    WARPS: gl.constexpr = first.shape[0]
    TILE: gl.constexpr = _words_layout(WARPS)
    ROW: gl.constexpr = gl.SliceLayout(2, TILE)
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))[None, None, :]
    group = gl.convert_layout(first, gl.SliceLayout(1, ROW))[:, None]
    place = values + gl.convert_layout(rows, ROW)[:, :, None]
    words, factors, offsets = (), (), ()
    for number in gl.static_range(DEPTH):
        own = (group + number)[:, :, None]
        words += (gl.load(place + (own * WORDS + word), mask=own < GROUPS, other=0),)  # type: ignore[assignment]
    if VALUES == "e2m1":
        FOUR: gl.constexpr = _exponents_layout(WARPS)
        each = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, FOUR)))[None, None, :]
        group = gl.convert_layout(first, gl.SliceLayout(1, gl.SliceLayout(2, FOUR)))[:, None, None]
        place = scales + gl.convert_layout(blocks, gl.SliceLayout(2, FOUR))[:, :, None]
        for number in gl.static_range(DEPTH):
            block = (group + number) * 4 + each
            factors += (gl.load(place + block, mask=block < NUM, other=0),)  # type: ignore[assignment]
    elif EVERY is not None:
        for number in gl.static_range(DEPTH // EVERY):
            block = first[:, None] // EVERY + number
            factor = gl.load(scales + blocks + block, mask=block < NUM, other=0.0)
            factors += (factor.to(gl.float32),)  # type: ignore[assignment]
            if zeros is not None:
                block = group // EVERY + number
                zero = gl.load(zeros + gl.convert_layout(blocks, ROW) + block, mask=block < NUM, other=0)
                offsets += (zero,)  # type: ignore[assignment]
    return words, factors, offsets


@jit
def _find_operand(factors, offsets, unit, VALUES: gl.constexpr, WARPS: gl.constexpr):
    """What a group is unpacked with, i32[W, 16, 16]: pairs of bf16, as in packed_hopper.py."""
    TILE: gl.constexpr = _words_layout(WARPS)
    if VALUES == "e2m1":
        pairs = (factors[unit].to(gl.int32) + (126 - UP_EXPONENT)) * 0x00800080
        pairs = gl.convert_layout(pairs, gl.SliceLayout(2, _fours_layout(WARPS)))
        pairs = gl.expand_dims(pairs, 2).broadcast_to([WARPS, ROWS, 4, 4]).reshape([WARPS, ROWS, WORDS])
        return gl.convert_layout(pairs, TILE, assert_trivial=True)
    elif len(offsets) > 0:
        offset = 0x43004300 + offsets[unit].to(gl.int32) * 0x00010001
        return gl.expand_dims(offset, 2).broadcast_to([WARPS, ROWS, WORDS])
    else:
        return gl.full([WARPS, ROWS, WORDS], 0x43084308, gl.int32, TILE)  # 136


@jit
def _add_products(acc, loaded, x_groups, step, VALUES: gl.constexpr, EVERY: gl.constexpr, DEPTH: gl.constexpr,
                  COLUMNS: gl.constexpr):  # fmt: skip
    """Add the products of a step's groups to the sums."""
    words, factors, offsets = loaded
    WARPS: gl.constexpr = acc.shape[0]
    ACC: gl.constexpr = _sums_layout(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    EACH: gl.constexpr = 1 if EVERY is None else EVERY
    for unit in gl.static_range(DEPTH // EACH):
        sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, ACC)
        for number in gl.static_range(EACH):
            operand = None
            if VALUES != "e4m3":
                operand = _find_operand(factors, offsets, unit, VALUES, WARPS)
            numbers = _unpack(words[unit * EACH + number], operand, VALUES, LEFT)
            x = x_groups.index(step * DEPTH + unit * EACH + number).load(gl.SliceLayout(2, RIGHT))
            sums = mma_v2(numbers, gl.expand_dims(x, 2).broadcast_to([WARPS, COLUMNS, TOKENS]), sums)
        if EVERY is not None and VALUES != "e2m1":
            sums *= factors[unit][:, :, None]
        acc += sums
    return acc


@jit
def _sum_up(weight, rows, blocks, split, loaded, x_groups, steps, VALUES: gl.constexpr, NUM: gl.constexpr,
            EVERY: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, DEPTH: gl.constexpr,
            COLUMNS: gl.constexpr):  # fmt: skip
    """The products of rows by x, fp32[W, 16], in so many steps, of which the first is loaded. split [W]: of SPLITS"""
    WARPS: gl.constexpr = split.shape[0]
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, _sums_layout(WARPS))
    for step in range(steps - 1):
        first = ((step + 1) * SPLITS + split) * DEPTH
        next_loaded = _load_groups(weight, rows, blocks, first, VALUES, NUM, EVERY, GROUPS, DEPTH)
        acc = _add_products(acc, loaded, x_groups, step, VALUES, EVERY, DEPTH, COLUMNS)
        loaded = next_loaded
    acc = _add_products(acc, loaded, x_groups, steps - 1, VALUES, EVERY, DEPTH, COLUMNS)
    return gl.max(acc, 2)  # all columns are alike


@jit
def _fill(x_groups, x, split, INNER: gl.constexpr, SPLITS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr,
          PLACES: gl.constexpr):  # fmt: skip
    """Store x in shared memory, in groups as each warp goes through them. split [1, W, 1]: of SPLITS"""
    WARPS: gl.constexpr = split.shape[1]
    X: gl.constexpr = _x_layout(COLUMNS, WARPS)
    WHOLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    each = gl.arange(0, PLACES, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    place = ((each // DEPTH * SPLITS + split) * DEPTH + each % DEPTH) * COLUMNS + column
    whole = x_groups._reinterpret(gl.bfloat16, [PLACES, WARPS, COLUMNS], WHOLE)
    whole.store(gl.load(x + place, mask=place < INNER, other=0.0))
    barrier()


@jit
def _finish(sums, scales, bias, own, VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, EVERY: gl.constexpr):
    """The sums of rows scaled, with their biases. own: each row in the weight"""
    if VALUES == "e2m1":
        sums *= 1 << UP_EXPONENT
    if EVERY is None:
        sums *= gl.load(scales + own // SCALE_ROWS).to(gl.float32)
    if bias is not None:
        sums += gl.load(bias + own).to(gl.float32)
    return sums


@jit
def _ask(pointer):
    """Have L2 fetch a line."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@jit(do_not_specialize=["steps"])
def _gates_kernel(
    x, ids, values, scales, zeros, bias, y, x_stride, steps, TOP_K: gl.constexpr, KIND: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, OUT: gl.constexpr, INNER: gl.constexpr, VALUES: gl.constexpr,
    SCALE_ROWS: gl.constexpr, NUM: gl.constexpr, EVERY: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr,
    PLACES: gl.constexpr, SPLITS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """8 gates and their ups of one pair of token and expert, activated. OUT: gates and ups of an expert"""
    ROW: gl.constexpr = gl.SliceLayout(2, _sums_layout(SPLITS))
    X: gl.constexpr = _x_layout(COLUMNS, SPLITS)
    x_groups = gl.allocate_shared_memory(
        gl.bfloat16, [PLACES, SPLITS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    pair, first = gl.program_id(1), gl.program_id(0) * 8
    split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, ROW))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW))[None, :]
    out = first + row % 8 + row // 8 * (OUT // 2) + 0 * split[:, None]
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    expert = gl.load(ids + pair).to(gl.int32)
    weight = (values + expert.to(gl.int64) * (OUT * GROUPS * WORDS), scales, zeros)
    rows, blocks = out * (GROUPS * WORDS), (expert * OUT + out) // SCALE_ROWS * NUM
    loaded = _load_groups(weight, rows, blocks, split * DEPTH, VALUES, NUM, EVERY, GROUPS, DEPTH)
    split_x = gl.arange(0, SPLITS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    _fill(x_groups, x + pair // TOP_K * x_stride, split_x, INNER, SPLITS, DEPTH, COLUMNS, PLACES)
    sums = _sum_up(weight, rows, blocks, split, loaded, x_groups, steps, VALUES, NUM, EVERY, GROUPS, SPLITS, DEPTH,
                   COLUMNS)  # fmt: skip
    total = gl.sum(sums, 0)
    row = gl.arange(0, ROWS, layout=total.type.layout)
    own = expert * OUT + first + row % 8 + row // 8 * (OUT // 2)
    result = _finish(total, scales, bias, own, VALUES, SCALE_ROWS, EVERY).to(y.dtype.element_ty)
    gates, ups = result.reshape([2, 8]).permute((1, 0)).split()
    m = activate_rounded(gates, ups, KIND, LIMIT, ALPHA)
    gl.store(y + pair * (OUT // 2) + first + gl.arange(0, 8, layout=m.type.layout), m)


@jit(do_not_specialize=["steps"])
def _downs_kernel(
    x, weights, ids, values, scales, zeros, bias, y, steps, TOP_K: gl.constexpr, EXPERTS: gl.constexpr,
    OUT: gl.constexpr, INNER: gl.constexpr, VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, NUM: gl.constexpr,
    EVERY: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr, PLACES: gl.constexpr, SPLITS: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """16 outputs of a token, summed over its experts. EXPERTS: a power of 2, of which TOP_K are used"""
    WARPS: gl.constexpr = EXPERTS * SPLITS
    ROW: gl.constexpr = gl.SliceLayout(2, _sums_layout(WARPS))
    X: gl.constexpr = _x_layout(COLUMNS, WARPS)
    x_groups = gl.allocate_shared_memory(
        gl.bfloat16, [PLACES, WARPS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    first_pair, first = gl.program_id(1) * TOP_K, gl.program_id(0) * ROWS
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, ROW))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW))[None, :]
    expert = gl.load(ids + first_pair + gl.minimum(warp // SPLITS, TOP_K - 1), cache_modifier=".cg").to(gl.int32)
    own = gl.minimum(first + row, OUT - 1)
    weight = (values, scales, zeros)
    rows = expert.to(gl.int64)[:, None] * (OUT * GROUPS * WORDS) + own * (GROUPS * WORDS)
    blocks = (expert[:, None] * OUT + own) // SCALE_ROWS * NUM
    split = gl.where(warp // SPLITS < TOP_K, warp % SPLITS, 1 << 16)  # beyond the end
    loaded = _load_groups(weight, rows, blocks, split * DEPTH, VALUES, NUM, EVERY, GROUPS, DEPTH)
    # the rest is asked for meanwhile: of an expert, rows are one after another
    LINES: gl.constexpr = (ROWS * GROUPS + 1) // 2
    ALL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    choice = gl.arange(0, EXPERTS, layout=gl.SliceLayout(1, ALL))
    expert = gl.load(ids + first_pair + gl.minimum(choice, TOP_K - 1), cache_modifier=".cg")
    line = gl.minimum(gl.arange(0, triton.next_power_of_2(LINES), layout=gl.SliceLayout(0, ALL)), LINES - 1)
    end = (OUT - first) * (GROUPS * WORDS) - 1
    _ask(values + ((expert * OUT + first) * (GROUPS * WORDS))[:, None] + gl.minimum(line * 32, end)[None, :])
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    warp_x = gl.arange(0, WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    x += (first_pair + gl.minimum(warp_x // SPLITS, TOP_K - 1)) * INNER
    _fill(x_groups, x, warp_x % SPLITS, INNER, SPLITS, DEPTH, COLUMNS, PLACES)
    sums = _sum_up(weight, rows, blocks, split, loaded, x_groups, steps, VALUES, NUM, EVERY, GROUPS, SPLITS, DEPTH,
                   COLUMNS)  # fmt: skip
    if SPLITS > 1:
        sums = gl.sum(sums.reshape([EXPERTS, SPLITS, ROWS]), 1)
    choice = gl.arange(0, EXPERTS, layout=gl.SliceLayout(1, sums.type.layout))[:, None]
    pair = first_pair + gl.minimum(choice, TOP_K - 1)
    out = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, sums.type.layout)), OUT - 1)[None, :]
    own = gl.load(ids + pair).to(gl.int32) * OUT + out
    result = _finish(sums, scales, bias, own, VALUES, SCALE_ROWS, EVERY)
    share = gl.load(weights + pair)
    result = gl.where(choice < TOP_K, result.to(y.dtype.element_ty).to(gl.float32) * share, 0.0)
    total = gl.sum(result, 0)
    place = first + gl.arange(0, ROWS, layout=total.type.layout)
    gl.store(y + gl.program_id(1) * OUT + place, total.to(y.dtype.element_ty), mask=place < OUT)


def suits_few(x: Tensor, ids: Tensor, gate_up: PackedWeight) -> bool:
    """Whether these tokens go through their shuffled experts without being grouped."""
    _, out, inner = gate_up.shape
    top_k = ids.shape[1]
    is_few = 0 < len(x) <= FEW and top_k <= MOST_CHOSEN and x.dtype == torch.bfloat16
    return is_few and out % 16 == 0 and max(inner, next_power_of_2(top_k) * out // 2) <= MOST_COLUMNS


def multiply_gates(
    x: Tensor, ids: Tensor, weight: PackedWeight, bias: Tensor | None, kind: str, limit: float | None = None,
    alpha: float | None = None, split: Split | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H], ids i64[T, k], weight [E, 2 W, H], gates before ups, bias [E, 2 W] -> gated_activate [k T, W]."""
    x, out = align_rows(x), weight.shape[1]
    split = split or split_gates(style_of_weight(weight), weight.parts["values"].shape[-1])
    parts, steps, constants = _describe(weight, split)
    y = x.new_empty(ids.numel(), out // 2)
    _gates_kernel[(out // 16, len(y))](
        x, ids, *parts, bias, y, x.stride(0), steps, ids.shape[1], kind, limit, alpha, *constants,
        num_warps=split.warps, launch_pdl=True,
    )  # fmt: skip
    return y


def multiply_downs(
    x: Tensor, weights: Tensor, ids: Tensor, weight: PackedWeight, bias: Tensor | None, split: Split | None = None
) -> Tensor:
    """x [k T, W], weights fp32[T, k], ids i64[T, k], weight [E, H, W], bias [E, H] -> [T, H]

    The kernel ahead is `multiply_gates`, of the same ids.
    """
    (tokens, top_k), out = ids.shape, weight.shape[1]
    tiles, experts = -(-out // ROWS.value), next_power_of_2(top_k)
    split = split or split_downs(style_of_weight(weight), tiles * tokens, top_k, find_gpu(x.device))
    parts, steps, constants = _describe(weight, split)
    y = x.new_empty(tokens, out)
    _downs_kernel[(tiles, tokens)](
        x, weights, ids, *parts, bias, y, steps, top_k, experts, *constants, num_warps=experts * split.warps,
        launch_pdl=True,
    )  # fmt: skip
    return y


def _describe(weight: PackedWeight, split: Split) -> tuple[tuple[Tensor | None, ...], int, tuple[Any, ...]]:
    """A weight's values in words, scales and zeros; the steps through its columns; what kernels are compiled for."""
    (_, out, inner), parts, style = weight.shape, weight.parts, style_of_weight(weight)
    groups, columns = parts["values"].shape[-1] // GROUP, GROUP * style.per_byte
    steps = -(-groups // (split.warps * split.depth))
    num = 1 if style.columns is None else -(-inner // style.columns)  # scales of a row
    places = next_power_of_2(steps * split.depth)
    constants = (out, inner, style.values, style.rows, num, _groups_of_a_scale(style), groups, columns, places, *split)
    return (parts["values"].view(torch.int32), parts["scales"], parts.get("zeros")), steps, constants

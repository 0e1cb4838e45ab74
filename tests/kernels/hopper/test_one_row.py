"""Linears of one row on Hopper: which tiles they have, and without a GPU what programs multiply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.hopper.emulated import emulate

pytest.importorskip("triton")

from kernels.hopper.test_few_experts import unpack
from kernels.hopper.test_hopper import FORMATS, H200, IS_HOPPER, draw

from atom.graph import ops
from atom.kernels.hopper import boxes, few_experts, one_row, packed_linear
from atom.kernels.hopper.shuffle import GROUP, shuffle
from atom.kernels.triton.linear.shuffled import PARTS, Row, Wgmma, choose_row
from atom.kernels.triton.linear.tiles import Shape, choose
from atom.kernels.triton.linear.tune import candidates
from atom.kernels.triton.linear.weight_encoding import encoding_of

EPS = 0.01


@pytest.fixture(scope="module")
def emulated() -> SimpleNamespace:
    packed = emulate(packed_linear)
    few = emulate(few_experts, UP_EXPONENT=packed.UP_EXPONENT)
    names = {name: getattr(packed, name) for name in ("_find_blocks", "_load_operands", "_load_scales")}
    names |= {name: getattr(few, name) for name in ("_finish", "_pick")}
    return emulate(one_row, _unpack=unpack, BOX=emulate(boxes).BOX, **names)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_programs_multiply_a_normed_sum(fmt: str, has_norm: bool, emulated: SimpleNamespace):
    check_row(fmt, 256, 2048, has_norm, emulated, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("out", "inner"), [(8, 1024), (5120, 2048), (2048, 4096)])
def test_a_normed_sum_is_multiplied(fmt: str, out: int, inner: int):
    for has_norm in (False, True):
        check_row(fmt, out, inner, has_norm, one_row, "cuda")


def check_row(fmt: str, out: int, inner: int, has_norm: bool, kernels: Any, device: str) -> None:
    """By the op's body, and a weight in float32."""
    torch.manual_seed(0)
    weight, bias = draw(fmt, out, inner, dtype="fp32", device=device), torch.randn(out, device=device).bfloat16()
    a, b = torch.randn(2, 1, inner, device=device).bfloat16()
    norm = torch.rand(inner, device=device).bfloat16()
    x, truth = ops.add_rms_norm.body(a, b, norm, eps=EPS) if has_norm else (a, a)
    laid_out = shuffle(weight)
    row = Row(laid_out.parts["values"].shape[-1] // (PARTS * GROUP))
    y, total = kernels.multiply_row(
        a, b if has_norm else None, norm if has_norm else None, shuffle(weight), bias, EPS, row
    )
    assert torch.equal(total, truth)
    truth = x.double() @ weight.unpack().double().t() + bias.double()
    assert (y.double() - truth).norm() < 0.004 * truth.norm()


@pytest.mark.parametrize(
    ("fmt", "out", "inner", "boxes"),
    [
        ("fp8[128, 128]", 5120, 2048, 4),
        ("fp8[128, 128]", 2048, 4096, 8),
        ("int4[1, 128]", 6144, 4096, 4),
        ("fp8[128, 128]", 5120, 1536, None),  # parts without whole blocks
        ("fp8[1, *]", 6144, 4096, None),  # more than fits
        ("fp8[1, *]", 151936, 2048, None),
        ("mxfp4", 2880, 2880, None),
    ],
)
def test_one_row_has_its_own_tiles_where_all_of_a_weight_fits(fmt: str, out: int, inner: int, boxes: int | None):
    encoding = encoding_of(fmt, out, None, True)
    expected = None if boxes is None else Row(boxes)
    assert choose_row(out, inner, encoding, H200) == expected
    for rows, gates in ((1, 1), (2, 1), (1, 2)):
        chosen = choose(Shape(rows, out, inner, gates, encoding=encoding), H200)
        is_row = expected is not None and rows == gates == 1
        assert chosen == expected if is_row else isinstance(chosen, Wgmma)


@pytest.mark.parametrize("fmt", ["q4_k", "q6_k"])
def test_k_quants_of_one_row_are_not_even_tried(fmt: str):
    shape = Shape(1, 4096, 4096, encoding=encoding_of(fmt, 4096, None, True))
    assert candidates(shape, H200) and not any(isinstance(each, Row) for each in candidates(shape, H200))

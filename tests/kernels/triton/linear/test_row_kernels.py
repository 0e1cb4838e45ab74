"""Norms and gates that quantize what they give: the numbers of a norm or gates, and of `quantize_rows` after it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from atom.graph import PackedWeight, Type, ops
from atom.graph.quantize_rows import quantize_rows
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.triton.linear import linear, quantized, row_kernels
from atom.kernels.triton.linear.row_kernels import FP8, QuantizedRows
from atom.weights.quantize import quantize

pytestmark = pytest.mark.early
EPS = 0.01


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def in_order(made: QuantizedRows, inner: int) -> torch.Tensor:
    """The numbers of rows in the order of x's columns, as bytes."""
    values = made.values.view(torch.uint8).cpu()
    if not made.is_shuffled:
        return values
    order = torch.arange(inner) % 128  # of 7 bits, so that fp8 holds them as bytes
    weight = PackedWeight(Type("bf16", (1, inner), "fp8[1, *]"), {"values": order.to(torch.uint8)[None].view(FP8)})
    moved = shuffle(weight).parts["values"].view(torch.uint8)[0].long()
    places = moved + torch.arange(inner) // 128 * 128  # no byte leaves its 64 columns
    return torch.empty_like(values).scatter_(1, places.expand(len(values), -1), values)


def assert_quantized(made: QuantizedRows, x: torch.Tensor, span: int) -> None:
    """Almost all numbers of x in fp8, and the others next to it: x itself may be rounded otherwise."""
    rows, inner = x.shape
    values, scales = quantize_rows(x.cpu(), f"fp8[1, {span}]")
    assert made.rows == rows and made.values.shape == (-(-rows // 4) * 4, inner)
    assert made.scales.stride(0) == 1
    assert torch.allclose(made.scales[:rows].cpu(), scales, rtol=1e-6 if x.dtype == torch.float32 else 0.01)
    stored, expected = in_order(made, inner), values.view(torch.uint8)
    assert (stored[:rows] != expected).float().mean() < 0.01
    assert ((stored[:rows].int() - expected.int()).abs() <= 1).all()
    assert not (stored[rows:] & 127).any()  # 0, or -0


@pytest.mark.parametrize(("span", "inner"), [(128, 384), (384, 384), (320, 320)])
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("has_sum", [False, True])
def test_a_norm_gives_its_rows_quantized(triton_device, exact_fp8, span, inner, is_shuffled, has_sum):
    if is_shuffled and inner == 320:
        pytest.skip("rows in this order are of 128 columns, or of a power of 2 of them")
    a, b, norm = make(triton_device, 5, inner + 8)[:, :inner], make(triton_device, 5, inner), make(triton_device, inner)
    made, total = row_kernels.quantize_normalized(a, b if has_sum else None, norm, EPS, span, is_shuffled)
    assert torch.equal(total, a + b) if has_sum else total is a
    assert_quantized(made, ops.rms_norm.body(total, norm, eps=EPS), span)


@pytest.mark.parametrize(("span", "inner"), [(128, 384), (384, 384)])
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates_give_their_rows_quantized(triton_device, exact_fp8, span, inner, is_shuffled, kind):
    x = make(triton_device, 6, 2 * inner)
    made = row_kernels.quantize_gated(x, kind, span, is_shuffled)
    assert_quantized(made, ops.gated_activate.body(x, kind=kind), span)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize(("span", "inner"), [(128, 384), (128, 640), (384, 384)])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_many_short_rows_are_quantized_several_in_a_program(
    triton_device, exact_fp8, monkeypatch, rows, span, inner, is_shuffled
):
    monkeypatch.setattr(row_kernels, "MANY_ROWS", rows)
    launched, kernel = [], row_kernels._quantize_kernel

    class Launch:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(row_kernels, "_quantize_kernel", Launch())
    x = make(triton_device, rows, inner + 8)[:, :inner]
    assert_quantized(row_kernels.quantize_rows(x, span, FP8, is_shuffled=is_shuffled), x, span)
    assert launched == [(2,)]


@pytest.mark.parametrize(("columns", "num_copies"), [(4, 0), (8, 0), (6, 1)])
def test_scales_of_whole_quadruples_are_not_copied_for_the_library(monkeypatch, columns, num_copies):
    given = []

    def scaled_mm(x, values, x_scales, x_kind, scales, kind, output_dtype):
        given.append(scales.t())
        return torch.zeros(len(x), values.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    stored = {"values": torch.zeros(128, 128 * columns).to(FP8), "scales": torch.rand(1, columns)}
    weight = PackedWeight(Type("bf16", (128, 128 * columns), "fp8[128, 128]"), stored)
    x = QuantizedRows(torch.zeros(4, 128 * columns).to(FP8), torch.ones(columns, 4).t(), 4, False)
    quantized.multiply_quantized(x, weight, None, "fp8[1, 128]")
    assert (given[0].data_ptr() != stored["scales"].data_ptr()) == num_copies
    assert given[0].shape[1] % 4 == 0 and torch.equal(given[0][:, :columns], stored["scales"])


def test_a_nan_stays_a_nan(triton_device, exact_fp8):
    a, norm = make(triton_device, 3, 256), make(triton_device, 256)
    a[1, 5] = float("nan")
    made, _ = row_kernels.quantize_normalized(a, None, norm, EPS, 256)
    gated = row_kernels.quantize_gated(a, "silu", 128)
    for scales in (made.scales, gated.scales):
        assert scales[:3].isnan().any(1).tolist() == [False, True, False]


@pytest.mark.sampled(6, gpu=2)
@pytest.mark.parametrize("fmt", ["fp8[1, *]", "fp8[128, 128]"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_the_rows_of_gates_reach_the_next_linear_quantized(triton_device, exact_fp8, monkeypatch, fmt, is_shuffled):
    """Of more than MAX_ROWS rows; without such a GPU the library's result is computed from the same numbers."""
    given: list[int] = []

    def multiply(x: QuantizedRows, weight: PackedWeight) -> torch.Tensor:
        given.append(x.values.shape[1])
        plain = PackedWeight(Type("fp32", weight.shape, fmt), {**weight.parts, "values": stored[weight.shape]}).unpack()
        values = in_order(x, x.values.shape[1]).view(FP8).float().to(plain.device)
        spans = x.scales.repeat_interleave(x.values.shape[1] // x.scales.shape[1], 1)
        return (values * spans)[: x.rows] @ plain.t()

    if triton_device == "cpu":
        monkeypatch.setattr(quantized, "_multiply_fp8", multiply)
        monkeypatch.setattr(linear, "MAX_ROWS", 13)  # a program for each row is interpreted
    dtype, act = ("fp32", "bf16")[triton_device != "cpu"], "fp8[1, *]" if "*" in fmt else "fp8[1, 128]"
    weights, stored = [], {}
    for out, inner in ((512, 128), (128, 256)):
        parts = {name: part.to(triton_device) for name, part in quantize(fmt, torch.randn(out, inner)).items()}
        stored[out, inner] = parts["values"]
        weight = PackedWeight(Type(dtype, (out, inner), fmt), parts)
        weights.append(shuffle(weight) if is_shuffled else weight)
    gate_up, down = weights
    for rows in (linear.MAX_ROWS, linear.MAX_ROWS + 3):
        products = linear.Linears(lambda *_: None)
        a, b, norm = (make(triton_device, *shape) for shape in ((rows, 128), (rows, 128), (128,)))
        kwargs = {"eps": EPS, "kind": "silu", "act": act}
        m, total = products.add_norm_linear(a, b, norm, gate_up, gives=act, **kwargs)
        assert isinstance(m, QuantizedRows) == (rows > linear.MAX_ROWS)
        y = products.linear(m, down, act=act)
        plain, same = products.add_norm_linear(a, b, norm, gate_up, **kwargs)
        assert isinstance(plain, torch.Tensor) and torch.equal(total, same)
        assert torch.equal(y, products.linear(plain, down, act=act)) and y.shape == (rows, 128)
    assert triton_device != "cpu" or given == [128, 256] * 4

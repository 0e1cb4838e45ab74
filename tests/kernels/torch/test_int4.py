from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from kernels.checks import relative_error

from atom.graph import PackedWeight, Type, ops, parse
from atom.graph.unpack import unpack
from atom.kernels import Target, find_kernel, shuffle
from atom.kernels.backend import LoadContext
from atom.kernels.registry import tensor_type
from atom.kernels.torch.int4 import FEATURE, is_supported
from atom.weights.quantize import quantize

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch packs int4 otherwise on this CPU")
TARGET = Target("cpu", frozenset({FEATURE}))
BF16 = Type("bf16", ("T", 768))
FORMATS = [
    "q4_0", "q4_1", "q8_0", "int8[1, *]", "int4[1, 32]", "int4[1, 64]", "int4[1, 128]", "awq_int4[1, 256]",
    "ct_packed_int4[1, *]", "ct_packed_int4z[1, 64]", "ct_packed_int8[1, 32]", "gptq_v2_int8[1, 128]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def draw(fmt: str, *shape: int) -> PackedWeight:
    """A random packed weight, with zero points and minima that differ from block to block."""
    parts = quantize(fmt, torch.randn(shape) * 0.05)
    if "zeros" in parts:
        parts["zeros"].random_(0, 16 if "int4" in fmt else 256)
    if "mins" in parts:
        parts["mins"].normal_(0, 0.1)
    return PackedWeight(Type("bf16", shape, fmt), parts)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_are_those_of_the_weight_unpacked(fmt: str):
    weight, bias = draw(fmt, 192, 768), torch.randn(192).bfloat16()
    kernel = find_kernel(ops.linear, "torch")
    assert kernel.accepts(TARGET, BF16, weight.type) is None
    packed, run = shuffle(weight, "int4"), kernel.load(LoadContext())
    dense = unpack(fmt, weight.parts)
    for rows in (1, 2, 5, 17, 64, 65, 130):
        x = torch.randn(rows, 768).bfloat16()
        assert relative_error(run(x, packed, bias), x.float() @ dense.T + bias.float()) < 5e-3
        assert relative_error(run(x, packed), x.float() @ dense.T) < 5e-3


def test_a_weight_of_many_blocks_is_unpacked_in_parts():
    weight = draw("q8_0", 2048, 768)
    x, packed = torch.randn(100, 768).bfloat16(), shuffle(weight, "int4")
    truth = x.float() @ unpack("q8_0", weight.parts).T
    assert relative_error(find_kernel(ops.linear, "torch").load(LoadContext())(x, packed), truth) < 5e-3


def test_experts_are_packed_one_by_one():
    weight, kernel = draw("q4_1", 3, 64, 96), find_kernel(ops.grouped_linear, "torch")
    assert kernel.accepts(TARGET, Type("bf16", ("P", 96)), weight.type, Type("i64", (3,))) is None
    experts = [
        PackedWeight(
            Type("bf16", (1, 64, 96), "q4_1"), {name: part[at : at + 1] for name, part in weight.parts.items()}
        )
        for at in range(3)
    ]
    x, ends = torch.randn(9, 96).bfloat16(), torch.tensor([2, 2, 9])
    y = kernel.load(LoadContext())(x, [shuffle(expert, "int4") for expert in experts], ends)
    assert relative_error(y, ops.grouped_linear.body(x.float(), unpack("q4_1", weight.parts), ends)) < 5e-3


@pytest.mark.parametrize(
    ("x", "weight", "features", "reason"),
    [
        (Type("fp32", ("T", 64)), Type("fp32", (64, 64), "q4_1"), {FEATURE}, "by bf16, not by fp32"),
        (Type("bf16", ("T", 64)), Type("bf16", (64, 64), "q4_1"), set(), "no fast product of int4 for this CPU"),
        (Type("bf16", ("T", 64)), Type("bf16", (80, 64), "q4_1"), {FEATURE}, "80 rows of 64 columns are no blocks"),
        (Type("bf16", ("T", 48)), Type("bf16", (64, 48), "int8[1, *]"), {FEATURE}, "64 rows of 48 columns"),
        (Type("bf16", ("T", 64)), Type("bf16", (64, 64), "int8[64, *]"), {FEATURE}, "is stored as int8[64, *]"),
        (Type("bf16", ("T", 64)), Type("bf16", (64, 64), "fp8[1, *]"), {FEATURE}, "is stored as fp8[1, *]"),
        (Type("bf16", ("T", 64)), Type("bf16", (64, 64), "gptq_int4_ordered[1, 32]"), {FEATURE}, "is stored as gptq"),
    ],
)
def test_what_it_does_not_take_has_a_reason(x: Type, weight: Type, features: set[str], reason: str):
    target = Target("cpu", frozenset({"onednn_bf16", "onednn_fp32", *features}))
    assert reason in str(find_kernel(ops.linear, "torch").accepts(target, x, weight))


def test_a_piece_has_such_a_linear_within():
    text = (
        'def piece(x0: bf16[A, 64], w0: bf16[64], w1: bf16[128, 64, "q4_1"]):\n'
        "    h = inductor.rms_norm(x0, w0, eps=1e-05)\n"
        "    y = torch.linear(h, w1)\n"
        "    return y\n"
    )
    assert tensor_type(parse(text, "piece").programs["piece"].inputs[2]) == Type("u8", (128, 40))
    code = "import sys; from atom.pieces.compilers import compile_piece; print(*compile_piece(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, timeout=200)
    assert "piece.so" in made.stdout.split(), made.stderr

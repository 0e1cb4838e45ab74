"""A linear fused with the norm before it and the gated activation after it, if a kernel computes both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passes.cases import context_of, run, text_of

from atom.graph import Graph, Type, ops, parse
from atom.kernels import Target
from atom.passes.fuse_linear_gate import fuse_linear_gate
from atom.passes.fuse_norm_linear import fuse_norm_linear

Fuse = Callable[..., Graph]
GPU, BACKENDS = Target("cuda", frozenset({"amd", "gfx942"})), ("triton", "reference")

GATE = """\
def f(h: fp32[T, 8]):
    gate_up = linear(h, W("gate_up", fp32[12, 8]))
    m = gated_activate(gate_up, kind="silu")
    return m"""

GATE_FUSED = """\
def f(h: fp32[T, 8]):
    m = gated_linear(h, W("gate_up", fp32[12, 8]), kind="silu")
    return m"""

NORM = """\
def f(x: fp32[T, 8]):
    h = rms_norm(x, W("w", fp32[8]), eps=1e-06)
    y = linear(h, W("y", fp32[6, 8]), W("y.b", fp32[6]))
    z = add(y, y)
    return z"""

NORM_FUSED = """\
def f(x: fp32[T, 8]):
    y = norm_linear(x, W("w", fp32[8]), W("y", fp32[6, 8]), W("y.b", fp32[6]), eps=1e-06)
    z = add(y, y)
    return z"""

NORM_GATE = """\
def f(x: fp32[T, 8]):
    h = rms_norm(x, W("w", fp32[8]), eps=1e-06)
    m = gated_linear(h, W("gate_up", fp32[12, 8]), kind="silu")
    return m"""

NORM_GATE_FUSED = """\
def f(x: fp32[T, 8]):
    m = norm_linear(x, W("w", fp32[8]), W("gate_up", fp32[12, 8]), eps=1e-06, kind="silu")
    return m"""

ADD_NORM = """\
def f(x: fp32[T, 8], r: fp32[T, 8]):
    h, s = add_rms_norm(x, r, W("w", fp32[8]), eps=1e-06)
    y = linear(h, W("y", fp32[8, 8]))
    z = add(y, s)
    return z"""

ADD_NORM_FUSED = """\
def f(x: fp32[T, 8], r: fp32[T, 8]):
    y, s = add_norm_linear(x, r, W("w", fp32[8]), W("y", fp32[8, 8]), eps=1e-06)
    z = add(y, s)
    return z"""

CASES = [
    (fuse_linear_gate, GATE, GATE_FUSED),
    (fuse_norm_linear, NORM, NORM_FUSED),
    (fuse_norm_linear, NORM_GATE, NORM_GATE_FUSED),
    (fuse_norm_linear, ADD_NORM, ADD_NORM_FUSED),
]
IDS = ["gate", "norm", "norm and gate", "add and norm"]


def fused(fuse: Fuse, text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> Graph:
    return fuse(parse(text), context_of(target, *backends))


def assert_stays(fuse: Fuse, text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> None:
    graph = fused(fuse, text, target, backends)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


@pytest.mark.parametrize(("fuse", "before", "after"), CASES, ids=IDS)
def test_the_text_before_becomes_the_text_after(fuse: Fuse, before: str, after: str):
    graph = fused(fuse, before)
    assert text_of(graph).strip() == after
    assert graph.num_rewrites == 1
    assert_stays(fuse, after)


@pytest.mark.parametrize(("fuse", "before", "after"), CASES, ids=IDS)
def test_the_numbers_stay(fuse: Fuse, before: str, after: str):
    inputs = {name: torch.randn(5, 8) for name in ("h", "x", "r") if f"{name}: fp32" in before}
    torch.testing.assert_close(run(text_of(fused(fuse, before)), **inputs), run(before, **inputs))


@pytest.mark.parametrize(("fuse", "before", "after"), CASES, ids=IDS)
def test_where_no_kernel_takes_the_two_as_one_they_stay(fuse: Fuse, before: str, after: str):
    assert_stays(fuse, before, Target("cpu"), ("inductor", "torch", "reference"))
    assert_stays(fuse, before, GPU, ("reference",))
    assert_stays(fuse, before, Target("cpu"), BACKENDS)  # the kernel is there and refuses


@pytest.mark.parametrize(
    ("fuse", "before", "weight"),
    [
        (fuse_linear_gate, GATE, "[12, 8]"),
        (fuse_norm_linear, NORM, "[6, 8]"),
        (fuse_norm_linear, NORM_GATE, "[12, 8]"),
        (fuse_norm_linear, ADD_NORM, "[8, 8]"),
    ],
    ids=IDS,
)
def test_a_packed_weight_that_no_kernel_takes_with_the_two_stays(fuse: Fuse, before: str, weight: str):
    assert_stays(fuse, before.replace(f"fp32{weight})", f'fp32{weight}, fmt="int8z")'))


TWO_READERS = [
    (
        fuse_linear_gate,
        GATE.replace("return m", "n = gated_activate(gate_up, kind='gelu')\n    o = add(m, n)\n    return o"),
    ),
    (
        fuse_linear_gate,
        GATE.replace("return m", "n, o = split(gate_up, sizes=[6, 6])\n    p = add(m, n)\n    return p"),
    ),
    (fuse_norm_linear, NORM.replace("z = add(y, y)", 'g = linear(h, W("g", fp32[6, 8]))\n    z = add(y, g)')),
    (
        fuse_norm_linear,
        NORM_GATE.replace("return m", 'g = linear(h, W("g", fp32[6, 8]))\n    z = add(m, g)\n    return z'),
    ),
    (fuse_norm_linear, ADD_NORM.replace("z = add(y, s)", "z = add(y, h)")),
]


@pytest.mark.parametrize(("fuse", "text"), TWO_READERS)
def test_what_another_reads_too_stays(fuse: Fuse, text: str):
    assert_stays(fuse, text)


@pytest.mark.parametrize(
    ("fuse", "text"),
    [
        (fuse_linear_gate, GATE.replace("return m", "return gate_up, m")),
        (fuse_norm_linear, NORM.replace("return z", "return h, z")),
        (fuse_norm_linear, ADD_NORM.replace("return z", "return h, z")),
    ],
)
def test_what_is_a_result_of_the_program_stays(fuse: Fuse, text: str):
    assert_stays(fuse, text)


def test_gates_with_a_limit_stay():
    assert_stays(fuse_linear_gate, GATE.replace('kind="silu"', 'kind="swigluoai", limit=7.0, alpha=1.702'))
    assert_stays(fuse_linear_gate, GATE.replace('kind="silu"', 'kind="silu", limit=7.0'))


def test_gates_of_anything_but_a_linear_stay():
    assert_stays(fuse_linear_gate, GATE.replace('linear(h, W("gate_up", fp32[12, 8]))', "add(h, h)"))


def test_a_linear_of_anything_but_a_norm_stays():
    assert_stays(fuse_norm_linear, NORM.replace('rms_norm(x, W("w", fp32[8]), eps=1e-06)', "add(x, x)"))
    layer = NORM.replace('rms_norm(x, W("w", fp32[8]), eps', 'layer_norm(x, W("w", fp32[8]), W("w.b", fp32[8]), eps')
    assert_stays(fuse_norm_linear, layer)
    assert_stays(fuse_norm_linear, 'def f(x: fp32[T, 8]):\n    y = linear(x, W("y", fp32[6, 8]))\n    return y')


def test_a_linear_of_the_sum_next_to_a_norm_stays():
    text = ADD_NORM.replace("linear(h,", "linear(s,").replace("z = add(y, s)", "z = add(y, h)")
    assert_stays(fuse_norm_linear, text)


def test_a_sum_that_nobody_reads_is_dropped():
    graph = fused(fuse_norm_linear, ADD_NORM.replace("add(y, s)", "add(y, y)"))
    inputs = {"x": torch.randn(3, 8), "r": torch.randn(3, 8)}
    before = ADD_NORM.replace("add(y, s)", "add(y, y)")
    torch.testing.assert_close(run(text_of(graph), **inputs), run(before, **inputs))


def test_gates_of_a_linear_with_a_bias_stay():
    assert_stays(fuse_linear_gate, GATE.replace("[12, 8]))", '[12, 8]), W("b", fp32[12]))'))


def test_a_kernel_of_a_gpu_takes_what_it_is_asked_for():
    x, weight = Type("bf16", ("T", 8)), Type("bf16", (12, 8))
    assert context_of(GPU, *BACKENDS).takes(ops.gated_linear, x, weight, kind="silu")
    assert not context_of(GPU, "reference").takes(ops.gated_linear, x, weight), "the reference does not count"
    assert not context_of(GPU, *BACKENDS).takes(ops.rotary, x, weight), "there is none"

"""Gates give their rows in the format of the linear after them: the text before and after, what stays, and the numbers."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, random_weight, text_of

from atom.errors import ConfigError, PassError
from atom.graph import Graph, PackedWeight, Recipe, W, interpret, ops, parse, verify
from atom.graph.recipes import Shuffle
from atom.kernels import Target
from atom.passes.fuse_gate_quant import fuse_gate_quant
from atom.passes.select_kernels import select_kernels
from atom.weights.quantize import quantize

HOPPER = Target("cuda", frozenset({"nvidia", "sm_90", "gluon"}))

GATE = """\
def f(h: bf16[T, 128]):
    m = gated_linear(h, W("gate_up", bf16[256, 128], fmt="fp8[1, *]"), kind="silu", act="fp8[1, *]")
    y = linear(m, W("down", bf16[128, 128], fmt="fp8[1, *]"), act="fp8[1, *]")
    return y"""

NORM = """\
def f(h: bf16[T, 128]):
    m = norm_linear(h, W("n", bf16[128]), W("gate_up", bf16[256, 128], fmt="fp8[1, *]"), eps=0.01, act="fp8[1, *]", \
kind="silu")
    y = linear(m, W("down", bf16[128, 128], fmt="fp8[128, 128]"), act="fp8[1, 128]")
    return y"""

SUM = """\
def f(h: bf16[T, 128]):
    m, s = add_norm_linear(h, h, W("n", bf16[128]), W("gate_up", bf16[256, 128], fmt="fp8[1, *]"), eps=0.01, \
act="fp8[1, *]", kind="silu")
    y = linear(m, W("down", bf16[128, 128], fmt="fp8[1, *]"), act="fp8[1, *]")
    z = add(y, s)
    return z"""

FOUR = GATE.replace('256, 128], fmt="fp8[1, *]"', '256, 128], fmt="mxfp4"').replace(
    '128, 128], fmt="fp8[1, *]"', '128, 128], fmt="int4[1, 128]"'
)

GIVEN = {  # by text: the end of its first call, and what that becomes
    GATE: ('kind="silu", act="fp8[1, *]")', 'kind="silu", act="fp8[1, *]", gives="fp8[1, *]")'),
    NORM: ('kind="silu")', 'kind="silu", gives="fp8[1, 128]")'),
    SUM: ('kind="silu")', 'kind="silu", gives="fp8[1, *]")'),
}


def selected(text: str, target: Target = HOPPER, *backends: str) -> Graph:
    return select_kernels(parse(text), context_of(target, *(backends or ("hopper", "triton", "reference"))))


def fused(text: str, target: Target = HOPPER, *backends: str) -> Graph:
    graph = selected(text, target, *backends)
    graph.num_rewrites = 0
    return fuse_gate_quant(graph, context_of(target, *(backends or ("hopper", "triton", "reference"))))


def assert_stays(text: str, target: Target = HOPPER, *backends: str) -> None:
    graph = fused(text, target, *backends)
    assert text_of(graph) == text_of(selected(text, target, *backends))
    assert graph.num_rewrites == 0


@pytest.mark.parametrize("backends", [("hopper", "triton", "reference"), ("triton", "reference")])
@pytest.mark.parametrize("text", GIVEN)
def test_the_text_before_becomes_the_text_after(text: str, backends: tuple[str, ...]):
    graph = fused(text, HOPPER, *backends)
    expected = text_of(selected(text, HOPPER, *backends)).replace(*GIVEN[text])
    assert text_of(graph) == expected
    assert graph.num_rewrites == 1
    verify(graph, ops.LOWERED)
    assert fuse_gate_quant(graph, context_of(HOPPER, *backends)).num_rewrites == 1, "a second run changes nothing"


def test_rows_for_weights_that_are_rounded_to_fp8_are_given_too():
    graph = fused(FOUR)
    assert text_of(graph) == text_of(selected(FOUR)).replace(*GIVEN[GATE]) and graph.num_rewrites == 1


@pytest.mark.parametrize("text", GIVEN)
def test_the_numbers_stay(text: str):
    def weight(recipe: Recipe) -> torch.Tensor | PackedWeight:
        if isinstance(recipe, Shuffle):
            recipe = recipe.part
        assert isinstance(recipe, W)
        plain = random_weight(recipe)
        fmt = recipe.type.fmt
        return plain if fmt is None else PackedWeight(recipe.type, quantize(fmt, plain.float()))

    inputs = {"h": torch.randn(5, 128, dtype=torch.bfloat16)}
    after, before = (interpret(graph, "f", inputs, weight) for graph in (fused(text), parse(text)))
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    "text",
    [
        GATE.replace("return y", "return y, m"),
        GATE.replace("return y", "z = add(y, m)\n    return z"),
        GATE.replace(', act="fp8[1, *]")\n    return', ")\n    return"),  # multiplied in bf16
        GATE.replace('kind="silu", act="fp8[1, *]"', 'kind="silu"'),
        GATE.replace("linear(m,", "norm_linear(m, W('n', bf16[128]),").replace(
            'act="fp8[1, *]")\n    r', "eps=1.0)\n    r"
        ),
        GATE.replace("fp8[1, *]", "int8[1, *]"),
        GATE.replace(
            '256, 128], fmt="fp8[1, *]"', '256, 128], fmt="mxfp4"'
        ),  # whose columns have an order of their own
        GATE.replace('W("down", bf16[128, 128]', 'W("down", bf16[24, 128]'),  # which has no such layout
        GATE.replace('kind="silu", ', "").replace("gated_linear", "linear").replace("256, 128", "128, 128"),
    ],
)
def test_it_declines(text: str):
    assert_stays(text)


def test_other_gpus_decline():
    assert_stays(
        GATE.replace("fp8[1, *]", "int8[1, *]"), Target("cuda", frozenset({"nvidia", "sm_80"})), "triton", "reference"
    )
    assert_stays(
        GATE.replace(', act="fp8[1, *]"', ""), Target("cuda", frozenset({"amd", "gfx942"})), "triton", "reference"
    )


@pytest.mark.parametrize(
    "text",
    [
        GATE.replace('kind="silu"', 'kind="silu", gives="fp8[1, *]"').replace(
            "return y", "z = add(y, m)\n    return z"
        ),
        GATE.replace('kind="silu"', 'kind="silu", gives="fp8[1, 128]"'),
    ],
)
def test_rows_that_another_op_reads_are_refused(text: str):
    with pytest.raises(PassError, match="gives rows in fp8"):
        verify(parse(text), ops.LOWERED)


def test_a_linear_without_gates_gives_no_such_rows():
    with pytest.raises(ConfigError, match="after gates only"):
        parse(NORM.replace('kind="silu"', 'gives="fp8[1, *]"'))

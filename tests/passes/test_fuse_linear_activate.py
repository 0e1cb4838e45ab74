"""A tower's linear and the activation after it become one call, if a kernel computes both."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, random_weight, text_of

from atom.graph import Graph, interpret, parse
from atom.kernels import Target
from atom.passes.fuse_linear_activate import fuse_linear_activate

GPU, BACKENDS = Target("cuda", frozenset({"nvidia", "sm_90"})), ("triton", "reference")

BEFORE = """\
def vision(h: bf16[M, 8]):
    up = linear(h, W("up", bf16[12, 8]), W("up.b", bf16[12]))
    a = activate(up, kind="gelu_tanh")
    return a"""

AFTER = """\
def vision(h: bf16[M, 8]):
    a = linear_activate(h, W("up", bf16[12, 8]), W("up.b", bf16[12]), kind="gelu_tanh")
    return a"""


def fused(text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> Graph:
    return fuse_linear_activate(parse(text), context_of(target, *backends))


def test_the_text_before_becomes_the_text_after_and_the_numbers_stay():
    graph = fused(BEFORE)
    assert (text_of(graph).strip(), graph.num_rewrites) == (AFTER, 1)
    x = torch.randn(5, 8).bfloat16()
    before, after = (interpret(parse(text), "vision", {"h": x}, random_weight) for text in (BEFORE, AFTER))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    ("changed", "into"),
    [
        ("def vision", "def body"),  # of few rows
        ("gelu_tanh", "gelu"),
        ("gelu_tanh", "quick_gelu"),
        ("bf16", "fp32"),
        (', W("up.b", bf16[12])', ""),
        ('W("up", bf16[12, 8])', 'W("up", bf16[12, 8], fmt="int8z")'),
        ("[12]))", "[12]), act=\"fp8[1, *]\")"),
        ("return a", "return a, up"),
        ("return a", "b = add(a, up)\n    return b"),
        ("linear(h, W(\"up\", bf16[12, 8]), W(\"up.b\", bf16[12]))", "add(h, h)"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_or_another_reads_stays(changed: str, into: str):
    text = BEFORE.replace(changed, into)
    assert text != BEFORE
    graph = fused(text)
    assert (text_of(graph), graph.num_rewrites) == (text_of(parse(text)), 0)


def test_targets_without_the_kernel_keep_the_two():
    for target, backends in (
        (GPU, ("reference",)),
        (Target("cuda", frozenset({"amd", "gfx942"})), BACKENDS),
        (Target("cpu"), ("inductor", "cpp", "torch", "reference")),
    ):
        assert fused(BEFORE, target, backends).num_rewrites == 0

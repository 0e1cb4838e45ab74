"""The expert that all tokens share as some of the experts, where a kernel computes them in one call."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, run, text_of

from atom.graph import Graph, parse
from atom.graph.mesh import Mesh
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.fuse_shared_experts import fuse_shared_experts

GPU = context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference")

BEFORE = """\
def f(h: fp32[T, 8]):
    weights, ids = router(h, W("gate", fp32[4, 8]), None, None, top_k=2)
    y = experts(h, weights, ids, W("gate_up", fp32[4, 6, 8]), W("down", fp32[4, 8, 3]), kind="silu")
    gate_up = linear(h, cat([W("g", fp32[6, 8]), W("u", fp32[6, 8])]))
    m = gated_activate(gate_up, kind="silu")
    down = linear(m, W("d", fp32[8, 6]))
    y_1 = add(y, down)
    return y_1"""

GATE_UPS = [
    f'stack(cat([slice(W("g", fp32[6, 8]), {at}), slice(W("u", fp32[6, 8]), {at})]), 0, 1)' for at in ("0, 3", "3, 6")
]
DOWNS = [f'stack(slice(W("d", fp32[8, 6]), {at}, dim=1), 0, 1)' for at in ("0, 3", "3, 6")]
AFTER = f"""\
def f(h: fp32[T, 8]):
    weights, ids = router(h, W("gate", fp32[4, 8]), None, None, top_k=2, shared=2)
    y = experts(h, weights, ids, cat([W("gate_up", fp32[4, 6, 8]), {", ".join(GATE_UPS)}]), \
cat([W("down", fp32[4, 8, 3]), {", ".join(DOWNS)}]), kind="silu")
    return y"""


def assert_stays(text: str, context: PassContext = GPU) -> None:
    graph = fuse_shared_experts(parse(text), context)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


def fused() -> Graph:
    return fuse_shared_experts(parse(BEFORE), GPU)


def test_a_shared_expert_becomes_two_of_the_experts():
    text = text_of(fused()).strip()
    names = {"weights_1": "weights", "ids_1": "ids", "y_1": "y"}
    for name, plain in names.items():
        text = text.replace(name, plain)
    assert text == AFTER
    assert_stays(AFTER)


def test_a_sum_the_other_way_round_is_one_too():
    assert "shared=2" in text_of(fuse_shared_experts(parse(BEFORE.replace("add(y, down)", "add(down, y)")), GPU))


def test_numbers_are_equal():
    h = torch.randn(9, 8)
    torch.testing.assert_close(run(text_of(fused()), h=h), run(BEFORE, h=h))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("linear(m, ", "linear(h, "),
        ('W("d", fp32[8, 6])', 'W("d", fp32[8, 6], fmt="fp8[1, *]")'),
        ('W("d", fp32[8, 6])', 'W("d", fp32[8, 6]), W("b", fp32[8])'),
        ("gated_activate(gate_up, kind=\"silu\")", "gated_activate(gate_up, kind=\"gelu\")"),
        ("return y_1", "return y_1, down"),
        ("return y_1", "return y_1, y"),
        ("[4, 6, 8]", "[4, 8, 8]"),
    ],
)  # fmt: skip
def test_another_form_stays(old: str, new: str):
    text = BEFORE.replace(old, new)
    if new == "linear(h, ":
        text = text.replace("fp32[8, 6]))", "fp32[8, 8]))")
    if new == "[4, 8, 8]":
        text = text.replace("[4, 8, 3]", "[4, 8, 4]")
    assert_stays(text)


def test_among_ranks_and_without_such_a_kernel_it_stays():
    assert_stays(BEFORE, PassContext(GPU.target, GPU.backends, Mesh(tensor=2)))
    assert_stays(BEFORE, context_of(Target("cpu"), "torch", "reference"))

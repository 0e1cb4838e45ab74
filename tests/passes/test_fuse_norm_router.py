"""The norm that a router takes in, where a kernel computes both."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, run, text_of

from atom.graph import parse
from atom.kernels import Target
from atom.passes.fuse_norm_router import fuse_norm_router

CPU = context_of(Target("cpu"), "torch", "reference")
GPU = context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference")

BEFORE = """\
def f(x: fp32[T, 8], r: fp32[T, 8]):
    h, s = add_rms_norm(x, r, W("w", fp32[8]), eps=1e-06)
    weights, ids = router(h, W("gate", fp32[4, 8]), W("b", fp32[4]), None, top_k=2, renormalize=True)
    y = experts(h, weights, ids, W("gate_up", fp32[4, 12, 8]), W("down", fp32[4, 8, 6]), kind="silu")
    z = add(y, s)
    return z"""

AFTER = """\
def f(x: fp32[T, 8], r: fp32[T, 8]):
    weights, ids, h, s = add_norm_router(x, r, W("w", fp32[8]), W("gate", fp32[4, 8]), W("b", fp32[4]), None, \
eps=1e-06, top_k=2, renormalize=True)
    y = experts(h, weights, ids, W("gate_up", fp32[4, 12, 8]), W("down", fp32[4, 8, 6]), kind="silu")
    z = add(y, s)
    return z"""


def test_a_router_takes_the_norm_before_it():
    graph = fuse_norm_router(parse(BEFORE), GPU)
    assert text_of(graph).strip() == AFTER
    assert graph.num_rewrites == 1


@pytest.mark.parametrize(
    "text",
    [
        AFTER,
        BEFORE.replace("router(h,", "router(s,"),
        BEFORE.replace('h, s = add_rms_norm(x, r, W("w", fp32[8]), eps=1e-06)', 's = add(x, r)\n    h = rms_norm(s, W("w", fp32[8]), eps=1e-06)'),
    ],
    ids=["fused", "the sum", "a norm of no sum"],
)  # fmt: skip
def test_others_stay(text: str):
    graph = fuse_norm_router(parse(text), GPU)
    assert text_of(graph) == text_of(parse(text)) and graph.num_rewrites == 0


def test_it_stays_where_no_kernel_computes_both():
    assert fuse_norm_router(parse(BEFORE), CPU).num_rewrites == 0


def test_numbers_are_equal():
    inputs = {"x": torch.randn(9, 8), "r": torch.randn(9, 8)}
    fused = text_of(fuse_norm_router(parse(BEFORE), GPU))
    torch.testing.assert_close(run(fused, **inputs), run(BEFORE, **inputs))

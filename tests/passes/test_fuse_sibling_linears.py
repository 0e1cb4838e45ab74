"""Linears of one input become one, if a kernel multiplies by the joined weight."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, run, text_of

from atom.graph import parse
from atom.kernels import Target
from atom.passes.fuse_sibling_linears import fuse_sibling_linears

CONTEXT = context_of(Target("cuda", frozenset({"nvidia", "sm_80"})), "triton", "reference")

DELTA = """\
def f(h: bf16[T, 64]):
    qkv = linear(h, W("l.qkv", bf16[48, 64]))
    z = linear(h, W("l.z", bf16[24, 64]))
    beta = linear(h, W("l.beta", bf16[3, 64]))
    a = linear(h, W("l.a", bf16[3, 64]))
    x = add(qkv, qkv)
    y = activate(z, kind="silu")
    s = activate(beta, kind="sigmoid")
    t = add(s, a)
    return x, y, t"""

DELTA_FUSED = """\
def f(h: bf16[T, 64]):
    qkv_z = linear(h, cat([W("l.qkv", bf16[48, 64]), W("l.z", bf16[24, 64])]))
    qkv, z = split(qkv_z, sizes=[48, 24])
    beta_a = linear(h, cat([W("l.beta", bf16[3, 64]), W("l.a", bf16[3, 64])]))
    beta, a = split(beta_a, sizes=[3, 3])
    x = add(qkv, qkv)
    y = activate(z, kind="silu")
    s = activate(beta, kind="sigmoid")
    t = add(s, a)
    return x, y, t"""

PAIR = """\
def f(h: bf16[T, 256]):
    q = linear(h, {q})
    k = linear(h, {k})
    y = add(q, k)
    return y"""

PAIR_FUSED = """\
def f(h: bf16[T, 256]):
    q_k = linear(h, cat([{q}, {k}]))
    q, k = split(q_k, sizes=[128, 128])
    y = add(q, k)
    return y"""

LAYERS = """\
def f(q: bf16[T, 128], h: bf16[T, 256]):
    k = linear(h, {k})
    v = linear(h, {v})
    k_1 = split_heads(k, heads=2)
    v_1 = split_heads(v, heads=2)
    q_1 = split_heads(q, heads=2)
    a = attention(q_1, k_1, k_1, KV("l", bf16[2, 2, 64]), scale=1.0)
    b = attention(q_1, v_1, v_1, KV("m", bf16[2, 2, 64]), scale=1.0)
    return a, b"""


def weight(name: str, fmt: str | None = None) -> str:
    return f'W("{name}", bf16[128, 256]{"" if fmt is None else f", fmt={fmt!r}"})'.replace("'", '"')


def test_all_that_read_one_tensor_become_one_with_those_of_other_alignment_apart():
    graph = fuse_sibling_linears(parse(DELTA), CONTEXT)
    assert text_of(graph).strip() == DELTA_FUSED
    assert graph.num_rewrites == 2
    again = fuse_sibling_linears(parse(DELTA_FUSED), CONTEXT)
    assert text_of(again).strip() == DELTA_FUSED and again.num_rewrites == 0


def test_the_numbers_stay():
    h = torch.randn(5, 64).bfloat16()
    for fused, separate in zip(run(DELTA_FUSED, h=h), run(DELTA, h=h), strict=True):
        torch.testing.assert_close(fused, separate)


@pytest.mark.parametrize("fmt", [None, "fp8[1, *]", "fp8[128, 128]", "int8", "q4_0", "mxfp4"])
def test_weights_that_are_stored_alike_are_joined(fmt: str | None):
    q, k = weight("q", fmt), weight("k", fmt)
    assert text_of(fuse_sibling_linears(parse(PAIR.format(q=q, k=k)), CONTEXT)).strip() == PAIR_FUSED.format(q=q, k=k)


@pytest.mark.parametrize(
    "text",
    [
        PAIR.format(q=weight("q"), k=weight("k", "fp8")),
        PAIR.format(q=weight("q"), k=f'{weight("k")}, W("b", bf16[128])'),
        PAIR.format(q=weight("q"), k=f'{weight("k")}, act="fp8[1, *]"'),
        PAIR.format(q=weight("q"), k=weight("k")).replace("k = linear(h", "g = add(h, h)\n    k = linear(g"),
        PAIR.format(q=weight("q", "gptq_int4_ordered"), k=weight("k", "gptq_int4_ordered")),  # each has its own order
        PAIR.format(q=weight("q", "fp8[96, 128]"), k=weight("k", "fp8[96, 128]")),  # rows end within a block
        LAYERS.format(k=weight("l.k"), v=weight("m.k")),  # of two layers
        # k has another reader, and would be kept twice
        PAIR.format(q=weight("q"), k=weight("k"))
        .replace("y = add", f"o = linear(g, {weight('k')})\n    y = add")
        .replace("f(", "f(g: bf16[T, 256], ")
        .replace("return y", "return y, o"),
        # its activation is fused with it
        PAIR.format(q=weight("q"), k=weight("k"))
        .replace("y = add(q, k)", 'g = gated_activate(k, kind="silu")\n    x = add(q, q)')
        .replace("return y", "return x, g"),
    ],
)
def test_it_declines(text: str):
    graph = parse(text)
    before = text_of(graph)
    assert text_of(fuse_sibling_linears(graph, CONTEXT)) == before
    assert graph.num_rewrites == 0


def test_linears_of_one_layer_are_joined_next_to_those_of_another():
    graph = fuse_sibling_linears(parse(LAYERS.format(k=weight("l.k"), v=weight("l.v"))), CONTEXT)
    assert "k, v = split(k_v, sizes=[128, 128])" in text_of(graph)


def test_it_declines_if_a_kernel_takes_only_one_of_the_parts():
    """Activations in fp8 are multiplied by multiples of 16 rows."""
    text = """\
def f(h: bf16[T, 256]):
    q = linear(h, W("q", bf16[128, 256], fmt="fp8[1, *]"), act="fp8[1, *]")
    k = linear(h, W("k", bf16[{rows}, 256], fmt="fp8[1, *]"), act="fp8[1, *]")
    return q, k"""
    context = context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference")
    joined = {rows: "q_k" in text_of(fuse_sibling_linears(parse(text.format(rows=rows)), context)) for rows in (24, 32)}
    assert joined == {24: False, 32: True}

"""Each fusion: the text before and after, what it leaves unchanged, and equal numbers on the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passes.cases import run, text_of

from atom.graph import Graph, parse
from atom.passes.fuse_gate_up import fuse_gate_up
from atom.passes.fuse_norm_residual import fuse_norm_residual
from atom.passes.fuse_qkv import fuse_qkv

QKV = """\
def f(h: fp32[T, 8]):
    q = linear(h, W("q", fp32[8, 8]))
    k = linear(h, W("k", fp32[4, 8]))
    v = linear(h, W("v", fp32[4, 8]))
    q_1 = split_heads(q, heads=2)
    k_1 = split_heads(k, heads=1)
    v_1 = split_heads(v, heads=1)
    q_2 = rms_norm(q_1, W("q_norm", fp32[4]), eps=1e-06)
    a = attention(q_2, k_1, v_1, KV("0", fp32[2, 1, 4]), scale=0.5)
    return a"""

QKV_FUSED = """\
def f(h: fp32[T, 8]):
    qkv = linear(h, cat([W("q", fp32[8, 8]), W("k", fp32[4, 8]), W("v", fp32[4, 8])]))
    q, k, v = split(qkv, sizes=[8, 4, 4])
    q_1 = split_heads(q, heads=2)
    k_1 = split_heads(k, heads=1)
    v_1 = split_heads(v, heads=1)
    q_2 = rms_norm(q_1, W("q_norm", fp32[4]), eps=1e-06)
    a = attention(q_2, k_1, v_1, KV("0", fp32[2, 1, 4]), scale=0.5)
    return a"""

NARROW, NARROW_FUSED = (  # values of fewer dims than keys
    text.replace('W("v", fp32[4, 8])', 'W("v", fp32[3, 8])')
    .replace("sizes=[8, 4, 4]", "sizes=[8, 4, 3]")
    .replace(
        "    v_1 = split_heads(v, heads=1)",
        "    v_1 = scale(v, by=0.5)\n    v_2 = split_heads(v_1, heads=1)\n    v_3 = pad(v_2, size=4)",
    )
    .replace("k_1, v_1,", "k_1, v_3,")
    for text in (QKV, QKV_FUSED)
)

LATENT = """\
def f(h: fp32[T, 8]):
    g = add(h, h)
    q_a = linear(h, W("q_a", fp32[6, 8]))
    low = rms_norm(q_a, W("q_a_norm", fp32[6]), eps=1e-06)
    q_b = linear(low, W("q_b", fp32[10, 6]))
    q_1 = split_heads(q_b, heads=2)
    q_2, q_rope = split(q_1, sizes=[3, 2])
    kv_a = linear(h, W("kv_a", fp32[6, 8]))
    latent, k_rope = split(kv_a, sizes=[4, 2])
    k_rope_1 = split_heads(k_rope, heads=1)
    index_k = linear(h, W("index_k", fp32[4, 8]))
    index_k_1 = layer_norm(index_k, W("k_norm", fp32[4]), W("k_norm.bias", fp32[4]), eps=1e-06)
    index_k_2 = split_heads(index_k_1, heads=1)
    index_k_3 = merge_heads(index_k_2)
    index_q = linear(low, W("index_q", fp32[12, 6]))
    index_q_1 = split_heads(index_q, heads=3)
    weights = linear(h, W("weights", fp32[3, 8]))
    selected = index_topk(index_q_1, index_k_3, weights, KV("0", fp32[4], part="index"), top_k=2)
    a = mla_attention(q_2, q_rope, latent, k_rope_1, W("kv_b", fp32[12, 4]), KV("0", fp32[6]), None, selected, scale=0.5)
    return a"""

LATENT_FUSED = (
    LATENT.replace(
        '    q_a = linear(h, W("q_a", fp32[6, 8]))',
        '    qkv_a = linear(h, cat([W("q_a", fp32[6, 8]), W("kv_a", fp32[6, 8]), W("index_k", fp32[4, 8])]))\n'
        "    q_a, kv_a, index_k = split(qkv_a, sizes=[6, 6, 4])",
    )
    .replace('    kv_a = linear(h, W("kv_a", fp32[6, 8]))\n', "")
    .replace('    index_k = linear(h, W("index_k", fp32[4, 8]))\n', "")
)
# of another layer's indexer, or stored otherwise
LATENT_ELSEWHERE, LATENT_ELSEWHERE_FUSED = (
    LATENT.replace('(h, W("index_k"', '(g, W("index_k"'),
    LATENT.replace('(h, W("index_k"', '(g, W("index_k"')
    .replace(
        '    q_a = linear(h, W("q_a", fp32[6, 8]))',
        '    qkv_a = linear(h, cat([W("q_a", fp32[6, 8]), W("kv_a", fp32[6, 8])]))\n'
        "    q_a, kv_a = split(qkv_a, sizes=[6, 6])",
    )
    .replace('    kv_a = linear(h, W("kv_a", fp32[6, 8]))\n', ""),
)

GATE_UP = """\
def f(h: fp32[T, 8]):
    gate = linear(h, W("g", fp32[6, 8]), W("g.b", fp32[6]))
    up = linear(h, W("u", fp32[6, 8]), W("u.b", fp32[6]))
    active = activate(gate, kind="silu")
    m = mul(active, up)
    return m"""

GATE_UP_FUSED = """\
def f(h: fp32[T, 8]):
    gate_up = linear(h, cat([W("g", fp32[6, 8]), W("u", fp32[6, 8])]), cat([W("g.b", fp32[6]), W("u.b", fp32[6])]))
    m = gated_activate(gate_up, kind="silu")
    return m"""

CLAMPED = (
    GATE_UP.split("    active")[0]
    + """\
    gate_up = join(gate, up)
    m = gated_activate(gate_up, kind="silu", limit=0.5)
    return m"""
)

CLAMPED_FUSED = GATE_UP_FUSED.replace('"silu"', '"silu", limit=0.5')

NORM = """\
def f(h: fp32[T, 8]):
    x = add(h, h)
    n = rms_norm(x, W("w", fp32[8]), eps=1e-06)
    y = add(n, x)
    return y"""

NORM_FUSED = """\
def f(h: fp32[T, 8]):
    n, x = add_rms_norm(h, h, W("w", fp32[8]), eps=1e-06)
    y = add(n, x)
    return y"""

CASES = [
    (fuse_qkv, QKV, QKV_FUSED),
    (fuse_qkv, NARROW, NARROW_FUSED),
    (fuse_qkv, LATENT, LATENT_FUSED),
    (fuse_qkv, LATENT_ELSEWHERE, LATENT_ELSEWHERE_FUSED),
    (fuse_gate_up, GATE_UP, GATE_UP_FUSED),
    (fuse_gate_up, CLAMPED, CLAMPED_FUSED),
    (fuse_norm_residual, NORM, NORM_FUSED),
]


@pytest.mark.parametrize(("fuse", "before", "after"), CASES)
def test_the_text_before_becomes_the_text_after(fuse: Callable[[Graph], Graph], before: str, after: str):
    graph = fuse(parse(before))
    assert text_of(graph).strip() == after
    assert graph.num_rewrites == 1


@pytest.mark.parametrize(("fuse", "before", "after"), CASES)
def test_the_numbers_stay(fuse: Callable[[Graph], Graph], before: str, after: str):
    h = torch.randn(5, 8)
    torch.testing.assert_close(run(after, h=h), run(before, h=h))


@pytest.mark.parametrize(("fuse", "before", "after"), CASES)
def test_a_second_run_changes_nothing(fuse: Callable[[Graph], Graph], before: str, after: str):
    graph = fuse(parse(after))
    assert text_of(graph).strip() == after
    assert graph.num_rewrites == 0


@pytest.mark.parametrize(
    ("fuse", "text"),
    [
        (fuse_qkv, QKV.replace("k = linear(h, ", "g = add(h, h)\n    k = linear(g, ")),  # not the same input
        (fuse_qkv, QKV.replace('W("k", fp32[4, 8])', 'W("k", fp32[4, 8]), W("k.b", fp32[4])')),  # one bias
        (fuse_qkv, QKV.replace('W("v", fp32[4, 8])', 'W("v", fp32[4, 8], fmt="int8")')),  # another stored format
        (fuse_gate_up, GATE_UP.replace("up = linear(h, ", "g = add(h, h)\n    up = linear(g, ")),
        (fuse_gate_up, GATE_UP.replace(', W("u.b", fp32[6])', "")),
        (fuse_gate_up, GATE_UP.replace('W("u", fp32[6, 8])', 'W("u", fp32[6, 8], fmt="int8")')),
        (fuse_gate_up, GATE_UP.replace("mul(active, up)", "mul(active, active)")),
        (fuse_gate_up, GATE_UP.replace("mul(active, up)", "mul(gate, up)")),
        (fuse_gate_up, CLAMPED.replace(', W("u.b", fp32[6])', "")),
        (fuse_norm_residual, NORM.replace("x = add(", "x = mul(")),
        (fuse_norm_residual, NORM.replace("x = add(h, h)", 'x = add(h, W("b", fp32[8]))')),  # a vector for all rows
    ],
)
def test_it_declines(fuse: Callable[[Graph], Graph], text: str):
    before = parse(text)
    expected = text_of(before)
    graph = fuse(before)
    assert text_of(graph) == expected
    assert graph.num_rewrites == 0


def test_a_layer_that_reads_latents_of_another_fuses_only_its_own():
    text = """\
def f(h: fp32[T, 8]):
    q = linear(h, W("q", fp32[10, 8]))
    q_1 = split_heads(q, heads=2)
    q_2, q_rope = split(q_1, sizes=[3, 2])
    kv_a = linear(h, W("kv_a", fp32[6, 8]))
    latent, k_rope = split(kv_a, sizes=[4, 2])
    k_rope_1 = split_heads(k_rope, heads=1)
    a = mla_attention(q_2, q_rope, latent, k_rope_1, W("kv_b", fp32[12, 4]), KV("0", fp32[6]), scale=0.5)
    g = merge_heads(a)
    g_1 = linear(g, W("o", fp32[8, 6]))
    r = linear(g_1, W("r", fp32[10, 8]))
    r_1 = split_heads(r, heads=2)
    r_2, r_rope = split(r_1, sizes=[3, 2])
    index_k = linear(g_1, W("index_k", fp32[4, 8]))
    index_q = linear(g_1, W("index_q", fp32[12, 8]))
    index_q_1 = split_heads(index_q, heads=3)
    weights = linear(g_1, W("weights", fp32[3, 8]))
    selected = index_topk(index_q_1, index_k, weights, KV("1", fp32[4], part="index"), top_k=2)
    b = mla_attention(r_2, r_rope, latent, k_rope_1, W("kv_b_1", fp32[12, 4]), KV("0", fp32[6]), None, selected, scale=0.5)
    return b"""
    graph = fuse_qkv(parse(text))
    first, second = (line.strip() for line in text_of(graph).splitlines() if "qkv_a" in line and "linear" in line)
    assert first == 'qkv_a = linear(h, cat([W("q", fp32[10, 8]), W("kv_a", fp32[6, 8])]))'
    assert second == 'qkv_a_1 = linear(g_1, cat([W("r", fp32[10, 8]), W("index_k", fp32[4, 8])]))'
    h = torch.randn(5, 8)
    torch.testing.assert_close(run(text_of(graph), h=h), run(text, h=h))


def test_keys_that_are_values_too_are_computed_once():
    text = QKV.replace('    v = linear(h, W("v", fp32[4, 8]))\n', "").replace("split_heads(v,", "split_heads(k,")
    fused = text_of(fuse_qkv(parse(text)))
    assert (
        'qkv = linear(h, cat([W("q", fp32[8, 8]), W("k", fp32[4, 8])]))\n    q, k = split(qkv, sizes=[8, 4])' in fused
    )
    assert "k_1 = split_heads(k, heads=1)\n    v_1 = split_heads(k, heads=1)" in fused


def test_a_gate_that_is_read_elsewhere_stays_for_its_reader():
    graph = fuse_gate_up(parse(GATE_UP.replace("return m", "n = mul(m, gate)\n    return n")))
    assert 'gate = linear(h, W("g", fp32[6, 8]), W("g.b", fp32[6]))' in text_of(graph)


def test_the_sum_before_a_norm_keeps_its_other_readers_in_order():
    text = NORM.replace("    n =", "    z = mul(x, h)\n    n =")
    fused = text_of(fuse_norm_residual(parse(text)))
    h = torch.randn(3, 8)
    torch.testing.assert_close(run(fused, h=h), run(text, h=h))

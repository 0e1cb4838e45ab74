from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, run, text_of

from atom.graph import ops, parse
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.lower_moe import lower_moe

BEFORE = """\
def f(h: fp32[T, 8], weights: fp32[T, 2], ids: i64[T, 2]):
    y = experts(h, weights, ids, W("gate_up", fp32[4, 12, 8]), W("down", fp32[4, 8, 6]), kind="silu")
    return y"""

AFTER = """\
def f(h: fp32[T, 8], weights: fp32[T, 2], ids: i64[T, 2]):
    grouped, order, ends = group(h, ids, experts=4)
    gate_up = grouped_linear(grouped, W("gate_up", fp32[4, 12, 8]), ends, None)
    m = gated_activate(gate_up, kind="silu")
    down = grouped_linear(m, W("down", fp32[4, 8, 6]), ends, None)
    y = combine(down, weights, order)
    return y"""

CLAMPED = BEFORE.replace(
    'W("down", fp32[4, 8, 6]), kind="silu"',
    'W("down", fp32[4, 8, 6]), W("b1", fp32[4, 12]), W("b2", fp32[4, 8]), kind="swigluoai", limit=1.5, alpha=1.7',
)


CPU = context_of(Target("cpu"), "torch", "reference")
GPU = context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference")


PLAIN = BEFORE.replace("experts(", "plain_experts(").replace('W("gate_up", fp32[4, 12, 8])', 'W("up", fp32[4, 6, 8])')
PLAIN = PLAIN.replace("silu", "relu2")


def test_plain_experts_have_no_gate():
    after = AFTER.replace(
        'gate_up = grouped_linear(grouped, W("gate_up", fp32[4, 12, 8])',
        'up = grouped_linear(grouped, W("up", fp32[4, 6, 8])',
    )
    after = after.replace('gated_activate(gate_up, kind="silu")', 'activate(up, kind="relu2")').replace(", None)", ")")
    for context in (CPU, GPU):
        assert text_of(lower_moe(parse(PLAIN), context)).strip() == after


def test_experts_become_group_linears_combine():
    assert text_of(lower_moe(parse(BEFORE), CPU)).strip() == AFTER


def test_biases_and_the_clamp_go_along():
    lowered = text_of(lower_moe(parse(CLAMPED), CPU))
    assert 'grouped_linear(grouped, W("gate_up", fp32[4, 12, 8]), ends, W("b1", fp32[4, 12]))' in lowered
    assert 'gated_activate(gate_up, kind="swigluoai", limit=1.5, alpha=1.7)' in lowered
    assert 'grouped_linear(m, W("down", fp32[4, 8, 6]), ends, W("b2", fp32[4, 8]))' in lowered


BLOCKS = """\
def f(h: bf16[T, 256], weights: fp32[T, 2], ids: i64[T, 2]):
    y = experts(h, weights, ids, W("gate_up", bf16[4, 256, 256], fmt="fp8[128, 128]"), W("down", bf16[4, 256, 128], fmt="fp8[128, 128]"), kind="silu", act="fp8[1, 128]")
    return y"""  # fmt: skip
HOPPER = context_of(Target("cuda", frozenset({"nvidia", "sm_90", "gluon"})), "hopper", "triton", "reference")


def test_where_a_kernel_computes_all_of_it_experts_stay():
    packed = BEFORE.replace("fp32[4, 12, 8]", 'fp32[4, 12, 8], fmt="fp8[1, *]"')
    for text in (CLAMPED, packed):
        assert text_of(lower_moe(parse(text), GPU)) == text_of(parse(text))


def test_those_of_a_rank_stay_too():
    head = "ids: i64[T, 2])", "ids: i64[T, 2], first: i64[1])"
    text = BEFORE.replace(*head).replace('kind="silu"', 'None, None, first, kind="silu"')
    assert "experts(" in text_of(lower_moe(parse(text), GPU))


def test_activations_keep_their_format_where_a_kernel_multiplies_it():
    assert text_of(lower_moe(parse(BLOCKS), HOPPER)).strip() == BLOCKS


@pytest.mark.parametrize("context", [GPU, CPU])
def test_elsewhere_activations_stay_in_their_dtype(context: PassContext):
    graph = lower_moe(parse(BLOCKS), context)
    assert "act=" not in text_of(graph)
    assert ("experts(" in text_of(graph)) == (context is GPU)


@pytest.mark.parametrize(
    ("of", "by", "reason"),
    [
        ('"silu"', '"gelu"', "has no biases and no gelu gate with activations in fp8[1, 128]"),
        ('"silu"', '"silu", limit=7.0', "has no biases and no silu gate with a limit with activations in fp8[1, 128]"),
        ('[128, 128]"), kind', '[64, 128]"), kind', "activations in fp8[1, 128] are not multiplied by"),
        ('[128, 128]"), kind', '[1, *]"), kind', "activations in fp8[1, 128] are not multiplied by"),
    ],
)
def test_what_the_kernel_lacks_leaves_activations_in_their_dtype(of: str, by: str, reason: str):
    graph = parse(BLOCKS.replace(of, by))
    (experts,) = graph.find(ops.experts)
    lower_moe(graph, HOPPER)
    assert "act=" not in text_of(graph) and "experts(" in text_of(graph)
    assert any(f"hopper: {reason}" in each for each in experts.meta["refused"]), experts.meta["refused"]


def test_a_graph_without_experts_is_left_as_it_is():
    graph = lower_moe(parse("def f(x: fp32[T, 8]):\n    y = add(x, x)\n    return y\n"), CPU)
    assert graph.num_rewrites == 0


def test_numbers_are_equal():
    inputs = {
        "h": torch.randn(9, 8),
        "weights": torch.rand(9, 2),
        "ids": torch.stack([torch.randperm(4)[:2] for _ in range(9)]),
    }
    for text in (BEFORE, CLAMPED, PLAIN):
        lowered = text_of(lower_moe(parse(text), CPU))
        torch.testing.assert_close(run(lowered, **inputs), run(text, **inputs))

"""Packed weights that no kernel takes become plain ones: the text before and after, and what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from passes.cases import context_of, text_of

from atom.graph import Graph, Type, ops, parse
from atom.kernels import Backend, Kernel, Target
from atom.passes.context import PassContext
from atom.passes.quantize import quantize
from atom.passes.select_kernels import select_kernels

GPU = Target("cuda", frozenset({"nvidia", "sm_90"}))
CPU = Target("cpu", frozenset({"onednn_fp32"}))
CONTEXT = context_of(CPU, "torch", "reference")

BEFORE = """\
def f(x: fp32[T, 32], ends: i64[4]):
    q = linear(x, cat([W("q", fp32[8, 32], fmt="mxfp4"), W("k", fp32[4, 32], fmt="mxfp4")]), W("b", fp32[12]))
    y = grouped_linear(x, stack(W("e.{expert}", fp32[8, 32], fmt="mxfp4"), 0, 4), ends)
    return q, y"""

AFTER = """\
def f(x: fp32[T, 32], ends: i64[4]):
    q = linear(x, dequantize(cat([W("q", fp32[8, 32], fmt="mxfp4"), W("k", fp32[4, 32], fmt="mxfp4")])), W("b", fp32[12]))
    y = grouped_linear(x, dequantize(stack(W("e.{expert}", fp32[8, 32], fmt="mxfp4"), 0, 4)), ends)
    return q, y"""


def done(text: str, context: PassContext = CONTEXT) -> Graph:
    return quantize(parse(text), context)


def test_the_text_before_becomes_the_text_after():
    graph = done(BEFORE)
    assert text_of(graph).strip() == AFTER
    assert graph.num_rewrites == 2
    assert all(recipe.type.fmt is None for recipe in graph.recipes())


def test_a_second_run_changes_nothing():
    assert done(AFTER).num_rewrites == 0


@pytest.mark.parametrize(
    "text",
    [
        BEFORE.replace(', fmt="mxfp4"', ""),
        BEFORE.replace("mxfp4", "int8z[1, 32]"),  # only a name, of no tensors that are known
        'def f(x: fp32[T, 32], w: fp32[4, 32, "mxfp4"]):\n    y = linear(x, w)\n    return y',  # no recipe
    ],
)
def test_it_declines(text: str):
    graph = done(text)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


def test_what_a_kernel_takes_packed_stays_packed():
    def accepts(_target: Target, _x: Type, weight: Type, *_types: Type) -> str | None:
        return None if weight.fmt == "mxfp4" else "takes mxfp4"

    kernel = Kernel(ops.linear, "fast", accepts, lambda _: ops.linear.body)
    context = replace(CONTEXT, backends=(Backend("fast", (kernel,)), *CONTEXT.backends))
    graph = done(BEFORE, context)
    packed, plain = (node.args[1].type for node in graph.programs["f"].nodes)
    assert (packed.fmt, plain.fmt) == ("mxfp4", None)


def test_a_weight_that_one_of_its_readers_refuses_packed_is_plain_for_all():
    def accepts(_target: Target, _x: Type, weight: Type, *_types: Type) -> str | None:
        return None if weight.fmt == "mxfp4" else "takes mxfp4"

    kernel = Kernel(ops.linear, "fast", accepts, lambda _: ops.linear.body)
    context = replace(CONTEXT, backends=(Backend("fast", (kernel,)), *CONTEXT.backends))
    weight = 'W("e", fp32[8, 32], fmt="mxfp4")'
    text = f"def f(tokens: i64[T]):\n    x = embedding(tokens, {weight})\n    y = linear(x, {weight})\n    return y"
    assert text_of(done(text, context)).strip() == text.replace(weight, f"dequantize({weight})")
    single = f"def f(x: fp32[T, 32]):\n    y = linear(x, {weight})\n    return y"
    assert text_of(done(single, context)).strip() == single, "its only reader takes it"


@pytest.mark.parametrize(
    ("weight", "kept"),
    [
        ('W("e", bf16[4, 64, 96], fmt="mxfp4")', "mxfp4"),
        ('cat([slice(W("e", bf16[4, 64, 96], fmt="mxfp4"), 0, 64, dim=1, step=2), slice(W("e", bf16[4, 64, 96], fmt="mxfp4"), 1, 64, dim=1, step=2)], dim=1)', "mxfp4"),
        ('stack(cat([W("{expert}.gate", bf16[768, 256], fmt="fp8[128, 128]"), W("{expert}.up", bf16[768, 256], fmt="fp8[128, 128]")]), 0, 4)', "fp8[128, 128]"),
        ('stack(cat([W("{expert}.gate", bf16[192, 256], fmt="fp8[128, 128]"), W("{expert}.up", bf16[192, 256], fmt="fp8[128, 128]")]), 0, 4)', "fp8[64, 128]"),
        ('stack(cat([W("{expert}.gate", bf16[5, 256], fmt="ct_fp8"), W("{expert}.up", bf16[5, 256], fmt="ct_fp8")]), 0, 4)', "ct_fp8[1, *]"),
        ('stack(W("{expert}", bf16[8, 96], fmt="ct_packed_int4z[1, 32]"), 0, 4)', "ct_packed_int4z[1, 32]"),
        ('stack(cat([W("{expert}.gate", bf16[8, 96], fmt="modelopt_nvfp4"), W("{expert}.up", bf16[8, 96], fmt="modelopt_nvfp4")]), 0, 4)', "modelopt_nvfp4"),
        ('quantize(stack(W("{expert}", bf16[8, 96]), 0, 4), "int8[1, *]")', "int8[1, *]"),
    ],
)  # fmt: skip
def test_a_gpu_keeps_experts_packed(weight: str, kept: str):
    x = weight.rpartition("bf16")[2].partition("]")[0].rpartition(" ")[2]
    before = f"def f(x: bf16[T, {x}], ends: i64[4]):\n    y = grouped_linear(x, {weight}, ends)\n    return y\n"
    graph = done(before, PassContext.of(GPU, 1))
    (recipe,) = graph.recipes()
    assert recipe.type.fmt == kept
    (node,) = select_kernels(graph, PassContext.of(GPU, 1)).program("f").nodes
    assert node.meta["kernel"] == "triton"


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        ('W("e", bf16[4, 8, 96], fmt="int4[1, 48]")', "48 columns of its weight share a scale, no multiple of 32"),
        ('W("e", bf16[4, 8, 96], fmt="gptq_int4_ordered[1, 32]")', "the columns of its weight that share a scale are not neighbours"),
        ('transpose(W("e", bf16[4, 96, 32], fmt="mxfp4"))', "its weight is stored transposed, as mxfp4[32, 1]"),
    ],
)  # fmt: skip
def test_experts_that_a_gpus_kernel_cannot_unpack_are_unpacked_while_they_load(weight: str, reason: str):
    text = f"def f(x: bf16[T, 96], ends: i64[4]):\n    y = grouped_linear(x, {weight}, ends)\n    return y\n"
    (node,) = select_kernels(parse(text), PassContext.of(GPU, 1)).program("f").nodes
    assert f"triton: {reason}" in node.meta["notes"]
    (recipe,) = done(text, PassContext.of(GPU, 1)).recipes()
    assert recipe.type.fmt is None


def test_fp16_experts_of_fp4_are_unpacked_while_they_load():
    text = 'def f(x: fp16[T, 96], ends: i64[4]):\n    y = grouped_linear(x, W("e", fp16[4, 8, 96], fmt="mxfp4"), ends)\n    return y\n'
    (recipe,) = done(text, PassContext.of(GPU, 1)).recipes()
    assert recipe.type.fmt is None


ACTS = """\
def f(x: bf16[T, 256]):
    a = linear(x, W("a", bf16[256, 256], fmt="fp8[128, 128]"), act="fp8[1, 128]")
    b = linear(x, W("b", bf16[256, 256], fmt="ct_fp8[*, *]"), act="fp8[1, *]")
    c = linear(x, W("c", bf16[256, 256], fmt="int8[1, *]"), act="int8[1, *]")
    d = linear(x, W("d", bf16[256, 256], fmt="ct_int8[1, 64]"), act="int8[1, 64]")
    return a, b, c, d"""


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (GPU, "abc"),
        (Target("cuda", frozenset({"nvidia", "sm_89"})), "c"),
        (Target("cuda", frozenset({"amd", "gfx942"})), ""),
        (Target("cpu", frozenset({"int8_products"})), "c"),
        (Target("cpu"), ""),
    ],
)
def test_activations_stay_in_the_format_that_a_kernel_multiplies(target: Target, kept: str):
    graph = done(ACTS, PassContext.of(target, 1))
    nodes = graph.program("f").nodes
    assert {node.name: node.kwargs.get("act") for node in nodes} == {
        name: act if name in kept else None
        for name, act in (("a", "fp8[1, 128]"), ("b", "fp8[1, *]"), ("c", "int8[1, *]"), ("d", "int8[1, 64]"))
    }
    assert all(node.args[1].type.fmt is not None for node in nodes), "the weights stay packed"
    assert done(text_of(graph), PassContext.of(target, 1)).num_rewrites == 0
    chosen = {node.name: node for node in select_kernels(graph, PassContext.of(target, 1)).program("f").nodes}
    assert all(node.meta["kernel"] in ("triton", "cpp", "int8") for node in chosen.values())
    assert all(("act=" in " ".join(node.meta["notes"])) == (name not in kept) for name, node in chosen.items())


def test_a_format_of_activations_that_was_asked_for_is_left_to_the_reference():
    context = PassContext.of(Target("cpu"), 1, keeps_act=True)
    node = select_kernels(done(ACTS, context), context).program("f").nodes[0]
    assert node.kwargs["act"] == "fp8[1, 128]" and node.meta["kernel"] == "reference"
    assert "cpp: has no matmuls of activations in fp8[1, 128]" in node.meta["notes"]


def test_reference_bodies_round_only_activations_that_were_asked_for():
    assert "act" not in text_of(done(ACTS, PassContext.of(GPU, 0)))


def test_linears_of_a_gpu_take_blocks_of_gguf_files_split_and_experts_of_them_plain():
    context = context_of(GPU, "hopper", "triton", "reference")
    text = """\
def f(x: bf16[T, 512], ends: i64[4]):
    q = linear(x, cat([W("q", bf16[8, 512], fmt="q4_k"), W("k", bf16[4, 512], fmt="q4_k")]))
    o = linear(x, W("o", bf16[8, 512], fmt="q5_1"))
    z = linear(x, W("z", bf16[8, 512], fmt="q4_0"))
    y = grouped_linear(x, stack(W("e.{expert}", bf16[8, 512], fmt="q6_k"), 0, 4), ends)
    return q, o, z, y"""
    graph = select_kernels(done(text, context), context)
    calls = [line.split("#")[0].strip() for line in text_of(graph).splitlines()]
    assert (
        'q = triton.linear(x, shuffle(cat([W("q", bf16[8, 512], fmt="q4_k"), W("k", bf16[4, 512], fmt="q4_k")]), "parts"))'
        in calls
    )
    assert 'o = triton.linear(x, shuffle(W("o", bf16[8, 512], fmt="q5_1"), "parts"))' in calls
    assert 'z = triton.linear(x, W("z", bf16[8, 512], fmt="q4_0"))' in calls
    assert any("dequantize(stack(W(" in call for call in calls)
    one_block = done(
        'def f(x: bf16[T, 32]):\n    y = linear(x, W("w", bf16[8, 32], fmt="q5_1"))\n    return y', context
    )
    assert "dequantize" in text_of(one_block)

"""Packed weights that no kernel takes become plain ones: the text before and after, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from passes.cases import context_of, text_of

from atom.graph import Graph, Type, ops, parse
from atom.kernels import Backend, Kernel, Target
from atom.passes.context import PassContext
from atom.passes.dequantize import dequantize

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
    return dequantize(parse(text), context)


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
        BEFORE.replace("mxfp4", "int4[1, 32]"),  # a name alone, of no tensors that are known
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
